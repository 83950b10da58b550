"""What the driver does with a population whose worker fails, by the kind of the failure."""

import errno
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_worker import ScriptedWorker, run
from sweep_tools import assert_undisturbed, block, tiny

from generators.engines.fused.build import FusedUnavailableError
from generators.errors import InputError
from zoo import driver as driver_module
from zoo import sweep as sweep_module
from zoo.cluster import Failure, FailureKind, InProcess
from zoo.files import LocalStorage
from zoo.plan import Population
from zoo.store import Store
from zoo.sweep import generate
from zoo.verify_sweep import verify_sweep


def crash(population: Population) -> Failure:
    return Failure(FailureKind.CRASH, "the worker died")


def test_a_poisoned_population_is_set_aside_the_others_finish_and_a_rerun_tries_it_again(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: ScriptedWorker
) -> None:
    # ray#30584: one failing trial made the whole experiment impossible to restore.
    poisoned: list[str] = []

    def poison(population: Population) -> None:
        poisoned[:] = poisoned or [population.id]
        if population.id in poisoned:
            raise ValueError("poison")

    worker_task.outcome = poison
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (summary.sealed, list(summary.quarantined)) == (1, poisoned)
    assert re.search(r"error: Traceback[\s\S]*in poison\n[\s\S]*ValueError: poison", summary.quarantined[poisoned[0]])
    assert worker_task.calls.count(poisoned[0]) == 1
    worker_task.outcome = lambda population: None
    assert run(tiny(), tmp_path / "s", digits_dir).quarantined == {}
    assert_undisturbed(tmp_path / "s", expected)


