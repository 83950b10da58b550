"""Workers that fail on order. An order is a file in the folder `faults` beside the sweep, named POPULATION-NUMBER (or
any-NUMBER); the first worker that removes it carries it out, after so many epochs as it says."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from generators.tasks.data import TaskData
from zoo.plan import Population
from zoo.store import Store
from zoo.worker import WorkerSettings, run_population


def order(sweep: Path, fault: str, population: str = "any", epochs: int = 1, number: int = 0) -> None:
    """Let a worker fail at its `epochs`-th question whether to stop (0 is before training)."""
    folder = sweep.parent / "faults"
    folder.mkdir(exist_ok=True)
    (folder / f"{population}-{number}").write_text(json.dumps({"fault": fault, "epochs": epochs}))


def faulty_train(store: Store, population: Population, attempt: str, data: TaskData, settings: WorkerSettings) -> Any:
    """Train as the real task does, until an order says otherwise."""
    fault = _take_order(Path(store.root), population.id)
    if fault["fault"] == "garbage":
        return {"state": "done"}
    asked = iter(range(1_000_000))

    def should_stop() -> bool:
        if next(asked) == fault["epochs"]:
            FAULTS[fault["fault"]]()
        return store.stop_requested(population.id, attempt)

    return run_population(store, population, attempt, data, settings, should_stop)


def _take_order(sweep: Path, population: str) -> dict[str, Any]:
    for path in sorted((sweep.parent / "faults").glob("*")):
        if path.name.rpartition("-")[0] in (population, "any"):
            content = path.read_text()
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # another worker has taken it
            return json.loads(content)
    return {"fault": "none", "epochs": -1}


def _raise(error: BaseException) -> None:
    raise error


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit 0": lambda: os._exit(0),
    "sys.exit 0": lambda: sys.exit(0),
    "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "error": lambda: _raise(ValueError("poison")),
    "out of memory": lambda: _raise(torch.OutOfMemoryError("CUDA out of memory")),
    "input/output": lambda: _raise(OSError(5, "Input/output error")),
    "disk full": lambda: _raise(OSError(28, "No space left on device")),
}
