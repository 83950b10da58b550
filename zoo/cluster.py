"""Where populations train: the only file that knows Ray.

A cluster has a number of slots (one a GPU, or one a CPU core), takes one task a slot, never retries by itself, and
reports how a task failed, by kind. What is done is decided by the store, not here.
"""

import logging
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

# Ray listens on all interfaces otherwise, even where it only serves this process. Has to be set before the import.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# A Ray of our own would write about 100 MB of logs a day, and keep up to 600 MB of each of its processes.
os.environ.setdefault("RAY_event_stats_print_interval_ms", "3600000")
os.environ.setdefault("RAY_ROTATION_MAX_BYTES", "500000")
os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")

import ray
import torch
from ray import exceptions
from ray.autoscaler.sdk import request_resources
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from zoo.errors import DISK_FULL, ZooError, one_line

RECOUNT_SECONDS = 5.0
"""Nodes come and go; slots are counted anew after so long."""
NODE_ANSWER_SECONDS = 120.0
KNOCK_SECONDS = 10.0
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class FailureKind(Enum):
    """Why a task has no result."""

    LOST_NODE = "lost node"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of GPU memory"
    DISK_FULL = "full disk"
    STORAGE = "storage error"
    ERROR = "error"


@dataclass(frozen=True)
class Failure:
    """A task that ended without a result: its kind and what is known of it (a traceback, or one line)."""

    kind: FailureKind
    detail: str

    @classmethod
    def of(cls, error: BaseException, detail: str) -> "Failure":
        """Sort an exception that a task raised."""
        if isinstance(error, torch.OutOfMemoryError):
            return cls(FailureKind.OUT_OF_MEMORY, detail)
        if isinstance(error, OSError):
            full = error.errno in DISK_FULL
            return cls(FailureKind.DISK_FULL if full else FailureKind.STORAGE, detail)
        return cls(FailureKind.ERROR, detail)


