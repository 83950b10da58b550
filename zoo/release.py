"""The authors' own checkpoints as a sealed sweep: `import_release` reads their release; `zoo build` takes the result.

Released runs have no plan of ours, so the plan is made from the release's table, with origin "imported". What nobody
knows stays unknown: the data digest stands for the table instead of the data, curves hold the accuracy of the released
epochs and nothing else, and "best" has an accuracy but no epoch (header of its file: null; its accuracy is a column
of its own, best_test_accuracy, in the metrics).

The release is streamed, population by population, and each is sealed when it is done: an import that was interrupted
goes on with what has no commit. Whatever is left out is reported by name.
"""

import dataclasses
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from tqdm import tqdm

from generators.hyperparameters import Hyperparameters
from generators.population import METRICS, PER_RUN_FIELDS
from zoo.commit import Commit, FileRecord, RunRecord
from zoo.config import label_order
from zoo.errors import ReleaseError, one_line
from zoo.plan import Plan, Population
from zoo.release_archive import ReleaseArchive
from zoo.release_table import Finding, ReleasedCheckpoint, ReleaseTable, read_table, refuse_contradictions
from zoo.stacked import checkpoint_bytes, metrics_bytes
from zoo.store import METRICS_FILE, Store, checkpoint_file, new_attempt
from zoo.versions import versions

POPULATION_SIZE = 200
"""Runs of a population, at most: their four checkpoints take 60 MB of memory."""
ENGINE = "imported"
NON_FINITE = "non-finite"
UNREADABLE = "unreadable"
FINDINGS_FILE = "findings.json"
Released: TypeAlias = dict[Hyperparameters, dict[str, ReleasedCheckpoint]]
"""Run -> label -> checkpoint."""
SHOWN_FINDINGS = 10
"""Findings of a kind that the text of a report names; its JSON names all."""


@dataclass(frozen=True)
class ReleaseReport:
    """What an import found.

    rows: of the table. files: checkpoints in the archive. checkpoints, runs: imported, earlier calls included.
    populations: sealed, of which `skipped` were so before this call.
    accuracy_columns: column -> rows that have their accuracy there.
    findings: everything that was not imported, or not as it stands.
    """

    task: str
    rows: int
    files: int
    checkpoints: int
    runs: int
    populations: int
    skipped: int
    accuracy_columns: dict[str, int]
    findings: list[Finding]

    def counts(self) -> dict[str, int]:
        """Return kind of finding -> number."""
        return dict(Counter(finding.kind for finding in self.findings))

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    def text(self) -> str:
        """Return the report for a reader: totals, then each kind of finding with its first names."""
        columns = ", ".join(f"{name} ({count} rows)" for name, count in self.accuracy_columns.items())
        lines = [
            f"{self.task}: {self.checkpoints} checkpoints of {self.runs} runs imported, from {self.rows} rows and "
            f"{self.files} files; {self.populations} populations sealed ({self.skipped} of them before)",
            f"accuracy read from {columns}",
        ]
        for kind, count in self.counts().items():
            named = [finding for finding in self.findings if finding.kind == kind]
            lines.append(f"{kind}: {count}")
            lines += [f"  {finding.name}: {finding.reason}" for finding in named[:SHOWN_FINDINGS]]
            if count > SHOWN_FINDINGS:
                lines.append(f"  and {count - SHOWN_FINDINGS} more; --json names all")
        if UNREADABLE in self.counts():
            lines.append("for a better copy of the archive use another --out: what is sealed here stays as it is")
        return "\n".join(lines)


