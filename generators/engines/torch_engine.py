"""The reference engine: the model written once, for one run, and torch.func for the population (stacked_model.py).

It serves the CPU and CUDA, and float64 too. A batch's inputs and its dropout numbers are made once and shared by all
runs. On a GPU nothing in a training step waits for the device.

Dimensions: R run, B sample, T token, D width, C class, P parameter.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from generators.architecture import DROPOUT_SITES, WIDTH
from generators.engines.base import Batch, Evaluation, StepResult
from generators.engines.stacked_model import Mode, check_compiler, fixed_tensors, stacked_model
from generators.streams import DROPOUT_LEVELS, dropout_numbers, dropout_threshold
from generators.tasks.data import Split, TaskData, crop, scale

CPU_RUNS_AT_ONCE = 1
"""On a CPU stacked activations of several runs leave the cache, so runs go through the network one after the other."""
EVALUATION_BATCH = 250
"""Samples of one evaluation batch on a CPU."""
GPU_SAMPLES = 128
"""Samples of a training batch for which the memory of a GPU is shared out."""
GPU_MEMORY_SHARE = 0.8
GRAPH_RUNS = 16
"""Widest compiled population whose step is replayed as a CUDA graph. The 50 or so launches of a step take about as long
as the kernels of so many runs; this is a calculation, which tests/benchmarks/gpu.py checks."""
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
        compiled: by torch.compile; then the engine's name is "compiled", as fused kernels round differently.
        graph_runs: widest population whose compiled step is replayed as a CUDA graph; changes no bit.

    Raises:
        InputError: torch.compile is asked for and does not work here.
    """

    def __init__(
        self,
        data: TaskData,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        runs_at_once: int | None = None,
        compiled: bool = False,
        graph_runs: int = GRAPH_RUNS,
    ) -> None:
        self.name = "compiled" if compiled else "torch"
        self.device = torch.device(device)
        self.dtype = dtype
        self.data = data.to(self.device)
        buffers = fixed_tensors(data.task, data.word_vectors, data.max_tokens)
        self._buffers = {name: tensor.to(self.device, dtype) for name, tensor in buffers.items()}
        self._runs_at_once = self._settle_width(runs_at_once)
        self._graph_runs = min(graph_runs, self._runs_at_once) if self.device.type != "cpu" else 0
        if compiled:
            check_compiler(self.device.type)
        self._model = stacked_model(data.task, Mode.COMPILED if compiled else Mode.EAGER)

    @torch.no_grad()
    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        split = self.data.train
        labels = split.labels[batch.indices]
        inputs, lengths = self._inputs(split, batch.indices, batch.crops)
        masks = self._dropout_masks(batch, tokens=self.data.max_tokens if lengths is None else inputs.shape[1])
        model = self._model
        if self.name == "compiled" and len(weights) <= self._graph_runs:
            model = stacked_model(self.data.task, Mode.GRAPH)
        gradients, losses, correct = [], [], []
        for rows in self._run_chunks(len(weights)):
            gradient, (loss, right) = model.gradients(weights[rows], self._buffers, inputs, lengths, masks, labels)
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

    @torch.no_grad()
    def logits(self, weights: Tensor, split: Split) -> Tensor:
        return torch.cat(list(self._logit_batches(weights, split.to(self.device))), dim=1)

    @torch.no_grad()
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
            chunks = self._run_chunks(len(weights))
            yield torch.cat(
                [self._model.logits(weights[rows], self._buffers, inputs, lengths, None) for rows in chunks]
            )

    def _inputs(self, split: Split, indices: Tensor, crops: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what the model takes: scaled images, or token ids and their lengths.

        Eagerly on the CPU the ids are cut to the longest text. On a GPU its length would have to be waited for, and
        torch.compile would compile for each.
        """
        samples = split.inputs[indices]
        if split.lengths is None:
            return scale(samples if crops is None else crop(samples, crops), self.dtype), None
        lengths = split.lengths[indices]
        if self.device.type == "cpu" and self.name == "torch":
            samples = samples[:, : int(lengths.max())]
        return samples, lengths


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
