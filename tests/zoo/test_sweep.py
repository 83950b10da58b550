import json
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sweep_tools import assert_undisturbed, block, drive, kill_when, rows, start, tiny

from zoo import driver as driver_module
from zoo.cluster import Failure, FailureKind
from zoo.config import SweepConfig
from zoo.errors import PlanError, StoreError
from zoo.plan import Population
from zoo.signs import Sign
from zoo.store import Store
from zoo.sweep import SweepInterrupted, SweepSummary, generate

Outcome = Callable[[Population], Any]


def run(config: SweepConfig, sweep: Path | str, data_dir: Path, **options: Any) -> SweepSummary:
    return generate(config, sweep, data_dir, workers=0, progress=False, **options)


class Worker:
    """Stands for the task of a worker: answers by `outcome`, where that gives one, and else trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.widths: list[int | None] = []
        self.outcome: Outcome = lambda population: None
        self._train = driver_module._train
        monkeypatch.setattr(driver_module, "_train", self)
        monkeypatch.setattr(driver_module, "POLL_SECONDS", 0.01)

    def __call__(self, store: Any, population: Population, attempt: str, data: Any, settings: Any) -> Any:
        self.calls.append(population.id)
        self.widths.append(settings.runs_at_once)
        found = self.outcome(population)
        return self._train(store, population, attempt, data, settings) if found is None else found


@pytest.fixture
def worker_task(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def crash(population: Population) -> Failure:
    return Failure(FailureKind.CRASH, "the worker died")


def test_a_sweep_seals_every_population_of_its_plan(undisturbed: Path, expected: dict[str, Any]) -> None:
    assert_undisturbed(undisturbed, expected)
    assert len([key for key in expected if " " not in key]) == 4
    assert len(expected) == 4 + 4 * 4
    assert sorted(path.name for path in undisturbed.iterdir()) == ["commits", "data", "plans", "populations"]


def test_the_summary_counts(tmp_path: Path, digits_dir: Path) -> None:
    config = tiny(grid=[block(optimizer=["sgd"], learning_rate=[1e-2, 1e30])])
    summary = run(config, tmp_path / "s", digits_dir)
    assert (summary.populations, summary.runs, summary.sealed, summary.trained, summary.diverged) == (2, 4, 2, 2, 2)
    assert summary.run_steps == 4 * 4 * 4
    again = run(config, tmp_path / "s", digits_dir)
    assert (again.sealed, again.trained, again.run_steps, again.diverged) == (2, 0, 0, 2)


def test_results_do_not_depend_on_the_population_size(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    run(tiny(population_size=1), tmp_path / "s", digits_dir)
    assert_undisturbed(tmp_path / "s", expected)


def test_after_a_kill_the_same_command_redoes_nothing_and_misses_nothing(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker
) -> None:
    # ray#27790: what exists is decided by commits alone.
    process = start(drive, tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    kill_when(process, lambda: bool(store.sealed()))
    sealed = store.sealed()
    commits = {id_: store.storage.read(f"commits/{id_}.json") for id_ in sealed}
    run(tiny(), tmp_path / "s", digits_dir)
    assert not sealed & set(worker_task.calls)
    assert {id_: store.storage.read(f"commits/{id_}.json") for id_ in sealed} == commits
    assert_undisturbed(tmp_path / "s", expected)


def test_a_poisoned_population_is_set_aside_the_others_finish_and_a_rerun_tries_it_again(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker
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


def test_three_crashes_in_a_row_set_a_population_aside(tmp_path: Path, digits_dir: Path, worker_task: Worker) -> None:
    worker_task.outcome = crash
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert {id_: worker_task.calls.count(id_) for id_ in summary.quarantined} == dict.fromkeys(worker_task.calls, 3)
    assert set(summary.quarantined.values()) == {"crash: the worker died"}


def test_a_newly_saved_state_starts_the_count_of_crashes_again(
    tmp_path: Path, digits_dir: Path, worker_task: Worker
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
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "LONGEST_PAUSE", 0.01)
    losses = iter(range(12))
    worker_task.outcome = lambda p: None if next(losses, None) is None else Failure(FailureKind.LOST_NODE, "gone")
    assert run(tiny(), tmp_path / "s", digits_dir).quarantined == {}
    assert len(worker_task.calls) == 14
    assert_undisturbed(tmp_path / "s", expected)


def test_pauses_after_lost_nodes_grow_to_a_limit(
    tmp_path: Path, digits_dir: Path, worker_task: Worker, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("garbage", ["done", "sealed", "skipped", "stopped", 7, {"a": [1]}, b"\x00" * 1000])
def test_a_worker_that_returns_garbage_has_crashed(
    garbage: Any, tmp_path: Path, digits_dir: Path, worker_task: Worker
) -> None:
    worker_task.outcome = lambda population: garbage
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (summary.sealed, len(summary.quarantined), len(worker_task.calls)) == (0, 2, 6)
    assert all(e.startswith("crash: the worker returned ") and len(e) < 300 for e in summary.quarantined.values())


def test_a_worker_that_dies_right_after_sealing_has_sealed(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker
) -> None:
    train = worker_task._train

    def train_and_die(*arguments: Any) -> Failure:
        assert train(*arguments) == "sealed"
        return Failure(FailureKind.CRASH, "died")

    worker_task._train = train_and_die
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert (summary.sealed, summary.quarantined, len(worker_task.calls)) == (2, {}, 2)
    assert_undisturbed(tmp_path / "s", expected)


def test_short_gpu_memory_halves_the_runs_that_go_together_and_trains_the_same_runs(
    tmp_path: Path, digits_dir: Path, worker_task: Worker
) -> None:
    def short_of_memory(population: Population) -> None:
        if worker_task.widths[-1] != 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    worker_task.outcome = short_of_memory
    config = tiny(population_size=5, grid=[block(learning_rate=[1e-2, 1e-3, 2e-3, 3e-3, 4e-3], dropout=[0.0])])
    summary = run(config, tmp_path / "s", digits_dir)
    assert (worker_task.widths, summary.quarantined) == ([None, 3, 2, 1], {})
    assert len(Store(tmp_path / "s").commit(worker_task.calls[0]).runs) == 5


def test_a_run_that_alone_is_too_much_for_the_gpu_is_set_aside(
    tmp_path: Path, digits_dir: Path, worker_task: Worker
) -> None:
    def never(population: Population) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker_task.outcome = never
    summary = run(tiny(), tmp_path / "s", digits_dir)
    assert [e.partition(":")[0] for e in summary.quarantined.values()] == ["out of GPU memory"] * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"epochs": 5}, "epochs: found 4; configuration has 5"),
        ({"save_epochs": [0, 4]}, "labels: found ('0', '2', '4', 'best'), configuration has ('0', '4')"),
        ({"grid": [block(l2=[1e-3])]}, "l2: found 1e-06; configuration has 0.001"),
        ({"data": {"source": "idx", "train_limit": 96, "test_limit": 50}}, "data_digest: found "),
        ({"seed": 4}, "seed: found 3; configuration has 4"),
    ],
)
def test_another_configuration_or_other_data_is_refused_with_what_differs(
    change: dict[str, Any], named: str, undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match=re.escape(named)) as caught:
        run(tiny(**change), undisturbed, digits_dir)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("; use another --sweep-dir")


def test_a_configuration_with_more_runs_is_refused_with_the_way_to_add_them(
    undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match="use another --sweep-dir, or --extend to add runs to this one"):
        run(tiny(grid=[block(), block(l2=[1e-3])]), undisturbed, digits_dir)


def test_what_changes_no_result_may_change(undisturbed: Path, digits_dir: Path) -> None:
    changed = tiny(population_size=1, engine="torch", sweep={"grace_seconds": 5}, store={"state_seconds": 9})
    assert run(changed, undisturbed, digits_dir).trained == 0


def test_extending_adds_a_plan_of_the_new_runs_only(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker
) -> None:
    sweep = tmp_path / "s"
    run(tiny(), sweep, digits_dir)
    first = (sweep / "plans/000.json").read_bytes()
    worker_task.calls.clear()
    wider = tiny(grid=[block(learning_rate=[1e-2, 3e-3, 1e-3]), block(seed=[4], dropout=[0.0])])
    summary = run(wider, sweep, digits_dir, extend=True)
    plans = Store(sweep).plans()
    assert (sweep / "plans/000.json").read_bytes() == first
    assert len(plans) == 2
    assert {(r.learning_rate, r.seed) for r in plans[1].runs} == {(1e-3, 3), (1e-2, 4), (3e-3, 4)}
    assert set(worker_task.calls) == {p.id for p in plans[1].populations}
    assert (summary.runs, summary.sealed) == (8, len(plans[0].populations) + len(plans[1].populations))
    assert expected.items() <= rows(sweep).items()
    # From now on the wider configuration is the sweep's, with or without --extend; the old one is not.
    assert run(wider, sweep, digits_dir).trained == 0
    assert run(wider, sweep, digits_dir, extend=True).trained == 0
    with pytest.raises(PlanError, match="the sweep was planned otherwise"):
        run(tiny(), sweep, digits_dir)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"grid": [block(learning_rate=[1e-2, 1e-3])]}, "2 runs of .* are not in the configuration.*learning_rate"),
        ({"epochs": 5}, "4 runs of .* are not in the configuration, expected a superset.*epochs: found 4"),
        ({"save_epochs": [0, 4, "best"]}, "save_epochs: found .*one sweep keeps the same epochs of every run"),
    ],
)
def test_extending_by_anything_but_a_superset_is_refused(
    change: dict[str, Any], named: str, undisturbed: Path, digits_dir: Path
) -> None:
    with pytest.raises(PlanError, match=named):
        run(tiny(**change), undisturbed, digits_dir, extend=True)
    assert len(Store(undisturbed).plans()) == 1


def test_too_little_room_is_refused_before_the_start(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch, worker_task: Worker
) -> None:
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: 1_000_000)
    with pytest.raises(
        StoreError, match=r"found 0\.00 GB free, expected 0\.00 GB for 2 populations to come; make room"
    ):
        run(tiny(), tmp_path / "s", digits_dir)
    # 4 runs x 4 labels, and twice 2 runs with 8 tensors of their weights' size in the states.
    needed = 18_506 * 4 * (4 * 4 + 2 * 2 * 8)
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: needed - 1)
    with pytest.raises(StoreError, match="make room"):
        run(tiny(), tmp_path / "s", digits_dir)
    assert worker_task.calls == []
    monkeypatch.setattr("zoo.files.LocalStorage.free_bytes", lambda self: needed)
    assert run(tiny(), tmp_path / "s", digits_dir).sealed == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_population_save_its_state_and_the_same_command_goes_on(
    number: int, tmp_path: Path, digits_dir: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, write_sign = tmp_path / "s", Store.write_sign
    config = tiny(store={"state_seconds": 1e9})

    def signal_at_epoch_2(self: Store, population: str, attempt: str, sign: Sign) -> None:
        write_sign(self, population, attempt, sign)
        if sign.epoch == 2 and sign.first_epoch == 0:
            signal.raise_signal(number)

    monkeypatch.setattr(Store, "write_sign", signal_at_epoch_2)
    before = signal.getsignal(number)
    with pytest.raises(SweepInterrupted, match="stopped after 0 of 2 populations; run the command again") as caught:
        run(config, sweep, digits_dir)
    assert (caught.value.signal, caught.value.summary.sealed) == (number, 0)
    assert signal.getsignal(number) == before
    store = Store(sweep)
    assert [[int(name[:5]) for name in store.states(p)] for p in store.begun()] == [[2]]
    monkeypatch.undo()
    run(config, sweep, digits_dir)
    assert_undisturbed(sweep, expected)


def test_a_second_signal_ends_at_once(tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached: list[int] = []
    write_sign = Store.write_sign

    def two_signals(self: Store, population: str, attempt: str, sign: Sign) -> None:
        write_sign(self, population, attempt, sign)
        if sign.epoch == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            reached.append(sign.epoch)

    monkeypatch.setattr(Store, "write_sign", two_signals)
    with pytest.raises(SweepInterrupted) as caught:
        run(tiny(store={"state_seconds": 1e9}), tmp_path / "s", digits_dir)
    assert (caught.value.signal, caught.value.summary.populations, reached) == (signal.SIGTERM, 2, [])
    assert [Store(tmp_path / "s").states(p) for p in Store(tmp_path / "s").begun()] == [[]]


def test_a_signal_before_the_start_trains_nothing(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch, worker_task: Worker
) -> None:
    check = Store.check
    monkeypatch.setattr(Store, "check", lambda self: (signal.raise_signal(signal.SIGTERM), check(self)))
    with pytest.raises(SweepInterrupted, match="stopped after 0 of 2"):
        run(tiny(), tmp_path / "s", digits_dir)
    assert worker_task.calls == []


def test_a_sweep_in_a_thread_leaves_signals_alone(tmp_path: Path, digits_dir: Path) -> None:
    results: list[SweepSummary] = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=lambda: results.append(run(tiny(), tmp_path / "s", digits_dir)))
    thread.start()
    thread.join()
    assert results[0].sealed == 2
    assert signal.getsignal(signal.SIGINT) == before


def test_two_drivers_at_once_end_with_every_run_exactly_once(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    # wandb#3522: 25 runs became 442 after agents were restarted.
    drivers = [start(drive, tiny(population_size=1), tmp_path / "s", digits_dir) for _ in range(3)]
    for process in drivers:
        process.join()
    assert [process.exitcode for process in drivers] == [0, 0, 0]
    assert_undisturbed(tmp_path / "s", expected)


def test_a_driver_leaves_alone_what_another_one_trains_until_that_one_is_silent(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], worker_task: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "SIGN_SECONDS", 0.0)
    run(tiny(), tmp_path / "plan-only", digits_dir)
    first, second = (p.id for p in Store(tmp_path / "plan-only").plans()[0].populations)
    store, asked = Store(tmp_path / "s"), []
    is_alive = Sign.is_alive

    def alive_at_first(self: Sign) -> bool:
        asked.append(self.host)
        return self.host == "elsewhere" and len(asked) < 5

    monkeypatch.setattr(Sign, "is_alive", alive_at_first)
    sign = Sign(1, time.time(), 0, time.time(), "elsewhere", 1)
    store.write_sign(first, "of-another", sign)
    run(tiny(), tmp_path / "s", digits_dir)
    assert worker_task.calls[-2:] == [second, first]
    assert asked.count("elsewhere") >= 5
    monkeypatch.setattr(Sign, "is_alive", is_alive)
    assert rows(tmp_path / "s") == expected


def test_a_sign_that_never_changes_is_no_life_even_if_it_comes_from_the_future(
    tmp_path: Path, digits_dir: Path, worker_task: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was set back, or a machine whose clock is ahead, must not hold a population for ever."""
    monkeypatch.setattr(driver_module, "SIGN_SECONDS", 0.0)
    monkeypatch.setattr(driver_module, "STALE_SECONDS", 0.2)
    run(tiny(), tmp_path / "plan-only", digits_dir)
    store, later = Store(tmp_path / "s"), time.time() + 1e7
    for population in Store(tmp_path / "plan-only").plans()[0].populations:
        store.write_sign(population.id, "of-another", Sign(1, later, 0, later, "elsewhere", 1))
    assert run(tiny(), tmp_path / "s", digits_dir).sealed == 2


def test_attempts_of_a_driver_that_was_killed_are_taken_over_at_once(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    process = start(drive, tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    kill_when(process, lambda: any(store.states(p) for p in store.begun()))
    run(tiny(), tmp_path / "s", digits_dir)
    assert_undisturbed(tmp_path / "s", expected)


def test_a_quarantined_population_that_another_driver_sealed_is_not_reported(
    tmp_path: Path, digits_dir: Path, worker_task: Worker
) -> None:
    run(tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    store.quarantine(worker_task.calls[0], "error: of a slower driver")
    assert run(tiny(), tmp_path / "s", digits_dir).quarantined == {}


def test_the_record_of_the_data_is_kept(undisturbed: Path) -> None:
    record = json.loads((undisturbed / "data/record.json").read_text())
    assert record["data_digest"] == Store(undisturbed).plans()[0].data_digest
    assert (record["train_samples"], record["test_samples"]) == (128, 50)
