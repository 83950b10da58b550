import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError
from loopback_s3 import BUCKET, Fault, LoopbackS3, loopback_s3
from sweep_tools import assert_undisturbed, block, rows, tiny

from zoo import objects
from zoo.config import SweepConfig
from zoo.errors import PlanError, StoreError
from zoo.objects import ObjectStorage
from zoo.repair import repair_sweep
from zoo.signs import Sign
from zoo.status import sweep_status
from zoo.store import Store
from zoo.sweep import SweepSummary, generate
from zoo.verify_sweep import verify_sweep


@pytest.fixture(scope="module")
def server() -> Iterator[LoopbackS3]:
    with loopback_s3() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield server


@pytest.fixture
def s3(server: LoopbackS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopbackS3:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.faults.clear()
    server.requests.clear()
    return server


@pytest.fixture
def url(s3: LoopbackS3, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


def small(**changes: Any) -> SweepConfig:
    """Two populations of one run, two epochs, no states."""
    few = {"epochs": 2, "save_epochs": [0, "best"], "store": {"state_seconds": 1e9}}
    return tiny(**few | {"grid": [block(learning_rate=[1e-2])]} | changes)


def run(url: str, digits_dir: Path, **changes: Any) -> SweepSummary:
    return generate(small(**changes), url, digits_dir, workers=0, progress=False)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> dict[str, Any]:
    """The rows of the same sweep on disk."""
    sweep = tmp_path_factory.mktemp("disk") / "s"
    run(str(sweep), digits_dir)
    return rows(sweep)


def test_a_sweep_on_s3_has_the_rows_of_one_on_disk(url: str, digits_dir: Path, expected: dict[str, Any]) -> None:
    assert run(url, digits_dir).sealed == 2
    assert_undisturbed(url, expected)
    assert run(url, digits_dir).trained == 0
    status = sweep_status(url)
    assert (status.done, status.sweep, status.populations_sealed) == (True, url, 2)
    with pytest.raises(PlanError, match="epochs: found 2; configuration has 3"):
        run(url, digits_dir, epochs=3)


def test_listing_reading_and_removing(url: str) -> None:
    storage = ObjectStorage(url + "/")
    assert storage.children("") == storage.children("nothing") == []
    storage.write("a/b/one", b"1")
    storage.write("a/two", b"22")
    storage.write("ab", b"333")
    assert (storage.children(""), storage.children("a")) == (["a", "ab"], ["b", "two"])
    assert {name: entry.size for name, entry in storage.walk("a").items()} == {"a/b/one": 1, "a/two": 2}
    assert (storage.exists("a/two"), storage.exists("a/three")) == (True, False)
    assert storage.read("ab") == b"333"
    with pytest.raises(FileNotFoundError):
        storage.read("a/three")
    storage.remove_folder("a")
    storage.remove("gone")
    assert storage.children("") == ["ab"]


def test_of_two_puts_the_first_wins(url: str) -> None:
    storage = ObjectStorage(url)
    assert storage.put_if_absent("seal", b"first")
    assert not storage.put_if_absent("seal", b"second")
    assert storage.read("seal") == b"first"
    storage.write("seal", b"third")
    assert storage.read("seal") == b"third"


def test_503_is_waited_out(url: str, s3: LoopbackS3, digits_dir: Path, expected: dict[str, Any]) -> None:
    s3.faults += [Fault("PUT", part, 503) for part in ("plans/", "commits/", "best.", "state/", "progress")]
    s3.faults += [Fault("GET", "plans/000", 503), Fault("PUT", "metrics", 500, "InternalError")]
    assert run(url, digits_dir, store={"state_seconds": 0}).quarantined == {}
    assert [fault for fault in s3.faults if fault.times] == []
    assert_undisturbed(url, expected)


@pytest.mark.parametrize("lost", [{"status": 503}, {"drop": True}])
def test_a_seal_whose_answer_is_lost_is_still_a_win(
    lost: dict[str, Any], url: str, s3: LoopbackS3, digits_dir: Path, expected: dict[str, Any]
) -> None:
    """The repeated request meets its own content (412); taken for a defeat, it would delete the sealed files."""
    s3.faults.append(Fault("PUT", "commits/", after=True, **lost))
    assert run(url, digits_dir).trained == 2
    assert s3.faults[0].times == 0
    assert_undisturbed(url, expected)


def test_a_conflict_is_tried_again(url: str, s3: LoopbackS3) -> None:
    storage = ObjectStorage(url)
    s3.faults.append(Fault("PUT", "seal", 409, "ConditionalRequestConflict", times=3))
    assert storage.put_if_absent("seal", b"first")
    s3.faults.append(Fault("PUT", "other", 409, "ConditionalRequestConflict", times=objects.CONFLICTS))
    with pytest.raises(OSError, match="on order"):
        storage.put_if_absent("other", b"first")


def test_slow_answers_cost_time_only(url: str, s3: LoopbackS3, digits_dir: Path, expected: dict[str, Any]) -> None:
    s3.faults += [
        Fault("PUT", "commits/", seconds=0.5),
        Fault("PUT", "best.", seconds=0.5),
        Fault("GET", "plans", seconds=0.5),
    ]
    run(url, digits_dir)
    assert_undisturbed(url, expected)


class Client:
    """Stands for s3fs, and fails where `fault` says so of a method and its first argument."""

    def __init__(self, files: Any, fault: Callable[[str, str], Exception | None]) -> None:
        self._real, self._fault = files, fault

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            error = self._fault(method, arguments[0])
            if error is not None:
                raise error
            return getattr(self._real, method)(*arguments, **options)

        return call


def lose_network(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str, str], Exception | None]) -> None:
    files = ObjectStorage._files
    monkeypatch.setattr(ObjectStorage, "_files", property(lambda self: Client(files.fget(self), fault)))


