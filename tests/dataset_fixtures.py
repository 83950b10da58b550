"""Fixtures for tests of datasets: `pytest_plugins = ["dataset_fixtures"]` brings them in."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from dataset_tools import CLASSES, NAME, ROWS_A_GROUP, CountingFiles, Stored, grid_block, read_stored, train
from large_sweep import write_large_sweep

from zoo import shards
from zoo.builder import build
from zoo.dataset import Zoo, open_zoo
from zoo.reading import Source


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 runs over all four optimizers, and two of a learning rate with which every run diverges."""
    diverging = grid_block(optimizer=["adam"], learning_rate=[1e38])
    return train(tmp_path_factory.mktemp("trained") / "sweep", [grid_block(), diverging])


@pytest.fixture(scope="session")
def dataset(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of `sweep`, not to be changed."""
    out = tmp_path_factory.mktemp("built") / NAME
    build([sweep], out, progress=False)
    return out


@pytest.fixture(scope="session")
def text_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four AG News runs on made-up texts, with word vectors trained on them."""
    folder = tmp_path_factory.mktemp("texts")
    words = [f"word{number}" for number in range(40)]
    generator = np.random.default_rng(0)
    for split, count in (("train", 96), ("test", 40)):
        with (folder / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["Class Index", "Title", "Description"])
            for row in range(count):
                length = 20 if row % 4 == 0 else 6
                text = [CLASSES[row % 4], *generator.choice(words, length)]
                writer.writerow([row % 4 + 1, "title", " ".join(text)])
    data = {"source": "csv", "vectors": "corpus", "vector_epochs": 1, "vector_min_count": 1, "max_tokens": 16}
    block = grid_block(optimizer=["adam", "rmsprop"], learning_rate=[1e-3, 3e-3], init_std=[0.2])
    return train(folder / "sweep", [block], folder, task="ag_news", data=data, batch_size=16)


@pytest.fixture(scope="session")
def two_tasks(sweep: Path, text_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of both sweeps, not to be changed."""
    out = tmp_path_factory.mktemp("two-tasks") / NAME
    build([sweep, text_sweep], out, progress=False)
    return out


@pytest.fixture(scope="session")
def stored(sweep: Path) -> Stored:
    """checkpoint_id -> tensors of `sweep`."""
    return read_stored(sweep)[0]


@pytest.fixture(scope="session")
def metrics(sweep: Path) -> dict[str, dict[str, Any]]:
    """run_id -> metrics of `sweep`."""
    return read_stored(sweep)[1]


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for load_dataset in this process."""
    cache = tmp_path / "hf-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    datasets.disable_progress_bars()
    return cache


@pytest.fixture
def counted() -> Callable[[Path], tuple[Zoo, CountingFiles]]:
    """A function that opens a dataset folder and counts what is read of it."""

    def opened(folder: Path) -> tuple[Zoo, CountingFiles]:
        files = CountingFiles()
        return Zoo(Source(files, str(folder), folder.name)), files

    return opened


@pytest.fixture(scope="session")
def zoo(dataset: Path) -> Zoo:
    """`dataset`, opened."""
    return open_zoo(dataset)


@pytest.fixture(scope="session")
def frame(zoo: Zoo) -> pd.DataFrame:
    """The index as pandas has it."""
    return zoo.index.to_pandas()


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,280 checkpoints, 95 MB of weights, in row groups of 20."""
    folder = tmp_path_factory.mktemp("grouped")
    write_large_sweep(folder / "sweep", 320, epochs=4, labels=("0", "2", "4", "best"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shards, "ROW_GROUP_ROWS", ROWS_A_GROUP)
        build([folder / "sweep"], folder / "zoo", progress=False)
    return folder / "zoo"
