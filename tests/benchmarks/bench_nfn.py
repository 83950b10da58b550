"""One training step of Transformer-NFN against every term as its own contraction over heads, alternating in one run.

    python tests/benchmarks/bench_nfn.py [--rounds 20] [--threads 2]

Forward and backward, batch 16, MNIST shapes, 10 channels. Prints the largest relative difference of the predictions
with the same coefficients, milliseconds a step of both (median and least of the rounds), and the ratio.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from nfn_terms import PlainNFN, plain_inputs
from torch import Tensor

from generators.architecture import parameter_count
from zoo.nfn.predictors import make_predictor

BATCH = 16
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network = make_predictor("transformer-nfn", "mnist")
    flat = 0.2 * torch.randn(BATCH, parameter_count("mnist"))
    network.fit_inputs(flat)
    print(f"{network.parameters_trained:,} parameters")
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        network, flat = network.to(dtype), flat.to(dtype)
        plain = PlainNFN(network)
        inputs = plain_inputs(network, flat)
        with torch.no_grad():
            expected, found = plain(*inputs), network(flat)
        print(f"{name}: largest relative difference {((found - expected).abs() / expected.abs()).max().item():.1e}")
    terms, layers = alternate(lambda: plain(*inputs), lambda: network(flat), options.rounds)
    for label, times in (("terms", terms), ("layers", layers)):
        print(f"{label:6} {median(times):6.1f} ms median {min(times):6.1f} ms least")
    print(f"ratio  {median(terms) / median(layers):6.2f}    median {min(terms) / min(layers):6.2f}    least")


def alternate(
    first: Callable[[], Tensor], second: Callable[[], Tensor], rounds: int
) -> tuple[list[float], list[float]]:
    """Return milliseconds a step (forward and backward) of both, one entry a round."""
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for forward, found in zip((first, second), times, strict=True):
            began = time.perf_counter()
            for _ in range(STEPS):
                forward().sum().backward()
            if number > 0:  # the first round warms up
                found.append((time.perf_counter() - began) / STEPS * 1e3)
    return times


if __name__ == "__main__":
    main()
