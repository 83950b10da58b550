import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from huggingface_hub import DatasetCard

from zoo.builder import PROVENANCE, read_checksums
from zoo.errors import DatasetError
from zoo.plan import Plan
from zoo.schema import tensor_array, tensor_values
from zoo.shards import _weight_options
from zoo.verification import verify
from zoo.verify_dataset import verify_dataset

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture
def copy(dataset: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset, tmp_path / "zoo"))


def shard(folder: Path, split: str = "train") -> Path:
    return next(folder.glob(f"mnist/{split}-*"))


def seal(folder: Path) -> None:
    """Make the checksums agree with the files, so that only deeper checks can find what was changed."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names.remove("SHA256SUMS")
    lines = (f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    (folder / "SHA256SUMS").write_text("".join(lines))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **options: object) -> str:
    """Change a shard's rows under its name; returns the name."""
    table = change(pq.read_table(path))
    with pq.ParquetWriter(path, table.schema, **{**_weight_options("mnist"), **options}) as writer:
        writer.write_table(table, row_group_size=100)
    seal(path.parents[1])
    return f"mnist/{path.name}"


def replaced(name: str, change: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    """Return a change of one scalar column."""

    def apply(table: pa.Table) -> pa.Table:
        values = pa.array(change(table[name].to_pylist()), table.schema.field(name).type)
        return table.set_column(table.schema.names.index(name), table.schema.field(name), values)

    return apply


class TestSound:
    @pytest.mark.parametrize("fixture", ["dataset", "two_tasks"])
    def test_no_problem(self, fixture: str, request: pytest.FixtureRequest) -> None:
        assert verify_dataset(request.getfixturevalue(fixture)) == []

    def test_no_dataset(self, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match="found no SHA256SUMS"):
            verify_dataset(tmp_path)
        for name in ("plans", "index"):  # of a first build that was killed
            (tmp_path / name).mkdir()
        with pytest.raises(DatasetError, match="found no SHA256SUMS, expected a dataset folder; make one with"):
            verify(tmp_path)
        (tmp_path / "SHA256SUMS").write_text("what\n")
        with pytest.raises(DatasetError, match=r"SHA256SUMS, line 1: found 'what'"):
            verify_dataset(tmp_path)


class TestFiles:
    def test_one_flipped_bit_anywhere_is_found(self, copy: Path) -> None:
        for name, digest in read_checksums(copy).items():
            path = copy / name
            whole = path.read_bytes()
            changed = bytearray(whole)
            changed[len(whole) // 2] ^= 1
            path.write_bytes(changed)
            problems = verify_dataset(copy)
            expected = f"{name}: its SHA-256 is {hashlib.sha256(changed).hexdigest()}, SHA256SUMS says {digest}"
            assert problems[0] == expected
            path.write_bytes(whole)
        assert verify_dataset(copy) == []

    def test_missing_and_foreign_files(self, copy: Path) -> None:
        name = f"mnist/{shard(copy).name}"
        shard(copy).rename(copy / "mnist" / "other.parquet")
        assert verify_dataset(copy) == [
            f"{name}: listed in SHA256SUMS but missing",
            "mnist/other.parquet: not listed in SHA256SUMS",
        ]

    def test_what_clients_and_dead_writers_leave(self, copy: Path) -> None:
        (copy / ".cache" / "huggingface").mkdir(parents=True)
        (copy / ".cache" / "huggingface" / "README.md.metadata").write_text("")
        (copy / ".gitattributes").write_text("")
        assert verify_dataset(copy) == []
        leftover = f"mnist/.tmp-{'0' * 32}"
        (copy / leftover).write_text("")
        assert verify_dataset(copy) == [f"{leftover}: not listed in SHA256SUMS"]

    def test_a_shard_that_the_card_does_not_name(self, copy: Path) -> None:
        shutil.copy(shard(copy), copy / "mnist" / "train-00001-of-00002-00000000.parquet")
        seal(copy)
        assert verify_dataset(copy) == ["README.md: does not name mnist/train-00001-of-00002-00000000.parquet"]

    def test_a_shard_that_is_gone_from_the_checksums_too(self, copy: Path) -> None:
        name = f"mnist/{shard(copy).name}"
        shard(copy).unlink()
        seal(copy)
        assert verify_dataset(copy) == [f"README.md: names {name}, which is missing"]

    @pytest.mark.parametrize("kind", ["dangling", "pipe"])
    @pytest.mark.parametrize("pattern", ["mnist/train-*", "plans/*.json", "index/*", "README.md", "provenance.json"])
    def test_what_stands_in_a_files_place_is_not_read(
        self, kind: str, pattern: str, copy: Path, tmp_path: Path
    ) -> None:
        (path,) = copy.glob(pattern)
        path.rename(tmp_path / "elsewhere")
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(tmp_path / "nowhere")
        name = path.relative_to(copy).as_posix()
        assert verify_dataset(copy)[0] == f"{name}: a broken link or special file, expected a regular file"

    def test_links_to_files_as_the_hubs_cache_has_them(self, copy: Path, tmp_path: Path) -> None:
        for path in [path for path in copy.rglob("*") if path.is_file()]:
            blob = tmp_path / f"blob-{len(list(tmp_path.iterdir()))}"
            path.rename(blob)
            path.symlink_to(blob)
        assert verify_dataset(copy) == []

    def test_a_folder_behind_a_link(self, copy: Path, tmp_path: Path) -> None:
        (copy / "mnist").rename(tmp_path / "elsewhere")
        (copy / "mnist").symlink_to(tmp_path / "elsewhere")
        problems = verify_dataset(copy)
        assert (
            f"mnist/{next((tmp_path / 'elsewhere').glob('train-*')).name}: listed in SHA256SUMS but missing" in problems
        )
        assert "mnist: not listed in SHA256SUMS" in problems


class TestCard:
    def change(self, folder: Path, old: str, new: str) -> list[str]:
        card = folder / "README.md"
        assert old in card.read_text()
        card.write_text(card.read_text().replace(old, new, 1))
        seal(folder)
        return verify_dataset(folder)

    def test_features_that_lack_a_column_datasets_8608(self, copy: Path) -> None:
        entry = re.search(r"  - name: generalization_gap\n    dtype: float64\n", (copy / "README.md").read_text())
        assert entry is not None
        (problem,) = self.change(copy, entry[0], "")
        assert problem == "README.md: the features of config index are not the columns of its files"

    def test_a_version_that_stayed_behind(self, copy: Path) -> None:
        version = re.search(r"version: (1\.0\.\d+)", (copy / "README.md").read_text())
        assert version is not None
        (problem,) = self.change(copy, version[1], "1.0.1")
        assert problem == "README.md: the version of config mnist does not follow from its files"

    def test_a_split_that_has_anothers_files(self, copy: Path) -> None:
        name = f"mnist/{shard(copy, 'test').name}"
        problems = self.change(copy, "split: test", "split: dev")
        assert len(problems) > 1
        assert all(re.fullmatch(rf"{name}: \S+: split is dev, expected test", problem) for problem in problems)

    def test_a_card_without_metadata(self, copy: Path) -> None:
        (copy / "README.md").write_text("# A zoo\n")
        seal(copy)
        (problem,) = verify_dataset(copy)
        assert problem.startswith("README.md or provenance.json: cannot be read")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("dataset_info", [5]),
            ("configs", 5),
            ("configs", [5]),
            ("configs", [{"config_name": ["mnist"], "data_files": []}]),
            ("configs", [{"config_name": "mnist", "version": 1, "data_files": [{"split": "train", "path": [{}]}]}]),
        ],
    )
    def test_an_odd_card(self, key: str, value: object, copy: Path) -> None:
        card = DatasetCard.load(copy / "README.md")
        content = card.data.to_dict() | {key: value}
        (copy / "README.md").write_text(f"---\n{yaml.safe_dump(content)}---\n{card.text}")
        seal(copy)
        (problem,) = verify_dataset(copy)
        assert problem.startswith("README.md or provenance.json: cannot be read")

    def test_a_config_of_no_task(self, copy: Path) -> None:
        problems = self.change(copy, "config_name: mnist", "config_name: cifar")
        assert "README.md: found config cifar, expected one of index, mnist, ag_news" in problems