class Cluster(Protocol):
    on_gpu: bool
    """Whether each task has a GPU of its own (or a share of one, on request)."""

    @property
    def slots(self) -> int:
        """Tasks that can run at once, now."""
        ...

    def share(self, value: Any) -> Any:
        """Make a value available to all tasks once; pass the result to `submit` in its place."""
        ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start a task; returns a handle for `wait`, which can be a dictionary key."""
        ...

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        """Wait at most `timeout` seconds for one of `tasks`; return (handle, result or Failure) of those that ended."""
        ...

    def kill(self, task: Any, host: str | None, pid: int | None) -> None:
        """End a task that hangs, in the process `pid` of `host` if that is known; `wait` then reports a crash."""
        ...

    def on_every_node(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        """Call a function once on every node that takes tasks; return (host, result or Failure) of each."""
        ...

    def close(self) -> None: ...


def connect(workers: int | None = None, address: str | None = None, gpus_per_task: float = 1.0) -> Cluster:
    """Return a cluster to train on.

    Args:
        workers: how many tasks run at once; None for all GPUs, or all cores where there is no GPU; 0 trains in this
            process, without Ray. An autoscaler behind `address` is asked for so many.
        address: of a running Ray cluster ("auto" for the one that this machine belongs to); None starts Ray here, for
            this process only (or uses the one that this process is connected to already).
        gpus_per_task: less than 1 puts several tasks on a GPU.

    Raises:
        ZooError: `workers` is negative, or no cluster answers at `address`.
    """
    if workers is not None and workers < 0:
        raise ZooError(
            f"--workers: found {workers}, expected 0 or more; leave it out to use all GPUs, or all cores without one"
        )
    if workers == 0:
        return InProcess()
    return RayCluster(workers, address, gpus_per_task)


class InProcess:
    """One slot, in this process; for small sweeps, debuggers and tests."""

    slots = 1
    on_gpu = False

    def share(self, value: Any) -> Any:
        return value

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return partial(function, *arguments)

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        if not tasks:
            time.sleep(timeout)
            return []
        try:
            return [(tasks[0], tasks[0]())]
        except Exception as error:
            return [(tasks[0], Failure.of(error, traceback.format_exc()))]

    def kill(self, task: Any, host: str | None, pid: int | None) -> None:
        """A task of this process ends before anyone can find it hanging."""

    def on_every_node(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        return [(socket.gethostname(), function(*arguments))]

    def close(self) -> None:
        """Nothing was started."""


class RayCluster:
    """Slots on a Ray cluster, or on a Ray of our own that ends with this process."""

    def __init__(self, workers: int | None, address: str | None, gpus_per_task: float) -> None:
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            _start(workers, address)
        gpus = ray.cluster_resources().get("GPU", 0)
        self.on_gpu = gpus > 0
        self._workers = workers
        self._resource, self._per_task = ("GPU", gpus_per_task) if self.on_gpu else ("CPU", 1.0)
        self._counted_at = -RECOUNT_SECONDS
        needs: dict[str, Any] = {"num_gpus": gpus_per_task, "num_cpus": 0} if self.on_gpu else {"num_cpus": 1}
        self._scales = False
        if address is not None and workers is not None:
            self._scales = True
            # Tasks beyond the slots that there are would tell an autoscaler, but hold populations while they queue.
            request_resources(bundles=[{self._resource: self._per_task}] * workers)
        # A task must not be started a second time behind our back: what is to be done again is decided by the store.
        self._remote = ray.remote(max_retries=0, **needs)(_call)
        self._light = ray.remote(max_retries=0, num_cpus=0)(_call)

    @property
    def slots(self) -> int:
        if time.monotonic() - self._counted_at >= RECOUNT_SECONDS:
            self._counted_at = time.monotonic()
            available = int(ray.cluster_resources().get(self._resource, 0) / self._per_task)
            self._slots = available if self._workers is None else min(self._workers, available)
        return self._slots

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._remote.remote(function, *arguments)

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        if not tasks:
            time.sleep(timeout)
            return []
        ready, _ = ray.wait(tasks, num_returns=1, timeout=timeout)
        return [(task, _result(task)) for task in ready]

    def kill(self, task: Any, host: str | None, pid: int | None) -> None:
        ray.cancel(task, force=True)
        # A process that is stopped, or deep in foreign code, does not hear that.
        for node in self._nodes():
            if pid is not None and node["NodeManagerHostname"] == host:
                self._on(node).remote(os.kill, pid, signal.SIGKILL)

    def on_every_node(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        tasks = {self._on(node).remote(function, *arguments): node for node in self._nodes()}
        ray.wait(list(tasks), num_returns=len(tasks), timeout=NODE_ANSWER_SECONDS)
        return [(node["NodeManagerHostname"], _result(task, timeout=0)) for task, node in tasks.items()]

    def _nodes(self) -> list[dict[str, Any]]:
        return [n for n in ray.nodes() if n["Alive"] and n["Resources"].get(self._resource, 0) > 0]

    def _on(self, node: dict[str, Any]) -> Any:
        return self._light.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))

    def close(self) -> None:
        if self._scales:
            request_resources(bundles=[])
        if self._connected_here:
            ray.shutdown()


def _start(workers: int | None, address: str | None) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        with _deaf_to_sigterm():
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
        return
    try:
        _knock(address)
        with _deaf_to_sigterm():
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise ZooError(
            f"--address {address}: no Ray cluster answers ({_one_line(error)}); start one with `ray start --head`, "
            f"or leave --address out to train on this machine"
        ) from error


@contextmanager
def _deaf_to_sigterm() -> Iterator[None]:
    """Let processes that start in the block never hear SIGTERM, and this one hear it as before, after the block.

    Schedulers send SIGTERM to a whole process group or job. Ray's servers would end at once and take the workers along;
    as it is, this process lets the workers save their states first. (Ray blocks SIGINT for them itself.) Ray also puts
    a handler of its own in place of ours.
    """
    handler = signal.getsignal(signal.SIGTERM)
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)


def _knock(address: str) -> None:
    """Find out in seconds that nobody listens at host:port; Ray itself takes minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _result(task: Any, timeout: float | None = None) -> Any:
    try:
        return ray.get(task, timeout=timeout)
    except exceptions.RayTaskError as error:
        return Failure.of(error.cause, COLOUR.sub("", str(error)))
    except exceptions.LocalRayletDiedError as error:
        raise ZooError(f"Ray on this machine has ended ({_one_line(error)}); run the command again") from error
    except (exceptions.NodeDiedError, exceptions.TaskUnschedulableError) as error:
        return Failure(FailureKind.LOST_NODE, _one_line(error))
    except exceptions.RayError as error:
        return Failure(FailureKind.CRASH, _one_line(error))


def _one_line(error: Exception) -> str:
    return one_line(COLOUR.sub("", str(error)))[:500] or type(error).__name__
