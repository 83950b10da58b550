"""How fast a sweep trains, end to end, against the usual loop and the torch engine, alternating in one run.

    python tests/benchmarks/bench_training.py --data-dir MNIST_FOLDER [--rounds 5] [--runs 16]

End to end: real MNIST, batch 128, full test set after the epoch, checkpoints and metrics written and sealed, one worker
a core; start-up of the workers excluded. Prints run-steps per second, medians and ratios.
"""

import argparse
import os
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core; the plain loop sets its own

import plain_loop
import torch

from zoo.config import load_config
from zoo.store import Store
from zoo.sweep import generate


def sweep_rate(engine: str, data_dir: Path, runs: int, workers: int) -> float:
    """Return run-steps per second of a sweep of `runs` Adam runs over one epoch of the 60,000 images."""
    rates = [1e-3 * 1.05**i for i in range(runs)]
    fixed = "optimizer: [adam], init_std: [0.2], l2: [1e-6], dropout: [0.1], train_fraction: [1.0]"
    overrides = [
        "epochs=1",
        "warmup_epochs=0",
        "save_epochs=[0, 1, best]",
        "data.source=idx",
        f"engine={engine}",
        f"population_size={runs // workers}",
        f"grid=[{{{fixed}, learning_rate: {rates}}}]",
    ]
    with tempfile.TemporaryDirectory() as folder:
        summary = generate(load_config("mnist", overrides), folder, data_dir=data_dir, workers=workers, progress=False)
        # Every worker has one population, so the sweep lasts as long as the slower one, from its start to its seal.
        return summary.run_steps / max(commit.seconds for commit in Store(folder).commits())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=16)
    parser.add_argument("--torch-runs", type=int, default=4, help="runs of the slower torch engine's sweep")
    options = parser.parse_args()
    workers = os.cpu_count() or 1
    rows = []
    for _ in range(options.rounds):
        torch.set_num_threads(workers)
        plain = plain_loop.run_steps_per_second(options.data_dir, steps=60)
        torch_rate = sweep_rate("torch", options.data_dir, max(options.torch_runs, workers), workers)
        fused_rate = sweep_rate("fused", options.data_dir, options.runs, workers)
        rows.append((plain, torch_rate, fused_rate, fused_rate / plain, fused_rate / torch_rate, torch_rate / plain))
        print("  ".join(f"{value:8.1f}" for value in rows[-1]), flush=True)
    names = ("plain loop", "torch engine", "fused engine", "fused/plain", "fused/torch", "torch/plain")
    for name, values in zip(names, zip(*rows, strict=True), strict=True):
        print(f"{name:14s} {median(values):8.1f}")


if __name__ == "__main__":
    main()
