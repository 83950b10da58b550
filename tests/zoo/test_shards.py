import hashlib
import os
import pickle
import re
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_tools import LABELS, Stored, contents
from large_sweep import write_large_sweep

from generators.architecture import tensor_table
from generators.hyperparameters import Hyperparameters
from zoo import shards
from zoo.cluster import InProcess, connect
from zoo.errors import DatasetError, StoreError, ZooError
from zoo.executor import ClusterExecutor
from zoo.schema import CURVES, HYPERPARAMETER_NAMES, tensor_paths, tensor_values
from zoo.shards import ROW_GROUP_BYTES, Tables, write_shards
from zoo.splits import split_of
from zoo.store import FileRecord, Store, checkpoint_file

pytest_plugins = ["dataset_fixtures"]

RUNS = 48
ROWS = RUNS * 4
BYTES_A_ROW = 18_506 * 4


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """192 checkpoints in three populations."""
    return write_large_sweep(tmp_path_factory.mktemp("large"), RUNS, epochs=4, labels=("0", "2", "4", "best"))


@pytest.fixture(scope="module")
def written(large: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tables]:
    """The shards of `large`, of 2.5 MB of weights, and what was returned."""
    out = tmp_path_factory.mktemp("shards")
    return out, write_shards([large], out, shard_bytes=2_500_000, progress=False)


class Elsewhere(Executor):
    """Runs everything last to first, on copies, as workers in other processes would."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Future, Callable[..., Any], bytes]] = []
        self.most = 0

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        executor = self

        class Late(Future):
            def result(self, timeout: float | None = None) -> Any:
                executor.run_all()
                return super().result(timeout)

        future = Late()
        self.waiting.append((future, pickle.loads(pickle.dumps(function)), pickle.dumps(arguments)))
        self.most = max(self.most, len(self.waiting))
        return future

    def run_all(self) -> None:
        while self.waiting:
            future, function, arguments = self.waiting.pop()
            future.set_result(function(*pickle.loads(arguments)))


class TestSplits:
    @pytest.mark.parametrize(
        ("run_id", "split"),
        [("0000000000000000", "test"), ("0000000000000001", "train"), ("0000000000000013", "validation")],
    )
    def test_a_run_never_moves(self, run_id: str, split: str) -> None:
        assert split_of(run_id) == split

    def test_shares(self) -> None:
        found = [split_of(f"{number:016x}") for number in range(20_000)]
        shares = {split: found.count(split) / len(found) for split in ("train", "validation", "test")}
        assert shares == pytest.approx({"train": 0.70, "validation": 0.15, "test": 0.15}, abs=0.01)


class TestLayout:
    def test_every_checkpoint_is_in_one_shard_of_its_runs_split(self, written: tuple[Path, Tables]) -> None:
        out, tables = written
        ids: list[str] = []
        for shard in tables.shards:
            rows = pq.read_table(out / shard.path, columns=["checkpoint_id", "run_id"])
            assert len(rows) == shard.rows
            assert {split_of(run_id) for run_id in rows["run_id"].to_pylist()} == {shard.split}
            ids += rows["checkpoint_id"].to_pylist()
        assert len(ids) == len(set(ids)) == ROWS

    def test_rows_are_sorted_by_accuracy_through_all_shards_of_a_split(self, written: tuple[Path, Tables]) -> None:
        out, tables = written
        for split in ("train", "validation", "test"):
            paths = [out / shard.path for shard in tables.shards if shard.split == split]
            rows = pa.concat_tables(pq.read_table(path, columns=["test_accuracy", "checkpoint_id"]) for path in paths)
            keys = [(-row["test_accuracy"], row["checkpoint_id"]) for row in rows.to_pylist()]
            assert keys == sorted(keys)

    def test_shards_are_even_and_their_names_carry_number_total_and_digest(self, written: tuple[Path, Tables]) -> None:
        out, tables = written
        train = [shard for shard in tables.shards if shard.split == "train"]
        rows = sum(shard.rows for shard in train)
        assert len(train) == -(-rows // (2_500_000 // BYTES_A_ROW)) > 2
        assert max(shard.rows for shard in train) - min(shard.rows for shard in train) <= 1
        for number, shard in enumerate(train):
            digest = hashlib.sha256((out / shard.path).read_bytes()).hexdigest()
            assert shard.sha256 == digest
            assert shard.path == f"mnist/train-{number:05d}-of-{len(train):05d}-{digest[:8]}.parquet"

    def test_nothing_else_is_left_in_the_folder(self, written: tuple[Path, Tables]) -> None:
        out, tables = written
        assert set(contents(out)) == {file.path for file in (*tables.shards, tables.index_file)}

    def test_footers_dataset_viewer_1519(self, large: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Row groups stay far below the Hub viewer's 100 MB, in bytes as the written footer has them."""
        monkeypatch.setattr(shards, "GATHER_ROWS", 2 * shards.ROW_GROUP_ROWS)
        for shard in write_shards([large], tmp_path, progress=False).shards:
            parquet = pq.ParquetFile(tmp_path / shard.path)
            groups = [parquet.metadata.row_group(number) for number in range(parquet.num_row_groups)]
            assert [group.num_rows for group in groups[:-1]] == [100] * (len(groups) - 1)
            for group in groups:
                assert group.total_byte_size < ROW_GROUP_BYTES / 10
                columns = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
                for name in tensor_paths("mnist"):
                    assert "BYTE_STREAM_SPLIT" in columns[name].encodings
                    assert columns[name].compression == "ZSTD"
                    assert columns[name].has_offset_index and columns[name].has_column_index
                assert "RLE_DICTIONARY" in columns["optimizer"].encodings

    def test_a_groups_statistics_show_its_accuracies(self, written: tuple[Path, Tables]) -> None:
        """What lets readers skip row groups."""
        out, tables = written
        parquet = pq.ParquetFile(out / tables.shards[0].path)
        column = parquet.schema_arrow.names.index("test_accuracy")
        statistics = parquet.metadata.row_group(0).column(column).statistics
        accuracy = parquet.read(["test_accuracy"])["test_accuracy"].to_numpy()
        assert (statistics.min, statistics.max) == (accuracy.min(), accuracy.max())


