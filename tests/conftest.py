"""Fixtures that all tests share."""

import os
import signal
from pathlib import Path

import pytest

# Ray listens on all interfaces otherwise, even with a node address of 127.0.0.1. Set before anything imports it.
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell lets what it starts in the background ignore SIGINT, which some tests send to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Folder of the real MNIST and AG News files: ZOO_TEST_DATA, or ../shared/data beside the project."""
    named = os.environ.get("ZOO_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not (folder / "mnist").is_dir():
        message = f"no real data in {folder}; set ZOO_TEST_DATA to a folder with mnist/ and ag_news/"
        if named:
            pytest.fail(message)
        pytest.skip(message)
    return folder
