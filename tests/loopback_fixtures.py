"""Fixtures for tests that publish to the loopback Hub: `pytest_plugins = ["loopback_fixtures"]` brings them in."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from loopback_dataset import write_dataset
from loopback_hub import LoopbackHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that this process's client talks to; every address asked for must be one it knows."""
    with LoopbackHub(tmp_path / "home") as hub:
        hub.connect(monkeypatch)
        yield hub
    assert hub.unknown == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small dataset folder: two shards, 40 rows."""
    write_dataset(tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that publishing, or the client within it, would have waited."""
    seconds: list[float] = []
    monkeypatch.setattr("zoo.hub_session.sleep", seconds.append)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=seconds.append))
    return seconds
