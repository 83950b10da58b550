"""Commits -> Parquet: the rows of a dataset, split, sorted, and written in shards.

A row is a checkpoint. All checkpoints of a run are in one split, which follows from the run_id alone. Rows are sorted
by test accuracy, best first, in small row groups, so that a selection by accuracy reads few of them. Shards carry a
piece of their digest in their names, and equal commits give equal bytes. Weights are gathered shard by shard, so
memory does not grow with the sweep.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from generators.architecture import parameter_count, tensor_table
from zoo.errors import DatasetError
from zoo.plan import Plan
from zoo.schema import CURVES, SCALAR_NAMES, checkpoint_schema, index_schema, tensor_array, tensor_paths
from zoo.stacked import StackedCheckpoints
from zoo.store import METRICS_FILE, Commit, Store, checkpoint_file

SPLITS = ("train", "validation", "test")
SPLIT_SHARES = (0.70, 0.15, 0.15)
SHARD_BYTES = 256_000_000
ROW_GROUP_ROWS = 100
"""Rows of a row group: 7.4 MB of MNIST weights."""


@dataclass(frozen=True)
class Shard:
    """A written Parquet file: where, how many rows, in which split; `path` is relative to the dataset."""

    task: str
    split: str
    path: str
    rows: int


@dataclass(frozen=True)
class Tables:
    """Everything that a dataset's card and provenance are made from.

    shards: all weight files. index: the rows of the index. index_path: its file. plans: of all sweeps.
    """

    shards: list[Shard]
    index: pa.Table
    index_path: str
    plans: list[Plan]

    @property
    def tasks(self) -> list[str]:
        return sorted({shard.task for shard in self.shards})


def split_of(run_id: str) -> str:
    """Return the split of a run: 70 % train, 15 % validation, 15 % test, by a hash of its id alone."""
    position = int.from_bytes(hashlib.sha256(f"split:{run_id}".encode()).digest()[:8], "big") / 2**64
    if position < SPLIT_SHARES[0]:
        return "train"
    return "validation" if position < SPLIT_SHARES[0] + SPLIT_SHARES[1] else "test"


def write_shards(
    stores: Sequence[Store],
    out: Path,
    executor: Executor | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Tables:
    """Write the Parquet files of all sealed populations of `stores` below `out`.

    Args:
        executor: runs the writing of shards; None for a thread a core.
        shard_bytes: target size of a shard's weights.

    Raises:
        DatasetError: nothing is sealed, the sweeps' data differ, or two copies of one checkpoint are unequal.
    """
    rows, sources, plans = _collect(stores)
    _check_one_data(rows)
    rows, sources = _drop_equal_copies(rows, sources)
    jobs, places = _shard_jobs(rows, sources, shard_bytes)
    with _Owned(executor) as pool:
        futures = [pool.submit(_write_shard, job, out) for job in jobs]
        written = [f.result() for f in tqdm(futures, desc="shards", unit="shard", disable=not progress)]
    index = _index_table(rows, places, written)
    index_path = _write_named(index, out, "index", "index", _write_plain)
    return Tables(written, index, index_path, plans)


class _Owned:
    """An executor of the caller's, or one of our own that ends with the block."""

    def __init__(self, executor: Executor | None) -> None:
        self._given = executor

    def __enter__(self) -> Executor:
        self._pool = self._given or ThreadPoolExecutor()
        return self._pool

    def __exit__(self, *exception: object) -> None:
        if self._given is None:
            self._pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class _Source:
    """Where a checkpoint's weights lie: a stacked file and the position in it."""

    file: Path
    position: int


def _collect(stores: Sequence[Store]) -> tuple[list[dict[str, Any]], list[_Source | None], list[Plan]]:
    """Return a row of scalars and curves for every run and label, its source (None without a checkpoint), the plans."""
    rows: list[dict[str, Any]] = []
    sources: list[_Source | None] = []
    plans: list[Plan] = []
    for store in stores:
        for plan in store.require_plans():
            plans.append(plan)
            sealed = store.sealed()
            for population in plan.populations:
                if population.id in sealed:
                    commit = store.commit(population.id)
                    for row, source in _population_rows(store, plan, commit, population.runs):
                        rows.append(row)
                        sources.append(source)
    if not any(sources):
        names = ", ".join(str(store.root) for store in stores)
        raise DatasetError(f"{names}: found no sealed checkpoint, expected at least one; let `zoo generate` finish one")
    return rows, sources, plans


