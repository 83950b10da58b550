"""How fast this machine trains a population, what share of its matrix-product rate that is, and a forecast."""

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from generators.architecture import (
    BLOCKS,
    CLASSES,
    IMAGE,
    IMAGE_TOKENS,
    MLP_WIDTH,
    PATCH,
    WIDTH,
    parameter_count,
)
from generators.engines import make_engine
from generators.engines.base import Batch, Engine
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from generators.optimizers import make_optimizer
from generators.tasks.data import Split, TaskData
from zoo.plan import Population, run_steps
from zoo.threads import available_cores, torch_threads

BATCH = 128
EVALUATION_COST = 0.37
"""Of a batch's evaluation, as a share of a training step (measured with the fused engine)."""
WARM_UP_STEPS = 3
"""Not timed: a compiled engine compiles in the first, and captures a CUDA graph in the second."""
SAMPLES = 20_000
TEXT_TOKENS = 64
TEXT_LENGTHS = (1, 61)
"""Shortest and longest random text: a mean of 31 tokens, as in AG News."""
CPU_FEATURES = ("avx512f", "avx2", "fma", "asimd", "sve")


@dataclass(frozen=True)
class BenchReport:
    """What `measure` found.

    run_steps_per_second: training steps of one run (Adam, dropout 0.1), forward, backward and update.
    gflops: floating-point operations of the network's matrix products per second, in units of 1e9.
    matmul_gflops: of torch's large matrix product on the same threads or GPU; share: gflops / matmul_gflops, which is
    more than 1 where the fused engine's products beat torch's.
    """

    machine: str
    task: str
    engine: str
    device: str
    threads: int
    runs: int
    batch_size: int
    run_steps_per_second: float
    gflops: float
    matmul_gflops: float

    @property
    def share(self) -> float:
        return self.gflops / self.matmul_gflops

    def hours(self, run_steps: float, cores: int | None = None) -> float:
        """Return how long so many run-steps take here, or on so many cores like those that were measured.

        Raises:
            InputError: fewer cores than 1, or the rate is that of a GPU.
        """
        hours = run_steps / self.run_steps_per_second / 3600
        if cores is None:
            return hours
        if cores < 1:
            raise InputError(f"--cores: found {cores}, expected 1 or more; leave it out for this machine alone")
        if self.device != "cpu":
            raise InputError(
                f"--cores: found a GPU ({self.machine}), whose rate tells nothing about cores; use --gpus and "
                f"--gpu-rate, or set CUDA_VISIBLE_DEVICES= to measure the processor"
            )
        return hours * self.threads / cores


def measure(
    task: str, engine: str = "auto", runs: int | None = None, seconds: float = 5.0, batch_size: int = BATCH
) -> BenchReport:
    """Train a population on random data for some seconds, with all cores or the GPU.

    Args:
        task: "mnist" or "ag_news".
        engine: "auto", "torch", "compiled" or "fused".
        runs: width of the population; None for 8 a core, or 200 on a GPU.

    Raises:
        InputError: `runs` or `seconds` is not more than 0.
    """
    if runs is not None and runs < 1:
        raise InputError(f"--runs: found {runs}, expected 1 or more; leave it out for 8 a core, or 200 on a GPU")
    if not seconds > 0:
        raise InputError(f"--seconds: found {seconds}, expected more than 0; leave it out for 5")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = available_cores()
    runs = runs or (200 if device == "cuda" else 8 * threads)
    data = random_data(task)
    with torch_threads(threads):
        made = make_engine(engine, data, device, threads)
        rate = train_rate(made, runs, seconds, batch_size)
        matmul = matmul_rate(device)
    tokens = IMAGE_TOKENS if data.train.lengths is None else float(data.train.lengths.double().mean())
    return BenchReport(
        machine=machine(),
        task=task,
        engine=made.name,
        device=device,
        threads=threads,
        runs=runs,
        batch_size=batch_size,
        run_steps_per_second=rate,
        gflops=rate * step_operations(task, tokens, batch_size) / 1e9,
        matmul_gflops=matmul / 1e9,
    )


