"""How fast a sweep trains, end to end, against the usual loop and the torch engine, alternating in one run.

    python tests/benchmarks/bench_training.py --task mnist --data-dir FOLDER [--rounds 5] [--epochs 4]

End to end: real data, batch 128, an evaluation after every epoch, checkpoints and metrics written and sealed, one
worker a core; start-up of the workers excluded. Beside it the fused engine's training steps alone, in one process and
in one a core: what the rest of an epoch costs, and how well processes scale. Prints run-steps per second of every
round, then medians and ratios.
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core; the plain loop sets its own

import plain_loop
import torch

from generators.engines import make_engine
from zoo.bench import random_data, train_rate
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


def sweep_rate(task: str, engine: str, data_dir: Path, runs: int, workers: int, epochs: int) -> float:
    """Return run-steps per second of a sweep of `runs` Adam runs with dropout 0.1."""
    rates = [1e-3 * 1.05**i for i in range(runs)]
    fixed = "optimizer: [adam], init_std: [0.2], l2: [1e-6], dropout: [0.1], train_fraction: [1.0]"
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


def step_rate(task: str, runs: int) -> float:
    """Return the run-steps per second of two seconds of training steps and nothing else: fused engine, one core."""
    torch.set_num_threads(1)
    return train_rate(make_engine("fused", random_data(task)), runs, seconds=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(SETTINGS), default="mnist")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=16, help="of the fused engine's sweep")
    parser.add_argument("--torch-runs", type=int, default=4, help="of the slower torch engine's sweep")
    parser.add_argument("--torch-engine", choices=("torch", "compiled"), default="torch")
    parser.add_argument("--epochs", type=int, help="of the sweeps; default: 1 for mnist, 8 for ag_news")
    options = parser.parse_args()
    workers = os.cpu_count() or 1
    epochs = options.epochs or EPOCHS[options.task]
    data = plain_loop.load(options.task, options.data_dir, **SETTINGS[options.task])
    rates = ("plain loop", f"{options.torch_engine} engine", "fused engine", "steps, 1", f"steps, {workers}")
    names = (
        *rates,
        f"{options.torch_engine}/plain",
        "fused/plain",
        f"fused/{options.torch_engine}",
        "rest/steps",
        "scaling",
    )
    rows = []
    print(f"{options.task}, {workers} cores, run-steps/s")
    print("  ".join(f"{name:>15s}" for name in names))
    pool = multiprocessing.get_context("spawn").Pool(workers)
    for _ in range(options.rounds):
        torch.set_num_threads(workers)
        plain = plain_loop.run_steps_per_second(data, steps=100)
        slow_runs = max(options.torch_runs, workers)
        slow = sweep_rate(options.task, options.torch_engine, options.data_dir, slow_runs, workers, epochs)
        fast = sweep_rate(options.task, "fused", options.data_dir, options.runs, workers, epochs)
        width = options.runs // workers
        (one,) = pool.starmap(step_rate, [(options.task, width)])
        all_ = sum(pool.starmap(step_rate, [(options.task, width)] * workers, chunksize=1))
        ratios = (slow / plain, fast / plain, fast / slow, all_ / fast - 1, all_ / (one * workers))
        rows.append((plain, slow, fast, one, all_, *ratios))
        print("  ".join(f"{value:15.2f}" for value in rows[-1]), flush=True)
    pool.terminate()
    print("  ".join(f"{median(column):12.2f}" for column in zip(*rows, strict=True)), " median")


if __name__ == "__main__":
    main()