class TestValues:
    def test_rows_equal_the_stored_checkpoints_bit_for_bit(self, dataset: Path, stored: Stored) -> None:
        seen = set()
        for path in dataset.glob("mnist/*.parquet"):
            table = pq.read_table(path)
            for row, checkpoint_id in enumerate(table["checkpoint_id"].to_pylist()):
                seen.add(checkpoint_id)
                for spec in tensor_table("mnist"):
                    found = tensor_values(table[spec.name], spec.shape)[row]
                    assert found.tobytes() == stored[checkpoint_id][spec.name].tobytes(), (checkpoint_id, spec.name)
        assert seen == stored.keys()

    def test_metrics_are_those_after_the_labels_epoch(self, dataset: Path, metrics: dict[str, dict[str, Any]]) -> None:
        for path in dataset.glob("mnist/*.parquet"):
            for row in pq.read_table(path).to_pylist():
                of_run = metrics[row["run_id"]]
                if row["epoch_label"] == "best":
                    assert row["epoch"] == 1 + int(np.argmax(of_run["test_accuracy"][1:]))
                else:
                    assert row["epoch"] == int(row["epoch_label"])
                assert row["test_accuracy"] == of_run["test_accuracy"][row["epoch"]]
                assert row["test_loss"] == of_run["test_loss"][row["epoch"]]
                assert (row["train_loss"] is None) == (row["epoch"] == 0)
                assert row["validation_loss"] is row["validation_accuracy"] is None
                if row["epoch"]:
                    assert row["train_accuracy"] == of_run["train_accuracy"][row["epoch"]]
                    assert row["generalization_gap"] == row["train_accuracy"] - row["test_accuracy"]

    def test_curves_are_those_of_the_run_with_null_for_nan(
        self, dataset: Path, metrics: dict[str, dict[str, Any]]
    ) -> None:
        for path in dataset.glob("mnist/*.parquet"):
            for row in pq.read_table(path, columns=["run_id", *(column.name for column in CURVES)]).to_pylist():
                for name in ("train_loss", "train_accuracy", "test_loss", "test_accuracy"):
                    expected = [None if np.isnan(value) else value for value in metrics[row["run_id"]][name]]
                    assert row[f"{name}_by_epoch"] == (expected if any(expected) else None)
                assert row["validation_loss_by_epoch"] is None

    def test_a_rows_run_id_follows_from_its_columns(self, dataset: Path) -> None:
        for path in dataset.glob("mnist/*.parquet"):
            for row in pq.read_table(path, columns=["run_id", *HYPERPARAMETER_NAMES]).to_pylist():
                run_id = row.pop("run_id")
                assert Hyperparameters(**row).run_id == run_id

    def test_the_index_has_diverged_runs_and_the_shards_do_not(self, dataset: Path, sweep: Path) -> None:
        index = pq.read_table(next(dataset.glob("index/*.parquet"))).to_pylist()
        diverged = [row for row in index if row["status"] == "diverged"]
        assert {row["learning_rate"] for row in diverged} == {1e38}
        assert len(index) == 26 * len(LABELS) and len(diverged) == 2 * len(LABELS)
        for row in diverged:
            kept = row["epoch_label"] == "0"  # nothing had diverged yet
            assert [row[name] is not None for name in ("file", "row_group", "row", "test_accuracy")] == [kept] * 4
            expected = None if row["epoch_label"] == "best" else int(row["epoch_label"])
            assert row["epoch"] == expected

    def test_the_index_finds_every_row(self, written: tuple[Path, Tables]) -> None:
        out, _ = written
        for row in pq.read_table(next(out.glob("index/*.parquet"))).to_pylist():
            group = pq.ParquetFile(out / row["file"]).read_row_group(row["row_group"], columns=["checkpoint_id"])
            assert group["checkpoint_id"][row["row"] % 100].as_py() == row["checkpoint_id"]


