"""Tiny sweeps for tests: data that loads in no time, a configuration, what a sweep holds, and drivers as processes."""

import gzip
import hashlib
import json
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors.numpy import load

from zoo.config import SweepConfig, parse_config
from zoo.store import METRICS_FILE, Store, checkpoint_file
from zoo.sweep import generate
from zoo.verify_sweep import verify_sweep
from zoo.worker import safetensors_header

TRAIN, TEST = 128, 50


def write_digits(folder: Path) -> Path:
    """Write noisy patterns of ten classes as MNIST files, which a small transformer learns in a few epochs."""
    generator = np.random.default_rng(1)
    patterns = generator.integers(0, 256, (10, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", TRAIN), ("t10k", TEST)):
        labels = generator.integers(0, 10, count).astype(np.uint8)
        images = np.clip(patterns[labels] + generator.normal(0, 40, (count, 28, 28)), 0, 255).astype(np.uint8)
        _write_idx(folder / f"{prefix}-images-idx3-ubyte.gz", images)
        _write_idx(folder / f"{prefix}-labels-idx1-ubyte.gz", labels)
    return folder


def _write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes(), mtime=0))


def tiny(**changes: Any) -> SweepConfig:
    """The configuration of `tiny_content`; keyword arguments replace keys."""
    return parse_config(tiny_content() | changes)


def tiny_content() -> dict[str, Any]:
    """Two populations (without and with dropout) of two runs, four epochs."""
    return {
        "task": "mnist",
        "epochs": 4,
        "save_epochs": [0, 2, 4, "best"],
        "batch_size": 32,
        "warmup_epochs": 1,
        "population_size": 2,
        "data": {"source": "idx", "train_limit": TRAIN, "test_limit": TEST},
        "store": {"state_seconds": 0},
        "grid": [block()],
    }


def block(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "optimizer": ["adam"],
        "learning_rate": [1e-2, 3e-3],
        "init_std": [0.2],
        "l2": [1e-6],
        "dropout": [0.0, 0.1],
        "train_fraction": [1.0],
    }
    return values | changes


def rows(sweep: Path | str) -> dict[str, Any]:
    """Return all that a dataset takes from a sweep, bit for bit: (run, label) -> digest of its weights and its epoch,
    run -> status and the digest of its curves. Fails on a row that is there twice."""
    found: dict[str, Any] = {}
    store = Store(sweep)
    for commit in store.commits():
        folder = store.attempt_folder(commit.population, commit.attempt)
        labels = sorted({label for run in commit.runs.values() for label in run.labels})
        for label in labels:
            content = (folder / checkpoint_file(label)).read_bytes()
            header, tensors = json.loads(safetensors_header(content)), load(content)
            for row, (run_id, epoch) in enumerate(zip(header["run_ids"], header["epochs"], strict=True)):
                weights = b"".join(name.encode() + tensors[name][row].tobytes() for name in sorted(tensors))
                _add(found, f"{run_id} {label}", (hashlib.sha256(weights).hexdigest(), epoch))
        for values in pq.read_table(BytesIO((folder / METRICS_FILE).read_bytes())).to_pylist():
            run_id = values.pop("run_id")
            curves = np.array([values[name] for name in sorted(values)])
            _add(found, run_id, (commit.runs[run_id].status, hashlib.sha256(curves.tobytes()).hexdigest()))
    return found


def _add(found: dict[str, Any], key: str, value: Any) -> None:
    assert key not in found, f"{key} is there twice"
    found[key] = value


def assert_undisturbed(sweep: Path | str, expected: dict[str, Any]) -> None:
    """Commits equal the plan, keys are unique, digests valid, and the rows those of an undisturbed sweep."""
    assert verify_sweep(sweep) == []
    assert rows(sweep) == expected


CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, in the process that the others are forked from; it does not know the path of the tests themselves.
CONTEXT.set_forkserver_preload(["torch", "ray", "pyarrow.parquet", "zoo.sweep"])


def start(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a driver in a process group of its own; see `kill`."""
    process = CONTEXT.Process(target=_lead_group, args=(target, *arguments))
    process.start()
    return process


def kill(process: Any, number: int = signal.SIGKILL) -> None:
    """Send a signal to a driver and all processes that it has started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:  # it does not lead its group yet, or has ended
        os.kill(process.pid, number)


def kill_when(process: Any, fulfilled: Callable[[], bool]) -> None:
    """Kill a driver as soon as something is so; fails if the driver ends before."""
    while not fulfilled():
        assert process.is_alive(), "the driver ended before"
        time.sleep(0.001)
    kill(process)
    process.join()


def drive(config: SweepConfig, sweep: Path | str, data_dir: Path, workers: int = 0, address: str | None = None) -> None:
    """Target of a driver's process."""
    generate(config, sweep, data_dir, workers=workers, address=address, progress=False)


def _lead_group(target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    target(*arguments)
