import json
import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from sweep_tools import tiny

from zoo import signs
from zoo.commit import Commit, FileRecord, RunRecord
from zoo.errors import PlanError, StoreError
from zoo.plan import make_plan
from zoo.signs import Sign
from zoo.store import Store, new_attempt

DIGEST = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "sweep")


def commit_of(store: Store, population: str, attempt: str = "first") -> Commit:
    record = store.write(population, attempt, "metrics.parquet", b"metrics")
    runs = {"r1": RunRecord("finished", None, ["0", "best"]), "r2": RunRecord("diverged", 3, ["0"])}
    return Commit(population, attempt, {"metrics.parquet": record}, runs, "torch", "cpu", {"torch": "2"}, 1.5)


def test_a_commit_comes_back_equal_and_is_json(store: Store) -> None:
    commit = commit_of(store, "p1")
    assert store.seal(commit)
    assert store.commit("p1") == commit
    assert list(store.commits()) == [commit]
    assert json.loads((Path(store.root) / "commits/p1.json").read_text())["format"] == 1


def test_the_first_commit_wins_and_the_loser_cleans_up(store: Store) -> None:
    first, second = commit_of(store, "p1", "first"), commit_of(store, "p1", "second")
    store.save_state("p1", 3, b"state")
    assert store.seal(first)
    assert not store.seal(second)
    assert store.commit("p1") == first
    assert store.attempts("p1") == ["first"]
    assert store.read("p1", "first", "metrics.parquet") == b"metrics"
    assert store.states("p1") == []


def test_sealing_again_with_the_same_commit_is_a_win(store: Store) -> None:
    """An answer that was lost on its way is asked for again: NFS and S3 both repeat requests."""
    commit = commit_of(store, "p1")
    assert store.seal(commit)
    assert store.seal(commit)
    assert store.attempts("p1") == ["first"]


