"""Datasets that somebody else wrote, with ill intent or by accident: one clear line, nothing outside is touched."""

import fcntl
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.errors import DatasetError, ZooError
from zoo.evaluation import evaluate, rerun
from zoo.schema import HYPERPARAMETER_NAMES, IN_EVERY_ROW, index_schema
from zoo.selection import select
from zoo.verify_dataset import verify_dataset

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


def rewrite(folder: Path, pattern: str, change: Callable[[pa.Table], pa.Table]) -> None:
    for path in folder.glob(pattern):
        pq.write_table(change(pq.read_table(path)), path)


def with_column(name: str, values: Callable[[pa.Table], pa.Array]) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, values(table))


def lists(table: pa.Table) -> pa.Array:
    return pa.array([[0.5]] * len(table), pa.list_(pa.float32()))


ALL_COLUMNS = [(fault, name) for fault in ("missing", "of another type") for name in index_schema().names]
NEVER_NULL = [("null", name) for name in (*IN_EVERY_ROW, *HYPERPARAMETER_NAMES, "row_group", "row")]


@pytest.mark.parametrize(("fault", "name"), [*ALL_COLUMNS, *NEVER_NULL])
def test_an_index_whose_columns_are_not_those_of_an_index_is_a_line(fault: str, name: str, hostile: Path) -> None:
    type_ = index_schema().field(name).type
    other = pa.int64() if type_ == pa.string() else pa.string()
    change = {
        "missing": lambda table: table.drop_columns([name]),
        "null": with_column(name, lambda table: pa.nulls(len(table), type_)),
        "of another type": with_column(name, lambda table: pa.array([1] * len(table)).cast(other)),
    }[fault]
    rewrite(hostile, "index/*.parquet", change)
    with pytest.raises(DatasetError, match=rf"index/[^\n]*: {name}: found [^\n]*, expected [^\n]*dataset again$"):
        _ = open_zoo(hostile).index
    assert [problem for problem in verify_dataset(hostile) if problem.startswith("index")]


@pytest.mark.parametrize("value", [None, math.nan, 1.5])
def test_an_accuracy_that_is_none_is_not_compared(value: float | None, hostile: Path, digits_dir: Path) -> None:
    rewrite(
        hostile, "index/*.parquet", with_column("test_accuracy", lambda t: pa.array([value] * len(t), pa.float64()))
    )
    with pytest.raises(DatasetError, match=r"test_accuracy: found (None|nan|1\.5), expected a fraction"):
        evaluate(hostile, "mnist", digits_dir, limit=1, progress=False)


TENSOR = "encoder.0.attention.queries.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns([TENSOR]),
        lambda table: table.drop_columns(["checkpoint_id"]),
        with_column(TENSOR, lambda table: pa.nulls(len(table), table.schema.field(TENSOR).type)),
        with_column(TENSOR, lambda table: pa.array(["x"] * len(table))),
        with_column(TENSOR, lists),
    ],
)
def test_weights_that_are_none_are_a_line(change: Callable[[pa.Table], pa.Table], hostile: Path) -> None:
    rewrite(hostile, "mnist/*.parquet", change)
    name = rf"({TENSOR}|checkpoint_id)"
    with pytest.raises(DatasetError, match=rf"mnist/[^\n]*: {name}: found [^\n]*, expected [^\n]*see `zoo verify`$"):
        open_zoo(hostile).checkpoints("mnist").tensors()


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "null",
        "5",
        "[" * 100_000,
        '{"data": {}, "plans": 5}',
        '{"data": {}, "plans": {"a\\u0000": "x"}}',
        "",
    ],
)
def test_an_odd_provenance_is_a_line(content: str, hostile: Path, digits_dir: Path) -> None:
    run_id = open_zoo(hostile).checkpoints("mnist").metadata["run_id"][0].as_py()
    (hostile / "provenance.json").write_text(content)
    for check in (
        lambda: evaluate(hostile, "mnist", digits_dir, progress=False),
        lambda: rerun(hostile, run_id, digits_dir, progress=False),
    ):
        with pytest.raises(ZooError, match=r"^[^\n]+$"):
            check()
    assert [problem for problem in verify_dataset(hostile) if "provenance.json" in problem]


@pytest.mark.parametrize(
    "config",
    [
        "{config_name: index, data_files: [x]}",
        "{config_name: index, data_files: []}",
        "{config_name: index, data_files: [{split: train, path: [5]}]}",
        "{config_name: index, data_files: [{split: train, path: null}]}",
        "{config_name: [index], data_files: [{split: train, path: [a]}]}",
        "{config_name: index, data_files: [{split: train, path: [a]}]}",
        "!!bool abc",
        "!!timestamp abc",
    ],
)
def test_a_card_of_odd_types_is_a_line(config: str, hostile: Path) -> None:
    (hostile / "README.md").write_text(f"---\nconfigs:\n- {config}\n---\n")
    with pytest.raises(DatasetError, match=r"^[^\n]*README\.md: [^\n]*`zoo build`$"):
        open_zoo(hostile)


@pytest.mark.parametrize("label", ["zz", "-1", "99", "05"])
def test_a_label_that_is_no_epoch_of_its_run_is_a_line(label: str, hostile: Path, digits_dir: Path) -> None:
    change_index(hostile, "epoch_label", label)
    (changed,) = (row for row in open_zoo(hostile).index.to_pylist() if row["epoch_label"] == label)
    with pytest.raises(DatasetError, match=rf"epoch_label: found {label}, expected 0 to \d+ or best"):
        rerun(hostile, changed["run_id"], digits_dir, progress=False)
