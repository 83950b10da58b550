"""Commits -> the rows of a dataset: a row of scalars for every run and label, curves once a run, and where the weights
of each row lie. Weights are not read here; what is held in memory is about 6 kB a run of 50 epochs and four labels.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from generators.hyperparameters import Hyperparameters
from zoo.errors import DatasetError, StoreError
from zoo.plan import Plan
from zoo.schema import CURVES, HYPERPARAMETER_NAMES, INDEX_PLACE, index_schema
from zoo.splits import split_of
from zoo.stacked import StackedCheckpoints
from zoo.store import METRICS_FILE, Commit, Store, checkpoint_file

NO_FILE = -1


@dataclass(frozen=True)
class Rows:
    """All rows of a dataset, in the order of the plans.

    scalars: the index's columns without the place (file, row_group, row), N rows.
    curves: a row a run.
    run: int64 [N], the row of `curves` that belongs to each row.
    files: stacked checkpoint files. file: int32 [N], which of them holds a row's weights, -1 for a row without a
        checkpoint. position: int32 [N], where in the stack.
    """

    scalars: pa.Table
    curves: pa.Table
    run: np.ndarray
    files: list[Path]
    file: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return self.scalars.num_rows


def collect_rows(stores: Sequence[Store]) -> tuple[Rows, list[Plan]]:
    """Return the rows of all sealed populations, each checkpoint once, and the plans ordered by their text.

    The order of the sweeps does not matter to the result.

    Raises:
        DatasetError: nothing is sealed, the sweeps' data differ, or two copies of one checkpoint are unequal.
    """
    planned = [(plan, store) for store in stores for plan in store.require_plans()]
    planned.sort(key=lambda pair: pair[0].to_json())
    sealed = {id(store): store.sealed() for store in stores}
    collector = _Collector()
    for plan, store in planned:
        for population in plan.populations:
            if population.id in sealed[id(store)]:
                collector.add(store, plan, store.commit(population.id), population.runs)
    if not collector.files:
        names = ", ".join(str(store.root) for store in stores)
        raise DatasetError(f"{names}: found no sealed checkpoint, expected at least one; let `zoo generate` finish one")
    rows = collector.rows()
    _check_one_data(rows.scalars)
    return _drop_equal_copies(rows), [plan for plan, _ in planned]


class _Collector:
    """Columns that grow by a population at a time."""

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {f.name: [] for f in index_schema() if f.name not in INDEX_PLACE}
        self.curves: list[pa.Table] = []
        self.run: list[int] = []
        self.files: list[Path] = []
        self.file: list[int] = []
        self.position: list[int] = []
        self._runs = 0

    def add(self, store: Store, plan: Plan, commit: Commit, runs: Sequence[Hyperparameters]) -> None:
        folder = store.attempt_folder(commit.population, commit.attempt)
        run_ids = [run.run_id for run in runs]
        _check_digest(folder / METRICS_FILE, commit)
        metrics = _Metrics(folder / METRICS_FILE, run_ids)
        self.curves.append(metrics.curves())
        common = [
            {name: getattr(run, name) for name in HYPERPARAMETER_NAMES}
            | {"run_id": run_id, "split": split_of(run_id), "status": commit.runs[run_id].status}
            for run, run_id in zip(runs, run_ids, strict=True)
        ]
        for label in plan.labels:
            places = self._places(folder, label, commit)
            for number, run_id in enumerate(run_ids):
                position, epoch = places.get(run_id, (NO_FILE, None if label == "best" else int(label)))
                present = position != NO_FILE
                values = metrics.at(number, epoch) if present else {}
                row = {
                    **common[number],
                    "checkpoint_id": f"{run_id}-{label}",
                    "epoch_label": label,
                    "epoch": epoch,
                    "engine": commit.engine,
                    "device": commit.device,
                    "origin": plan.origin,
                    **values,
                }
                for name, column in self.columns.items():
                    column.append(row.get(name))
                self.run.append(self._runs + number)
                self.file.append(len(self.files) - 1 if present else NO_FILE)
                self.position.append(position)
        self._runs += len(runs)

    def _places(self, folder: Path, label: str, commit: Commit) -> dict[str, tuple[int, int | None]]:
        """Return run_id -> (position, epoch) for the checkpoints of a label, and note their file."""
        name = checkpoint_file(label)
        if name not in commit.files:
            return {}
        _check_digest(folder / name, commit)
        stacked = StackedCheckpoints(folder / name)
        self.files.append(stacked.path)
        return stacked.places

    def rows(self) -> Rows:
        schema = pa.schema([field for field in index_schema() if field.name not in INDEX_PLACE])
        return Rows(
            scalars=pa.table(self.columns, schema=schema),
            curves=pa.concat_tables(self.curves).combine_chunks(),
            run=np.array(self.run, np.int64),
            files=self.files,
            file=np.array(self.file, np.int32),
            position=np.array(self.position, np.int32),
        )


def _check_digest(path: Path, commit: Commit) -> None:
    """Refuse a file that is not the one that was sealed: a dataset of it would look sound."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error}); see `zoo verify`") from error
    sealed = commit.files[path.name].sha256
    if found != sealed:
        raise StoreError(f"{path}: found SHA-256 {found[:16]}, its commit says {sealed[:16]}; see `zoo verify`")


