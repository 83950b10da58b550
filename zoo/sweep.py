"""A sweep: the populations that have no commit yet, dealt over a cluster until all have one."""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from generators.tasks.data import TaskData
from zoo.cluster import Cluster, Failure, FailureKind, connect
from zoo.config import SweepConfig
from zoo.data_record import load_data, write_data_record
from zoo.errors import PlanError
from zoo.plan import Plan, Population, differences, make_plan
from zoo.store import Store, new_attempt
from zoo.worker import WorkerSettings, run_population

POLL_SECONDS = 0.5
CRASHES_IN_A_ROW = 3
"""A population whose worker has died so often, with no new state in between, is set aside."""


@dataclass
class SweepSummary:
    """What a call of `generate` left behind.

    populations, runs: planned. sealed: populations that have a commit now. trained: populations that this call sealed.
    diverged: runs that diverged. quarantined: population id -> error. seconds: of training, start-up excluded.
    run_steps: training steps of all runs that this call sealed.
    """

    populations: int
    runs: int
    sealed: int
    trained: int
    diverged: int
    seconds: float
    run_steps: int
    quarantined: dict[str, str] = field(default_factory=dict)


class SweepInterrupted(Exception):
    """The sweep was asked to stop and did; the same command goes on. `signal` is what asked."""

    def __init__(self, signal_number: int, summary: SweepSummary) -> None:
        super().__init__(f"stopped after {summary.sealed} of {summary.populations} populations; run the command again")
        self.signal = signal_number
        self.summary = summary


@dataclass
class _Running:
    population: Population
    attempt: str


def generate(
    config: SweepConfig,
    sweep_dir: Path | str,
    data_dir: Path | str | None = None,
    workers: int | None = None,
    address: str | None = None,
    extend: bool = False,
    progress: bool = True,
) -> SweepSummary:
    """Start a sweep, or go on with it: train every planned population that is not sealed yet.

    Args:
        config: what to train.
        sweep_dir: folder of the sweep; made if it is not there.
        data_dir: folder of the task's data files.
        workers: populations trained at once; None for one a GPU or core; 0 trains in this process.
        address: of a running Ray cluster; None starts one for this call.
        extend: add the runs of `config` that the sweep does not have.
        progress: show a bar on stderr.

    Raises:
        PlanError: the sweep directory was made by another configuration or with other data.
        SweepInterrupted: SIGINT or SIGTERM came; all sealed work is kept.
    """
    store = Store(sweep_dir)
    data = load_data(config.data, store.root, Path(data_dir) if data_dir is not None else None)
    cluster = connect(workers, address)
    try:
        plans = settle_plan(store, config, data, cluster.on_gpu, extend)
        write_data_record(store.root, data)
        settings = WorkerSettings(
            labels=plans[0].labels,
            engine=config.engine,
            device="cuda" if cluster.on_gpu else "cpu",
            state_seconds=config.store.state_seconds,
        )
        with _stop_signals() as stop:
            sweep = _Sweep(store, cluster, settings, data, stop, progress)
            sweep.run()
    finally:
        cluster.close()
    summary = sweep.summary(plans)
    if stop.signal is not None and summary.sealed < summary.populations:
        raise SweepInterrupted(stop.signal, summary)
    return summary


def settle_plan(store: Store, config: SweepConfig, data: TaskData, on_gpu: bool, extend: bool) -> list[Plan]:
    """Return the sweep's plans after adding what `config` asks for; refuse a configuration that does not fit.

    An automatic population size is settled by the first plan, so that a sweep can go on on another kind of machine.
    """
    digest, samples = data.digest(), len(data.train)
    plans = store.plans()
    if not plans:
        store.add_plan(make_plan(config, digest, samples, on_gpu))
        return store.plans()
    known = {run.run_id for plan in plans for run in plan.runs}
    planned = make_plan(config, digest, samples, on_gpu)
    wanted = {run.run_id for run in planned.runs}
    if planned.labels == plans[0].labels and wanted == known:
        return plans
    if not extend:
        lines = "; ".join(differences(planned, plans[0]))
        raise PlanError(
            f"{store.root}: the sweep was planned otherwise ({lines}); "
            f"use another --sweep-dir, or --extend to add runs to this one"
        )
    if planned.labels != plans[0].labels:
        raise PlanError(
            f"save_epochs: found {list(planned.labels)}, expected {list(plans[0].labels)} as in {store.root}; "
            f"one sweep keeps the same epochs of every run"
        )
    if not known <= wanted:
        raise PlanError(
            f"grid: {len(known - wanted)} runs of {store.root} are not in the configuration, expected a superset; "
            f"differing: {'; '.join(differences(planned, plans[0]))}"
        )
    store.add_plan(make_plan(config, digest, samples, on_gpu, exclude=known))
    return store.plans()


