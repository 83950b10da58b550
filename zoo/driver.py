"""Deals the populations that are to be done over a cluster, and decides by the kind of a failure what happens next.

The driver may die at any moment and several may work on one sweep: nothing that it knows is needed to go on. What is
done is decided by commits; signs of life keep drivers from training the same population at the same time, which would
cost time and nothing else.
"""

import math
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from generators.tasks.data import TaskData
from zoo.cluster import Cluster, Failure, FailureKind
from zoo.config import SweepOptions
from zoo.errors import StoreError
from zoo.plan import Population
from zoo.signals import Stop
from zoo.signs import Sign
from zoo.store import Store, new_attempt, state_epoch
from zoo.worker import WorkerSettings, run_population

POLL_SECONDS = 0.5
SIGN_SECONDS = 5.0
"""Signs of life of running attempts are read so often; of other drivers' attempts too."""
START_SECONDS = 600.0
"""A worker may take so long, or hang_seconds if that is more, until its first epoch: it queues, starts, and loads."""
KILL_SECONDS = 30.0
"""A hanging task that still has not ended so long after it was killed is given up, with its slot."""
CRASHES_IN_A_ROW = 3
"""A population whose worker has died so often, with no new state in between, is set aside."""
LONGEST_PAUSE = 60.0
SLOTLESS_SECONDS = 10.0
SMALLEST_GPU_SHARE = 2**-10
"""Of its part of a GPU's memory: where a population does not get by with that, it is set aside."""
UNSEEN = "unseen"
"""What a task returns on a machine that does not see the sweep directory."""


@dataclass
class _Job:
    """A running attempt: its claim is the sign that the driver left for it, `state` the newest state at its start."""

    population: Population
    attempt: str
    claim: Sign
    state: list[str]
    sign: Sign
    settings: WorkerSettings
    changed_at: float = field(default_factory=time.monotonic)
    killed_at: float | None = None


