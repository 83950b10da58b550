import json
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_tools import block, tiny

from zoo.errors import StoreError
from zoo.plan import make_plan
from zoo.signs import STALE_SECONDS, Sign
from zoo.status import sweep_status
from zoo.store import Store
from zoo.sweep import generate


@pytest.fixture
def half(tmp_path: Path, undisturbed: Path) -> Store:
    """A sweep of two populations of which one is sealed."""
    store, whole = Store(tmp_path / "half"), Store(undisturbed)
    store.add_plan(whole.plans()[0], 0)
    first = next(whole.commits())
    for name in first.files:
        store.write(first.population, first.attempt, name, whole.read(first.population, first.attempt, name))
    store.seal(first)
    return store


def missing(store: Store) -> str:
    return store.todo()[0].id


def sign(epoch: int, seconds: float, age: float = 0.0, host: str = "node-7") -> Sign:
    """A sign of an attempt that took `seconds` for its epochs so far and was last seen `age` seconds ago."""
    now = time.time() - age
    return Sign(epoch, now, 0, now - seconds, host, 1)


def test_a_finished_sweep_is_done(undisturbed: Path) -> None:
    status = sweep_status(undisturbed)
    assert status.done
    assert (status.populations, status.populations_sealed, status.runs, status.runs_sealed) == (2, 2, 4, 4)
    assert (status.epochs_done, status.epochs_planned, status.seconds_left) == (16, 16, None)
    assert (status.running, status.quarantined, status.runs_diverged) == ((), {}, 0)
    weights = 4 * 4 * 18_506 * 4
    assert status.bytes_planned == weights
    assert weights < status.bytes_sealed < weights * 1.1
    assert status.bytes_sealed == sum(p.stat().st_size for p in (undisturbed / "populations").rglob("*.*"))


def test_what_runs_is_shown_with_its_pace_and_the_time_left(half: Store) -> None:
    half.write_sign(missing(half), "a1", sign(epoch=2, seconds=8.0, age=30.0))
    status = sweep_status(half.root)
    [running] = status.running
    assert (running.population, running.epoch, running.epochs, running.runs) == (missing(half), 2, 4, 2)
    assert (running.host, running.alive) == ("node-7", True)
    assert running.age == pytest.approx(30.0, abs=1)
    assert status.epochs_done == 8 + 2 * 2
    assert status.epochs_per_second == pytest.approx(2 * 2 / 8.0)
    assert status.seconds_left == pytest.approx(4 / 0.5)
    text = status.text()
    assert "75.0% of 16 runs x epochs" in text
    assert "0.50 runs x epochs a second, 8 s left" in text
    assert "on node-7: epoch 2 of 4, 2 runs, last sign of life 30 s ago" in text


def test_the_silent_are_shown_but_promise_nothing(half: Store) -> None:
    half.write_sign(missing(half), "a1", sign(2, 8.0, age=STALE_SECONDS + 60))
    status = sweep_status(half.root)
    assert [attempt.alive for attempt in status.running] == [False]
    assert (status.epochs_per_second, status.seconds_left) == (None, None)
    assert "last sign of life 6 min 0 s ago, taken for dead" in status.text()


def test_of_several_attempts_the_furthest_counts_once(half: Store) -> None:
    half.write_sign(missing(half), "a1", sign(3, 6.0))
    half.write_sign(missing(half), "a2", sign(1, 1.0))
    assert sweep_status(half.root).epochs_done == 8 + 2 * 3


def test_a_clock_that_was_set_back_gives_no_negative_age(half: Store) -> None:
    half.write_sign(missing(half), "a1", sign(2, 8.0, age=-5000.0))
    assert [attempt.age for attempt in sweep_status(half.root).running] == [0.0]


def test_a_process_of_this_machine_that_is_gone_is_dead(half: Store) -> None:
    gone = replace(sign(2, 8.0, host=socket.gethostname()), pid=2**22 + 1)  # above every pid
    half.write_sign(missing(half), "a1", gone)
    assert [attempt.alive for attempt in sweep_status(half.root).running] == [False]


def test_quarantine_shows_the_last_line_of_the_error_until_it_is_sealed(half: Store) -> None:
    half.quarantine(missing(half), "error: Traceback\n  File x\nValueError: poison\n")
    half.quarantine(next(half.commits()).population, "error: of a slower driver")
    status = sweep_status(half.root)
    assert status.quarantined == {missing(half): "ValueError: poison"}
    assert f"quarantined  {missing(half)}: ValueError: poison" in status.text()


def test_diverged_runs_are_counted(tmp_path: Path, digits_dir: Path) -> None:
    config = tiny(grid=[block(optimizer=["sgd"], learning_rate=[1e-2, 1e30])])
    generate(config, tmp_path / "s", digits_dir, workers=0, progress=False)
    status = sweep_status(tmp_path / "s")
    assert (status.runs_sealed, status.runs_diverged) == (4, 2)
    assert "4 of 4 sealed, 2 of them diverged" in status.text()


def test_it_is_json(half: Store) -> None:
    half.write_sign(missing(half), "a1", sign(2, 8.0))
    record = json.loads(json.dumps(sweep_status(half.root).to_dict()))
    assert record["done"] is False
    assert record["running"][0]["population"] == missing(half)
    assert record["sweep"] == str(half.root)


def test_what_is_no_sweep_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"found no plans/000\.json, expected a sweep directory"):
        sweep_status(tmp_path)


def test_epochs_of_saved_states_are_not_lost_to_the_reader(tmp_path: Path) -> None:
    store = Store(tmp_path / "sweep")
    plan = make_plan(tiny(), "0" * 16, 96)
    store.add_plan(plan, 0)
    store.save_state(plan.populations[0].id, 1, b"older")
    store.save_state(plan.populations[0].id, 3, b"newest")
    assert sweep_status(store.root).epochs_done == 3 * len(plan.populations[0].runs)
