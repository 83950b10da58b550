"""The table of the authors' release, metadata/TASK.csv: a row a checkpoint, with the hyperparameters of its run."""

import csv
import difflib
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from generators.architecture import HEADS
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from zoo.errors import ReleaseError
from zoo.release_archive import CHECKPOINT_NAME

NUMBER_COLUMNS = {
    "lr": "learning_rate",
    "w_init_std": "init_std",
    "l2_regularize": "l2",
    "dropout": "dropout",
    "train_fraction": "train_fraction",
}
"""Column of the table -> hyperparameter."""
WHOLE_COLUMNS = {"seed": 3, "epochs": 100, "batch_size": 128, "warmup_epochs": 10}
"""Columns of whole numbers, with what the authors set in every run; it is assumed where a table lacks the column."""
LARGEST_WHOLE = 100_000
"""A larger number of epochs would only be there to make their curves fill the memory."""
ACCURACY_COLUMNS = ("test_top1_accuracy", "test_accuracy")
FIXED = {"min_learning_rate": 1e-5, "best_by": "test", "initialisation": "shared", "stream_version": 0}
"""What the authors' training does in every run and writes into no table; its random streams are none of ours."""


@dataclass(frozen=True)
class Finding:
    """One thing of a release that was not imported, or not as it stands: what kind, its name, and why."""

    kind: str
    name: str
    reason: str


@dataclass(frozen=True)
class ReleasedCheckpoint:
    """A row that can be used.

    file: name of the file, without folders. run: the release's own name of the run.
    label: "50" or "best". accuracy: on the test set, in [0, 1].
    """

    file: str
    run: str
    label: str
    accuracy: float
    hyperparameters: Hyperparameters


@dataclass
class ReleaseTable:
    """A table, read.

    rows: of the table. files: all file names in it, usable or not. checkpoints: the usable rows.
    findings: the others. accuracy_columns: column -> rows that take their accuracy from it.
    assumed: values of columns that the table lacks. digest: stands for the unknown data in the runs' run_id.
    """

    digest: str
    rows: int = 0
    files: set[str] = field(default_factory=set)
    checkpoints: list[ReleasedCheckpoint] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    accuracy_columns: Counter[str] = field(default_factory=Counter)
    assumed: dict[str, int] = field(default_factory=dict)