LOST = EndpointConnectionError(endpoint_url="http://127.0.0.1:1/")


@pytest.mark.parametrize("error", [LOST, ConnectionClosedError(endpoint_url="http://[::1]"), ClientPayloadError("cut")])
def test_a_lost_network_is_an_error_of_the_storage(error: Exception, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = ObjectStorage(url)
    lose_network(monkeypatch, lambda method, key: error)
    for call in (
        lambda: storage.read("a"),
        lambda: storage.write("a", b""),
        lambda: storage.put_if_absent("a", b""),
        lambda: storage.exists("a"),
        lambda: storage.children(""),
        lambda: storage.walk(""),
        lambda: storage.remove("a"),
        lambda: storage.local_folder("a"),
    ):
        with pytest.raises(OSError, match=r"Could not connect|Connection was closed|cut") as caught:
            call()
        assert caught.value.errno == errno.EIO


def test_a_population_outlives_a_network_that_is_lost_for_a_while(
    url: str, digits_dir: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter([LOST, LOST])
    lose_network(monkeypatch, lambda method, key: next(errors, None) if "metrics.parquet" in key else None)
    summary = run(url, digits_dir)
    assert (summary.trained, summary.quarantined) == (2, {})
    assert_undisturbed(url, expected)


def test_a_network_that_is_lost_for_good_ends_the_sweep_on_one_line(
    url: str, digits_dir: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[str] = []

    def from_the_second_seal_on(method: str, key: str) -> Exception | None:
        lost.extend([key] if method == "pipe_file" and "/commits/" in key else [])
        return LOST if len(lost) > 1 else None

    with monkeypatch.context() as patch:
        lose_network(patch, from_the_second_seal_on)
        with pytest.raises(StoreError, match=rf"^{url}: .*Could not connect to the endpoint URL") as caught:
            run(url, digits_dir)
    assert "\n" not in str(caught.value)
    # The sign of the attempt that was cut off could not be taken away, and its process, this one, lives.
    monkeypatch.setattr("zoo.driver.Driver._is_taken", lambda self, population: False)
    assert run(url, digits_dir).trained == 1
    assert_undisturbed(url, expected)


def test_a_zombie_loses_against_the_seal(
    url: str, digits_dir: Path, expected: dict[str, Any], monkeypatch: Any
) -> None:
    seal = Store.seal

    def sealed_meanwhile(self: Store, commit: Any) -> bool:
        monkeypatch.setattr(Store, "seal", seal)
        assert run(url, digits_dir).trained >= 1
        return seal(self, commit)

    monkeypatch.setattr("zoo.driver.Driver._is_taken", lambda self, population: False)
    monkeypatch.setattr(Store, "seal", sealed_meanwhile)
    assert run(url, digits_dir).trained == 0
    assert_undisturbed(url, expected)
    store = Store(url)
    assert [store.attempts(c.population) for c in store.commits()] == [[c.attempt] for c in store.commits()]


def test_damage_is_found_and_repaired(url: str, digits_dir: Path, expected: dict[str, Any]) -> None:
    run(url, digits_dir)
    store = Store(url)
    commit = next(store.commits())
    name = f"populations/{commit.population}/{commit.attempt}/best.safetensors"
    content = store.storage.read(name)
    store.storage.write(name, content[:-1] + bytes([content[-1] ^ 1]))
    [problem] = verify_sweep(url)
    assert problem.startswith(f"{name}: SHA-256 ")
    repair_sweep(url, apply=True)
    assert len(store.storage.children("removed")) == 1
    assert run(url, digits_dir).trained == 1
    assert_undisturbed(url, expected)
    [orphan] = repair_sweep(url, apply=True, orphans=True, orphan_seconds=-60).orphans
    assert orphan.name == f"populations/{commit.population}/{commit.attempt}"
    assert_undisturbed(url, expected)


def test_signs_of_life_and_requests_to_stop(url: str) -> None:
    store = Store(url)
    store.write_sign("p1", "a1", Sign.now(3))
    assert {attempt: sign.epoch for attempt, sign in store.signs("p1").items()} == {"a1": 3}
    assert not store.stop_requested("p1", "a1")
    store.request_stop("p1", "a1")
    assert store.stop_requested("p1", "a1")
    store.discard("p1", "a1")
    assert store.begun() == []


def test_fetched_files_are_the_sealed_ones(url: str, digits_dir: Path) -> None:
    run(url, digits_dir)
    store = Store(url)
    commit = next(store.commits())
    folder = store.attempt_folder(commit.population, commit.attempt)
    assert sorted(p.name for p in folder.iterdir()) == sorted(commit.files)
    (folder / "best.safetensors").write_bytes(b"torn")
    assert rows(url)  # fetched again, as the size is another one


def test_a_folder_that_was_written_anew_is_fetched_anew(url: str) -> None:
    storage = ObjectStorage(url)
    for content in (b"one", b"two"):
        storage.write("a/file", content)
        assert (storage.local_folder("a") / "file").read_bytes() == content


def test_a_prefix_and_a_folder_that_a_web_console_has_made_may_be_used(
    url: str, digits_dir: Path, expected: dict[str, Any]
) -> None:
    """They are empty objects whose names end with a slash."""
    storage = ObjectStorage(url)
    for name in ("", "commits/"):
        storage._files.call_s3("put_object", Bucket=BUCKET, Key=f"{url.rpartition('/')[2]}/{name}", Body=b"")
    assert (storage.children(""), storage.children("commits"), storage.walk("")) == (["commits"], [], {})
    run(url, digits_dir)
    assert_undisturbed(url, expected)


def test_a_storage_that_ignores_conditions_is_refused(url: str, digits_dir: Path, monkeypatch: Any) -> None:
    pipe_file = objects.ObjectStorage.write
    monkeypatch.setattr(objects.ObjectStorage, "put_if_absent", lambda *a: (pipe_file(*a), True)[1])
    with pytest.raises(StoreError, match="expected a storage that refuses it"):
        run(url, digits_dir)


def test_a_bucket_that_is_not_there_is_one_line(s3: LoopbackS3, digits_dir: Path) -> None:
    with pytest.raises(
        StoreError, match=r"^s3://no-such/zoo: cannot reach bucket 'no-such'.*AWS_ENDPOINT_URL$"
    ) as caught:
        run("s3://no-such/zoo", digits_dir)
    assert "\n" not in str(caught.value)
