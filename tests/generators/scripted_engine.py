"""An engine for tests of what surrounds the arithmetic."""

from collections.abc import Sequence

import torch
from torch import Tensor

from generators.engines.base import Batch, Evaluation, StepResult
from generators.tasks.data import Split, TaskData


class ScriptedEngine:
    """An engine that computes nothing: it answers evaluations from a script and records what it is asked.

    accuracies: [R][E + 1] of the split that chooses the best epoch; losses likewise, 1.0 where not given.
    """

    name = "scripted"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        data: TaskData,
        accuracies: Sequence[Sequence[float]] = (),
        losses: Sequence[Sequence[float]] | None = None,
        step_losses: Sequence[float] = (),
    ) -> None:
        self.data = data
        self.accuracies = torch.tensor(accuracies, dtype=torch.float64)
        self.losses = torch.ones_like(self.accuracies) if losses is None else torch.tensor(losses, dtype=torch.float64)
        self.step_losses = list(step_losses)
        self.batches: list[Batch] = []
        self.validation: list[Split] = []
        self.epoch = -1

    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        self.batches.append(batch)
        loss = self.step_losses.pop(0) if self.step_losses else 1.0
        correct = torch.arange(len(weights)) + 1
        return StepResult(torch.full((len(weights),), loss), correct, torch.ones_like(weights))

    def logits(self, weights: Tensor, split: Split) -> Tensor:
        raise NotImplementedError

    def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
        if split is not self.data.test:
            self.validation.append(split)
            return Evaluation(torch.ones(len(weights)).double(), torch.zeros(len(weights)).double())
        self.epoch += 1
        if not self.accuracies.numel():
            return Evaluation(torch.ones(len(weights)).double(), torch.zeros(len(weights)).double())
        return Evaluation(self.losses[:, self.epoch], self.accuracies[:, self.epoch])