class TestPlans:
    def test_another_plan(self, copy: Path) -> None:
        """A plan that is whole, but not the one that the rows come from."""
        (path,) = copy.glob("plans/*.json")
        plan = Plan.from_json(path.read_text(), path.name)
        path.write_text(dataclasses.replace(plan, labels=("0", "1", "2")).to_json())
        seal(copy)
        problems = verify_dataset(copy)
        assert re.fullmatch(rf"plans/{path.name}: its digest is \w+, provenance.json says \w+", problems[0])
        assert re.fullmatch(r"index: run \w{16} has rows for 0, 1, 2, best, expected 0, 1, 2", problems[1])
        assert problems[-1] == "index: and 6 more"  # of 26, 20 are shown

    def test_a_changed_run(self, copy: Path) -> None:
        (path,) = copy.glob("plans/*.json")
        path.write_text(path.read_text().replace("0.003", "0.004"))
        seal(copy)
        assert f"plans/{path.name}: not the content that was written" in verify_dataset(copy)[0]

    def test_a_plan_that_is_gone(self, copy: Path) -> None:
        content = json.loads((copy / PROVENANCE).read_text())
        content["plans"]["plans/001-00000000.json"] = "0" * 64
        (copy / PROVENANCE).write_text(json.dumps(content))
        seal(copy)
        (problem,) = verify_dataset(copy)
        assert "plans/001-00000000.json" in problem


