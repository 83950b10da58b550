"""Checks one shard of a dataset: columns, encodings, size of row groups, order, ids, agreement with the index, and that
every number is finite."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from generators.architecture import tensor_table
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from zoo.errors import one_line
from zoo.schema import (
    CURVES,
    HYPERPARAMETER_NAMES,
    SCALAR_NAMES,
    checkpoint_schema,
    tensor_paths,
    tensor_values,
)
from zoo.shards import ROW_GROUP_BYTES
from zoo.splits import split_of

PROBLEMS_SHOWN = 20
"""Of one kind in one file; the rest is counted."""


@dataclass(frozen=True)
class _ShardCheck:
    """One shard under check."""

    path: str
    task: str
    split: str
    parquet: pq.ParquetFile


def check_shard(folder: Path, path: str, task: str, split: str, index: pa.Table) -> list[str]:
    """Return what is wrong with one shard, a line a problem; all of it is read, a row group at a time."""
    try:
        parquet = pq.ParquetFile(folder / path)
        if not parquet.schema_arrow.equals(checkpoint_schema(task)):
            return [f"{path}: its columns are not those of a checkpoint of {task}"]
        check = _ShardCheck(path, task, split, parquet)
        problems = _check_footer(check)
        scalars = []
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group, use_threads=False)
            scalars.append(table.select([*SCALAR_NAMES]))
            problems += first_problems(path, _check_values(task, table, group))
        return problems + _check_rows(check, pa.concat_tables(scalars), index)
    except (pa.ArrowException, OSError) as error:
        return [f"{path}: cannot be read ({one_line(error)})"]


def _check_footer(check: _ShardCheck) -> list[str]:
    """Look at the written footer: byte-stream-split on the tensors, and row groups that the Hub's viewer takes."""
    problems = []
    tensors, seen = set(tensor_paths(check.task)), set()
    for group in range(check.parquet.metadata.num_row_groups):
        metadata = check.parquet.metadata.row_group(group)
        if metadata.total_byte_size > ROW_GROUP_BYTES:
            problems.append(
                f"{check.path}: row group {group} has {metadata.total_byte_size} bytes, "
                f"expected {ROW_GROUP_BYTES} at most"
            )
        for column in map(metadata.column, range(metadata.num_columns)):
            if column.path_in_schema in tensors:
                seen.add(column.path_in_schema)
                if "BYTE_STREAM_SPLIT" not in column.encodings or column.compression != "ZSTD":
                    problems.append(
                        f"{check.path}: row group {group}: {column.path_in_schema} is {', '.join(column.encodings)} "
                        f"with {column.compression}, expected BYTE_STREAM_SPLIT with ZSTD"
                    )
    return problems + [f"{check.path}: found no column {name}" for name in sorted(tensors - seen)]


def _check_values(task: str, table: pa.Table, group: int) -> list[str]:
    """Return what is not finite in a row group."""
    problems = []
    for spec in tensor_table(task):
        column = table[spec.name]
        if column.null_count:
            problems.append(f"row group {group}: {spec.name} has {column.null_count} nulls")
            continue
        finite = np.isfinite(tensor_values(column, spec.shape)).reshape(len(table), -1).all(axis=1)
        ids = table["checkpoint_id"].filter(pa.array(~finite)).to_pylist()
        problems += [f"{checkpoint_id}: {spec.name} is not finite" for checkpoint_id in ids]
    for name in (
        *(field.name for field in table.schema if pa.types.is_floating(field.type)),
        *(c.name for c in CURVES),
    ):
        values = pc.list_flatten(table[name]) if pa.types.is_list(table[name].type) else table[name]
        if not pc.all(pc.is_finite(values.drop_null()), min_count=0).as_py():
            problems.append(f"row group {group}: {name} has a value that is not finite, expected null")
    return problems


def _check_rows(check: _ShardCheck, rows: pa.Table, index: pa.Table) -> list[str]:
    """Compare a shard's scalars with its place, with their own run_ids and with the index."""
    problems = []
    for row in rows.to_pylist():
        problems += _check_ids(row, check)
    accuracy = np.nan_to_num(rows["test_accuracy"].to_numpy(), nan=-1)  # rows without one come last
    if not np.all(accuracy[:-1] >= accuracy[1:]):
        problems.append("rows are not sorted by test_accuracy")
    listed = index.filter(pc.equal(index["file"], check.path)).sort_by("row")
    if len(listed) != len(rows):
        problems.append(f"has {len(rows)} rows, the index has {len(listed)} for it")
        return first_problems(check.path, problems)
    groups = [check.parquet.metadata.row_group(g).num_rows for g in range(check.parquet.num_row_groups)]
    rows = rows.append_column("row", pa.array(np.arange(len(rows))))
    rows = rows.append_column("row_group", pa.array(np.repeat(np.arange(len(groups)), groups)))
    for name in rows.column_names:
        differing = sum(a != b for a, b in zip(rows[name].to_pylist(), listed[name].to_pylist(), strict=True))
        if differing:
            problems.append(f"{name}: {differing} rows differ from the index")
    return first_problems(check.path, problems)


def _check_ids(row: dict[str, Any], check: _ShardCheck) -> list[str]:
    """Compare what a row says of itself: its run_id follows from its hyperparameters, its split from its run_id."""
    name = row["checkpoint_id"]
    try:
        run_id = Hyperparameters(**{key: row[key] for key in HYPERPARAMETER_NAMES}).run_id
    except InputError as error:
        return [f"{name}: {one_line(error)}"]
    rules = (
        ("run_id", row["run_id"], run_id),
        ("checkpoint_id", name, f"{run_id}-{row['epoch_label']}"),
        ("task", row["task"], check.task),
        ("split", check.split, split_of(run_id)),
    )
    return [f"{name}: {what} is {found}, expected {expected}" for what, found, expected in rules if found != expected]


def first_problems(where: str, texts: Sequence[str]) -> list[str]:
    """Name the first problems of one kind, and count the others."""
    lines = [f"{where}: {text}" for text in texts[:PROBLEMS_SHOWN]]
    return lines + ([f"{where}: and {len(texts) - PROBLEMS_SHOWN} more"] if len(texts) > PROBLEMS_SHOWN else [])
