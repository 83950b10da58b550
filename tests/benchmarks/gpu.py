"""The torch engine on a GPU: run-steps per second by width against a plain loop, peak memory, parity with the CPU.

    python tests/benchmarks/gpu.py [--widths 1 16 64 256 1024] [--seconds 8]

Takes under 4 minutes. Random data of MNIST's form; batch 128, Adam, dropout 0.1. `--device cpu` tries the script
itself. `--compile` also measures torch.compile on the population's step.
"""

import argparse
import time

import torch
from torch import nn

from generators.architecture import SmallTransformer, parameter_count
from generators.engines.base import Batch
from generators.engines.torch_engine import TorchEngine
from generators.tasks.data import scale
from zoo.bench import BATCH, machine, random_data, step_operations, train_rate


def plain_rate(device: str, seconds: float) -> float:
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


def parity(device: str, dtype: torch.dtype) -> float:
    """Return the largest relative difference of a gradient between the device and the CPU in float64."""
    data, runs = random_data("mnist"), 4
    generator = torch.Generator().manual_seed(0)
    weights = 0.2 * torch.randn(runs, parameter_count("mnist"), generator=generator, dtype=torch.float64)
    batch = Batch(torch.arange(BATCH), torch.full((BATCH, 2), 1), 0.1, 12345)
    exact = TorchEngine(data, "cpu", torch.float64).train_step(weights, batch).gradient
    there = Batch(batch.indices.to(device), torch.full((BATCH, 2), 1, device=device), 0.1, 12345)
    found = TorchEngine(data, device, dtype).train_step(weights.to(device, dtype), there).gradient
    return float(((found.cpu().double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = options.device
    print(machine())
    print(f"gradient against float64 on the CPU: float32 {parity(device, torch.float32):.1e} relative")
    print(f"gradient against float64 on the CPU: float64 {parity(device, torch.float64):.1e} relative")
    plain = plain_rate(device, options.seconds)
    print(f"plain loop {plain:.1f} run-steps/s")
    for width in options.widths:
        for compiled in (False, True) if options.compile else (False,):
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            engine = TorchEngine(random_data("mnist"), device)
            if compiled:
                engine._gradients = torch.compile(engine._gradients)
            rate = train_rate(engine, width, options.seconds)
            peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
            operations = rate * step_operations("mnist", 49) / 1e12
            name = "compiled" if compiled else "eager"
            print(
                f"width {width:5d} {name:8s} {rate:9.1f} run-steps/s  {rate / plain:6.1f} x plain  "
                f"{operations:6.2f} TFLOP/s  {peak:5.1f} GB peak",
                flush=True,
            )


if __name__ == "__main__":
    # TF32 off, as in training: the parity check compares float32 sums.
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
