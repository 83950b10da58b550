"""The torch engines on a GPU: parity with the CPU, and run-steps per second by width against a plain loop.

    python tests/benchmarks/gpu.py [--widths 1 16 64 256 1024] [--seconds 3] [--limit 220]

Random data of the tasks' forms; batch 128, Adam, dropout 0.1. What would start after `--limit` seconds is left out, and
said. `--device cpu` tries the script itself. Three ways are measured: eager, compiled, and compiled with every step
replayed as a CUDA graph; `GRAPH_RUNS` of generators/engines/torch_engine.py should be where the third stops paying.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

from generators.architecture import SmallTransformer, parameter_count
from generators.engines.base import Batch
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from generators.optimizers import make_optimizer
from generators.population import _train_epoch
from generators.tasks.data import TaskData, scale
from zoo.bench import BATCH, machine, random_data, step_operations, synchronise, train_rate

NEVER, ALWAYS = 0, 1_000_000
WAYS: dict[str, dict] = {
    "eager": {},
    "compiled": {"compiled": True, "graph_runs": NEVER},
    "graph": {"compiled": True, "graph_runs": ALWAYS},
}


def random_batch(data: TaskData, device: torch.device) -> Batch:
    crops = torch.full((BATCH, 2), 1, device=device) if data.task == "mnist" else None
    return Batch(torch.arange(BATCH, device=device), crops, 0.1, dropout_key=12345)


def gradient(data: TaskData, device: torch.device, dtype: torch.dtype, steps: int = 1, **way) -> torch.Tensor:
    """Return the gradients of four runs, float64 [4, P] on the CPU, as the last of `steps` equal steps gives them."""
    generator = torch.Generator().manual_seed(0)
    weights = 0.2 * torch.randn(4, parameter_count(data.task), generator=generator, dtype=torch.float64)
    engine = TorchEngine(data, device, dtype, **way)
    for _ in range(steps):
        found = engine.train_step(weights.to(device, dtype), random_batch(data, device)).gradient
    return found.cpu().double()


def report_parity(device: torch.device) -> None:
    for task in ("mnist", "ag_news"):
        data = random_data(task)
        exact = gradient(data, torch.device("cpu"), torch.float64)
        for name, dtype in (("eager", torch.float64), ("eager", torch.float32), ("compiled", torch.float32)):
            found = gradient(data, device, dtype, **WAYS[name])
            off = float(((found - exact).norm(dim=1) / exact.norm(dim=1)).max())
            print(f"{task}: gradient, {name} {dtype} against float64 on the CPU: {off:.1e} relative", flush=True)
    data = random_data("mnist")
    plain, replayed = (gradient(data, device, torch.float32, steps=4, **WAYS[way]) for way in ("compiled", "graph"))
    print(f"mnist: a replayed graph gives the same bits: {torch.equal(plain, replayed)}", flush=True)


def report_waits(device: torch.device) -> None:
    """Train an epoch in which torch refuses to wait for the device, but for the copies of the epoch's order."""
    data = random_data("mnist")
    engine = TorchEngine(data, device)
    weights = 0.2 * torch.randn(4, parameter_count("mnist"), device=device)
    column = torch.full((4, 1), 1e-3, device=device)
    recipe = Hyperparameters(
        "mnist", "adam", 1e-3, 0.2, 1e-6, 0.1, 1.0, 3, 1, BATCH, 1, 1e-5, "test", "per_run", data.digest()
    )
    optimizer = make_optimizer("adam", weights, column)
    rows = torch.arange(len(data.train))
    torch.cuda.set_sync_debug_mode("warn")
    _train_epoch(weights, optimizer, column, recipe, engine, rows, epoch=0, steps=20)
    torch.cuda.set_sync_debug_mode("default")
    print("an epoch of 20 steps: at most two warnings above, for the copies of order and crops", flush=True)


def plain_rate(device: torch.device, seconds: float) -> float:
    """Return run-steps per second of one model in a plain loop, its data resident on the device."""
    split = random_data("mnist").train.to(device)
    model = SmallTransformer("mnist", dropout=0.1).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    loss, steps, started, elapsed = nn.CrossEntropyLoss(), -5, time.perf_counter(), 0.0
    while steps < 1 or elapsed < seconds:
        indices = torch.randint(len(split), (BATCH,), device=device)
        optimizer.zero_grad()
        loss(model(scale(split.inputs[indices])), split.labels[indices]).backward()
        optimizer.step()
        steps += 1
        if steps == 0:
            synchronise(device)
            started = time.perf_counter()
        elapsed = time.perf_counter() - started
    synchronise(device)
    return steps / (time.perf_counter() - started)


def evaluation_rate(engine: TorchEngine, runs: int) -> float:
    """Return samples evaluated per second, over all runs."""
    weights = 0.2 * torch.randn(runs, parameter_count("mnist"), device=engine.device)
    split = engine.data.test
    engine.evaluate(weights, split)
    synchronise(engine.device)
    started = time.perf_counter()
    engine.evaluate(weights, split)
    synchronise(engine.device)
    return runs * len(split) / (time.perf_counter() - started)


def report_rates(device: torch.device, widths: list[int], seconds: float, in_time: Callable[[str], bool]) -> None:
    plain = plain_rate(device, seconds)
    print(f"plain loop {plain:.1f} run-steps/s", flush=True)
    data = random_data("mnist")
    for width in widths:
        for name, way in WAYS.items():
            if not in_time(f"width {width} {name}"):
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                engine = TorchEngine(data, device, **way)
                rate = train_rate(engine, width, seconds)
                samples = evaluation_rate(engine, width)
            except (torch.OutOfMemoryError, InputError) as error:
                print(f"width {width:5d} {name:8s} {str(error).splitlines()[0]}", flush=True)
                continue
            peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
            operations = rate * step_operations("mnist", 49) / 1e12
            print(
                f"width {width:5d} {name:8s} {rate:9.1f} run-steps/s  {rate / plain:6.1f} x plain  "
                f"{operations:6.2f} TFLOP/s  {peak:5.1f} GB peak  {samples:10.0f} evaluated samples/s",
                flush=True,
            )


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--limit", type=float, default=220.0)
    options = parser.parse_args()
    device = torch.device(options.device)

    def in_time(what: str) -> bool:
        late = time.monotonic() - started > options.limit
        if late:
            print(f"{what}: left out, {options.limit:.0f} s are over")
        return not late

    print(machine())
    report_parity(device)
    if device.type == "cuda":
        report_waits(device)
    report_rates(device, options.widths, options.seconds, in_time)
    print(f"{time.monotonic() - started:.0f} s in all")


if __name__ == "__main__":
    # TF32 off, as in training: the parity check compares float32 sums.
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
