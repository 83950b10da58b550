import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from faulty_workers import faulty_train, order
from ray.cluster_utils import Cluster as LocalCluster
from sweep_tools import assert_undisturbed, drive, rows, start, tiny

from zoo import cluster as cluster_module
from zoo import driver as driver_module
from zoo.cluster import Failure, FailureKind, InProcess, RayCluster, connect
from zoo.errors import StoreError, ZooError
from zoo.plan import make_plan
from zoo.store import Store
from zoo.sweep import SweepSummary, check_nodes, generate


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A sweep directory whose workers follow orders to fail, and whose driver looks often."""
    monkeypatch.setattr(driver_module, "_train", faulty_train)
    monkeypatch.setattr(driver_module, "SIGN_SECONDS", 0.2)
    monkeypatch.setattr(driver_module, "POLL_SECONDS", 0.1)
    return tmp_path / "sweep"


def run(folder: Path, digits_dir: Path, address: str, **changes: Any) -> SweepSummary:
    return generate(tiny(**changes), folder, digits_dir, address=address, progress=False)


def planned(digits_dir: Path, **changes: Any) -> list[str]:
    """Return the ids of the populations of `tiny(**changes)`."""
    data = tiny().data.load(digits_dir)
    return [p.id for p in make_plan(tiny(**changes), data.digest(), len(data.train)).populations]


def listening(names: str) -> set[str]:
    """Return "ADDRESS:PORT", in the kernel's hexadecimal form, of the TCP sockets on which such processes listen."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if re.match(names, (process / "comm").read_text()):
                sockets |= {str(link.readlink()).removeprefix("socket:[")[:-1] for link in (process / "fd").iterdir()}
        except OSError:  # it has ended
            continue
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()]
    return {line[1] for line in lines if line[3] == "0A" and line[9] in sockets}


def test_nothing_listens_beyond_loopback(ray_address: str) -> None:
    addresses = listening("ray|gcs_server|python")
    assert len(addresses) >= 3
    loopback = ("0100007F", "0000000000000000FFFF00000100007F")  # 127.0.0.1, and the same as an IPv6 address
    assert {address for address in addresses if not address.startswith(loopback)} == set()


