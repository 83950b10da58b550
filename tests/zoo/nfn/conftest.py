"""A small real zoo, and weights whose accuracy can be read off."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from sweep_tools import block, tiny

from generators.architecture import flatten, tensor_table
from zoo.builder import build
from zoo.nfn.data import Splits, WeightData, split
from zoo.nfn.fit import Recipe
from zoo.nfn.train import Setting
from zoo.sweep import generate

SHORT = Recipe(epochs=4, warmup_epochs=1)
STATNN = Setting(task="mnist", epoch_label="best", predictor="statnn", recipe=SHORT, seed=3)


@pytest.fixture(scope="session")
def small_zoo(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> Path:
    """A dataset of 48 really trained runs with labels 0, 2 and best."""
    folder = tmp_path_factory.mktemp("nfn")
    rates = [float(rate) for rate in np.geomspace(3e-4, 3e-2, 16)]
    grid = [block(learning_rate=rates, init_std=[0.1, 0.2, 0.4], dropout=[0.0])]
    config = tiny(epochs=2, save_epochs=[0, 2, "best"], population_size=48, grid=grid)
    generate(config, folder / "sweep", digits_dir, workers=0, progress=False)
    build([folder / "sweep"], folder / "zoo", progress=False)
    return folder / "zoo"


def make_data(task: str, count: int, seed: int = 0) -> WeightData:
    """Checkpoints whose weights are the larger the better, with hyperparameters that say nothing."""
    generator = torch.Generator().manual_seed(seed)
    size = 0.05 + 0.4 * torch.rand(count, generator=generator, dtype=torch.float64)
    tensors = {
        spec.name: (
            torch.randn(count, *spec.shape, generator=generator) * size.view(-1, *[1] * len(spec.shape))
        ).float()
        for spec in tensor_table(task)
    }
    metadata = pa.table(
        {
            "checkpoint_id": [f"run{number:04d}-best" for number in range(count)],
            "test_accuracy": (2 * size).numpy(),
            "optimizer": ["adam" if number % 2 == 0 else "sgd" for number in range(count)],
            "learning_rate": [1e-3] * count,
            "init_std": [0.2] * count,
            "l2": [1e-4 * (number % 2) for number in range(count)],
            "dropout": [0.0] * count,
            "train_fraction": [1.0] * count,
        }
    )
    return WeightData(task, flatten(task, tensors), metadata)


@pytest.fixture(scope="session")
def readable() -> Splits:
    """120 MNIST checkpoints of `make_data`, split 84 / 18 / 18."""
    return split(make_data("mnist", 120), resplit_seed=0)


DAMAGED_RECORDS = [
    (b"[" * 100_000, "found no JSON .*, expected the record of a training"),
    (b'{"config": {', "found no JSON .*, expected the record of a training"),
    (b"\xff\xfe{}", "found no JSON .*, expected the record of a training"),
    (b"[1]", "found no config, expected the record of a training"),
    (b'{"config": {}, "result": 1}', "found no result, expected the record of a training"),
    (b'{"config": {}, "result": {"tau": 1}}', "result: found tau, expected parameters, checkpoints, .*, predictions"),
]
"""What a torn or an old record may hold, and what is said of it."""
