"""Fixtures for tests that measure a dataset again: `pytest_plugins = ["evaluation_fixtures"]` brings them in."""

import shutil
from pathlib import Path

import pytest

from generators.engines import make_engine
from generators.tasks import MNISTSource
from zoo.builder import build


@pytest.fixture(scope="module")
def tiny_dataset(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of `tiny()`: four runs, 16 checkpoints, not to be changed."""
    out = tmp_path_factory.mktemp("evaluated") / "dataset"
    build([undisturbed], out, progress=False)
    return out


@pytest.fixture
def tiny_copy(tiny_dataset: Path, tmp_path: Path) -> Path:
    """A copy of the dataset that may be changed."""
    return shutil.copytree(tiny_dataset, tmp_path / "copy")


@pytest.fixture(scope="module")
def engine_here(digits_dir: Path) -> str:
    """The engine that "auto" is on this machine."""
    return make_engine("auto", MNISTSource().load(digits_dir)).name
