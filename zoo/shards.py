"""Rows -> Parquet: the weights of a dataset, split, sorted, and written in shards; and its index.

A row is a checkpoint. All checkpoints of a run are in one split, which follows from the run_id alone. Rows are sorted
by test accuracy, best first, in small row groups, so that a selection by accuracy reads few of them. Shards carry a
piece of their digest in their names, and equal commits give equal bytes. Weights are gathered a few row groups at a
time, so memory does not grow with the sweep.
"""

import hashlib
import io
import itertools
import json
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from generators.architecture import parameter_count, tensor_table
from zoo.files import TEMPORARY_PREFIX, flush_folder, make_folder, named_in_errors
from zoo.plan import Plan
from zoo.rows import NO_FILE, Rows, collect_rows
from zoo.schema import checkpoint_schema, index_schema, tensor_array, tensor_paths
from zoo.splits import SPLITS
from zoo.stacked import StackedCheckpoints
from zoo.store import Store
from zoo.threads import available_cores

SHARD_BYTES = 256_000_000
ROW_GROUP_ROWS = 100
"""Rows of a row group: 7.4 MB of MNIST weights. With 50 files are 1 % larger; with 250 they are 1 % smaller, but the
best 2 % of 6,000 rows lie in an eighth of the bytes."""
ROW_GROUP_BYTES = 100_000_000
"""What the Hub's viewer takes at most; `zoo verify` checks the written footers against it."""
GATHER_ROWS = 5 * ROW_GROUP_ROWS
"""Rows whose weights are in memory at once, in each thread: 37 MB of MNIST."""
SHARDS_IN_FLIGHT = 4
"""Shards handed to the executor at once; each brings its scalars and curves, about 10 MB."""
INDEX_ROW_GROUP_ROWS = 100_000
INDEX_OPTIONS = {"compression": "zstd", "write_page_index": True}


@dataclass(frozen=True)
class WrittenFile:
    """A file of a dataset: its name relative to the dataset, and its SHA-256."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Shard(WrittenFile):
    """A Parquet file of weights: how many rows, of which task and split."""

    task: str
    split: str
    rows: int


@dataclass(frozen=True)
class Tables:
    """Everything that a dataset's card and provenance are made from.

    shards: all weight files. index: the rows of the index. curves: a row a run, and `curve_rows`, int64, the row of
    `curves` that belongs to each row of the index. index_file: where the index was written. plans: of all sweeps.
    """

    shards: list[Shard]
    index: pa.Table
    curves: pa.Table
    curve_rows: np.ndarray
    index_file: WrittenFile
    plans: list[Plan]

    @property
    def tasks(self) -> list[str]:
        return sorted({shard.task for shard in self.shards})


def write_shards(
    stores: Sequence[Store],
    out: Path,
    executor: Executor | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> Tables:
    """Write the Parquet files of all sealed populations of `stores` below `out`.

    Args:
        executor: runs the writing of shards; None for a thread a core. Its workers have to see the sweeps and `out`.
        shard_bytes: target size of a shard's weights.

    Raises:
        DatasetError: nothing is sealed, the sweeps' data differ, or two copies of one checkpoint are unequal.
        StoreError: a file is not what its commit says.
    """
    rows, plans = collect_rows(stores)
    members = _shard_members(rows, shard_bytes)
    with (
        _executor(executor) as pool,
        tqdm(total=len(members), desc="shards", unit="shard", disable=not progress) as bar,
    ):
        shards = []
        for shard in _in_order(pool, _write_shard, ((_job(rows, member), out) for member in members)):
            shards.append(shard)
            bar.update()
    index, curve_rows = _index_table(rows, members, shards)
    index_file = write_parquet(iter([index]), index.schema, out, "index/index", INDEX_OPTIONS, INDEX_ROW_GROUP_ROWS)
    return Tables(shards, index, rows.curves, curve_rows, index_file, plans)


@contextmanager
def _executor(given: Executor | None) -> Iterator[Executor]:
    """Yield the caller's executor, or one of our own that ends with the block."""
    if given is not None:
        yield given
        return
    pool = ThreadPoolExecutor(available_cores())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, function: Callable[..., Shard], calls: Iterator[tuple[Any, ...]]) -> Iterator[Shard]:
    """Yield the results of all calls in their order, with a bounded number of them under way."""
    running = deque(pool.submit(function, *call) for call in itertools.islice(calls, SHARDS_IN_FLIGHT))
    while running:
        yield running.popleft().result()
        running.extend(pool.submit(function, *call) for call in itertools.islice(calls, 1))


@dataclass(frozen=True)
class _Members:
    """Which rows, in which order, one shard holds; `name` is its path up to the digest."""

    task: str
    split: str
    name: str
    rows: np.ndarray


