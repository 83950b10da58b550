"""Small sweeps that really train, what their commits hold, and files that count what is read of them."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import load

from zoo.config import parse_config
from zoo.dataset import Checkpoints
from zoo.store import METRICS_FILE, Store, checkpoint_file
from zoo.sweep import generate

NAME = "small-transformer-zoo"
LABELS = ("0", "1", "2", "best")
ROWS_A_GROUP = 20
"""So that the small dataset of the byte counts has as many row groups a row as a large one."""
CLASSES = ("World", "Sports", "Business", "Science")


def grid_block(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "optimizer": ["sgd", "sgd_momentum", "adam", "rmsprop"],
        "learning_rate": [1e-3, 3e-3, 1e-2],
        "init_std": [0.2, 0.3],
        "l2": [1e-6],
        "dropout": [0],
        "train_fraction": [1.0],
    }
    return values | changes


def train(folder: Path, grid: list[dict[str, Any]], data_dir: Path | None = None, **changes: Any) -> Path:
    """Train a sweep of two epochs on 320 of the embedded images; keyword arguments replace keys of the config."""
    content: dict[str, Any] = {
        "task": "mnist",
        "epochs": 2,
        "save_epochs": [0, 1, 2, "best"],
        "batch_size": 32,
        "warmup_epochs": 1,
        "data": {"source": "embedded", "train_limit": 320, "test_limit": 100},
        "grid": grid,
    }
    generate(parse_config(content | changes), folder, data_dir, workers=0, progress=False)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of all files below a folder."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


Stored = dict[str, dict[str, np.ndarray]]


def read_stored(sweep: Path) -> tuple[Stored, dict[str, dict[str, Any]]]:
    """Return checkpoint_id -> tensors, and run_id -> curves, of all that a sweep's commits name, without the reader."""
    tensors: Stored = {}
    metrics: dict[str, dict[str, Any]] = {}
    store = Store(sweep)
    for commit in store.commits():
        folder = store.attempt_folder(commit.population, commit.attempt)
        metrics |= {row["run_id"]: row for row in pq.read_table(folder / METRICS_FILE).to_pylist()}
        for label in LABELS:
            kept = [run_id for run_id, record in commit.runs.items() if label in record.labels]
            if kept:
                stacked = load((folder / checkpoint_file(label)).read_bytes())
                for row, run_id in enumerate(kept):
                    tensors[f"{run_id}-{label}"] = {name: values[row] for name, values in stacked.items()}
    return tensors, metrics


def ids(checkpoints: Checkpoints) -> list[str]:
    """Return the checkpoint_ids of a selection, in its order."""
    return checkpoints.metadata["checkpoint_id"].to_pylist()


class CountingFiles(LocalFileSystem):
    """Local files that count the bytes read of each, by name."""

    protocol = ("counting",)
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.read: dict[str, int] = {}

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        return _CountingFile(super()._open(path, mode, block_size, **options), self.read, Path(path).name)


class _CountingFile:
    def __init__(self, file: Any, read: dict[str, int], name: str) -> None:
        self._file, self._read, self._name = file, read, name

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._read[self._name] = self._read.get(self._name, 0) + len(content)
        return content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_CountingFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
