"""Datasets that somebody else wrote, with ill intent or by accident: one clear line, nothing outside is touched."""

import fcntl
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.errors import DatasetError
from zoo.selection import select

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture
def hostile(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "hostile"))


def change_index(folder: Path, column: str, value: str) -> None:
    """Set a column of the index's first row that has a checkpoint."""
    (path,) = (folder / "index").glob("*.parquet")
    table = pq.read_table(path)
    values = table[column].to_pylist()
    values[table["file"].is_valid().to_pylist().index(True)] = value
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table.schema.field(column).type)), path)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", "a/b", ""])
def test_a_checkpoint_id_names_no_file_elsewhere(name: str, hostile: Path, tmp_path: Path) -> None:
    change_index(hostile, "checkpoint_id", name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DatasetError):
        select(open_zoo(hostile).checkpoints("mnist"), tmp_path / "out" / "selection")
    assert sorted(path for path in tmp_path.rglob("*") if path.name != "out") == before


@pytest.mark.parametrize("name", ["../hostile/mnist/x.parquet", "/etc/passwd", "mnist/../../x.parquet"])
def test_an_index_leads_to_no_file_outside(name: str, hostile: Path) -> None:
    change_index(hostile, "file", name)
    with pytest.raises(DatasetError, match="expected a path inside the dataset"):
        open_zoo(hostile).checkpoints("mnist").tensors()


def test_weights_of_another_row_are_not_passed_off(hostile: Path) -> None:
    rows = open_zoo(hostile).checkpoints("mnist", split="train").metadata
    change_index(hostile, "checkpoint_id", rows["checkpoint_id"][1].as_py())
    with pytest.raises(DatasetError, match="rows are not those of the index; see `zoo verify`"):
        open_zoo(hostile).checkpoints("mnist").tensors()


@pytest.mark.parametrize("part", ["index", "mnist"])
def test_a_torn_file_is_named(part: str, hostile: Path) -> None:
    for path in (hostile / part).glob("*.parquet"):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2] + bytes(100) + content[len(content) // 2 + 100 :])
    with pytest.raises(DatasetError, match=rf"{part}/.*: not a readable Parquet file .*; see `zoo verify`"):
        open_zoo(hostile).checkpoints("mnist").tensors()


@pytest.mark.parametrize("configs", ["null", "[5]", "foo", "[{config_name: index}]"])
def test_an_odd_card_is_no_zoo(configs: str, hostile: Path) -> None:
    (hostile / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(DatasetError, match="found no index among its configs"):
        open_zoo(hostile)


def test_two_builds_into_one_folder_do_not_meet(sweep: Path, hostile: Path) -> None:
    other = os.open(hostile, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(DatasetError, match="another build is writing there"):
            build([sweep], hostile, progress=False)
    finally:
        os.close(other)
    build([sweep], hostile, progress=False)