def import_release(source: Path | str, task: str, out: Path | str, *, progress: bool = True) -> ReleaseReport:
    """Import the checkpoints of one task from the authors' release into a sweep directory.

    Args:
        source: the zip archive, or the folder that it unpacks to.
        task: "mnist" or "ag_news".
        out: a new sweep directory, or that of an import which was interrupted.
        progress: show a bar on stderr.

    Returns:
        The report: every row and file that was left out, by name.

    Raises:
        ReleaseError: the archive is unsafe, is no release, has nothing to import, or is not the one of which `out`
            holds a part.
        StoreError: `out` cannot be used, or holds something else.
    """
    store = Store(out)
    with ReleaseArchive(Path(source), task) as archive:
        table = read_table(archive.read_metadata(), task, f"{source}: {archive.metadata.name}")
        checkpoints, findings = _match(archive, table)
        plan = _make_plan(source, checkpoints, table, findings)
        store.check("--out")
        _settle_plan(store, plan)
        by_run: Released = defaultdict(dict)
        for checkpoint in checkpoints:
            by_run[checkpoint.hyperparameters][checkpoint.label] = checkpoint
        todo = store.todo()
        with tqdm(total=len(checkpoints), unit="checkpoint", desc="import", disable=not progress) as bar:
            left = sum(len(by_run[run]) for population in todo for run in population.runs)
            bar.update(len(checkpoints) - left)
            for population in todo:
                attempt = new_attempt()
                try:
                    _import_population(store, archive, population, attempt, plan.labels, by_run, bar)
                except BaseException:
                    store.discard(population.id, attempt)
                    raise
    return _make_report(store, plan, table, archive, findings, skipped=len(plan.populations) - len(todo))


def _match(archive: ReleaseArchive, table: ReleaseTable) -> tuple[list[ReleasedCheckpoint], list[Finding]]:
    """Bring rows and files together; return the checkpoints to import, and the findings so far."""
    findings = list(table.findings)
    findings += [Finding("duplicate", name, "twice in the archive; the first one counts") for name in archive.doubled]
    findings += [
        Finding("set aside", name, "belongs to the release, but is no checkpoint of this task")
        for name in archive.set_aside
    ]
    for file in archive.checkpoints:
        if file not in table.files:
            findings.append(Finding("file without a row", file, "its hyperparameters and accuracy are not known"))
    for checkpoint in table.checkpoints:
        if checkpoint.file not in archive.checkpoints:
            findings.append(Finding("row without a file", checkpoint.file, "the archive holds no such file"))
    there = [checkpoint for checkpoint in table.checkpoints if checkpoint.file in archive.checkpoints]
    checkpoints, contradictions = refuse_contradictions(there)
    findings += contradictions
    for checkpoint in checkpoints:
        named = int(checkpoint.file.removesuffix(".pt").rpartition("_")[2])
        if abs(named - checkpoint.accuracy * 10_000) > 1:
            reason = f"accuracy is {checkpoint.accuracy} in the table, {named / 10_000} in the name; the table counts"
            findings.append(Finding("name disagrees", checkpoint.file, reason))
    return checkpoints, findings


def _make_plan(
    source: Path | str, checkpoints: Sequence[ReleasedCheckpoint], table: ReleaseTable, findings: Sequence[Finding]
) -> Plan:
    """Derive the plan that these runs would have had."""
    if not checkpoints:
        first = f"; first of {len(findings)} findings: {findings[0].name}: {findings[0].reason}" if findings else ""
        raise ReleaseError(f"{source}: found no checkpoint with both a file and a usable row{first}")
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for run in dict.fromkeys(checkpoint.hyperparameters for checkpoint in checkpoints):
        groups[tuple(value for name, value in run.to_dict().items() if name not in PER_RUN_FIELDS)].append(run)
    populations = tuple(Population.of(part) for runs in groups.values() for part in _parts(runs))
    labels = sorted({c.label for c in checkpoints}, key=label_order)
    data = {
        "source": "the release of the paper's authors",
        "data_digest": "a digest of the release's table; the data itself is not known",
        "accuracy": f"of the test set, from {', '.join(table.accuracy_columns)}",
        "assumed": table.assumed,
    }
    return Plan(populations, tuple(labels), POPULATION_SIZE, data, origin="imported")


def _parts(runs: list[Any]) -> Iterator[list[Any]]:
    return (runs[start : start + POPULATION_SIZE] for start in range(0, len(runs), POPULATION_SIZE))


def _settle_plan(store: Store, plan: Plan) -> None:
    plans = store.plans()
    if not plans:
        store.add_plan(plan, 0)
    elif [found.to_json() for found in plans] != [plan.to_json()]:
        raise ReleaseError(
            f"{store.root}: found the plan of another sweep or release, expected a new directory, or one that an "
            f"import of this release has begun; use another --out"
        )