@pytest.mark.parametrize(("workers", "asked"), [(None, []), (3, [[{"CPU": 1.0}] * 3, []])])
def test_an_autoscaler_is_asked_for_the_workers_that_were_asked_for(
    ray_address: str, workers: int | None, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    request = cluster_module.request_resources

    def requested(bundles: list[dict[str, float]]) -> None:
        request(bundles=bundles)
        calls.append(bundles)

    monkeypatch.setattr(cluster_module, "request_resources", requested)
    connect(workers, ray_address).close()
    assert calls == asked


def test_a_sweep_on_a_running_cluster_has_the_rows_of_one_in_this_process(
    ray_address: str, tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    summary = run(tmp_path / "s", digits_dir, ray_address)
    assert (summary.sealed, summary.trained) == (2, 2)
    assert not ray.is_initialized()
    assert_undisturbed(tmp_path / "s", expected)


def test_workers_that_die_in_any_way_cost_time_and_no_row(
    ray_address: str, orders: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    faults = ("kill", "segfault", "exit 0", "sys.exit 0", "garbage", "input/output")
    for number, (fault, population) in enumerate(
        zip(faults, itertools.cycle(planned(digits_dir, population_size=1)), strict=False)
    ):
        order(orders, fault, population, epochs=2, number=number)
    summary = run(orders, digits_dir, ray_address, population_size=1)
    assert (summary.quarantined, list((orders.parent / "faults").iterdir())) == ({}, [])
    assert_undisturbed(orders, expected)


def test_a_worker_that_hangs_is_ended_by_the_watchdog(
    ray_address: str, orders: Path, digits_dir: Path, expected: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    order(orders, "hang", epochs=2)
    summary = run(orders, digits_dir, ray_address, sweep={"hang_seconds": 2})
    assert summary.quarantined == {}
    assert "no sign of life for 2 s, its worker is ended (sweep.hang_seconds)" in capfd.readouterr().err
    assert_undisturbed(orders, expected)


def test_an_error_on_a_worker_is_kept_with_its_traceback(ray_address: str, orders: Path, digits_dir: Path) -> None:
    poisoned, other = planned(digits_dir)
    order(orders, "error", poisoned)
    order(orders, "out of memory", other)  # which is no error: the population runs again, narrower
    summary = run(orders, digits_dir, ray_address)
    assert (list(summary.quarantined), Store(orders).sealed()) == ([poisoned], {other})
    error = summary.quarantined[poisoned]
    assert re.search(r"^error: [\s\S]*faulty_workers\.py[\s\S]*ValueError: poison", error)
    assert "\x1b" not in error


def test_a_full_disk_on_a_worker_ends_the_sweep_on_one_line_that_names_the_folder(
    ray_address: str, orders: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    order(orders, "disk full", epochs=1)
    with pytest.raises(StoreError, match=rf"^{orders}: no space left, .*make room and run the same command again$"):
        run(orders, digits_dir, ray_address)
    assert run(orders, digits_dir, ray_address).quarantined == {}
    assert_undisturbed(orders, expected)


def test_failures_have_their_kind_and_no_colours(ray_address: str) -> None:
    cluster = connect(address=ray_address)
    try:
        found = {}
        for name, function, argument in (
            ("error", int, "x"),
            ("storage", open, "/no/such/file"),
            ("crash", os._exit, 0),
            ("none", len, "abc"),
        ):
            task = cluster.submit(function, argument)
            [(same, found[name])] = cluster.wait([task], 60)
            assert same == task
    finally:
        cluster.close()
    assert found.pop("none") == 3
    assert {name: failure.kind.value for name, failure in found.items()} == {
        "error": "error",
        "storage": "storage error",
        "crash": "crash",
    }
    assert "ValueError: invalid literal for int()" in found["error"].detail
    assert "\x1b" not in "".join(failure.detail for failure in found.values())


def test_in_this_process_failures_have_the_same_kinds() -> None:
    cluster = InProcess()
    task = cluster.submit(int, "x")
    [(_, failure)] = cluster.wait([task], 1)
    assert failure.kind is FailureKind.ERROR
    [(_, failure)] = cluster.wait([cluster.submit(open, "/no/such/file")], 1)
    assert failure.kind is FailureKind.STORAGE
    assert cluster.wait([], 0.0) == []


def test_slots_follow_the_cluster_and_the_bound(ray_address: str) -> None:
    for workers, slots in ((None, 2), (1, 1), (5, 2)):
        cluster = connect(workers, ray_address)
        assert (cluster.slots, cluster.on_gpu) == (slots, False)
        cluster.close()


def test_workers_below_zero_are_refused() -> None:
    with pytest.raises(ZooError, match=r"^--workers: found -3, expected 0 or more"):
        connect(-3)


def test_no_cluster_at_an_address_is_one_line() -> None:
    with pytest.raises(
        ZooError, match=r"^--address 127\.0\.0\.1:1: no Ray cluster answers .*leave --address out"
    ) as caught:
        connect(address="127.0.0.1:1")
    assert "\n" not in str(caught.value)


def test_a_node_that_does_not_see_the_folder_is_refused_by_name(
    ray_address: str, tmp_path: Path, digits_dir: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The driver's working directory is another one than a worker's: a path through /proc is not shared.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match=r"^/proc/self/cwd/s: found that .* cannot see this folder, expected storage"):
        run(Path("/proc/self/cwd/s"), digits_dir, ray_address)
    assert (tmp_path / "s" / "plans" / "000.json").is_file()
    cluster = RayCluster(None, ray_address, 1.0)
    try:
        check_nodes(Store(undisturbed), cluster)
    finally:
        cluster.close()


def test_a_node_that_stops_seeing_the_folder_is_taken_for_lost(
    tmp_path: Path, digits_dir: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(driver_module, "LONGEST_PAUSE", 0.1)
    answers = iter([False, True, False, False])  # before there is a plan; when nodes are checked; of two tasks
    monkeypatch.setattr(Store, "has_plan", lambda self: next(answers, True))
    generate(tiny(), tmp_path / "s", digits_dir, workers=0, progress=False)
    assert "a node does not see" in capfd.readouterr().err
    assert_undisturbed(tmp_path / "s", expected)


@pytest.fixture
def two_nodes(importable: None) -> Iterator[LocalCluster]:
    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


def test_a_node_lost_in_mid_population_costs_time_and_no_row(
    two_nodes: LocalCluster, orders: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    # Both workers stop after epoch 2, so that the node that goes has one of them; the other one goes by the watchdog.
    for number in range(2):
        order(orders, "hang", epochs=3, number=number)
    summaries: list[SweepSummary] = []
    address = two_nodes.address
    thread = threading.Thread(
        target=lambda: summaries.append(run(orders, digits_dir, address, sweep={"hang_seconds": 8})),
        daemon=True,
    )
    thread.start()
    store = Store(orders)
    wait_for(lambda: len(store.begun()) == 2 and all(store.states(p)[-1:] >= ["00001"] for p in store.begun()))
    for node in list(two_nodes.worker_nodes):
        with contextlib.suppress(ValueError):  # the driver's own node may not go
            two_nodes.remove_node(node, allow_graceful=False)
            two_nodes.add_node(num_cpus=1)
            break
    thread.join()
    assert summaries[0].quarantined == {}
    assert_undisturbed(orders, expected)


def test_two_drivers_on_one_cluster_end_with_every_run_exactly_once(
    ray_address: str, tmp_path: Path, digits_dir: Path, expected: dict[str, Any]
) -> None:
    # wandb#3522: 25 runs became 442 after agents were restarted.
    config = tiny(population_size=1)
    other = start(drive, config, tmp_path / "s", digits_dir, 2, ray_address)
    generate(config, tmp_path / "s", digits_dir, address=ray_address, progress=False)
    other.join()
    assert other.exitcode == 0
    assert_undisturbed(tmp_path / "s", expected)


SCRIPT = """
import sys
from pathlib import Path
from sweep_tools import tiny
from zoo.sweep import SweepInterrupted, generate
if __name__ == "__main__":
    config = tiny(epochs=int(sys.argv[3]), save_epochs=[0, 2], store={"state_seconds": float(sys.argv[4])})
    try:
        generate(config, sys.argv[1], Path(sys.argv[2]), workers=2, progress=False)
    except SweepInterrupted as stop:
        print(stop, flush=True)
        sys.exit(128 + stop.signal)
"""


def embedded(sweep: Path, digits_dir: Path, epochs: int, state_seconds: float) -> subprocess.Popen[str]:
    """Start a driver with a Ray of its own, as the command line does, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(sweep), str(digits_dir), str(epochs), str(state_seconds)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(fulfilled: Any) -> None:
    deadline = time.monotonic() + 60
    while not fulfilled():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "whole_group"), [(signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)]
)
def test_a_signal_with_ray_saves_states_and_tells_its_number(
    number: int, whole_group: bool, tmp_path: Path, digits_dir: Path, importable: None
) -> None:
    """Ctrl-C and schedulers reach the whole process group; `kill` and Slurm's --signal=B the driver alone."""
    process, store = embedded(tmp_path / "s", digits_dir, 500, 1e9), Store(tmp_path / "s")
    wait_for(
        lambda: len(store.begun()) == 2 and all(s.epoch > 1 for p in store.begun() for s in store.signs(p).values())
    )
    if whole_group:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert output == "stopped after 0 of 2 populations; run the command again\n"
    assert sorted(len(store.states(p)) for p in store.begun()) == [1, 1]
    assert [store.signs(p) for p in store.begun()] == [{}, {}]


def test_killing_the_driver_ends_its_workers_and_the_same_command_goes_on(
    tmp_path: Path, digits_dir: Path, importable: None
) -> None:
    process, store = embedded(tmp_path / "s", digits_dir, 40, 0.0), Store(tmp_path / "s")
    wait_for(lambda: any(name >= "00003" for p in store.begun() for name in store.states(p)))
    workers = {sign.pid for p in store.begun() for sign in store.signs(p).values() if sign.epoch > 0}
    process.kill()
    process.wait()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    config = tiny(epochs=40, save_epochs=[0, 2], store={"state_seconds": 0})
    generate(config, tmp_path / "s", digits_dir, workers=0, progress=False)
    generate(config, tmp_path / "whole", digits_dir, workers=0, progress=False)
    assert_undisturbed(tmp_path / "s", rows(tmp_path / "whole"))


def test_a_failure_is_a_plain_record() -> None:
    assert Failure.of(OSError(122, "Disk quota exceeded"), "d") == Failure(FailureKind.DISK_FULL, "d")
    assert Failure.of(ValueError("x"), "d") == Failure(FailureKind.ERROR, "d")
