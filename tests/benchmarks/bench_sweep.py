"""What keeping a sweep costs beside training it, and what the driver adds to a population, in one run.

    python tests/benchmarks/bench_sweep.py [--populations 10000] [--workers 0] [--widths 16 200]

States and seals: seconds of one save and of one seal of Adam populations with real shapes, against the training time
that lies between two of them, from the measured rate. Scheduling: populations of one run of one step, with all files
and flushes, pass through the driver; what is not spent in the worker's task is the driver's own. With --workers, over
Ray, the driver's processor time and the bytes of Ray's logs are told instead.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ahead of tests/, which has folders of the same names
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["PYTHONPATH"] = ":".join(sys.path[:2])

import numpy as np
import torch
from sweep_tools import block, tiny, write_digits

from generators.engines import make_engine
from generators.population import train_population
from generators.tasks.data import Split, TaskData
from zoo import driver, worker
from zoo.config import load_config
from zoo.plan import make_plan
from zoo.store import Store
from zoo.sweep import generate

STEPS_AN_EPOCH = 60_000 // 128
EPOCHS = 50
RAY_LOGS = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "session_latest" / "logs"


def bench_keeping(width: int, folder: Path) -> None:
    """Save and seal a population of `width` runs at its last epoch but one."""
    generator = np.random.default_rng(0)
    images = torch.from_numpy(generator.integers(0, 256, (1280, 28, 28), dtype=np.uint8))
    split = Split(images, torch.from_numpy(generator.integers(0, 10, 1280)))
    data = TaskData("mnist", split, split.head(128))
    rates = [1e-3 * (1 + i) for i in range(width)]
    preset = load_config("mnist")
    config = tiny(
        epochs=EPOCHS,
        batch_size=128,
        population_size=width,
        save_epochs=[0, 25, 50, "best"],
        grid=[block(learning_rate=rates, dropout=[0.0])],
        warmup_epochs=preset.warmup_epochs,
    )
    population = make_plan(config, "0" * 16, len(split)).populations[0]
    engine = make_engine("auto", data)
    states = train_population(population.runs, engine, [0, 1, 25, 50])
    state = next(states)
    started = time.perf_counter()
    state = next(states)
    step_seconds = (time.perf_counter() - started) / (len(split) // 128)
    state.checkpoints |= {label: state.checkpoints["0"].clone() for label in ("25", "50")}  # as large as it gets
    store = Store(folder / str(width))
    saves, seals = [], []
    for number in range(5):
        started = time.perf_counter()
        content = worker._state_bytes(state, population, engine)
        store.save_state(population.id, number, content)
        saves.append(time.perf_counter() - started)
        started = time.perf_counter()
        labels = ("0", "25", "50", "best")
        commit = worker._write_results(store, population, str(number), state, labels, engine.name, 0.0)
        store.seal(commit)
        seals.append(time.perf_counter() - started)
    interval = preset.store.state_seconds
    training = step_seconds * STEPS_AN_EPOCH * EPOCHS
    print(
        f"{width} runs, {width / step_seconds:.0f} run-steps a second: a state of {len(content) / 1e6:.1f} MB takes "
        f"{median(saves):.3f} s every {interval:.0f} s ({median(saves) / interval:.3%}); a seal takes "
        f"{median(seals):.3f} s after {training:.0f} s of training ({median(seals) / training:.4%})"
    )


def bench_scheduling(populations: int, workers: int, folder: Path) -> None:
    """Let many tiny populations through the driver, in this process or over Ray."""
    data_dir = write_digits(folder / "digits")
    rates = [1e-3 + 1e-7 * i for i in range(populations)]
    config = tiny(
        epochs=1,
        save_epochs=[1],
        population_size=1,
        grid=[block(learning_rate=rates, dropout=[0.0], train_fraction=[0.25])],
        store={"state_seconds": 1e9},
    )
    spent: list[float] = []
    memory: list[int] = []
    train = driver._train

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        result = train(*arguments)
        spent.append(time.perf_counter() - started)
        if len(spent) % max(populations // 10, 1) == 0:
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
        return result

    if workers == 0:
        driver._train = timed
    processor = time.process_time()
    summary = generate(config, folder / "sweep", data_dir, workers=workers, progress=False)
    assert summary.sealed == populations
    own = (summary.seconds - sum(spent)) / populations
    where = "in this process" if workers == 0 else f"over {workers} workers of Ray"
    print(f"{populations} populations {where}: {summary.seconds / populations * 1e3:.1f} ms each", end="")
    if spent:
        print(f", of which the driver {own * 1e3:.2f} ms", end="")
        print(f"; peak memory {memory[0] / 1e3:.0f} MB after a tenth, {memory[-1] / 1e3:.0f} MB at the end", end="")
    else:
        processor = (time.process_time() - processor) / populations
        logs = sum(path.stat().st_size for path in RAY_LOGS.rglob("*") if path.is_file()) / populations
        print(f", {processor * 1e3:.1f} ms of the driver's processor time, {logs:.0f} bytes of Ray's logs", end="")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--populations", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=0, help="0: in this process, so that the driver's part is known")
    parser.add_argument("--widths", type=int, nargs="*", default=[16, 200])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder:
        for width in options.widths:
            bench_keeping(width, Path(folder))
        if options.populations:
            bench_scheduling(options.populations, options.workers, Path(folder))


if __name__ == "__main__":
    main()
