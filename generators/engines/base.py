"""What an engine is: the arithmetic of a population's training step and of its evaluation.

An engine is made for one task's data on one device. It holds no weights and no random state: stacked weights go in,
losses and gradients come out. All engines draw the same random numbers (generators.streams), so they agree on the same
population up to float rounding.

Dimensions: R run, B sample of a batch, P parameter (order of the tensor table), N sample of a split.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from generators.tasks.data import Split, TaskData


@dataclass(frozen=True)
class Batch:
    """One training batch, shared by all runs of a population.

    indices: int64 [B], rows of the training split.
    crops: int64 [B, 2], offsets of `generators.tasks.data.crop` (MNIST), or None.
    dropout: rate, in [0, 1); a population has one.
    dropout_key: key of the step's dropout numbers (`generators.streams.dropout_numbers`).
    """

    indices: Tensor
    crops: Tensor | None
    dropout: float
    dropout_key: int


@dataclass(frozen=True)
class StepResult:
    """loss [R] (mean over the batch, nats), correct [R] (number of right answers, int64), gradient [R, P]."""

    loss: Tensor
    correct: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Evaluation:
    """loss [R] (mean over the split, nats, float64) and accuracy [R] (fraction in [0, 1], float64)."""

    loss: Tensor
    accuracy: Tensor


class Engine(Protocol):
    name: str
    """"torch", "compiled" or "fused"; recorded with everything that the engine makes."""
    data: TaskData
    """The data that it was made for, on its device."""
    device: torch.device
    dtype: torch.dtype

    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        """Return loss and gradient of every run on one batch; weights [R, P]."""
        ...

    def logits(self, weights: Tensor, split: Split) -> Tensor:
        """Return [R, N, C] without dropout; a sample's logits do not depend on the samples beside it."""
        ...

    def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
        """Return loss and accuracy of every run on a split, without dropout; a non-finite logit gives loss NaN."""
        ...
