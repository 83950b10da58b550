"""Checks a sweep directory against its plans, byte by byte: what is damaged, missing, or does not belong there."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError
from safetensors.numpy import load

from generators.architecture import tensor_table
from generators.hyperparameters import Hyperparameters
from generators.population import METRICS
from zoo.commit import Commit, FileRecord
from zoo.data_record import EMBEDDING, RECORD, VOCABULARY, read_data_record
from zoo.errors import StoreError, ZooError, one_line
from zoo.plan import Plan, Population
from zoo.stacked import CHECKPOINT_FORMAT, safetensors_header
from zoo.store import (
    FOLDERS,
    METRICS_FILE,
    SIGN_FILE,
    STATE_FOLDER,
    STOP_FILE,
    Store,
    checkpoint_file,
    state_is_whole,
)

DATA_FILES = (EMBEDDING, RECORD, VOCABULARY)


@dataclass(frozen=True)
class Problem:
    """Something that is not as commits and plans have it.

    name: the file, relative to the sweep directory.
    population: whose commit cannot be trusted, so that it has to be trained again; None where no commit is at fault.
    """

    name: str
    text: str
    population: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def verify_sweep(path: Path | str) -> list[str]:
    """Return what is wrong with a sweep directory, a line each; [] for a whole and finished one.

    Every file that a commit names is read. Left-overs of dead attempts are no problem: no reader follows them.
    """
    return [str(problem) for problem in find_problems(Store(path))]


def find_problems(store: Store) -> list[Problem]:
    """Return all problems, in the order plans, foreign files, data, commits, states, quarantine."""
    try:
        plans = store.require_plans()
    except (ZooError, OSError) as error:
        return [Problem("plans", one_line(error))]
    populations = {p.id: (p, plan) for plan in plans for p in plan.populations}
    problems = [*_check_plans(store, plans), *_find_foreign(store, populations), *_check_data(store, plans)]
    sealed = store.sealed()
    for id_ in sorted(sealed & populations.keys()):
        problems += _check_population(store, *populations[id_])
    missing = populations.keys() - sealed
    if missing:
        found = f"found {len(populations) - len(missing)} of {len(populations)} populations"
        problems.append(Problem("commits", f"{found}, expected all of the plan; run `{command_of(plans[0])}` again"))
    return [*problems, *_check_states(store, sealed), *_check_quarantine(store, set(populations))]


def command_of(plan: Plan) -> str:
    """Return the command that makes the populations of a plan, and makes again what is missing."""
    return "zoo import-release" if plan.origin == "imported" else "zoo generate"


def _check_plans(store: Store, plans: list[Plan]) -> Iterator[Problem]:
    expected = [f"{number:03d}.json" for number in range(len(plans))]
    found = store.storage.children("plans")
    for name in found:
        if name not in expected:
            yield Problem(f"plans/{name}", f"foreign file, expected {', '.join(expected)} only")
    for name in expected:
        if name not in found:
            yield Problem(f"plans/{name}", "missing; restore it from a copy")
    runs = [run.run_id for plan in plans for run in plan.runs]
    if len(set(runs)) < len(runs):
        yield Problem("plans", f"found {len(runs) - len(set(runs))} runs twice, expected every run once")


def _find_foreign(store: Store, planned: dict[str, tuple[Population, Plan]]) -> Iterator[Problem]:
    for name in store.storage.children(""):
        if name not in FOLDERS:
            yield Problem(name, f"foreign, expected {', '.join(sorted(FOLDERS))} only")
    for name in store.storage.children("commits"):
        if name.removesuffix(".json") not in planned or not name.endswith(".json"):
            population = name.removesuffix(".json") if name.endswith(".json") else None
            yield Problem(f"commits/{name}", "foreign, expected commits of planned populations", population)
    for name in store.begun():
        if name not in planned:
            yield Problem(f"populations/{name}", "foreign, expected planned populations")
    for name in store.storage.children("data"):
        if f"data/{name}" not in DATA_FILES:
            yield Problem(f"data/{name}", f"foreign, expected {', '.join(DATA_FILES)} only")


def _check_data(store: Store, plans: list[Plan]) -> Iterator[Problem]:
    try:
        record = read_data_record(store.storage)
        if record is None:
            if plans[0].origin == "generated":
                yield Problem(RECORD, "missing; run `zoo generate` again")
            return
        if record["data_digest"] != plans[0].data_digest:
            yield Problem(RECORD, f"data_digest: found {record['data_digest']}, expected {plans[0].data_digest}")
        for name, sha256 in record["sha256"].items():
            found = FileRecord.of(store.storage.read(name)).sha256
            if found != sha256:
                yield Problem(name, f"SHA-256 {found}, expected {sha256}; restore it from a copy")
    except StoreError as error:
        yield Problem(RECORD, str(error).removeprefix(f"{store.root}/{RECORD}: "))
    except OSError as error:
        yield Problem("data", f"missing file or not readable ({one_line(error)}); restore it from a copy")


def _check_population(store: Store, population: Population, plan: Plan) -> Iterator[Problem]:
    """Check one commit, the files that it names, and that there are no others beside them."""
    id_, name = population.id, f"commits/{population.id}.json"
    try:
        commit = store.commit(id_)
    except StoreError as error:
        yield Problem(name, str(error).removeprefix(f"{store.root}/{name}: "), id_)
        return
    except OSError as error:
        yield Problem(name, _unreadable(error))
        return
    run_ids = [run.run_id for run in population.runs]
    if commit.population != id_:
        yield Problem(name, f"population: found {commit.population}, expected {id_}", id_)
    if list(commit.runs) != run_ids:
        yield Problem(name, f"runs: found {len(commit.runs)} run ids, expected the {len(run_ids)} of the plan", id_)
        return
    for run_id, run in commit.runs.items():
        complete = run.status == "finished" and plan.origin == "generated"
        if not set(run.labels) <= set(plan.labels) or (complete and run.labels != list(plan.labels)):
            yield Problem(name, f"run {run_id}: found labels {run.labels}, expected {list(plan.labels)}", id_)
    expected = {METRICS_FILE} | {checkpoint_file(label) for run in commit.runs.values() for label in run.labels}
    for missing in sorted(expected - commit.files.keys()):
        yield Problem(name, f"files: {missing} is missing, expected a record of it", id_)
    folder = f"populations/{id_}/{commit.attempt}"
    for foreign in sorted(set(store.storage.children(folder)) - commit.files.keys() - {SIGN_FILE, STOP_FILE}):
        yield Problem(f"{folder}/{foreign}", "foreign, expected the files of the commit only")
    for file, record in commit.files.items():
        try:
            content = store.read(id_, commit.attempt, file)
        except FileNotFoundError:
            yield Problem(f"{folder}/{file}", "missing", id_)
            continue
        except (IsADirectoryError, NotADirectoryError):
            yield Problem(f"{folder}/{file}", "found something else in its place, expected a file", id_)
            continue
        except OSError as error:  # it may be there, and whole: no reason to train it again
            yield Problem(f"{folder}/{file}", _unreadable(error))
            continue
        fault = _fault_of_bytes(content, record) or _fault_of_content(content, file, population, plan, commit)
        if fault:
            yield Problem(f"{folder}/{file}", fault, id_)


def _unreadable(error: OSError) -> str:
    return f"cannot be read ({error.strerror or one_line(error)}); look at its permissions and its disk"


def _fault_of_bytes(content: bytes, record: FileRecord) -> str | None:
    if len(content) != record.size:
        return f"found {len(content)} bytes, expected {record.size}"
    found = FileRecord.of(content).sha256
    return None if found == record.sha256 else f"SHA-256 {found}, expected {record.sha256}"


def _fault_of_content(content: bytes, file: str, population: Population, plan: Plan, commit: Commit) -> str | None:
    """Say what is wrong with a file whose bytes are as they were written."""
    try:
        if file == METRICS_FILE:
            return _fault_of_metrics(content, population, plan, commit)
        for label in plan.labels:
            if file == checkpoint_file(label):
                return _fault_of_checkpoints(content, label, population, commit)
    except (SafetensorError, pa.ArrowInvalid, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"not readable ({error!r})"
    return None  # what an import kept beside them


def _fault_of_checkpoints(content: bytes, label: str, population: Population, commit: Commit) -> str | None:
    kept = [run_id for run_id, run in commit.runs.items() if label in run.labels]
    header = json.loads(safetensors_header(content))
    expected = {"format": CHECKPOINT_FORMAT, "task": population.runs[0].task, "label": label, "run_ids": kept}
    for key, value in expected.items():
        if header[key] != value:
            return f"{key}: found {header[key]}, expected {value}"
    if len(header["epochs"]) != len(kept) or (label != "best" and set(header["epochs"]) != {int(label)}):
        return f"epochs: found {header['epochs']}, expected {label} of every run"
    tensors = load(content)
    shapes = {spec.name: (len(kept), *spec.shape) for spec in tensor_table(population.runs[0].task)}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != shapes:
        return f"tensors: found {found}, expected {shapes}"
    for name, tensor in tensors.items():
        if tensor.dtype != np.float32 or not np.isfinite(tensor).all():
            return f"{name}: found {tensor.dtype} with values that are not finite, expected finite float32"
    return None


def _fault_of_metrics(content: bytes, population: Population, plan: Plan, commit: Commit) -> str | None:
    table = pq.read_table(BytesIO(content))
    if table["run_id"].to_pylist() != list(commit.runs):
        return f"run_id: found {len(table)} rows, expected the {len(commit.runs)} runs of the commit in their order"
    for name in METRICS:
        values = table[name].to_pylist()
        if {len(row) for row in values} != {population.runs[0].epochs + 1}:
            return f"{name}: expected {population.runs[0].epochs + 1} values a run"
        if plan.origin == "generated":
            fault = _fault_of_curves(name, values, population.runs, commit)
            if fault:
                return fault
    return None


def _fault_of_curves(
    name: str, values: list[list[float]], runs: Sequence[Hyperparameters], commit: Commit
) -> str | None:
    """Figures are finite from where they are measured on, up to the epoch in which a run diverged."""
    if name.startswith("validation") and runs[0].best_by != "validation":
        return None
    start = 1 if name.startswith("train") else 0
    for run, curve in zip(runs, values, strict=True):
        diverged = commit.runs[run.run_id].diverged_epoch
        measured = np.array(curve[start:diverged])
        in_range = measured >= 0 if name.endswith("loss") else (measured >= 0) & (measured <= 1)
        if not (np.isfinite(measured) & in_range).all():
            return f"{name} of run {run.run_id}: found {measured.tolist()}, expected finite values in range"
    return None


def _check_states(store: Store, sealed: set[str]) -> Iterator[Problem]:
    for id_ in store.begun():
        if id_ not in sealed:
            for name in store.states(id_):
                try:
                    content = store.read(id_, STATE_FOLDER, name)
                except FileNotFoundError:
                    continue  # the attempt has saved a newer one since, or sealed its population
                except OSError as error:
                    yield Problem(f"populations/{id_}", f"{STATE_FOLDER}/{name} {_unreadable(error)}")
                    continue
                if not state_is_whole(name, content):
                    yield Problem(f"populations/{id_}/{STATE_FOLDER}/{name}", "damaged; nobody will continue from it")


def _check_quarantine(store: Store, planned: set[str]) -> Iterator[Problem]:
    for name in store.storage.children("quarantine"):
        id_ = name.removesuffix(".json")
        if id_ not in planned:
            yield Problem(f"quarantine/{name}", "foreign, expected planned populations")
            continue
        try:
            store.quarantined_error(id_)
        except FileNotFoundError:
            continue  # a driver has taken it up again since
        except StoreError as error:
            yield Problem(f"quarantine/{name}", str(error))
