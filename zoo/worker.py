"""One population from start to seal: skip what is sealed, resume what was begun, train, write, seal. Knows no Ray."""

import itertools
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from generators.engines import make_engine
from generators.engines.base import Engine
from generators.population import PopulationState, train_population
from generators.tasks.data import TaskData
from zoo.commit import Commit, FileRecord, RunRecord
from zoo.errors import DISK_FULL
from zoo.plan import Population
from zoo.signs import Sign
from zoo.stacked import CHECKPOINT_FORMAT, HEADER_KEY, checkpoint_bytes, metrics_bytes, safetensors_header
from zoo.store import METRICS_FILE, Store, checkpoint_file
from zoo.threads import torch_threads
from zoo.versions import versions

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker trains.

    labels: epoch labels to keep.
    engine: auto, torch, compiled or fused.
    device: torch device.
    threads: of the fused engine.
    state_seconds: a state is saved at the first epoch boundary after so many seconds.
    gpu_share: share of a GPU's memory that the worker may use.
    """

    labels: tuple[str, ...]
    engine: str = "auto"
    device: str = "cpu"
    threads: int = 1
    state_seconds: float = 300.0
    gpu_share: float = 1.0


def run_population(
    store: Store,
    population: Population,
    attempt: str,
    data: TaskData,
    settings: WorkerSettings,
    should_stop: Callable[[], bool] = lambda: False,
) -> str:
    """Train a population and seal it.

    Returns "sealed", "skipped" (somebody else has sealed it) or "stopped" (asked to stop; the state is saved).
    """
    outcome = "skipped"
    try:
        if not store.is_sealed(population.id):
            with torch_threads(1):  # results of torch depend on their number, those of the fused engine do not
                outcome = _train(store, population, attempt, data, settings, should_stop)
    finally:
        store.clear_sign(population.id, attempt)
    if outcome != "sealed":
        store.discard(population.id, attempt)
    return outcome


def _train(
    store: Store,
    population: Population,
    attempt: str,
    data: TaskData,
    settings: WorkerSettings,
    should_stop: Callable[[], bool],
) -> str:
    started = time.monotonic()
    engine = make_engine(settings.engine, data, settings.device, settings.threads, gpu_share=settings.gpu_share)
    resumed = _newest_state(store, population, engine)
    first = Sign.now(resumed.epoch if resumed else 0)
    store.write_sign(population.id, attempt, first)
    if should_stop():
        return "stopped"
    epochs = population.runs[0].epochs
    save_epochs = [int(label) for label in settings.labels if label != "best"]
    saved_at = time.monotonic()
    for state in train_population(population.runs, engine, save_epochs, resumed):
        _show_life(store, population, attempt, Sign.now(state.epoch, first))
        if state.epoch == epochs:
            break
        stopping = should_stop()
        if stopping or time.monotonic() - saved_at >= settings.state_seconds:
            if store.is_sealed(population.id):
                return "skipped"
            store.save_state(population.id, state.epoch, _state_bytes(state, population, engine))
            saved_at = time.monotonic()
        if stopping:
            return "stopped"
    commit = _write_results(store, population, attempt, state, settings.labels, engine, started)
    return "sealed" if store.seal(commit) else "skipped"


def _show_life(store: Store, population: Population, attempt: str, sign: Sign) -> None:
    """Leave a sign. One that cannot be written costs no training: storage that is away for long fails a state."""
    try:
        store.write_sign(population.id, attempt, sign)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        _log.warning("population %s: no sign of life of epoch %d: %s", population.id, sign.epoch, error)


def _write_results(
    store: Store,
    population: Population,
    attempt: str,
    state: PopulationState,
    labels: tuple[str, ...],
    engine: Engine,
    started: float,
) -> Commit:
    """Write checkpoints and metrics; return the commit that will seal them."""
    task, run_ids = population.runs[0].task, [run.run_id for run in population.runs]
    records: dict[str, FileRecord] = {}
    present: dict[str, torch.Tensor] = {}
    for label in labels:
        weights = state.labelled(label).cpu()
        epochs = state.label_epochs(label)
        kept = torch.isfinite(weights).all(dim=1)
        if label == "best":
            kept &= epochs > 0
        present[label] = kept
        if kept.any():
            kept_ids = list(itertools.compress(run_ids, kept.tolist()))
            content = checkpoint_bytes(task, label, kept_ids, epochs[kept].tolist(), weights[kept])
            records[checkpoint_file(label)] = store.write(population.id, attempt, checkpoint_file(label), content)
    metrics = {name: values.tolist() for name, values in state.metrics.items()}
    content = metrics_bytes(run_ids, metrics)
    records[METRICS_FILE] = store.write(population.id, attempt, METRICS_FILE, content)
    runs = {}
    for index, run_id in enumerate(run_ids):
        diverged = int(state.diverged_epoch[index])
        runs[run_id] = RunRecord(
            status="diverged" if diverged >= 0 else "finished",
            diverged_epoch=diverged if diverged >= 0 else None,
            labels=[label for label in labels if present[label][index]],
        )
    made_by = engine.name, engine.device.type
    return Commit(population.id, attempt, records, runs, *made_by, versions(), time.monotonic() - started)


def _state_bytes(state: PopulationState, population: Population, engine: Engine) -> bytes:
    header = {"population": population.id, **_kind_of_state(engine)}
    return save(state.to_tensors(), {HEADER_KEY: json.dumps(header)})


def _kind_of_state(engine: Engine) -> dict[str, Any]:
    """What has to be equal for a state to be continued: another engine or device would go on with other rounding, so
    that the end depended on when the population was interrupted."""
    return {"format": CHECKPOINT_FORMAT, "engine": engine.name, "device": engine.device.type}


def _newest_state(store: Store, population: Population, engine: Engine) -> PopulationState | None:
    """Return the newest state that this engine can continue, or None."""
    for content in store.load_states(population.id):
        try:
            header = json.loads(safetensors_header(content))
            if header == {"population": population.id, **_kind_of_state(engine)}:
                return PopulationState.from_tensors(load(content), engine.device)
        except (SafetensorError, ValueError, KeyError, TypeError):
            continue  # no state, although its digest is right: as good as a torn one
    return None
