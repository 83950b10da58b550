"""The reference engine: the model written once, for one run, and torch.func for the population.

`functional_call` gives the network as a function of its weights, `grad_and_value` its gradient, `vmap` maps both over
the stacked weights. It serves the CPU and CUDA, and float64 too. A batch's inputs and its dropout numbers are made
once, outside vmap, and shared by all runs.

Dimensions: R run, B sample, T token, D width, C class, P parameter.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from generators.architecture import DROPOUT_SITES, WIDTH, SmallTransformer, unflatten
from generators.engines.base import Batch, Evaluation, StepResult
from generators.streams import DROPOUT_LEVELS, dropout_numbers, dropout_threshold
from generators.tasks.data import Split, TaskData, crop, scale

CPU_RUNS_AT_ONCE = 1
"""On a CPU stacked activations of several runs leave the cache, so runs go through the network one after the other."""
EVALUATION_BATCH = 250
"""Samples of one evaluation batch on a CPU."""
GPU_SAMPLES = 128
"""Samples of a training batch for which the memory of a GPU is shared out."""
GPU_MEMORY_SHARE = 0.8
TRAINING_BYTES = (8_000, 80)
"""Memory of one run's training step: bytes a token, and bytes a pair of tokens (attention). Measured without dropout
were 8.2 KB a token at 49 tokens, 12.1 KB at 128 and 33.6 KB at 512; the rest is for dropout, and a margin."""
EVALUATION_BYTES = (1_500, 24)
"""The same of an evaluation; measured were 83 KB an image (49 tokens) and 120 KB a text (64), each for one run."""


class TorchEngine:
    """Population arithmetic in torch on the CPU or a CUDA device, in float32 or float64.

    Args:
        data: the task's data; it is moved to `device`, still as integers.
        dtype: of weights, activations and gradients.
        runs_at_once: how many runs one vmap call takes, on a GPU no more than its memory holds; None for a choice by
            device. Changes results by rounding only.
    """

    name = "torch"

    def __init__(
        self,
        data: TaskData,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        runs_at_once: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.data = data.to(self.device)
        vectors = None if self.data.word_vectors is None else self.data.word_vectors.to(dtype)
        self._model = SmallTransformer(data.task, vectors, max_tokens=data.max_tokens).to(self.device, dtype).eval()
        self._runs_at_once = self._settle_width(runs_at_once)
        self._gradients = vmap(grad_and_value(self._loss, has_aux=True), (0, None, None, None, None))
        self._forward = vmap(self._logits, (0, None, None, None))

    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        split = self.data.train
        labels = split.labels[batch.indices]
        inputs, lengths = self._inputs(split, batch.indices, batch.crops)
        masks = self._dropout_masks(batch, tokens=self.data.max_tokens if lengths is None else inputs.shape[1])
        gradients, losses, correct = [], [], []
        for rows in self._run_chunks(len(weights)):
            gradient, (loss, right) = self._gradients(weights[rows], inputs, lengths, labels, masks)
            gradients.append(gradient)
            losses.append(loss)
            correct.append(right)
        return StepResult(torch.cat(losses), torch.cat(correct), torch.cat(gradients))

    def _dropout_masks(self, batch: Batch, tokens: int) -> list[Tensor] | None:
        """Return the five factors [B, T, D] that the whole population shares."""
        if batch.dropout == 0:
            return None
        samples, longest = len(batch.indices), self.data.max_tokens
        numbers = dropout_numbers(batch.dropout_key, samples, DROPOUT_SITES, tokens, WIDTH, longest, self.device)
        threshold = dropout_threshold(batch.dropout)
        kept_scale = DROPOUT_LEVELS / (DROPOUT_LEVELS - threshold)
        return list((numbers >= threshold).to(self.dtype) * kept_scale)

    def logits(self, weights: Tensor, split: Split) -> Tensor:
        return torch.cat(list(self._logit_batches(weights, split.to(self.device))), dim=1)

    def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
        split = split.to(self.device)
        loss = torch.zeros(len(weights), dtype=torch.float64, device=self.device)
        correct = torch.zeros(len(weights), dtype=torch.int64, device=self.device)
        start = 0
        for logits in self._logit_batches(weights, split):
            labels = split.labels[start : start + logits.shape[1]]
            start += logits.shape[1]
            chosen = labels.expand(logits.shape[:2])[..., None]
            loss -= torch.log_softmax(logits.double(), dim=-1).gather(-1, chosen)[..., 0].sum(dim=1)
            # The softmax alone would forgive -inf for a class that is not the right one.
            loss = loss.where(torch.isfinite(logits).flatten(1).all(dim=1), torch.nan)
            correct += (logits.argmax(dim=-1) == labels).sum(dim=1)
        return Evaluation(loss / len(split), correct.double() / len(split))

    def _settle_width(self, asked: int | None) -> int:
        """Return how many runs go through the network together: by cache on a CPU, by memory on a GPU.

        By the memory that the GPU has, not by what is free of it: rounding depends on the width, and results should not
        depend on what else runs there.
        """
        if self.device.type == "cpu":
            return asked or CPU_RUNS_AT_ONCE
        _, memory = torch.cuda.mem_get_info(self.device)
        fitting = runs_that_fit(memory, self.data.max_tokens)
        return min(asked or fitting, fitting)

    def _run_chunks(self, runs: int) -> Iterator[slice]:
        width = self._runs_at_once
        return (slice(start, start + width) for start in range(0, runs, width))

    def _logit_batches(self, weights: Tensor, split: Split) -> Iterator[Tensor]:
        batch = EVALUATION_BATCH
        if self.device.type != "cpu":
            batch = evaluation_samples(len(weights), self._runs_at_once, self.data.max_tokens)
        for indices in torch.arange(len(split), device=self.device).split(batch):
            inputs, lengths = self._inputs(split, indices, None)
            with torch.no_grad():
                parts = [self._forward(weights[rows], inputs, lengths, None) for rows in self._run_chunks(len(weights))]
            yield torch.cat(parts)

    def _inputs(self, split: Split, indices: Tensor, crops: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what the model takes: scaled images, or token ids cut to the longest text, and their lengths."""
        samples = split.inputs[indices]
        if split.lengths is None:
            return scale(samples if crops is None else crop(samples, crops), self.dtype), None
        lengths = split.lengths[indices]
        longest = int(lengths.max()) if self.device.type == "cpu" else samples.shape[1]
        return samples[:, :longest], lengths

    def _logits(self, weights: Tensor, inputs: Tensor, lengths: Tensor | None, masks: list[Tensor] | None) -> Tensor:
        return functional_call(self._model, unflatten(self.data.task, weights), (inputs, lengths, masks))

    def _loss(
        self, weights: Tensor, inputs: Tensor, lengths: Tensor | None, labels: Tensor, masks: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Return one run's loss and, beside it, the number of right answers."""
        logits = self._logits(weights, inputs, lengths, masks)
        return F.cross_entropy(logits, labels), (logits.argmax(dim=-1) == labels).sum()


def runs_that_fit(memory: int, tokens: int) -> int:
    """Return for how many runs a GPU with `memory` bytes holds a training step of samples of `tokens` tokens."""
    return max(1, int(GPU_MEMORY_SHARE * memory) // (GPU_SAMPLES * _sample_bytes(TRAINING_BYTES, tokens)))


def evaluation_samples(runs: int, runs_at_once: int, tokens: int) -> int:
    """Return how many samples a GPU evaluates at once for a population of `runs` runs.

    They take the memory that a training step of `runs_at_once` runs takes, so that a smaller width needs less.
    """
    memory = runs_at_once * GPU_SAMPLES * _sample_bytes(TRAINING_BYTES, tokens)
    return memory // (min(runs, runs_at_once) * _sample_bytes(EVALUATION_BYTES, tokens))


def _sample_bytes(rates: tuple[int, int], tokens: int) -> int:
    a_token, a_pair = rates
    return tokens * (a_token + tokens * a_pair)