def _import_population(
    store: Store,
    archive: ReleaseArchive,
    population: Population,
    attempt: str,
    labels: Sequence[str],
    by_run: Released,
    bar: tqdm,
) -> None:
    """Read, check, write and seal the checkpoints of one population."""
    started = time.monotonic()
    findings: list[Finding] = []
    run_ids = {run: run.run_id for run in population.runs}
    kept: dict[Hyperparameters, list[str]] = {run: [] for run in population.runs}
    records: dict[str, FileRecord] = {}

    def write(name: str, content: bytes) -> None:
        records[name] = store.write(population.id, attempt, name, content)

    for label in labels:
        weights: dict[Hyperparameters, Tensor] = {}
        for run in population.runs:
            if label in by_run[run]:
                read = _read_finite(archive, by_run[run][label], findings)
                bar.update()
                if read is not None:
                    weights[run] = read
                    kept[run].append(label)
        if weights:
            epochs = [None if label == "best" else int(label)] * len(weights)
            stacked = torch.stack(list(weights.values()))
            kept_ids = [run_ids[run] for run in weights]
            write(checkpoint_file(label), checkpoint_bytes(population.runs[0].task, label, kept_ids, epochs, stacked))
    write(METRICS_FILE, _metrics(run_ids, by_run))
    if findings:
        write(FINDINGS_FILE, json.dumps([dataclasses.asdict(finding) for finding in findings]).encode())
    diverged = {finding.name for finding in findings if finding.kind == NON_FINITE}
    runs = {}
    for run, run_id in run_ids.items():
        status = "diverged" if any(c.file in diverged for c in by_run[run].values()) else "finished"
        runs[run_id] = RunRecord(status, None, kept[run])
    store.seal(Commit(population.id, attempt, records, runs, ENGINE, None, versions(), time.monotonic() - started))


def _read_finite(archive: ReleaseArchive, checkpoint: ReleasedCheckpoint, findings: list[Finding]) -> Tensor | None:
    """Return a checkpoint's weights [P]; where they are no use, add a finding and return None."""
    try:
        weights = archive.read_weights(archive.checkpoints[checkpoint.file], checkpoint.hyperparameters.task)
    except ReleaseError as error:
        findings.append(Finding(UNREADABLE, checkpoint.file, str(error)))
        return None
    except OSError as error:  # what is sealed as unreadable stays so, and the file may be whole
        raise ReleaseError(
            f"{archive.source}: {checkpoint.file}: cannot be read now ({error.strerror or one_line(error)}); "
            f"what is sealed is kept: mend it and run the same command again"
        ) from error
    finite = torch.isfinite(weights)
    if finite.all():
        return weights
    findings.append(Finding(NON_FINITE, checkpoint.file, f"{int((~finite).sum())} of {len(weights)} weights"))
    return None


def _metrics(run_ids: dict[Hyperparameters, str], by_run: Released) -> bytes:
    """Return metrics as a worker writes them: NaN where the release says nothing, the accuracy of "best" apart."""
    unknown, accuracies, best = [], [], []
    for run in run_ids:
        by_label = {label: checkpoint.accuracy for label, checkpoint in by_run[run].items()}
        best.append(by_label.pop("best", None))
        accuracies.append([by_label.get(str(epoch), math.nan) for epoch in range(run.epochs + 1)])
        unknown.append([math.nan] * (run.epochs + 1))
    metrics = {name: accuracies if name == "test_accuracy" else unknown for name in METRICS}
    return metrics_bytes(list(run_ids.values()), metrics, best)


def _make_report(
    store: Store, plan: Plan, table: ReleaseTable, archive: ReleaseArchive, findings: list[Finding], skipped: int
) -> ReleaseReport:
    """Sum up from the commits, so that a call that goes on reports what earlier calls found too."""
    labels = []
    for population in plan.populations:
        commit = store.commit(population.id)
        labels += [record.labels for record in commit.runs.values()]
        if FINDINGS_FILE in commit.files:
            content = store.read(population.id, commit.attempt, FINDINGS_FILE)
            findings += [Finding(**finding) for finding in json.loads(content)]
    return ReleaseReport(
        task=plan.task,
        rows=table.rows,
        files=len(archive.checkpoints) + len(archive.doubled),
        checkpoints=sum(map(len, labels)),
        runs=sum(map(bool, labels)),
        populations=len(plan.populations),
        skipped=skipped,
        accuracy_columns=dict(table.accuracy_columns),
        findings=findings,
    )