class Driver:
    """One call's work: what is pending, what runs, what was sealed.

    trained: populations that this driver's workers sealed, each with the epoch of the state at which they began.
    set_aside: population id -> error of those that it gave up; another driver may have taken them up again meanwhile.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        settings: WorkerSettings,
        options: SweepOptions,
        data: TaskData,
        stop: Stop,
        bar: tqdm,
    ) -> None:
        self.store = store
        self.cluster = cluster
        self.settings = settings
        self.options = options
        self.data = data
        self.stop = stop
        self.bar = bar
        self.trained: list[tuple[Population, int]] = []
        self.set_aside: dict[str, str] = {}
        self._pending: deque[Population] = deque()
        self._running: dict[Any, _Job] = {}
        self._not_before: dict[str, float] = {}
        self._watched: dict[str, tuple[dict[str, Sign], float]] = {}
        self._losses: Counter[str] = Counter()
        self._crashes: Counter[str] = Counter()
        self._signs_read_at = time.monotonic()
        self._without_slots_since: float | None = None

    def run(self, todo: list[Population]) -> None:
        """Train `todo` until every population is sealed or set aside, or a stop was asked for.

        Raises:
            StoreError: the disk is full. Everything sealed so far is kept, and so are saved states.
        """
        for id_ in {population.id for population in todo}.intersection(self.store.in_quarantine()):
            self.store.release(id_)  # it is tried again
        self._pending.extend(todo)
        shared = self.cluster.share(self.data)
        self.stop.on_request = self._request_stops
        try:
            self._work_off(shared)
        finally:
            for task, job in self._running.items():
                self._kill(task, job)
                self.store.clear_sign(job.population.id, job.attempt)

    def _work_off(self, shared: Any) -> None:
        deadline = None
        while self._running or (self._pending and not self.stop.requested):
            self._fill_slots(shared)
            idle = bool(self._pending) and not self._running
            if idle and not self.options.wait_for_others and all(self._is_taken(p.id) for p in self._pending):
                self._say(f"left to other drivers, which train them: {len(self._pending)} populations")
                return
            if self.stop.requested and deadline is None:
                deadline = time.monotonic() + self.options.grace_seconds
                self._request_stops()  # also of a job that was not in our list when the signal came
            for task, result in self.cluster.wait(list(self._running), POLL_SECONDS):
                self._finish(self._running.pop(task), result)
            if time.monotonic() - self._signs_read_at >= SIGN_SECONDS:
                self._read_signs()
            if deadline is not None and time.monotonic() > deadline:
                return

    # Dealing

    def _fill_slots(self, shared: Any) -> None:
        self._look_for_slots()
        while len(self._running) < self.cluster.slots and not self.stop.requested:
            population = self._next()
            if population is None:
                return
            attempt, claim = new_attempt(), Sign.now(0)
            job = _Job(population, attempt, claim, self._newest_state(population.id), claim, self.settings)
            try:
                self.store.write_sign(population.id, attempt, claim)
            except OSError as error:
                self._handle(job, Failure.of(error, str(error)))
                continue
            # The job is known before it starts: in this process, a task runs inside `wait` and a signal meets it there.
            task = self.cluster.submit(_train, self.store, population, attempt, shared, self.settings)
            self._running[task] = job

    def _look_for_slots(self) -> None:
        """Say once, each time that the cluster has had no slot for some seconds, what the wait is for."""
        now, since = time.monotonic(), self._without_slots_since
        if self.cluster.slots or self._running:
            self._without_slots_since = None
        elif since is None:
            self._without_slots_since = now
        elif now - since > SLOTLESS_SECONDS:
            self._say("the cluster has no core or GPU for a worker now; waiting for nodes to join (Ctrl-C ends)")
            self._without_slots_since = math.inf

    def _next(self) -> Population | None:
        """Take the first pending population that nobody has sealed, or is training, and whose pause is over."""
        now = time.monotonic()
        for _ in range(len(self._pending)):
            population = self._pending.popleft()
            if self._not_before.get(population.id, now) > now:
                self._pending.append(population)
            elif self._is_taken(population.id):
                self._not_before[population.id] = now + SIGN_SECONDS
                self._pending.append(population)
            elif not self.store.is_sealed(population.id):
                return population
        return None

    def _is_taken(self, population: str) -> bool:
        """Whether another driver's attempt seems to be at work.

        A sign that does not change while we watch is no life, whatever the clocks say.
        """
        try:
            alive = {attempt: sign for attempt, sign in self.store.signs(population).items() if sign.is_alive()}
        except OSError:
            return False  # our own claim will fail, too, and then it is the population's failure
        if not alive:
            return False
        if self._watched.get(population, ({}, 0))[0] != alive:
            self._watched[population] = alive, time.monotonic()
        patience = max(sign.patience() for sign in alive.values())
        return time.monotonic() - self._watched[population][1] < patience

    # Results

    def _finish(self, job: _Job, result: Any) -> None:
        id_ = job.population.id
        if result == UNSEEN:
            result = Failure(FailureKind.LOST_NODE, f"a node does not see {self.store.root}, expected a shared folder")
            self._say(result.detail)
        if not isinstance(result, Failure):
            as_expected = self.store.is_sealed(id_) if result in ("sealed", "skipped") else self.stop.requested
            if result not in ("sealed", "skipped", "stopped") or not as_expected:
                result = Failure(FailureKind.CRASH, f"the worker returned {result!r:.200}")
        if isinstance(result, Failure):
            if job.killed_at is not None and job.sign == job.claim:
                # No process has ever claimed it: it only stood in the cluster's queue, whatever Ray calls its end.
                result = Failure(FailureKind.LOST_NODE, f"the task did not start ({result.detail})")
            self.store.clear_sign(id_, job.attempt)
            if not self.store.is_sealed(id_):  # it may have died right after sealing
                self._handle(job, result)
        elif result == "sealed":
            self.trained.append((job.population, state_epoch(job.state[0]) if job.state else 0))
            self._show()

    def _handle(self, job: _Job, failure: Failure) -> None:
        """Try a population again, or set it aside."""
        id_ = job.population.id
        if failure.kind is FailureKind.DISK_FULL:
            raise disk_full(self.store)
        if failure.kind is FailureKind.LOST_NODE:
            self._losses[id_] += 1
            return self._retry(job.population, pause=2.0 ** self._losses[id_])
        if failure.kind is FailureKind.OUT_OF_MEMORY and self._halve_gpu_share(job):
            return self._retry(job.population)
        if failure.kind in (FailureKind.CRASH, FailureKind.STORAGE):
            if self._newest_state(id_) != job.state:
                self._crashes[id_] = 0
            self._crashes[id_] += 1
            if self._crashes[id_] < CRASHES_IN_A_ROW:
                return self._retry(job.population, pause=float(failure.kind is FailureKind.STORAGE))
        self.set_aside[id_] = f"{failure.kind.value}: {failure.detail}"
        self.store.quarantine(id_, self.set_aside[id_])
        self._say(f"population {id_} set aside after {failure.kind.value}; see `zoo status`")
        return None

    def _newest_state(self, population: str) -> list[str]:
        """Return the name of the newest state, in a list; an empty one where there is none, or none can be seen."""
        try:
            return self.store.states(population)[-1:]
        except OSError:
            return []

    def _retry(self, population: Population, pause: float = 0.0) -> None:
        self._not_before[population.id] = time.monotonic() + min(pause, LONGEST_PAUSE)
        self._pending.append(population)

    def _halve_gpu_share(self, job: _Job) -> bool:
        """Let all populations plan with less memory from now on; False where that has come to its end.

        A population that was started before the last change just runs again with what is set now: all workers of a
        kind of GPU meet its limit at about the same time.
        """
        if job.settings.gpu_share > self.settings.gpu_share:
            return True
        if self.settings.gpu_share <= self.options.gpus_per_population * SMALLEST_GPU_SHARE:
            return False
        self.settings = replace(self.settings, gpu_share=self.settings.gpu_share / 2)
        self._say(f"GPU memory is short: populations plan with {self.settings.gpu_share:.2g} of it from now on")
        return True

    # Watching

    def _read_signs(self) -> None:
        """Look at the signs of life; kill what hangs and give up what cannot be killed."""
        now = self._signs_read_at = time.monotonic()
        for task, job in list(self._running.items()):
            sign = self.store.read_sign(job.population.id, job.attempt) or job.sign
            if sign != job.sign:
                job.sign, job.changed_at = sign, now
            if job.killed_at is not None:
                if now - job.killed_at >= KILL_SECONDS:
                    del self._running[task]
                    self._finish(job, Failure(FailureKind.CRASH, "the worker hangs and cannot be ended"))
            elif now - job.changed_at >= self._patience(job):
                self._say(
                    f"population {job.population.id}: no sign of life for {now - job.changed_at:.0f} s, its worker is "
                    f"ended (sweep.hang_seconds)"
                )
                job.killed_at = now
                self._kill(task, job)
        self._show()

    def _patience(self, job: _Job) -> float:
        """Seconds without a sign of life after which a job hangs."""
        limit = self.options.hang_seconds
        return limit if job.sign.time > job.sign.started else max(limit, START_SECONDS)

    def _kill(self, task: Any, job: _Job) -> None:
        known = job.sign != job.claim  # the claim names this process
        self.cluster.kill(task, job.sign.host if known else None, job.sign.pid if known else None)

    def _request_stops(self) -> None:
        for job in self._running.values():
            self.store.request_stop(job.population.id, job.attempt)

    def _show(self) -> None:
        done = sum(len(p.runs) * p.runs[0].epochs for p, _ in self.trained)
        done += sum(len(job.population.runs) * job.sign.epoch for job in self._running.values())
        self.bar.update(max(done - self.bar.n, 0))
        self.bar.set_postfix_str(f"{len(self.trained)} populations sealed, {len(self._running)} running", refresh=False)

    def _say(self, line: str) -> None:
        self.bar.write(line, file=sys.stderr)


def disk_full(store: Store) -> StoreError:
    """The error that ends a sweep whose disk is full."""
    return StoreError(
        f"{store.root}: no space left, expected room for the checkpoints to come; all sealed populations are kept: "
        f"make room and run the same command again"
    )


def _train(store: Store, population: Population, attempt: str, data: TaskData, settings: WorkerSettings) -> str:
    """The task that runs on a worker."""
    if not store.has_plan():
        return UNSEEN
    # From here on the task stands in no queue: if it hangs before its first epoch, that is a crash of the population.
    store.write_sign(population.id, attempt, Sign.now(0))
    return run_population(
        store, population, attempt, data, settings, lambda: store.stop_requested(population.id, attempt)
    )
