"""How fast a sweep trains, end to end, against the usual loop and the torch engine, alternating in one run.

    python tests/benchmarks/bench_training.py --task mnist --data-dir FOLDER [--rounds 5]

End to end: real data, batch 128, an evaluation after every epoch, checkpoints and metrics written and sealed, one
worker a core; start-up of the workers excluded. Prints run-steps per second of every round, then medians and ratios.
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

SETTINGS = {
    "mnist": {"source": "idx"},
    # Speed does not depend on the vectors. 507 test texts to 8,000 training texts is the proportion of the full data.
    "ag_news": {"source": "csv", "vectors": "corpus", "vector_epochs": 1, "test_limit": 507},
}
EPOCHS = {"mnist": 1, "ag_news": 8}
"""Enough steps that the evaluation of epoch 0 weighs little."""


def sweep_rate(task: str, engine: str, data_dir: Path, runs: int, workers: int) -> float:
    """Return run-steps per second of a sweep of `runs` Adam runs with dropout 0.1."""
    rates = [1e-3 * 1.05**i for i in range(runs)]
    fixed = "optimizer: [adam], init_std: [0.2], l2: [1e-6], dropout: [0.1], train_fraction: [1.0]"
    epochs = EPOCHS[task]
    overrides = [
        f"epochs={epochs}",
        "warmup_epochs=0",
        f"save_epochs=[0, {epochs}, best]",
        f"engine={engine}",
        f"population_size={runs // workers}",
        f"grid=[{{{fixed}, learning_rate: {rates}}}]",
        f"data={SETTINGS[task]}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        summary = generate(load_config(task, overrides), folder, data_dir=data_dir, workers=workers, progress=False)
        # Every worker has one population, so the sweep lasts as long as the slower one, from its start to its seal.
        return summary.run_steps / max(commit.seconds for commit in Store(folder).commits())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(SETTINGS), default="mnist")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=16, help="of the fused engine's sweep")
    parser.add_argument("--torch-runs", type=int, default=4, help="of the slower torch engine's sweep")
    options = parser.parse_args()
    workers = os.cpu_count() or 1
    data = plain_loop.load(options.task, options.data_dir, **SETTINGS[options.task])
    names = ("plain loop", "torch engine", "fused engine", "torch/plain", "fused/plain", "fused/torch")
    rows = []
    print(f"{options.task}, {workers} cores, run-steps/s")
    print("  ".join(f"{name:>12s}" for name in names))
    for _ in range(options.rounds):
        torch.set_num_threads(workers)
        plain = plain_loop.run_steps_per_second(data, steps=100)
        slow = sweep_rate(options.task, "torch", options.data_dir, max(options.torch_runs, workers), workers)
        fast = sweep_rate(options.task, "fused", options.data_dir, options.runs, workers)
        rows.append((plain, slow, fast, slow / plain, fast / plain, fast / slow))
        print("  ".join(f"{value:12.1f}" for value in rows[-1]), flush=True)
    print("  ".join(f"{median(column):12.1f}" for column in zip(*rows, strict=True)), " median")


if __name__ == "__main__":
    main()
