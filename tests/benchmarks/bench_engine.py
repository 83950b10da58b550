"""How fast the engines are, without a sweep around them: alternating in one run, medians and ratios.

    python tests/benchmarks/bench_engine.py [--rounds 5] [--seconds 2]
    python tests/benchmarks/bench_engine.py --profile mnist

Random data of the tasks' form (values do not change speed), 8 runs, batch 128, Adam, dropout 0.1, one thread as a
worker has, and the fused engine on all cores. Evaluation is given in batches of 128 samples of one run per second.
Two matrix products serve as yardstick: torch's, and the fused engine's own tiles in cache, since some processors'
vectors are wider than torch's library uses there. `--profile` shows the share of each stage of the fused engine
(timers take some of the time).
"""

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from generators.architecture import IMAGE_TOKENS, parameter_count
from generators.engines.base import Engine
from generators.engines.fused.build import FLAGS, SOURCES, find_compiler, processor_flags
from generators.engines.fused_engine import FusedEngine
from generators.engines.torch_engine import TorchEngine
from zoo.bench import BATCH, machine, matmul_rate, random_data, step_operations, train_rate

RUNS = 8
TILE_RATE = Path(__file__).with_name("tile_rate.cpp")


def tile_rate(folder: str) -> float:
    """Return GFLOP/s of the fused engine's matrix product on one core."""
    program = Path(folder) / "tile_rate"
    if not program.exists():
        compiler = find_compiler()
        flags = [*processor_flags(compiler), *(flag for flag in FLAGS if flag != "-shared"), f"-I{SOURCES}"]
        subprocess.run([*compiler, *flags, str(TILE_RATE), "-o", str(program)], check=True)
    return float(subprocess.run([program], check=True, capture_output=True, text=True).stdout)


def evaluation_rate(engine: Engine, seconds: float) -> float:
    """Return how many batches of one run are evaluated per second."""
    weights = 0.2 * torch.randn(RUNS, parameter_count(engine.data.task))
    passes, started, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        engine.evaluate(weights, engine.data.test)
        passes += 1
        elapsed = time.perf_counter() - started
    return passes * RUNS * len(engine.data.test) / BATCH / elapsed


def measurements(seconds: float, folder: str) -> dict[str, Callable[[], float]]:
    """Return what a round measures, by name."""
    cores = torch.get_num_threads()
    rows: dict[str, Callable[[], float]] = {
        "matrix product, torch, 1 core, GFLOP/s": lambda: matmul_rate("cpu") / 1e9,
        "matrix product, tiles, 1 core, GFLOP/s": lambda: tile_rate(folder),
    }
    for task in ("mnist", "ag_news"):
        data = random_data(task)
        torch_engine, fused, on_all_cores = TorchEngine(data), FusedEngine(data), FusedEngine(data, cores)
        rows |= {
            f"{task}: torch, 1 core": lambda engine=torch_engine: train_rate(engine, RUNS, seconds),
            f"{task}: fused, 1 core": lambda engine=fused: train_rate(engine, RUNS, seconds),
            f"{task}: fused, {cores} cores": lambda engine=on_all_cores: train_rate(engine, RUNS, seconds),
            f"{task}: fused, evaluation, 1 core": lambda engine=fused: evaluation_rate(engine, seconds / 2),
        }
    torch.set_num_threads(1)
    return rows


def print_ratios(medians: dict[str, float]) -> None:
    """Print engine against engine, evaluation against training, and MNIST's share of the matrix products."""
    for task in ("mnist", "ag_news"):
        fused = medians[f"{task}: fused, 1 core"]
        print(f"{fused / medians[f'{task}: torch, 1 core']:8.2f}  {task}: fused / torch")
        print(f"{medians[f'{task}: fused, evaluation, 1 core'] / fused:8.2f}  {task}: evaluation / training step")
    gflops = medians["mnist: fused, 1 core"] * step_operations("mnist", IMAGE_TOKENS) / 1e9
    print(f"{gflops:8.1f}  mnist: fused, 1 core, GFLOP/s")
    for kind in ("torch", "tiles"):
        print(f"{gflops / medians[f'matrix product, {kind}, 1 core, GFLOP/s']:8.2f}  share of the product by {kind}")


def profile(task: str, seconds: float) -> None:
    """Train and evaluate with timers; the library prints its stages when the process ends."""
    torch.set_num_threads(1)
    engine = FusedEngine(random_data(task), definitions=("-DFUSED_PROFILE",))
    print(f"{train_rate(engine, RUNS, seconds):8.1f}  run-steps per second, with timers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--profile", choices=("mnist", "ag_news"), metavar="TASK")
    options = parser.parse_args()
    print(machine())
    if options.profile:
        profile(options.profile, options.seconds)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = measurements(options.seconds, folder)
        found = [{name: measure() for name, measure in rows.items()} for _ in range(options.rounds)]
    medians = {name: median(row[name] for row in found) for name in rows}
    for name, value in medians.items():
        print(f"{value:8.1f}  {name}")
    print_ratios(medians)


if __name__ == "__main__":
    main()