class TestEqualBytes:
    def test_threads_other_workers_and_gathering_do_not_matter(
        self, large: Store, written: tuple[Path, Tables], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = Elsewhere()
        monkeypatch.setattr(shards, "SHARDS_IN_FLIGHT", 3)
        write_shards([large], tmp_path, elsewhere, shard_bytes=2_500_000, progress=False)
        assert contents(tmp_path) == contents(written[0])
        assert elsewhere.most == 3

    def test_nor_does_a_ray_cluster(
        self, large: Store, written: tuple[Path, Tables], tmp_path: Path, ray_address: str
    ) -> None:
        cluster = connect(2, ray_address)
        try:
            write_shards([large], tmp_path, ClusterExecutor(cluster), shard_bytes=2_500_000, progress=False)
        finally:
            cluster.close()
        assert contents(tmp_path) == contents(written[0])

    def test_order_and_repetition_of_sweeps_do_not_matter(self, tmp_path: Path) -> None:
        one = write_large_sweep(tmp_path / "one", 8, epochs=2, labels=("0", "2"))
        other = write_large_sweep(tmp_path / "other", 4, epochs=2, labels=("best",))
        copy = write_large_sweep(tmp_path / "copy", 8, epochs=2, labels=("0", "2"))
        tables = write_shards([one, other], tmp_path / "a", progress=False)
        write_shards([copy, other, one, other], tmp_path / "b", progress=False)
        assert contents(tmp_path / "a") == contents(tmp_path / "b")
        assert sum(shard.rows for shard in tables.shards) == 8 * 2 + 4

    def test_other_weights_have_other_names(self, written: tuple[Path, Tables], tmp_path: Path) -> None:
        other = write_large_sweep(tmp_path / "other", RUNS, epochs=4, labels=("0", "2", "4", "best"), seed=1)
        tables = write_shards([other], tmp_path / "out", shard_bytes=2_500_000, progress=False)
        assert not {shard.path for shard in tables.shards} & {shard.path for shard in written[1].shards}


class TestRefusals:
    def test_a_mixture_of_data(self, tmp_path: Path) -> None:
        one = write_large_sweep(tmp_path / "one", 2, epochs=1, labels=("0",), digest="a" * 16)
        other = write_large_sweep(tmp_path / "other", 2, epochs=1, labels=("0",), digest="b" * 16)
        with pytest.raises(DatasetError, match=f"data_digest: found {'a' * 16}, {'b' * 16} for task mnist"):
            write_shards([one, other], tmp_path / "out", progress=False)

    def test_unequal_copies_of_a_checkpoint(self, tmp_path: Path) -> None:
        one = write_large_sweep(tmp_path / "one", 2, epochs=1, labels=("0",))
        other = write_large_sweep(tmp_path / "other", 2, epochs=1, labels=("0",), seed=1)
        with pytest.raises(DatasetError, match=r"[0-9a-f]{16}-0: found two copies that differ \(.*one.* and .*other"):
            write_shards([one, other], tmp_path / "out", progress=False)

    def test_copies_with_equal_scalars_and_one_other_bit(self, tmp_path: Path) -> None:
        one = write_large_sweep(tmp_path / "one", 2, epochs=1, labels=("0",))
        other = write_large_sweep(tmp_path / "other", 2, epochs=1, labels=("0",))
        (path,) = other.root.rglob("*.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x80  # the sign of the last weight
        path.write_bytes(content)
        (commit,) = other.commits()
        other.unseal(commit.population)
        other.seal(replace(commit, files=commit.files | {path.name: FileRecord.of(bytes(content))}))
        with pytest.raises(DatasetError, match="found two copies that differ"):
            write_shards([one, other], tmp_path / "out", progress=False)

    @pytest.mark.parametrize("pattern", ["*.safetensors", "metrics.parquet"])
    @pytest.mark.parametrize("damage", ["cut", "flip"])
    def test_a_damaged_file_of_a_sweep(self, tmp_path: Path, pattern: str, damage: str) -> None:
        store = write_large_sweep(tmp_path / "sweep", 2, epochs=1, labels=("0",))
        (path,) = store.root.rglob(pattern)
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content[:-4] if damage == "cut" else content)
        with pytest.raises(StoreError, match=rf"{re.escape(str(path))}: found SHA-256 \w+, its commit says \w+; see"):
            write_shards([store], tmp_path / "out", progress=False)

    def test_nothing_sealed(self, tmp_path: Path) -> None:
        store = write_large_sweep(tmp_path / "sweep", 2, epochs=1, labels=("0",))
        for population in store.sealed():
            store.unseal(population)
        with pytest.raises(DatasetError, match="found no sealed checkpoint"):
            write_shards([store], tmp_path / "out", progress=False)

    def test_a_task_that_fails_on_a_cluster(self, tmp_path: Path) -> None:
        store = write_large_sweep(tmp_path / "sweep", 2, epochs=1, labels=("0",))
        (tmp_path / "out").write_text("a file where the folder should be")
        with pytest.raises(ZooError, match=r"a task of the cluster failed \(.*\): .*Error: "):
            write_shards([store], tmp_path / "out", ClusterExecutor(InProcess()), progress=False)

    def test_an_error_of_a_worker_leaves_no_temporary_file(
        self, large: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shards, "tensor_array", lambda values: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_shards([large], tmp_path, progress=False)
        assert contents(tmp_path) == {}


def test_a_shard_and_its_new_folders_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, os.rename

    def flushed(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append(f"flush {'file' if target.is_file() else target.relative_to(tmp_path)}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", lambda *names: (steps.append("rename"), rename(*names)))
    table = pa.table({"row": [1, 2]})
    shards.write_parquet(iter([table]), table.schema, tmp_path / "zoo", "index/index", {}, 10)
    assert steps == ["flush .", "flush zoo", "flush file", "rename", "flush zoo/index"]


def test_dead_writers_files_are_never_read_daft_3576(tmp_path: Path) -> None:
    """Half a file of a writer that died, beside what commits name, changes nothing: readers follow commits."""
    store = write_large_sweep(tmp_path / "sweep", 4, epochs=1, labels=("0", "best"))
    before = write_shards([store], tmp_path / "before", progress=False)
    (population,) = store.sealed()
    whole = next(store.root.rglob(checkpoint_file("0"))).read_bytes()
    for attempt in ("20250101T000000-dead", "20270101T000000-dead"):
        store.write(population, attempt, checkpoint_file("0"), whole[: len(whole) // 2])
    store.write("f" * 16, "20270101T000000-dead", checkpoint_file("best"), whole)
    assert write_shards([store], tmp_path / "after", progress=False).shards == before.shards


def test_an_imported_best_has_no_epoch(tmp_path: Path) -> None:
    store = write_large_sweep(tmp_path / "sweep", 2, epochs=1, labels=("best",))
    (plan,) = store.plans()
    (store.root / "plans" / "000.json").write_text(replace(plan, origin="imported").to_json())
    (commit,) = store.commits()
    folder = store.attempt_folder(commit.population, commit.attempt)
    path = folder / "metrics.parquet"
    pq.write_table(pq.read_table(path).append_column("best_test_accuracy", pa.array([0.25, None])), path)
    path = folder / checkpoint_file("best")
    content = path.read_bytes()
    changed = re.sub(rb'\\"epochs\\": \[1, 1\]', rb'\\"epochs\\": [null,null]', content)
    length = int.from_bytes(content[:8], "little") + len(changed) - len(content)
    path.write_bytes(length.to_bytes(8, "little") + changed[8:])
    files = {name: FileRecord.of((folder / name).read_bytes()) for name in commit.files}
    (store.root / "commits" / f"{commit.population}.json").write_text(replace(commit, files=files).to_json())
    rows = write_shards([store], tmp_path / "out", progress=False).index.to_pylist()
    assert [row["epoch"] for row in rows] == [None, None]
    assert [row["test_accuracy"] for row in rows] == [0.25, None]
    assert [row["test_loss"] for row in rows] == [None, None]
    assert {row["origin"] for row in rows} == {"imported"}