def test_readers_follow_commits_never_file_names(store: Store) -> None:
    # Daft#3576: a dead writer leaves half a file that readers pick up.
    commit = commit_of(store, "p1")
    folder = Path(store.root) / "populations/p1/dead"
    folder.mkdir(parents=True)
    (folder / "metrics.parquet").write_bytes(b"half")
    (Path(store.root) / "commits").mkdir()
    (Path(store.root) / "commits/.tmp-0123").write_bytes(b"half a commit")
    assert (store.sealed(), list(store.commits())) == (set(), [])
    store.seal(commit)
    assert [c.attempt for c in store.commits()] == ["first"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\x00", b'{"format": 1, "files": 3}'])
def test_a_broken_commit_is_named(store: Store, content: bytes) -> None:
    store.storage.write("commits/p1.json", content)
    with pytest.raises(StoreError, match=r"commits/p1\.json: not a readable commit .*zoo repair"):
        store.commit("p1")


def test_a_commit_of_another_format_is_refused(store: Store) -> None:
    store.storage.write("commits/p1.json", b'{"format": 99}')
    with pytest.raises(StoreError, match="format: found 99, expected 1"):
        store.commit("p1")


def test_plans_are_immutable_and_numbered(store: Store) -> None:
    plan, other = make_plan(tiny(), DIGEST, 128), make_plan(tiny(seed=4), DIGEST, 128)
    store.add_plan(plan, 0)
    store.add_plan(other, 1)
    assert store.plans() == [plan, other]
    assert store.storage.children("plans") == ["000.json", "001.json"]
    assert set(store.populations()) == {p.id for p in (*plan.populations, *other.populations)}


def test_two_drivers_may_put_the_same_plan_but_not_two(store: Store) -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    late = Store(store.root)
    store.add_plan(plan, 0)
    late.add_plan(plan, 0)
    with pytest.raises(PlanError, match=r"plans/000\.json: another plan was put there"):
        late.add_plan(make_plan(tiny(seed=4), DIGEST, 128), 0)
    assert store.plans() == [plan]


def test_todo_is_plans_minus_commits(store: Store) -> None:
    plan = make_plan(tiny(), DIGEST, 128)
    store.add_plan(plan, 0)
    assert store.todo() == list(plan.populations)
    store.seal(commit_of(store, plan.populations[0].id))
    assert store.todo() == [plan.populations[1]]


def test_no_sweep_directory_is_said(store: Store) -> None:
    with pytest.raises(StoreError, match=r"found no plans/000\.json, expected a sweep directory"):
        store.require_plans()


def test_the_newest_whole_state_wins(store: Store) -> None:
    for epoch in (1, 9, 10):
        store.save_state("p1", epoch, b"state %d" % epoch)
    assert [name[:5] for name in store.states("p1")] == ["00010"]
    store.save_state("p1", 4, b"of a slower attempt")
    path = Path(store.root) / "populations/p1/state" / store.states("p1")[1]
    assert list(store.load_states("p1")) == [b"state 10", b"of a slower attempt"]
    path.write_bytes(b"state 1")  # torn
    assert list(store.load_states("p1")) == [b"of a slower attempt"]


def test_quarantine_keeps_the_end_of_an_error_and_lets_go(store: Store) -> None:
    store.quarantine("p1", "x" * 50_000 + "ValueError: poison")
    assert store.quarantined()["p1"].endswith("ValueError: poison")
    assert len(store.quarantined()["p1"]) == 20_000
    store.release("p1")
    store.release("p1")
    assert store.quarantined() == {}


def test_a_storage_without_exclusive_puts_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.check()
    assert list(Path(store.root).iterdir()) == []

    def overwrite(name: str, content: bytes) -> bool:
        store.storage.write(name, content)
        return True

    monkeypatch.setattr(store.storage, "put_if_absent", overwrite)
    with pytest.raises(StoreError, match="a second conditional write replaced the first"):
        store.check()


def test_a_folder_that_cannot_be_written_is_refused_on_one_line() -> None:
    with pytest.raises(StoreError, match=r"^/proc/sweep: cannot be written .*use another --sweep-dir$"):
        Store("/proc/sweep").check()


def test_attempts_are_never_named_twice_and_a_clock_set_back_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    now = new_attempt()
    monkeypatch.setattr(time, "gmtime", lambda: time.struct_time((1999, 1, 1, 0, 0, 0, 0, 1, 0)))
    assert len({new_attempt() for _ in range(100)} | {now}) == 101


def test_a_sign_of_life_goes_stale_with_silence_or_with_its_process(store: Store) -> None:
    sign = Sign.now(2)
    store.write_sign("p1", "first", sign)
    assert store.signs("p1") == {"first": sign}
    assert sign.is_alive()
    assert not replace(sign, time=sign.time - signs.FIRST_EPOCH_SECONDS - 1).is_alive()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not replace(sign, pid=child).is_alive()
    assert replace(sign, pid=child, host=f"not-{socket.gethostname()}").is_alive()


@pytest.mark.parametrize(
    ("epochs", "seconds", "silence"),
    [(0, 0.0, 1800.0), (4, 40.0, 300.0), (1, 90.0, 300.0), (2, 800.0, 1200.0)],  # at work since, and patience
)
def test_a_slow_attempt_may_be_silent_for_three_of_its_epochs(epochs: int, seconds: float, silence: float) -> None:
    """On a CPU without a compiler an epoch takes five minutes and more."""
    for age, alive in ((silence - 5, True), (silence + 5, False)):
        now = time.time()
        sign = Sign(5 + epochs, now - age, 5, now - age - seconds, "node-7", 1)
        assert (sign.patience(), sign.is_alive()) == (silence, alive)


def test_a_sign_from_the_future_is_young(store: Store) -> None:
    sign = replace(Sign.now(0), time=time.time() + 1e6)
    assert (sign.age(), sign.is_alive()) == (0.0, True)


def test_a_torn_sign_is_no_sign(store: Store) -> None:
    store.storage.write_hint("populations/p1/first/progress.json", b'{"epo')
    assert store.read_sign("p1", "first") is None


def test_pace_counts_from_where_the_attempt_began() -> None:
    first = replace(Sign.now(10), time=100.0)
    assert first.epochs_per_second() is None
    later = replace(Sign.now(14, first), time=108.0)
    assert (later.first_epoch, later.started, later.epochs_per_second()) == (10, 100.0, 0.5)


def test_records_hold_size_and_digest() -> None:
    assert FileRecord.of(b"abc") == FileRecord(3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")


def test_a_folder_of_something_else_is_no_place_for_a_sweep(tmp_path: Path) -> None:
    (tmp_path / "mnist.yaml").write_text("task: mnist\n")
    with pytest.raises(StoreError, match=r"found mnist.yaml, expected a sweep directory or a new or empty folder"):
        Store(tmp_path).check()
    assert [path.name for path in tmp_path.iterdir()] == ["mnist.yaml"]


def test_a_stray_name_beside_the_states_is_no_state(store: Store) -> None:
    """NFS keeps a file that was removed while somebody reads it, as .nfs and a number."""
    store.save_state("p1", 3, b"state")
    for name in (".nfs0000000000a1", "notes.txt"):
        store.storage.write(f"populations/p1/state/{name}", b"")
    assert (store.saved_epoch("p1"), list(store.load_states("p1"))) == (3, [b"state"])
    store.save_state("p1", 4, b"state 4")
    assert [name[:5] for name in store.states("p1")] == ["00004"]


def test_a_population_that_is_let_go_while_the_quarantine_is_read_is_left_out(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for population in ("p1", "p2"):
        store.quarantine(population, "error: poison")
    monkeypatch.setattr(store, "in_quarantine", lambda: ["p1", "p2", "p3"])
    assert store.quarantined() == {"p1": "error: poison", "p2": "error: poison"}