class TestShards:
    def test_a_weight_that_is_not_finite(self, copy: Path) -> None:
        def poison(table: pa.Table) -> pa.Table:
            position = table.schema.names.index("classifier.fc2.weight")
            values = tensor_values(table.column(position), (10, 32)).copy()
            values[3, 9, 31] = np.nan
            return table.set_column(position, table.schema.field(position), tensor_array(values))

        checkpoint_id = pq.read_table(shard(copy))["checkpoint_id"][3].as_py()
        name = rewrite(shard(copy), poison)
        assert verify_dataset(copy) == [f"{name}: {checkpoint_id}: classifier.fc2.weight is not finite"]

    def test_a_metric_that_differs_from_the_index(self, copy: Path) -> None:
        name = rewrite(shard(copy), replaced("test_loss", lambda values: [values[0] + 1e-9, *values[1:]]))
        assert verify_dataset(copy) == [f"{name}: test_loss: 1 rows differ from the index"]

    def test_a_hyperparameter_that_does_not_make_the_run_id(self, copy: Path) -> None:
        name = rewrite(shard(copy), replaced("l2", lambda values: [2e-6, *values[1:]]))
        problems = verify_dataset(copy)
        assert re.fullmatch(rf"{name}: \w+-\w+: run_id is \w{{16}}, expected \w{{16}}", problems[0])
        assert problems[-1] == f"{name}: l2: 1 rows differ from the index"

    def test_rows_in_another_order(self, copy: Path) -> None:
        name = rewrite(shard(copy), lambda table: table.take(list(range(len(table)))[::-1]))
        problems = verify_dataset(copy)
        assert f"{name}: rows are not sorted by test_accuracy" in problems
        assert any("run_id" in problem and "differ from the index" in problem for problem in problems)

    def test_a_lost_row(self, copy: Path) -> None:
        rows = pq.read_metadata(shard(copy)).num_rows
        name = rewrite(shard(copy), lambda table: table.slice(1))
        assert verify_dataset(copy) == [f"{name}: has {rows - 1} rows, the index has {rows} for it"]

    def test_a_renamed_column(self, copy: Path) -> None:
        name = rewrite(
            shard(copy),
            lambda table: table.rename_columns([n.replace("fc1", "fc9") for n in table.schema.names]),
            column_encoding=None,
        )
        assert verify_dataset(copy) == [f"{name}: its columns are not those of a checkpoint of mnist"]

    def test_encodings_that_were_silently_ignored(self, copy: Path) -> None:
        """As they are where dictionaries are on: nothing is wrong with the rows, but the files are larger."""
        name = rewrite(shard(copy), lambda table: table, column_encoding=None, use_dictionary=True)
        problems = verify_dataset(copy)
        assert len(problems) == 22
        assert problems[0].startswith(f"{name}: row group 0: embedding.conv1.weight.list.element")
        assert problems[0].endswith("expected BYTE_STREAM_SPLIT with ZSTD")

    def test_row_groups_that_are_too_large_dataset_viewer_1519(
        self, copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("zoo.verify_shard.ROW_GROUP_BYTES", 100_000)
        problems = verify_dataset(copy)
        assert len(problems) == 3
        assert all(re.search(r"row group 0 has \d+ bytes, expected 100000 at most", problem) for problem in problems)

    def test_half_a_file_daft_3576(self, copy: Path) -> None:
        path = shard(copy)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        seal(copy)
        (problem,) = verify_dataset(copy)
        assert problem.startswith(f"mnist/{path.name}: cannot be read")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="absent: found no such folder, expected a sweep directory or a dataset"):
        verify(tmp_path / "absent")
