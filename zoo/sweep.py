"""A sweep: the populations that have no commit yet, dealt over a cluster until all have one."""

import contextlib
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

from generators.architecture import parameter_count
from generators.engines import make_engine
from generators.tasks.data import TaskData
from zoo.bench import first_estimate
from zoo.cluster import Cluster, Failure, FailureKind, connect
from zoo.config import SweepConfig
from zoo.data_record import load_data, write_data_record
from zoo.driver import Driver, disk_full
from zoo.durations import duration
from zoo.errors import DISK_FULL, PlanError, StoreError
from zoo.plan import BYTES_PER_WEIGHT, Plan, Population, differences, make_plan, run_steps
from zoo.signals import Interrupted, Stop, stop_signals
from zoo.store import Store
from zoo.threads import available_cores
from zoo.worker import WorkerSettings


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
        sweep_dir: folder of the sweep, made if it is not there; or s3://bucket/prefix.
        data_dir: folder of the task's data files.
        workers: populations trained at once; None for one a GPU or core; 0 trains in this process.
        address: of a running Ray cluster; None starts one for this call.
        extend: add the runs of `config` that the sweep does not have.
        progress: show a bar on stderr.

    Raises:
        PlanError: the sweep directory was made by another configuration or with other data.
        StoreError: the directory cannot be used, is not seen by all nodes, or its disk is full.
        InputError: the data cannot be loaded, or the engine is not available here.
        SweepInterrupted: SIGINT or SIGTERM came; all sealed work is kept.
    """
    store = Store(sweep_dir)
    # Ray prints what it has to say about dying workers to stdout, which belongs to results.
    with stop_signals() as stop, contextlib.redirect_stdout(sys.stderr):
        try:
            return _generate(store, config, data_dir, workers, address, extend, progress, stop)
        except Interrupted as interrupt:
            raise SweepInterrupted(interrupt.signal, _summary(store, [], {}, 0, 0.0)) from None
        except OSError as error:
            if error.errno in DISK_FULL:
                raise disk_full(store) from error
            raise StoreError(f"{store.root}: {error}, expected a sweep directory that can be written") from error


def _generate(
    store: Store,
    config: SweepConfig,
    data_dir: Path | str | None,
    workers: int | None,
    address: str | None,
    extend: bool,
    progress: bool,
    stop: Stop,
) -> SweepSummary:
    data = load_data(config.data, store.storage, Path(data_dir) if data_dir is not None else None)
    plans: list[Plan] = []
    if store.has_plan() and not extend:
        plans = settle_plan(store, config, data, on_gpu=False, extend=False)  # what is refused is so before Ray starts
        if not store.todo():
            write_data_record(store.storage, data)  # where it was lost since
            return _summary(store, [], {}, len(data.train), 0.0)
    cluster = connect(workers, address, config.sweep.gpus_per_population)
    try:
        store.check()
        plans = plans or settle_plan(store, config, data, cluster.on_gpu, extend)
        write_data_record(store.storage, data)
        todo = store.todo()
        check_room(store, todo, plans[0].labels, cluster.slots)
        check_nodes(store, cluster)
        settings = WorkerSettings(
            labels=plans[0].labels,
            engine=config.engine,
            device="cuda" if cluster.on_gpu else "cpu",
            threads=available_cores() if workers == 0 else 1,
            state_seconds=config.store.state_seconds,
            gpu_share=config.sweep.gpus_per_population,
        )
        if todo and address is None and not cluster.on_gpu and not stop.requested:
            # An engine that is not available is so for every population: refused here, before any is set aside for it.
            if not progress:
                make_engine(config.engine, data)
            else:
                rate, seconds = first_estimate(todo, data, config.engine, cluster.slots)
                print(f"about {duration(seconds)} at {rate:.0f} run-steps/s, as measured for a second", file=sys.stderr)
        started = time.monotonic()
        with _bar(todo, progress) as bar:
            driver = Driver(store, cluster, settings, config.sweep, data, stop, bar)
            driver.run(todo)
        summary = _summary(store, driver.trained, driver.set_aside, len(data.train), time.monotonic() - started)
    finally:
        cluster.close()
    if stop.signal is not None and summary.sealed < summary.populations:
        raise SweepInterrupted(stop.signal, summary)
    return summary


def settle_plan(store: Store, config: SweepConfig, data: TaskData, on_gpu: bool, extend: bool) -> list[Plan]:
    """Return the sweep's plans after adding what `config` asks for; refuse a configuration that does not fit.

    An automatic population size is settled by the first plan, so that a sweep can go on on another kind of machine.
    """
    digest, samples = data.digest(), len(data.train)
    plans = store.plans()
    planned = make_plan(config, digest, samples, on_gpu)
    if not plans:
        store.add_plan(planned, 0)
        return store.plans()
    found = replace(plans[0], populations=tuple(population for plan in plans for population in plan.populations))
    known, wanted = ({run.run_id for run in plan.runs} for plan in (found, planned))
    same_labels = planned.labels == found.labels
    if same_labels and wanted == known:
        return plans
    lines = "; ".join(differences(planned, found))
    if not extend:
        if same_labels and wanted < known:
            raise PlanError(
                f"{store.root}: the sweep has {len(known - wanted)} more runs ({lines}); use the configuration that "
                f"{'extended' if len(plans) > 1 else 'planned'} it, or another --sweep-dir"
            )
        way = ", or --extend to add runs to this one" if known < wanted else ""
        raise PlanError(f"{store.root}: the sweep was planned otherwise ({lines}); use another --sweep-dir{way}")
    if not same_labels:
        raise PlanError(
            f"save_epochs: found {list(planned.labels)}, expected {list(found.labels)} as in {store.root}; "
            f"one sweep keeps the same epochs of every run"
        )
    if not known <= wanted:
        raise PlanError(
            f"grid: {len(known - wanted)} runs of {store.root} are not in the configuration, expected a superset; "
            f"differing: {lines}"
        )
    store.add_plan(make_plan(config, digest, samples, on_gpu, exclude=known), len(plans))
    return store.plans()


def check_room(store: Store, todo: list[Population], labels: tuple[str, ...], slots: int) -> None:
    """Refuse to start where the checkpoints to come, and the states of what runs at once, do not fit.

    Raises:
        StoreError: with what is there and what is needed.
    """
    free = store.storage.free_bytes()
    if free is None or not todo:
        return
    run_bytes = parameter_count(todo[0].runs[0].task) * BYTES_PER_WEIGHT
    at_work = sorted((len(p.runs) for p in todo), reverse=True)[:slots]
    # A state holds the weights, two moments at most, the best weights and the checkpoints so far; an old and a new
    # one lie side by side for a moment.
    needed = run_bytes * (sum(len(p.runs) for p in todo) * len(labels) + 2 * sum(at_work) * (4 + len(labels)))
    if free < needed:
        raise StoreError(
            f"{store.root}: found {free / 1e9:.2f} GB free, expected {needed / 1e9:.2f} GB for {len(todo)} populations "
            f"to come; make room or use another --sweep-dir"
        )


def check_nodes(store: Store, cluster: Cluster) -> None:
    """Refuse a cluster with a node that does not see the sweep directory.

    Raises:
        StoreError: naming the node.
    """
    for host, answer in cluster.on_every_node(store.has_plan):
        if isinstance(answer, Failure):
            if answer.kind is FailureKind.LOST_NODE:
                continue  # it takes no tasks either
            reason = answer.detail.strip().splitlines()[-1]
            raise StoreError(f"{host}: found that it cannot run tasks of this package ({reason}); install it there")
        if answer is not True:
            raise StoreError(
                f"{store.root}: found that {host} cannot see this folder, expected storage that all nodes share; "
                f"use a shared file system or s3://"
            )


def _bar(todo: list[Population], progress: bool) -> tqdm:
    total = sum(len(p.runs) * p.runs[0].epochs for p in todo)
    return tqdm(total=total, unit="epoch", desc="runs x epochs", disable=not progress, smoothing=0.05)


def _summary(
    store: Store, trained: list[tuple[Population, int]], set_aside: dict[str, str], samples: int, seconds: float
) -> SweepSummary:
    plans = store.plans()
    commits = list(store.commits())
    sealed = {commit.population for commit in commits}
    return SweepSummary(
        populations=sum(len(plan.populations) for plan in plans),
        runs=sum(len(plan.runs) for plan in plans),
        sealed=len(commits),
        trained=len(trained),
        diverged=sum(run.status == "diverged" for commit in commits for run in commit.runs.values()),
        seconds=seconds,
        run_steps=sum(run_steps(population.runs, samples, first_epoch) for population, first_epoch in trained),
        # Another driver that has started meanwhile takes ours out of quarantine, to try them again.
        quarantined={id_: error for id_, error in (set_aside | store.quarantined()).items() if id_ not in sealed},
    )
