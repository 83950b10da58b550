"""Initial weights: a normal distribution with mean 0 and the run's standard deviation, cut at -2 and +2; biases 0."""

import math

import torch
from torch import Tensor

from generators.architecture import tensor_table
from generators.hyperparameters import Hyperparameters
from generators.streams import stream_key, uniform

CUT = 2.0
"""Absolute bound of an initial weight."""


def initial_weights(run: Hyperparameters) -> Tensor:
    """Return the weights at epoch 0, float32 [P].

    A `per_run` zoo draws them from the run_id. A `shared` zoo draws them from the seed and the task, so that runs of
    one seed differ in scale only (as in the paper, where every run has the same seed).
    """
    origin = [run.run_id] if run.initialisation == "per_run" else [run.seed, run.task]
    parts = []
    for spec in tensor_table(run.task):
        if spec.name.endswith("bias"):
            parts.append(torch.zeros(spec.numel, dtype=torch.float64))
        else:
            numbers = torch.from_numpy(uniform(stream_key("initialisation", *origin, spec.name), spec.numel))
            parts.append(truncated_normal(numbers, run.init_std))
    return torch.cat(parts).float()


def truncated_normal(uniform_numbers: Tensor, std: float) -> Tensor:
    """Map uniform numbers in (0, 1), float64, through the inverse distribution function of the cut normal."""
    # P(|x| < CUT) is erf(CUT / (std sqrt 2)); the quantile of u lies at the fraction 2u - 1 of it.
    inside = math.erf(CUT / (std * math.sqrt(2)))
    quantiles = torch.special.erfinv((2 * uniform_numbers - 1) * inside) * (std * math.sqrt(2))
    return quantiles.clamp(-CUT, CUT)