class _Stop:
    """Set by a signal; the number of the first one."""

    signal: int | None = None


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    """Turn SIGINT and SIGTERM into a request to stop; a second one ends the process as usual."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: Any) -> None:
        stop.signal = number
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Sweep:
    """One call's work: what is pending, what runs, what was sealed."""

    def __init__(
        self, store: Store, cluster: Cluster, settings: WorkerSettings, data: TaskData, stop: _Stop, progress: bool
    ) -> None:
        self.store = store
        self.cluster = cluster
        self.settings = settings
        self.data = data
        self.stop = stop
        self.progress = progress
        self.trained: list[Population] = []
        self.crashes: dict[str, int] = {}
        self.started = time.monotonic()

    def run(self) -> None:
        todo = self.store.todo()
        for population in todo:
            self.store.release(population.id)  # a population in quarantine is tried again
        pending = deque(todo)
        running: dict[Any, _Running] = {}
        shared = self.cluster.share(self.data)
        with self._bar(todo) as bar:
            while running or (pending and self.stop.signal is None):
                while pending and len(running) < self.cluster.slots and self.stop.signal is None:
                    job = _Running(pending.popleft(), new_attempt())
                    task = self.cluster.submit(_train, self.store, job.population, job.attempt, shared, self.settings)
                    running[task] = job
                if self.stop.signal is not None:
                    for job in running.values():
                        self.store.request_stop(job.population.id, job.attempt)
                for task, result in self.cluster.wait(list(running), POLL_SECONDS):
                    job = running.pop(task)
                    if isinstance(result, Failure):
                        self._handle(job.population, result, pending)
                    elif result == "sealed":
                        self.trained.append(job.population)
                self._show(bar, todo, running)

    def _handle(self, population: Population, failure: Failure, pending: deque[Population]) -> None:
        """Decide by the kind of a failure whether a population is tried again."""
        if failure.kind is FailureKind.LOST_NODE:
            pending.append(population)
            return
        self.crashes[population.id] = self.crashes.get(population.id, 0) + 1
        if failure.kind is FailureKind.CRASH and self.crashes[population.id] < CRASHES_IN_A_ROW:
            pending.append(population)
            return
        self.store.quarantine(population.id, f"{failure.kind.value}: {failure.detail}")
        tqdm.write(f"population {population.id} set aside after {failure.kind.value}; see `zoo status`")

    def _bar(self, todo: list[Population]) -> tqdm:
        total = sum(len(p.runs) * p.runs[0].epochs for p in todo)
        return tqdm(total=total, unit="epoch", desc="runs x epochs", disable=not self.progress, smoothing=0.05)

    def _show(self, bar: tqdm, todo: list[Population], running: dict[Any, _Running]) -> None:
        if bar.disable:
            return
        done = sum(len(p.runs) * p.runs[0].epochs for p in self.trained)
        for job in running.values():
            sign = self.store.read_progress(job.population.id, job.attempt)
            done += len(job.population.runs) * (sign["epoch"] if sign else 0)
        bar.update(max(done - bar.n, 0))
        bar.set_postfix_str(f"{len(self.trained)}/{len(todo)} populations sealed", refresh=False)

    def summary(self, plans: list[Plan]) -> SweepSummary:
        samples = len(self.data.train)
        commits = list(self.store.commits())
        return SweepSummary(
            populations=sum(len(plan.populations) for plan in plans),
            runs=sum(len(plan.runs) for plan in plans),
            sealed=len(commits),
            trained=len(self.trained),
            diverged=sum(run.status == "diverged" for commit in commits for run in commit.runs.values()),
            seconds=time.monotonic() - self.started,
            run_steps=sum(
                r.epochs * (round(r.train_fraction * samples) // r.batch_size) for p in self.trained for r in p.runs
            ),
            quarantined=self.store.quarantined(),
        )


def _train(store: Store, population: Population, attempt: str, data: TaskData, settings: WorkerSettings) -> str:
    """The task that runs on a worker."""
    return run_population(
        store, population, attempt, data, settings, lambda: store.stop_requested(population.id, attempt)
    )
