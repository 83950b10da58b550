"""A cluster as a concurrent.futures.Executor, for work that is a plain list of calls, such as writing shards."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from zoo.cluster import Cluster, Failure
from zoo.errors import ZooError

POLL_SECONDS = 1.0


class ClusterExecutor(Executor):
    """Runs calls on a cluster; functions, arguments and results travel between processes.

    A task that failed, or whose node was lost, raises ZooError from `result`; nothing is tried again here. The cluster
    stays open when the executor ends.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future:
        if options:
            raise TypeError(f"found keyword arguments {', '.join(options)}, expected positional ones only")
        return _Task(self._cluster, self._cluster.submit(function, *arguments))


class _Task(Future):
    """One call; its result is fetched when it is asked for."""

    def __init__(self, cluster: Cluster, handle: Any) -> None:
        super().__init__()
        self._cluster = cluster
        self._handle = handle

    def result(self, timeout: float | None = None) -> Any:
        while not self.done():
            for _, value in self._cluster.wait([self._handle], POLL_SECONDS if timeout is None else timeout):
                if isinstance(value, Failure):
                    last = value.detail.strip().rpartition("\n")[2]
                    self.set_exception(ZooError(f"a task of the cluster failed ({value.kind.value}): {last}"))
                else:
                    self.set_result(value)
            if timeout is not None:
                break
        return super().result(0)