@pytest.mark.parametrize("fault", ["a file in its place", "a disk error"])
def test_a_population_whose_folder_cannot_be_used_is_set_aside_and_the_others_finish(
    fault: str, tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "s"
    worker_task.outcome = lambda population: Failure(FailureKind.ERROR, "not yet")
    victim, *others = run(tiny(), sweep, digits_dir).quarantined
    worker_task.outcome = lambda population: None
    if fault == "a file in its place":
        shutil.rmtree(sweep / "populations", ignore_errors=True)
        (sweep / "populations").mkdir()
        (sweep / "populations" / victim).write_text("")
    else:
        for method in ("children", "write_hint", "write"):
            monkeypatch.setattr(LocalStorage, method, _with_disk_error(getattr(LocalStorage, method), victim))
    summary = run(tiny(), sweep, digits_dir)
    assert (summary.sealed, list(summary.quarantined)) == (len(others), [victim])
    assert re.match(r"storage error: [\s\S]*(Not a directory|File exists|Input/output)", summary.quarantined[victim])
    monkeypatch.undo()
    if fault == "a file in its place":
        (sweep / "populations" / victim).unlink()
    assert run(tiny(), sweep, digits_dir).quarantined == {}
    assert verify_sweep(sweep) == []


def _with_disk_error(method: Any, population: str) -> Any:
    def failing(self: LocalStorage, name: str, *content: bytes) -> Any:
        if name.startswith(f"populations/{population}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return method(self, name, *content)

    return failing


def test_three_crashes_in_a_row_set_a_population_aside(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    worker_task.outcome = crash
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert {id_: worker_task.calls.count(id_) for id_ in summary.quarantined} == dict.fromkeys(worker_task.calls, 3)
    assert set(summary.quarantined.values()) == {"crash: the worker died"}


def test_a_newly_saved_state_starts_the_count_of_crashes_again(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    store = Store(tmp_path / "s")

    def crash_after_progress(population: Population) -> Failure:
        if (epoch := len(worker_task.calls)) <= 5:
            store.save_state(population.id, epoch, b"%d" % epoch)
        return crash(population)

    worker_task.outcome = crash_after_progress
    summary = run(tiny(grid=[block(dropout=[0.0])]), tmp_path / "s", digits_dir)
    # The fifth crash is the first after the newest state; two more without a state make three in a row.
    assert (len(worker_task.calls), len(summary.quarantined)) == (7, 1)


def test_a_lost_node_is_no_fault_of_the_population(
    tmp_path: Path,
    digits_dir: Path,
    expected: dict[str, Any],
    worker_task: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver_module, "LONGEST_PAUSE", 0.01)
    losses = iter(range(12))
    worker_task.outcome = lambda p: None if next(losses, None) is None else Failure(FailureKind.LOST_NODE, "gone")
    assert run(tiny(), tmp_path / "s", digits_dir).quarantined == {}
    assert len(worker_task.calls) == 14
    assert_undisturbed(tmp_path / "s", expected)


def test_pauses_after_lost_nodes_grow_to_a_limit(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    retry = driver_module.Driver._retry

    def note(self: Any, population: Population, pause: float = 0.0) -> None:
        pauses.append(pause)
        retry(self, population, 0.0)

    monkeypatch.setattr(driver_module.Driver, "_retry", note)
    losses = iter(range(8))
    worker_task.outcome = lambda p: None if next(losses, None) is None else Failure(FailureKind.LOST_NODE, "gone")
    run(tiny(grid=[block(dropout=[0.0])]), tmp_path / "s", digits_dir)
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256]
    assert driver_module.LONGEST_PAUSE == 60


class Queue(InProcess):
    """A cluster whose tasks stand in a queue, until the driver has taken so many of them out again."""

    def __init__(self, kills: int) -> None:
        self.kills = kills
        self._killed: list[Any] = []

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        if self._killed:
            return [(self._killed.pop(), Failure(FailureKind.CRASH, "task was cancelled"))]
        return super().wait([] if self.kills else tasks, timeout)

    def kill(self, task: Any, host: str | None, pid: int | None) -> None:
        assert (host, pid) == (None, None)
        self.kills -= 1
        self._killed.append(task)


def test_a_task_that_only_stood_in_the_queue_is_no_fault_of_the_population(
    tmp_path: Path,
    digits_dir: Path,
    expected: dict[str, Any],
    worker_task: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another driver may keep all slots of a cluster busy for longer than a worker needs to start."""
    for name, value in (("START_SECONDS", 0.0), ("SIGN_SECONDS", 0.0), ("LONGEST_PAUSE", 0.01)):
        monkeypatch.setattr(driver_module, name, value)
    monkeypatch.setattr("zoo.sweep.connect", lambda *_: Queue(kills=8))
    assert run(tiny(sweep={"hang_seconds": 0.001}), tmp_path / "s", digits_dir).quarantined == {}
    assert len(worker_task.calls) == 2
    assert_undisturbed(tmp_path / "s", expected)


class Hanging(InProcess):
    """A cluster whose workers hang before their first epoch, until they are killed."""

    def __init__(self) -> None:
        self._started: set[Any] = set()
        self._killed: list[Any] = []

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        for task in set(tasks) - self._started:
            self._started.add(task)
            assert task() == "hangs"
        return [(self._killed.pop(), Failure(FailureKind.CRASH, "the worker died"))] if self._killed else []

    def kill(self, task: Any, host: str | None, pid: int | None) -> None:
        assert pid == os.getpid()
        self._killed.append(task)


def test_a_worker_that_hangs_before_its_first_epoch_has_crashed(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("START_SECONDS", 0.0), ("SIGN_SECONDS", 0.0), ("run_population", lambda *_: "hangs")):
        monkeypatch.setattr(driver_module, name, value)
    monkeypatch.setattr("zoo.sweep.connect", lambda *_: Hanging())
    summary = run(tiny(sweep={"hang_seconds": 0.001}), tmp_path / "s", digits_dir)
    assert list(summary.quarantined.values()) == ["crash: the worker died"] * 2
    assert len(worker_task.calls) == 6


@pytest.mark.parametrize("garbage", ["done", "sealed", "skipped", "stopped", 7, {"a": [1]}, b"\x00" * 1000])
def test_a_worker_that_returns_garbage_has_crashed(
    garbage: Any, tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    worker_task.outcome = lambda population: garbage
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (summary.sealed, len(summary.quarantined), len(worker_task.calls)) == (0, 2, 6)
    assert all(e.startswith("crash: the worker returned ") and len(e) < 300 for e in summary.quarantined.values())


def test_a_worker_that_dies_right_after_sealing_has_sealed(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: ScriptedWorker
) -> None:
    train = worker_task._train

    def train_and_die(*arguments: Any) -> Failure:
        assert train(*arguments) == "sealed"
        return Failure(FailureKind.CRASH, "died")

    worker_task._train = train_and_die
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (summary.sealed, summary.quarantined, len(worker_task.calls)) == (2, {}, 2)
    assert_undisturbed(tmp_path / "s", expected)


def test_short_gpu_memory_halves_what_populations_plan_with_and_trains_the_same_runs(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    def short_of_memory(population: Population) -> None:
        if worker_task.gpu_shares[-1] > 0.1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    worker_task.outcome = short_of_memory
    config = tiny(population_size=5, grid=[block(learning_rate=[1e-2, 1e-3, 2e-3, 3e-3, 4e-3], dropout=[0.0])])
    config = replace(config, sweep=replace(config.sweep, gpus_per_population=0.5))
    summary = run(config, tmp_path / "s", digits_dir)
    assert (worker_task.gpu_shares, summary.quarantined) == ([0.5, 0.25, 0.125, 0.0625], {})
    assert len(Store(tmp_path / "s").commit(worker_task.calls[0]).runs) == 5


def test_workers_that_run_short_of_gpu_memory_together_halve_it_once(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both populations start with the whole memory and fail; then both run with half of it."""

    class TwoSlots(InProcess):
        slots = 2

    def short_of_memory(population: Population) -> None:
        if worker_task.gpu_shares[-1] > 0.5:
            raise torch.OutOfMemoryError("CUDA out of memory")

    worker_task.outcome = short_of_memory
    monkeypatch.setattr(sweep_module, "connect", lambda *arguments: TwoSlots())
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (worker_task.gpu_shares, summary.sealed) == ([1.0, 1.0, 0.5, 0.5], 2)


def test_a_run_that_alone_is_too_much_for_the_gpu_is_set_aside(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    def never(population: Population) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker_task.outcome = never
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert [e.partition(":")[0] for e in summary.quarantined.values()] == ["out of GPU memory"] * 2
    assert worker_task.gpu_shares[-1] == 2**-10


def test_a_quarantined_population_that_another_driver_sealed_is_not_reported(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    run(tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    store.quarantine(worker_task.calls[0], "error: of a slower driver")
    assert run(tiny(), tmp_path / "s", digits_dir).quarantined == {}


def test_a_driver_that_starts_leaves_what_others_set_aside_and_they_still_report_it(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker
) -> None:
    """The other driver tries again what ours has set aside, and is still at it when ours ends."""
    store = Store(tmp_path / "s")

    def fail(population: Population) -> Failure:
        if len(worker_task.calls) == 2:
            store.release(worker_task.calls[0])
        return Failure(FailureKind.ERROR, "poison")

    worker_task.outcome = fail
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert store.in_quarantine() == [worker_task.calls[1]]
    assert summary.quarantined == dict.fromkeys(worker_task.calls, "error: poison")


def test_a_start_takes_only_what_is_in_quarantine_out_of_it(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_task.outcome = lambda p: crash(p) if p.id == worker_task.calls[0] else None
    [bad] = run(tiny(population_size=1), tmp_path / "s", digits_dir).quarantined
    store = Store(tmp_path / "s")
    store.unseal(next(iter(store.sealed())))
    released: list[str] = []
    monkeypatch.setattr(Store, "release", lambda self, population: released.append(population))
    worker_task.outcome = lambda population: None
    run(tiny(population_size=1), tmp_path / "s", digits_dir)
    assert released == [bad]


@pytest.mark.parametrize("progress", [True, False])
def test_an_engine_that_is_not_available_ends_the_sweep_before_any_population_is_tried(
    progress: bool, tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise FusedUnavailableError("no compiler")

    monkeypatch.setattr("generators.engines.FusedEngine", fails)
    with pytest.raises(InputError, match="engine: fused is not available: no compiler"):
        generate(tiny(engine="fused"), tmp_path / "s", digits_dir, workers=0, progress=progress)
    assert (worker_task.calls, Store(tmp_path / "s").in_quarantine()) == ([], [])
