"""How fast datasets are built and read, and how much of one a selection reads, in one run.

    python tests/benchmarks/bench_dataset.py [--runs 1500] [--rounds 3] [--folder DIR]

The checkpoints have real shapes and random weights, four a run. Loading all weights into torch is compared with a loop
over single .pt files of the same checkpoints; rates are medians over alternating rounds, in MB of weights a second.
With --folder the sweep is kept and used again.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ahead of tests/, which has folders of the same names

import numpy as np
import pytest
import torch
from dataset_tools import CountingFiles
from large_sweep import write_large_sweep
from loopback_hub import LoopbackHub

from generators.architecture import parameter_count
from zoo.builder import build
from zoo.dataset import Zoo, open_zoo
from zoo.reading import Source

ROW_BYTES = 4 * parameter_count("mnist")
REPO = "user/small-transformer-zoo"


def seconds(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def rate(rows: int, elapsed: float) -> float:
    """Return MB of weights a second."""
    return rows * ROW_BYTES / 1e6 / elapsed


def selection_shares(zoo: Zoo, size: int, read: Callable[[], int]) -> tuple[float, int]:
    """Return the share of the shards' bytes that the best 2 % cost, and the bytes of the metadata questions before."""
    chosen = zoo.checkpoints(filters=[("test_accuracy", ">=", float(np.quantile(zoo.index["test_accuracy"], 0.98)))])
    metadata = read()
    chosen.tensors()
    print(f"  best 2 %: {len(chosen)} of {zoo.index.num_rows} checkpoints")
    return (read() - metadata) / size, metadata


def compare_reading(folder: Path, files: Path, rounds: int) -> None:
    """Print rates of both ways, and their ratio."""
    whole = open_zoo(folder).checkpoints()
    count = min(len(whole), 1000)
    files.mkdir(exist_ok=True)
    part = whole.take(np.arange(count)).tensors()
    for row in range(count):
        torch.save({name: values[row].clone() for name, values in part.items()}, files / f"{row}.pt")
    del part
    singles, tables = [], []
    for _ in range(rounds):
        singles.append(rate(count, seconds(lambda: [torch.load(files / f"{row}.pt") for row in range(count)])))
        tables.append(rate(len(whole), seconds(lambda: open_zoo(folder).checkpoints().tensors())))
        print(f"  .pt files {singles[-1]:6.1f}  dataset {tables[-1]:6.1f}", flush=True)
    print(f"reading: .pt files {median(singles):.1f} MB/s, dataset {median(tables):.1f} MB/s")
    print(f"reading: {median(tables) / median(singles):.1f} times as fast as single .pt files (target 6, aim 8)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "sweep").is_dir():
            write_large_sweep(folder / "sweep", options.runs)
        out = folder / "small-transformer-zoo"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        processor = time.process_time()
        elapsed = seconds(lambda: build([folder / "sweep"], out, progress=False))
        processor = time.process_time() - processor
        rows = len(open_zoo(out).checkpoints())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"{rows} checkpoints, {rows * ROW_BYTES / 1e6:.0f} MB of weights, {os.cpu_count()} cores")
        print(f"build: {rate(rows, elapsed):.0f} MB/s, {rate(rows, processor):.0f} MB a processor-second (target 150)")
        print(f"build: peak memory {peak:.0f} MB, {before:.0f} MB of it before it began")
        size = sum(path.stat().st_size for path in out.glob("mnist/*.parquet"))
        print(f"size: {size / (rows * ROW_BYTES):.3f} of the raw weights")
        compare_reading(out, folder / "single", options.rounds)
        files = CountingFiles()
        local = Zoo(Source(files, str(out), "local"))
        share, metadata = selection_shares(local, size, lambda: sum(files.read.values()))
        print(f"selection, local: {share:.1%} of the bytes (limit 10 %); metadata {metadata / 1e6:.2f} MB (limit 1)")
        with LoopbackHub(folder / "home") as hub, pytest.MonkeyPatch.context() as patched:
            hub.connect(patched)
            hub.upload(REPO, out)
            share, metadata = selection_shares(open_zoo(REPO), size, hub.counters.sent)
        print(f"selection, Hub: {share:.1%} of the bytes (limit 10 %); metadata {metadata / 1e6:.2f} MB (limit 1)")


if __name__ == "__main__":
    main()
