"""Small runs, data and a training loop that the tests of the ground floor share."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from generators.engines.base import Engine
from generators.hyperparameters import Hyperparameters
from generators.population import PopulationState, train_population
from generators.tasks.data import Split, TaskData

RunFactory = Callable[..., Hyperparameters]
Trainer = Callable[..., PopulationState]


@pytest.fixture(scope="session")
def make_run() -> RunFactory:
    """A function that returns a run of four epochs; keyword arguments replace its hyperparameters."""

    def make(**changes: Any) -> Hyperparameters:
        values: dict[str, Any] = {
            "task": "mnist",
            "optimizer": "adam",
            "learning_rate": 3e-3,
            "init_std": 0.2,
            "l2": 1e-4,
            "dropout": 0.0,
            "train_fraction": 1.0,
            "seed": 3,
            "epochs": 4,
            "batch_size": 50,
            "warmup_epochs": 2,
            "min_learning_rate": 1e-5,
            "best_by": "test",
            "initialisation": "per_run",
            "data_digest": "0123456789abcdef",
        }
        return Hyperparameters(**(values | changes))

    return make


@pytest.fixture(scope="session")
def digits() -> TaskData:
    """300 + 60 images of ten noisy patterns, which a small transformer learns in a few epochs."""
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 256, (10, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)

    def split(count: int) -> Split:
        labels = generator.integers(0, 10, count)
        images = np.clip(patterns[labels] + generator.normal(0, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
        return Split(torch.from_numpy(images), torch.from_numpy(labels))

    return TaskData("mnist", split(300), split(60))


@pytest.fixture(scope="session")
def texts() -> TaskData:
    """120 + 40 texts of 1 to 12 tokens, each class with its own half of the words."""
    generator = np.random.default_rng(2)

    def split(count: int) -> Split:
        labels = generator.integers(0, 4, count)
        lengths = generator.integers(1, 13, count)
        tokens = generator.integers(1, 21, (count, 12)) + 10 * labels[:, None]
        tokens[np.arange(12) >= lengths[:, None]] = 0
        return Split(torch.from_numpy(tokens.astype(np.int32)), torch.from_numpy(labels), torch.from_numpy(lengths))

    vectors = torch.from_numpy(generator.normal(0, 1, (51, 32)).astype(np.float32))
    vectors[0] = 0
    return TaskData("ag_news", split(120), split(40), word_vectors=vectors)


@pytest.fixture(scope="session")
def train() -> Trainer:
    """A function that trains a population to its end and returns the last state."""

    def run_all(runs: Sequence[Hyperparameters], engine: Engine, **options: Any) -> PopulationState:
        *_, last = train_population(runs, engine, **options)
        return last

    return run_all