def _shard_members(rows: Rows, shard_bytes: int) -> list[_Members]:
    """Deal all rows that have weights to shards of about equal size: best accuracy first, then by id."""
    place = {
        "row": np.arange(len(rows)),
        "present": rows.file != NO_FILE,
        **{name: rows.scalars[name] for name in ("task", "split", "test_accuracy", "checkpoint_id")},
    }
    keys = [("task", "ascending"), ("test_accuracy", "descending"), ("checkpoint_id", "ascending")]
    ordered = pa.table(place).filter(pc.field("present")).sort_by(keys)
    members = []
    for task, split in itertools.product(sorted(ordered["task"].unique().to_pylist()), SPLITS):
        chosen = ordered.filter((pc.field("task") == task) & (pc.field("split") == split))["row"].to_numpy()
        size = max(shard_bytes // (4 * parameter_count(task)), 1)
        total = -(-len(chosen) // size)
        for number in range(total):
            part = chosen[len(chosen) * number // total : len(chosen) * (number + 1) // total]
            members.append(_Members(task, split, f"{task}/{split}-{number:05d}-of-{total:05d}", part))
    return members


@dataclass(frozen=True)
class _Job:
    """What a worker needs to write one shard: scalars and curves, and where the weights of each row lie."""

    members: _Members
    table: pa.Table
    files: list[Path]
    file: np.ndarray
    position: np.ndarray


def _job(rows: Rows, members: _Members) -> _Job:
    scalars, curves = rows.scalars.take(members.rows), rows.curves.take(rows.run[members.rows])
    for column in curves.schema.names:
        scalars = scalars.append_column(column, curves[column])
    used, file = np.unique(rows.file[members.rows], return_inverse=True)
    names = [name for name in checkpoint_schema(members.task).names if name in scalars.schema.names]
    files = [rows.files[i] for i in used]
    return _Job(members, scalars.select(names).combine_chunks(), files, file, rows.position[members.rows])


def _write_shard(job: _Job, out: Path) -> Shard:
    """Write a shard, gathering the weights of some row groups at a time."""
    members, schema = job.members, checkpoint_schema(job.members.task)

    def tables() -> Iterator[pa.Table]:
        for start in range(0, len(members.rows), GATHER_ROWS):
            scalars = job.table.slice(start, GATHER_ROWS)
            weights = _gather(job, slice(start, start + GATHER_ROWS))
            tensors = [tensor_array(values) for values in weights.values()]
            yield pa.Table.from_arrays([*scalars.columns, *tensors], schema=schema)

    written = write_parquet(tables(), schema, out, members.name, _weight_options(members.task), ROW_GROUP_ROWS)
    return Shard(written.path, written.sha256, members.task, members.split, len(members.rows))


def _gather(job: _Job, part: slice) -> dict[str, np.ndarray]:
    """Return each tensor of some of a shard's rows, [N, *shape], opening every stacked file once."""
    files, positions = job.file[part], job.position[part]
    weights = {spec.name: np.empty((len(files), *spec.shape), np.float32) for spec in tensor_table(job.members.task)}
    order = np.argsort(files, kind="stable")
    starts = np.flatnonzero(np.diff(files[order], prepend=-1))
    for targets in np.split(order, starts[1:]):
        stacked = StackedCheckpoints(job.files[files[targets[0]]]).tensors
        for name, values in weights.items():
            values[targets] = stacked[name][positions[targets]]
    return weights


def _weight_options(task: str) -> dict[str, Any]:
    """Byte-stream-split and zstd on the tensors, page index, page boundaries that follow the content."""
    schema = checkpoint_schema(task)
    return {
        "compression": "zstd",
        "use_dictionary": [field.name for field in schema if field.type == pa.string()],
        "column_encoding": dict.fromkeys(tensor_paths(task), "BYTE_STREAM_SPLIT"),
        "write_page_index": True,
        "use_content_defined_chunking": True,
    }


def write_parquet(
    tables: Iterator[pa.Table], schema: pa.Schema, out: Path, name: str, options: dict[str, Any], row_group_rows: int
) -> WrittenFile:
    """Write tables to `out`/`name`-DIGEST.parquet, whole and durable, or not at all."""
    folder = (out / name).parent
    make_folder(folder)
    temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        with named_in_errors(out / name), temporary.open("xb") as file:
            sink = _HashingSink(file)
            with pq.ParquetWriter(sink, schema, **options) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=row_group_rows)
            file.flush()
            os.fsync(file.fileno())
        digest = sink.digest.hexdigest()
        path = f"{name}-{digest[:8]}.parquet"
        temporary.rename(out / path)
        flush_folder(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return WrittenFile(path, digest)


class _HashingSink(io.RawIOBase):
    """A file to write to that keeps the SHA-256 of what passes."""

    def __init__(self, file: io.BufferedWriter) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self.digest.update(content)
        return self._file.write(content)

    def tell(self) -> int:
        return self._file.tell()


def _index_table(rows: Rows, members: list[_Members], shards: list[Shard]) -> tuple[pa.Table, np.ndarray]:
    """Return the index, a row for every run and label, sorted like the weights, then by id; and its rows of curves."""
    shard, row = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    for number, member in enumerate(members):
        shard[member.rows], row[member.rows] = number, np.arange(len(member.rows))
    absent = shard < 0
    names = pa.array([s.path for s in shards], pa.string())
    place = {
        "file": names.take(pa.array(shard, mask=absent)),
        "row_group": pa.array(row // ROW_GROUP_ROWS, mask=absent),
        "row": pa.array(row, mask=absent),
        "curve_row": pa.array(rows.run),
    }
    table = rows.scalars
    for name, column in place.items():
        table = table.append_column(name, column)
    table = table.sort_by([("task", "ascending"), ("test_accuracy", "descending"), ("checkpoint_id", "ascending")])
    return table.select(index_schema().names).cast(index_schema()).combine_chunks(), table["curve_row"].to_numpy()


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of a plan's canonical JSON."""
    return hashlib.sha256(plan.to_json().encode()).hexdigest()


def dumps(content: Any) -> str:
    """Return JSON as files of the dataset hold it."""
    return json.dumps(content, indent=1, sort_keys=True) + "\n"