def first_estimate(populations: Sequence[Population], data: TaskData, engine: str, slots: int) -> tuple[float, float]:
    """Measure for about a second; return (run-steps per second of all slots, seconds that `populations` will take).

    For a sweep's first word on its time, before it has a rate of its own: one thread a slot, evaluations included.
    """
    first = populations[0].runs[0]
    batch_size = min(first.batch_size, len(data.train))
    with torch_threads(1):
        made = make_engine(engine, data, "cpu")
        rate = slots * train_rate(made, min(len(populations[0].runs), 8), seconds=1.0, batch_size=batch_size)
    runs = [run for population in populations for run in population.runs]
    return rate, steps_with_evaluations(runs, len(data.train), len(data.test)) / rate


def steps_with_evaluations(runs: Sequence[Hyperparameters], train_samples: int, test_samples: int) -> float:
    """Return the run-steps of `runs`, with their evaluations counted as so many more of them."""
    evaluations = sum((run.epochs + 1) * test_samples / run.batch_size for run in runs)
    return run_steps(runs, train_samples) + EVALUATION_COST * evaluations


def train_rate(engine: Engine, runs: int, seconds: float, batch_size: int = BATCH) -> float:
    """Return run-steps per second of a population, Adam's updates included."""
    task = engine.data.task
    weights = (0.2 * torch.randn(runs, parameter_count(task))).to(engine.device, engine.dtype)
    optimizer = make_optimizer("adam", weights, torch.full_like(weights[:, :1], 1e-6))
    rates = torch.full_like(weights[:, :1], 1e-3)
    steps, started, elapsed = -WARM_UP_STEPS, time.perf_counter(), 0.0
    while steps < 1 or elapsed < seconds:
        indices = torch.randint(len(engine.data.train), (batch_size,), device=engine.device)
        crops = torch.randint(5, (batch_size, 2), device=engine.device) if task == "mnist" else None
        batch = Batch(indices, crops, 0.1, dropout_key=steps + WARM_UP_STEPS)
        optimizer.step(weights, engine.train_step(weights, batch).gradient, rates)
        steps += 1
        if steps == 0:
            synchronise(engine.device)
            started = time.perf_counter()
        elapsed = time.perf_counter() - started
    # A GPU works behind the host, as in training; it is waited for once.
    synchronise(engine.device)
    return steps * runs / (time.perf_counter() - started)


def synchronise(device: torch.device) -> None:
    """Wait for what a GPU has been asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_operations(task: str, tokens: float, batch_size: int = BATCH) -> float:
    """Return the floating-point operations of one run-step's matrix products: forward, and twice that backward."""
    per_token = BLOCKS * (4 * WIDTH * WIDTH + 2 * tokens * WIDTH + 2 * WIDTH * MLP_WIDTH)
    if task == "mnist":
        per_token += PATCH * PATCH * WIDTH
    return 6 * batch_size * (tokens * per_token + WIDTH * (WIDTH + CLASSES[task]))


def matmul_rate(device: str, size: int = 1024, seconds: float = 1.0) -> float:
    """Return the floating-point operations per second of a float32 matrix product."""
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    count, started, elapsed = -1, time.perf_counter(), 0.0
    while elapsed < seconds:
        torch.mm(a, b)
        count += 1
        if count == 0:
            synchronise(a.device)
            started = time.perf_counter()
        elapsed = time.perf_counter() - started
    synchronise(a.device)
    return count * 2 * size**3 / (time.perf_counter() - started)


def random_data(task: str) -> TaskData:
    """Return random data of the task's form: speed does not depend on the values."""
    generator = torch.Generator().manual_seed(0)

    def split(samples: int) -> Split:
        labels = torch.randint(CLASSES[task], (samples,), generator=generator)
        if task == "mnist":
            shape = (samples, IMAGE, IMAGE)
            return Split(torch.randint(256, shape, dtype=torch.uint8, generator=generator), labels)
        low, high = TEXT_LENGTHS
        lengths = torch.randint(low, high + 1, (samples,), generator=generator)
        tokens = torch.randint(1, 1000, (samples, TEXT_TOKENS), dtype=torch.int32, generator=generator)
        return Split(tokens.where(torch.arange(TEXT_TOKENS) < lengths[:, None], 0), labels, lengths)

    vectors = torch.randn(1000, WIDTH, generator=generator) if task == "ag_news" else None
    return TaskData(task, split(SAMPLES), split(2000), vectors)


def machine() -> str:
    """Return what a reader needs to compare: processor features and cores, or the GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    flags: set[Any] = set()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
        flags = set(next(lines, "").split())
    features = " ".join(name for name in CPU_FEATURES if name in flags)
    return f"{platform.machine()} {features}, {available_cores()} cores".replace(" ,", ",")