def _population_rows(
    store: Store, plan: Plan, commit: Commit, runs: Sequence[Any]
) -> Iterator[tuple[dict[str, Any], _Source | None]]:
    folder = store.attempt_folder(commit.population, commit.attempt)
    metrics = {row["run_id"]: row for row in pq.read_table(folder / METRICS_FILE).to_pylist()}
    positions: dict[str, dict[str, tuple[int, int | None]]] = {}
    for label in plan.labels:
        if checkpoint_file(label) in commit.files:
            header = StackedCheckpoints(folder / checkpoint_file(label)).header
            places = zip(header["run_ids"], range(len(header["run_ids"])), header["epochs"], strict=True)
            positions[label] = {run_id: (position, epoch) for run_id, position, epoch in places}
    for run in runs:
        record = commit.runs[run.run_id]
        curves = {column.name: _curve(metrics[run.run_id][column.name.removesuffix("_by_epoch")]) for column in CURVES}
        for label in plan.labels:
            position, epoch = positions.get(label, {}).get(run.run_id, (None, None))
            row = {
                **run.to_dict(),
                "run_id": run.run_id,
                "checkpoint_id": f"{run.run_id}-{label}",
                "epoch_label": label,
                "epoch": epoch if position is not None or label == "best" else int(label),
                "engine": commit.engine,
                "origin": plan.origin,
                "status": record.status,
                "split": split_of(run.run_id),
                **curves,
                **_values_at(metrics[run.run_id], label, epoch, position is not None),
            }
            source = None if position is None else _Source(folder / checkpoint_file(label), position)
            yield row, source


def _values_at(metrics: dict[str, Any], label: str, epoch: int | None, exists: bool) -> dict[str, float | None]:
    """Return the metrics of one checkpoint; null where there is none or where it was not measured."""
    names = [column.name.removesuffix("_by_epoch") for column in CURVES]
    if not exists:
        values = dict.fromkeys(names)
    elif epoch is None:  # an imported "best", whose epoch nobody wrote down
        values = dict.fromkeys(names) | {"test_accuracy": metrics[f"{label}_test_accuracy"]}
    else:
        values = {name: _null_if_nan(metrics[name][epoch]) for name in names}
    train, test = values["train_accuracy"], values["test_accuracy"]
    return values | {"generalization_gap": None if train is None or test is None else train - test}


def _null_if_nan(value: float | None) -> float | None:
    return None if value is None or np.isnan(value) else value


def _curve(values: list[float]) -> list[float | None] | None:
    """A curve with null for what was not measured; null as a whole where nothing was."""
    curve = [_null_if_nan(value) for value in values]
    return curve if any(value is not None for value in curve) else None


def _check_one_data(rows: list[dict[str, Any]]) -> None:
    """One dataset holds one data digest per task: accuracies on other data are not comparable."""
    digests: dict[str, set[str]] = {}
    for row in rows:
        digests.setdefault(row["task"], set()).add(row["data_digest"])
    for task, found in digests.items():
        if len(found) > 1:
            raise DatasetError(
                f"data_digest: found {', '.join(sorted(found))} for task {task}, expected one in a dataset; "
                f"build the sweeps into datasets of their own"
            )


def _drop_equal_copies(
    rows: list[dict[str, Any]], sources: list[_Source | None]
) -> tuple[list[dict[str, Any]], list[_Source | None]]:
    """Keep one of several equal copies of a checkpoint; refuse unequal ones."""
    first: dict[str, int] = {}
    for index, row in enumerate(rows):
        other = first.setdefault(row["checkpoint_id"], index)
        if other != index and not _equal(sources[other], sources[index]):
            raise DatasetError(
                f"{row['checkpoint_id']}: found two copies with different weights ({sources[other]} and "
                f"{sources[index]}), expected equal ones; build them into different datasets"
            )
    kept = sorted(first.values())
    return [rows[i] for i in kept], [sources[i] for i in kept]


def _equal(a: _Source | None, b: _Source | None) -> bool:
    if a is None or b is None:
        return a is b
    ours, theirs = (StackedCheckpoints(source.file).row(source.position) for source in (a, b))
    return all(np.array_equal(ours[name], theirs[name]) for name in ours)


@dataclass(frozen=True)
class _ShardJob:
    """What one shard holds: rows in their order and the source of each."""

    task: str
    split: str
    number: int
    total: int
    rows: list[dict[str, Any]]
    sources: list[_Source]