def read_table(content: bytes, task: str, where: str) -> ReleaseTable:
    """Read a table; `where` names it in errors.

    Rows are kept, or refused one by one: values that no run can have, or a second row of a file.

    Raises:
        ReleaseError: not a CSV file in UTF-8, or one that lacks a column.
    """
    digest = hashlib.sha256(f"metadata of an imported release, {task}\n".encode() + content).hexdigest()[:16]
    table = ReleaseTable(digest)
    try:
        reader = csv.DictReader(StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        columns = list(reader.fieldnames or ())
        _require_columns(columns, where)
        table.assumed = {name: value for name, value in WHOLE_COLUMNS.items() if name not in columns}
        for row in reader:
            table.rows += 1
            _add_row(table, row, task, f"line {reader.line_num}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise ReleaseError(f"{where}: cannot be read as CSV in UTF-8 ({error}); get the release again") from error
    return table


def _require_columns(columns: list[str], where: str) -> None:
    missing = [name for name in ("optimizer", *NUMBER_COLUMNS, "ckpt_epoch", "ckpt_file") if name not in columns]
    if not any(name in columns for name in ACCURACY_COLUMNS):
        missing.append(" or ".join(ACCURACY_COLUMNS))
    if missing:
        near = difflib.get_close_matches(missing[0], columns, n=1)
        hint = f"rename {near[0]}?" if near else "is this the table of a release?"
        raise ReleaseError(
            f"{where}: found columns {', '.join(columns) or 'none'}, expected {', '.join(missing)} too; {hint}"
        )


def _add_row(table: ReleaseTable, row: Mapping[str, Any], task: str, line: str) -> None:
    file = _file_name(row["ckpt_file"] or "")
    if CHECKPOINT_NAME.fullmatch(file) is None:
        reason = f"{line}: ckpt_file: found {row['ckpt_file']!r}, expected {task}/RUN_EPOCH_ACCURACY.pt"
        table.findings.append(Finding("refused row", file, reason))
        return
    if file in table.files:
        table.findings.append(Finding("duplicate", file, f"{line}: a second row of this file"))
        return
    table.files.add(file)
    try:
        checkpoint, column = _parse_row(row, file, task, table)
    except InputError as error:
        table.findings.append(Finding("refused row", file, f"{line}: {error}"))
        return
    table.accuracy_columns[column] += 1
    table.checkpoints.append(checkpoint)


def _file_name(path: str) -> str:
    """The last part: some rows of the authors' own script hold the folder twice."""
    return path.strip().replace("\\", "/").rpartition("/")[2]


def _parse_row(row: Mapping[str, Any], file: str, task: str, table: ReleaseTable) -> tuple[ReleasedCheckpoint, str]:
    """Return the checkpoint and the column of its accuracy; InputError, naming a column, for what no run can be."""
    if None in row or None in row.values():
        raise InputError("found another number of values than columns, expected as many")
    values: dict[str, Any] = {"optimizer": row["optimizer"].strip()}
    values |= {name: _number(row, column) for column, name in NUMBER_COLUMNS.items()}
    values |= {column: _whole(row, column) for column in WHOLE_COLUMNS if column not in table.assumed}
    if "n_attention_heads" in row and _whole(row, "n_attention_heads") != HEADS:  # no shape tells their number
        raise InputError(f"n_attention_heads: found {row['n_attention_heads']}, expected {HEADS}")
    values |= table.assumed | FIXED
    run = Hyperparameters(task=task, data_digest=table.digest, **values)
    label = "best" if row["ckpt_epoch"].strip() in ("best", "best1") else str(_whole(row, "ckpt_epoch"))
    named_run, named_epoch, _ = file.rsplit("_", 2)
    if label != named_epoch.removesuffix("1" if label == "best" else ""):
        raise InputError(f"ckpt_epoch: found {row['ckpt_epoch']}, expected {named_epoch} as in the file's name")
    if label != "best" and int(label) > run.epochs:
        raise InputError(f"ckpt_epoch: found {label}, expected at most the run's {run.epochs} epochs")
    column, accuracy = _accuracy(row)
    return ReleasedCheckpoint(file, named_run, label, accuracy, run), column


def _accuracy(row: Mapping[str, str]) -> tuple[str, float]:
    """Return the column that has the row's accuracy, and the accuracy."""
    filled = {column: _number(row, column) for column in ACCURACY_COLUMNS if row.get(column, "").strip()}
    if len(set(filled.values())) != 1:
        found = ", ".join(f"{column} {value}" for column, value in filled.items()) or "no accuracy"
        raise InputError(f"{' or '.join(ACCURACY_COLUMNS)}: found {found}, expected one value")
    column, accuracy = next(iter(filled.items()))
    if not 0 <= accuracy <= 1:
        raise InputError(f"{column}: found {accuracy}, expected a fraction in [0, 1]")
    return column, accuracy


def _number(row: Mapping[str, str], column: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"{column}: found {row[column]!r}, expected a number")
    return value


def _whole(row: Mapping[str, str], column: str) -> int:
    value = _number(row, column)  # a table that was written with gaps has "3.0"
    if not (value.is_integer() and 0 <= value <= LARGEST_WHOLE):
        raise InputError(f"{column}: found {row[column]!r}, expected a whole number from 0 to {LARGEST_WHOLE}")
    return int(value)


def refuse_contradictions(checkpoints: Sequence[ReleasedCheckpoint]) -> tuple[list[ReleasedCheckpoint], list[Finding]]:
    """Keep one configuration a run, one checkpoint a run and label, and one run a configuration; return the rest as
    findings.

    Call it with checkpoints whose files exist, so that none gives way to one that is not there. Of runs with one
    configuration, which would have one run_id, the one with most checkpoints is kept, the first of equals; checkpoints
    of different trainings are never mixed.
    """
    consistent: list[ReleasedCheckpoint] = []
    findings: list[Finding] = []
    first: dict[str, Hyperparameters] = {}
    labels: dict[tuple[str, str], str] = {}
    for checkpoint in checkpoints:
        run = first.setdefault(checkpoint.run, checkpoint.hyperparameters)
        if run != checkpoint.hyperparameters:
            names = [n for n, value in run.to_dict().items() if value != getattr(checkpoint.hyperparameters, n)]
            reason = f"{', '.join(names)}: other values than in the first row of run {checkpoint.run}"
            findings.append(Finding("refused row", checkpoint.file, reason))
            continue
        other = labels.setdefault((checkpoint.run, checkpoint.label), checkpoint.file)
        if other != checkpoint.file:
            reason = f"epoch {checkpoint.label} of run {checkpoint.run} is {other} already"
            findings.append(Finding("duplicate", checkpoint.file, reason))
        else:
            consistent.append(checkpoint)
    rivals: dict[Hyperparameters, Counter[str]] = defaultdict(Counter)
    for checkpoint in consistent:
        rivals[checkpoint.hyperparameters][checkpoint.run] += 1
    winners = {configuration: runs.most_common(1)[0][0] for configuration, runs in rivals.items()}
    kept = []
    for checkpoint in consistent:
        winner = winners[checkpoint.hyperparameters]
        if checkpoint.run == winner:
            kept.append(checkpoint)
        else:
            reason = f"run {checkpoint.run} has the configuration of run {winner}"
            findings.append(Finding("duplicate", checkpoint.file, reason))
    return kept, findings