class _Metrics:
    """A population's metrics, runs in the order that was asked for; NaN where nothing was measured."""

    def __init__(self, path: Path, run_ids: Sequence[str]) -> None:
        try:
            table = pq.read_table(path)
            rows = {run_id: row for row, run_id in enumerate(table["run_id"].to_pylist())}
            table = table.take([rows[run_id] for run_id in run_ids]).combine_chunks()
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            raise StoreError(f"{path}: not the metrics of its population ({error!r}); see `zoo verify`") from error
        self._best = table["best_test_accuracy"].to_numpy() if "best_test_accuracy" in table.column_names else None
        self._values = {
            column.name: np.stack(table[column.metric].to_numpy()) for column in CURVES
        }  # name -> float64 [runs, epochs + 1]

    def curves(self) -> pa.Table:
        """Return a row a run; null for what was not measured, and for the whole curve where nothing was."""
        columns = {}
        for column in CURVES:
            values = self._values[column.name]
            missing = np.isnan(values)
            flat = pa.array(values.ravel(), mask=missing.ravel())
            offsets = pa.array(np.arange(len(values) + 1, dtype=np.int32) * values.shape[1])
            nothing = pa.array(missing.all(axis=1))
            columns[column.name] = pa.ListArray.from_arrays(offsets, flat, mask=nothing)
        return pa.table(columns)

    def at(self, row: int, epoch: int | None) -> dict[str, float | None]:
        """Return the metrics of one run's checkpoint; None where one was not measured."""
        if epoch is None:  # an imported "best", whose epoch nobody wrote down
            best = None if self._best is None else _known(self._best[row])
            return {"test_accuracy": best}
        values = {column.metric: _known(self._values[column.name][row, epoch]) for column in CURVES}
        train, test = values["train_accuracy"], values["test_accuracy"]
        return values | {"generalization_gap": None if train is None or test is None else train - test}


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _check_one_data(scalars: pa.Table) -> None:
    """One dataset holds one data digest per task: accuracies on other data are not comparable."""
    pairs = scalars.group_by(["task", "data_digest"], use_threads=False).aggregate([]).to_pylist()
    digests: dict[str, list[str]] = {}
    for pair in pairs:
        digests.setdefault(pair["task"], []).append(pair["data_digest"])
    for task, found in sorted(digests.items()):
        if len(found) > 1:
            raise DatasetError(
                f"data_digest: found {', '.join(sorted(found))} for task {task}, expected one in a dataset; "
                f"build the sweeps into datasets of their own"
            )


def _drop_equal_copies(rows: Rows) -> Rows:
    """Keep one of several equal copies of a checkpoint; refuse unequal ones."""
    first: dict[str, int] = {}
    for row, checkpoint_id in enumerate(rows.scalars["checkpoint_id"].to_pylist()):
        other = first.setdefault(checkpoint_id, row)
        if other != row and not _equal(rows, other, row):
            places = [str(rows.files[rows.file[r]]) if rows.file[r] != NO_FILE else "diverged" for r in (other, row)]
            raise DatasetError(
                f"{checkpoint_id}: found two copies that differ ({' and '.join(places)}), expected equal ones; "
                f"build them into different datasets"
            )
    if len(first) == len(rows):
        return rows
    kept = np.fromiter(first.values(), np.int64)
    return Rows(rows.scalars.take(kept), rows.curves, rows.run[kept], rows.files, rows.file[kept], rows.position[kept])


def _equal(rows: Rows, a: int, b: int) -> bool:
    """Whether two rows have the same scalars and weights, bit for bit."""
    if rows.scalars.slice(a, 1).to_pylist() != rows.scalars.slice(b, 1).to_pylist():
        return False
    if NO_FILE in (rows.file[a], rows.file[b]):
        return bool(rows.file[a] == rows.file[b])
    ours, theirs = (StackedCheckpoints(rows.files[rows.file[r]]).row(rows.position[r]) for r in (a, b))
    return all(np.array_equal(ours[name].view(np.uint8), theirs[name].view(np.uint8)) for name in ours)
