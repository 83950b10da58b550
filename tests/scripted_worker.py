"""A sweep in this process whose worker answers as a test tells it to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zoo import driver as driver_module
from zoo.config import SweepConfig
from zoo.plan import Population
from zoo.sweep import SweepSummary, generate

Outcome = Callable[[Population], Any]


def run(config: SweepConfig, sweep: Path | str, data_dir: Path, **options: Any) -> SweepSummary:
    return generate(config, sweep, data_dir, workers=0, progress=False, **options)


class ScriptedWorker:
    """Stands for the task of a worker: answers by `outcome`, where that gives one, and else trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.gpu_shares: list[float] = []
        self.outcome: Outcome = lambda population: None
        self._train = driver_module._train
        monkeypatch.setattr(driver_module, "_train", self)
        monkeypatch.setattr(driver_module, "POLL_SECONDS", 0.01)

    def __call__(self, store: Any, population: Population, attempt: str, data: Any, settings: Any) -> Any:
        self.calls.append(population.id)
        self.gpu_shares.append(settings.gpu_share)
        found = self.outcome(population)
        return self._train(store, population, attempt, data, settings) if found is None else found
