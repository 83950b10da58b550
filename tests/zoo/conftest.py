"""Fixtures of the sweep's tests: tiny data, an undisturbed sweep to compare with, and one Ray for all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_worker import ScriptedWorker
from sweep_tools import rows, tiny, write_digits

from zoo.sweep import generate


@pytest.fixture(scope="session")
def digits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of MNIST files with 128 + 50 easy images."""
    return write_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> Path:
    """A finished sweep of `tiny()`, not to be changed."""
    sweep = tmp_path_factory.mktemp("undisturbed") / "sweep"
    generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    return sweep


@pytest.fixture(scope="session")
def expected(undisturbed: Path) -> dict[str, Any]:
    """The rows of an undisturbed sweep of `tiny()`."""
    return rows(undisturbed)


@pytest.fixture
def worker_task(monkeypatch: pytest.MonkeyPatch) -> ScriptedWorker:
    return ScriptedWorker(monkeypatch)


@pytest.fixture(scope="session")
def importable() -> Iterator[None]:
    """Lets processes that are started meanwhile, and Ray's workers, import what the tests import."""
    with pytest.MonkeyPatch.context() as patch:
        tests = Path(__file__).parents[1]
        patch.setenv("PYTHONPATH", f"{tests.parent}:{tests}")
        yield


@pytest.fixture(scope="session")
def ray_address(importable: None) -> Iterator[str]:
    """Address of a Ray cluster of one node with two CPUs, on this machine's loopback."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster.address
    cluster.shutdown()