def _shard_jobs(
    rows: list[dict[str, Any]], sources: list[_Source | None], shard_bytes: int
) -> tuple[list[_ShardJob], dict[str, tuple[int, int]]]:
    """Sort rows into shards; return the jobs and checkpoint_id -> (job, row)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, (row, source) in enumerate(zip(rows, sources, strict=True)):
        if source is not None:
            groups.setdefault((row["task"], row["split"]), []).append(index)
    jobs: list[_ShardJob] = []
    places: dict[str, tuple[int, int]] = {}
    for (task, split), members in sorted(groups.items(), key=lambda item: (item[0][0], SPLITS.index(item[0][1]))):
        members.sort(key=lambda i: (-_sort_value(rows[i]), rows[i]["checkpoint_id"]))
        size = max(shard_bytes // (4 * parameter_count(task)), 1)
        total = -(-len(members) // size)
        for number in range(total):
            part = members[len(members) * number // total : len(members) * (number + 1) // total]
            places |= {rows[i]["checkpoint_id"]: (len(jobs), row) for row, i in enumerate(part)}
            part_sources = [source for i in part if (source := sources[i]) is not None]
            jobs.append(_ShardJob(task, split, number, total, [rows[i] for i in part], part_sources))
    return jobs, places


def _sort_value(row: dict[str, Any]) -> float:
    return -1.0 if row["test_accuracy"] is None else row["test_accuracy"]


def _write_shard(job: _ShardJob, out: Path) -> Shard:
    """Gather a shard's weights and write it."""
    schema = checkpoint_schema(job.task)
    weights = _gather(job)
    scalars = {name: [row[name] for row in job.rows] for name in (*SCALAR_NAMES, *(c.name for c in CURVES))}
    columns = [pa.array(scalars[field.name], field.type) for field in schema if field.name in scalars]
    columns += [tensor_array(weights[spec.name]) for spec in tensor_table(job.task)]
    table = pa.Table.from_arrays(columns, schema=schema)
    prefix = f"{job.split}-{job.number:05d}-of-{job.total:05d}"
    path = _write_named(table, out, job.task, prefix, _write_weights)
    return Shard(job.task, job.split, path, len(job.rows))


def _gather(job: _ShardJob) -> dict[str, np.ndarray]:
    """Return each tensor of the shard's rows, [N, *shape], reading every stacked file once."""
    count = len(job.sources)
    weights = {spec.name: np.empty((count, *spec.shape), np.float32) for spec in tensor_table(job.task)}
    by_file: dict[Path, list[int]] = {}
    for target, source in enumerate(job.sources):
        by_file.setdefault(source.file, []).append(target)
    for file, targets in by_file.items():
        stacked = StackedCheckpoints(file)
        positions = [job.sources[target].position for target in targets]
        for name, values in weights.items():
            values[targets] = stacked.tensors[name][positions]
    return weights


def _write_weights(table: pa.Table, path: Path) -> None:
    """Write weights: byte-stream-split and zstd on the tensors, page index, boundaries that follow the content."""
    task = table["task"][0].as_py()
    texts = [field.name for field in table.schema if field.type == pa.string()]
    with pq.ParquetWriter(
        path,
        table.schema,
        compression="zstd",
        use_dictionary=texts,
        column_encoding=dict.fromkeys(tensor_paths(task), "BYTE_STREAM_SPLIT"),
        write_page_index=True,
        use_content_defined_chunking=True,
    ) as writer:
        writer.write_table(table, row_group_size=ROW_GROUP_ROWS)


def _write_plain(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", write_page_index=True)


def _write_named(table: pa.Table, out: Path, folder: str, prefix: str, write: Callable[[pa.Table, Path], None]) -> str:
    """Write a table under a name that carries a piece of its digest; return the path relative to `out`."""
    (out / folder).mkdir(parents=True, exist_ok=True)
    temporary = out / folder / f".tmp-{prefix}.parquet"
    try:
        write(table, temporary)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()[:8]
        name = f"{folder}/{prefix}-{digest}.parquet"
        temporary.rename(out / name)
    finally:
        temporary.unlink(missing_ok=True)
    return name


def _index_table(rows: list[dict[str, Any]], places: dict[str, tuple[int, int]], shards: list[Shard]) -> pa.Table:
    """Return the index: a row for every run and label, sorted like the weights, then by id."""
    schema = index_schema()
    columns: dict[str, list[Any]] = {field.name: [] for field in schema}
    for row in sorted(rows, key=lambda r: (r["task"], -_sort_value(r), r["checkpoint_id"])):
        job, position = places.get(row["checkpoint_id"], (None, None))
        place = {
            "file": None if job is None else shards[job].path,
            "row_group": None if position is None else position // ROW_GROUP_ROWS,
            "row": position,
        }
        for name, values in columns.items():
            values.append(place[name] if name in place else row[name])
    return pa.table(columns, schema=schema)


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of a plan's canonical JSON."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def counts(index: pa.Table, column: str) -> dict[str, int]:
    """Return how many index rows that have a checkpoint carry each value of a column."""
    present = index.filter(pc.is_valid(index["file"]))
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(present[column]).to_pylist()}


def dumps(content: Any) -> str:
    """Return JSON as files of the dataset hold it."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"
