"""Signals to a driver, and several drivers of one sweep."""

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_worker import ScriptedWorker, run
from sweep_tools import assert_undisturbed, drive, kill_when, rows, start, tiny

from zoo import driver as driver_module
from zoo import sweep as sweep_module
from zoo.cluster import InProcess
from zoo.files import LocalStorage
from zoo.plan import make_plan
from zoo.signals import stop_signals
from zoo.signs import Sign
from zoo.store import Store
from zoo.sweep import SweepInterrupted, SweepSummary


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


def test_further_signals_while_the_sweep_ends_change_nothing(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary, reached = sweep_module._summary, []

    def impatient(*arguments: Any) -> SweepSummary:
        signal.raise_signal(signal.SIGINT)
        reached.append(signal.SIGINT)
        return summary(*arguments)

    monkeypatch.setattr(sweep_module, "_summary", impatient)
    check = Store.check
    monkeypatch.setattr(Store, "check", lambda self: (signal.raise_signal(signal.SIGTERM), check(self)))
    with pytest.raises(SweepInterrupted) as caught:
        run(tiny(), tmp_path / "s", digits_dir)
    assert (caught.value.signal, caught.value.summary.populations) == (signal.SIGINT, 2)
    assert reached == [signal.SIGINT]  # the first of these ended the summary that it met, the next one did not


def test_a_request_to_stop_is_answered_once_and_on_one_line(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check = Store.check
    monkeypatch.setattr(Store, "check", lambda self: (signal.raise_signal(signal.SIGTERM), check(self)))
    with pytest.raises(SweepInterrupted):
        run(tiny(), tmp_path / "s", digits_dir)
    answer = capfd.readouterr().err.strip()
    assert answer == "zoo: saving states at the end of the epoch; once more ends at once"


def test_a_request_whose_answer_nobody_reads_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the other end of `zoo generate 2>&1 | tee log` first."""
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("zoo.signals.STDERR", writer)
    with stop_signals() as stop:
        signal.raise_signal(signal.SIGINT)
    os.close(writer)
    assert stop.signal == signal.SIGINT


def test_a_signal_before_the_start_trains_nothing(
    tmp_path: Path, digits_dir: Path, monkeypatch: pytest.MonkeyPatch, worker_task: ScriptedWorker
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
    tmp_path: Path,
    digits_dir: Path,
    expected: dict[str, Any],
    worker_task: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
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
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that was set back, or a machine whose clock is ahead, must not hold a population for ever."""
    monkeypatch.setattr(driver_module, "SIGN_SECONDS", 0.0)
    monkeypatch.setattr(Sign, "patience", lambda self: 0.2)
    run(tiny(), tmp_path / "plan-only", digits_dir)
    store, later = Store(tmp_path / "s"), time.time() + 1e7
    for population in Store(tmp_path / "plan-only").plans()[0].populations:
        store.write_sign(population.id, "of-another", Sign(1, later, 0, later, "elsewhere", 1))
    assert run(tiny(), tmp_path / "s", digits_dir).sealed == 2


def expected_populations(digits_dir: Path) -> list[str]:
    data = tiny().data.load(digits_dir)
    return [p.id for p in make_plan(tiny(), data.digest(), len(data.train)).populations]


def test_signs_and_stops_that_cannot_be_read_for_a_moment_end_no_sweep(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, a file that another machine is just replacing can be stale to a reader."""
    stale = OSError(errno.ESTALE, "Stale file handle")
    read, exists, failed = LocalStorage.read, LocalStorage.exists, []

    def reading(self: LocalStorage, name: str) -> bytes:
        if name.endswith("progress.json"):
            failed.append(name)
            raise stale
        return read(self, name)

    def looking(self: LocalStorage, name: str) -> bool:
        if name.endswith("stop"):
            failed.append(name)
            raise stale
        return exists(self, name)

    monkeypatch.setattr(LocalStorage, "read", reading)
    monkeypatch.setattr(LocalStorage, "exists", looking)
    for population in expected_populations(digits_dir):
        Store(tmp_path / "s").write_sign(population, "of-another", Sign.now(0))
    run(tiny(), tmp_path / "s", digits_dir)
    assert len({name.rpartition("/")[2] for name in failed}) == 2
    monkeypatch.undo()
    assert_undisturbed(tmp_path / "s", expected)


def test_a_driver_need_not_wait_for_what_others_train(
    tmp_path: Path, digits_dir: Path, worker_task: ScriptedWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = expected_populations(digits_dir)
    store = Store(tmp_path / "s")
    store.write_sign(first, "of-another", Sign(1, time.time(), 0, time.time() - 9, "elsewhere", 1))
    summary = run(tiny(sweep={"wait_for_others": False}), tmp_path / "s", digits_dir)
    assert (worker_task.calls, summary.sealed, summary.populations) == ([second], 1, 2)
    assert "left to other drivers, which train them: 1 populations" in capsys.readouterr().err


def test_a_cluster_without_slots_is_waited_for_and_said_once(
    tmp_path: Path,
    digits_dir: Path,
    worker_task: ScriptedWorker,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Late(InProcess):
        polls = 0

        @property
        def slots(self) -> int:  # type: ignore[override]
            self.polls += 1
            return int(self.polls > 50)

    monkeypatch.setattr(driver_module, "SLOTLESS_SECONDS", 0.05)
    monkeypatch.setattr(sweep_module, "connect", lambda *arguments: Late())
    assert run(tiny(), tmp_path / "s", digits_dir).sealed == 2
    assert capsys.readouterr().err.count("the cluster has no core or GPU for a worker now") == 1


def test_attempts_of_a_driver_that_was_killed_are_taken_over_at_once(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    process = start(drive, tiny(), tmp_path / "s", digits_dir)
    store = Store(tmp_path / "s")
    kill_when(process, lambda: any(store.states(p) for p in store.begun()))
    run(tiny(), tmp_path / "s", digits_dir)
    assert_undisturbed(tmp_path / "s", expected)
