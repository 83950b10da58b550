"""Where populations train: the only file that knows Ray.

A cluster has a number of slots (one a GPU, or one a CPU core), takes one task a slot, never retries by itself, and
reports how a task failed, by kind. What is done is decided by the store, not here.
"""

import logging
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol

# Ray listens on all interfaces otherwise, even where it only serves this process. Has to be set before the import.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray import exceptions

from zoo.errors import ZooError


class FailureKind(Enum):
    """Why a task has no result."""

    LOST_NODE = "lost node"
    CRASH = "crash"
    OUT_OF_MEMORY = "out of GPU memory"
    ERROR = "error"


@dataclass(frozen=True)
class Failure:
    """A task that ended without a result: its kind and what is known of it (a traceback, or one line)."""

    kind: FailureKind
    detail: str


class Cluster(Protocol):
    slots: int
    """Tasks that can run at once."""
    on_gpu: bool
    """Whether each task has a GPU of its own."""

    def share(self, value: Any) -> Any:
        """Make a value available to all tasks once; pass the result to `submit` in its place."""
        ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Start a task; returns a handle for `wait`."""
        ...

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        """Wait at most `timeout` seconds for one of `tasks`; return (handle, result or Failure) of those that ended."""
        ...

    def close(self) -> None: ...


def connect(workers: int | None = None, address: str | None = None) -> Cluster:
    """Return a cluster to train on.

    Args:
        workers: how many tasks run at once; None for all GPUs, or all cores where there is no GPU; 0 trains in this
            process, without Ray.
        address: of a running Ray cluster ("auto" for the one that this machine belongs to); None starts Ray here, for
            this process only.
    """
    if workers == 0:
        return InProcess()
    return RayCluster(workers, address)


class InProcess:
    """One slot, in this process; for small sweeps, debuggers and tests."""

    slots = 1
    on_gpu = False

    def share(self, value: Any) -> Any:
        return value

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return partial(function, *arguments)

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        try:
            return [(tasks[0], tasks[0]())]
        except Exception:
            return [(tasks[0], Failure(FailureKind.ERROR, traceback.format_exc()))]

    def close(self) -> None:
        pass


class RayCluster:
    """Slots on a Ray cluster, or on a Ray of our own that ends with this process."""

    def __init__(self, workers: int | None, address: str | None) -> None:
        if address is None:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        else:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ZooError(
                    f"--address {address}: no Ray cluster answers ({error}); start one with `ray start --head`, "
                    f"or leave --address out to train on this machine"
                ) from error
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        self.on_gpu = gpus > 0
        available = gpus or int(resources.get("CPU", 1))
        self.slots = min(workers or available, available)
        gpus_needed, cpus_needed = (1, 0) if self.on_gpu else (0, 1)
        # A task must not be started a second time behind our back: what is to be done again is decided by the store.
        self._remote = ray.remote(max_retries=0, num_gpus=gpus_needed, num_cpus=cpus_needed)(_call)

    def share(self, value: Any) -> Any:
        return ray.put(value)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._remote.remote(function, *arguments)

    def wait(self, tasks: list[Any], timeout: float) -> list[tuple[Any, Any]]:
        ready, _ = ray.wait(tasks, num_returns=1, timeout=timeout)
        return [(task, _result(task)) for task in ready]

    def close(self) -> None:
        ray.shutdown()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _result(task: Any) -> Any:
    try:
        return ray.get(task)
    except exceptions.NodeDiedError as error:
        return Failure(FailureKind.LOST_NODE, _one_line(error))
    except exceptions.OutOfMemoryError as error:
        return Failure(FailureKind.CRASH, _one_line(error))
    except (exceptions.WorkerCrashedError, exceptions.LocalRayletDiedError, exceptions.ObjectLostError) as error:
        return Failure(FailureKind.CRASH, _one_line(error))
    except exceptions.RayTaskError as error:
        kind = FailureKind.OUT_OF_MEMORY if "CUDA out of memory" in str(error) else FailureKind.ERROR
        return Failure(kind, str(error))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]
