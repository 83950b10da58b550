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
GPU_MEMORY_SHARE = 0.8
GRAPH_RUNS = 16
"""Widest compiled population whose step is replayed as a CUDA graph: the step has about 90 launches (torch 2.14 lowers
MNIST's to 36 kernels and 56 matrix products; eagerly it has over 200), which take about as long as the kernels of so
many runs. This is a calculation; tests/benchmarks/gpu.py checks it."""
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
        gpu_share: share of a GPU's memory to use, where others work on it too or the memory was too short.
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
        gpu_share: float = 1.0,
        compiled: bool = False,
        graph_runs: int = GRAPH_RUNS,
    ) -> None:
        self.name = "compiled" if compiled else "torch"
        self.device = torch.device(device)
        self.dtype = dtype
        self.data = data.to(self.device)
        buffers = fixed_tensors(data.word_vectors, data.max_tokens)
        self._buffers = {name: tensor.to(self.device, dtype) for name, tensor in buffers.items()}
        self._runs_at_once = runs_at_once
        self._memory = None if self.device.type == "cpu" else gpu_memory(self.device, gpu_share)
        self._graph_runs = 0 if self.device.type == "cpu" else graph_runs
        if compiled:
            check_compiler(self.device.type)
        self._model = stacked_model(data.task, Mode.COMPILED if compiled else Mode.EAGER)

    @torch.no_grad()
    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        split = self.data.train
        labels = split.labels[batch.indices]
        inputs, lengths = self._inputs(split, batch.indices, batch.crops)
        masks = self._dropout_masks(batch, tokens=self.data.max_tokens if lengths is None else inputs.shape[1])
        width = self._width(len(batch.indices))
        model = self._model
        if self.name == "compiled" and len(weights) <= min(width, self._graph_runs):
            model = stacked_model(self.data.task, Mode.GRAPH)
        gradients, losses, correct = [], [], []
        for rows in chunks(len(weights), width):
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

    def _width(self, samples: int) -> int:
        """Return how many runs train together on so many samples: by cache on a CPU, by memory on a GPU."""
        if self._memory is None:
            return self._runs_at_once or CPU_RUNS_AT_ONCE
        fitting = runs_that_fit(self._memory, samples, self.data.max_tokens)
        return min(self._runs_at_once or fitting, fitting)

    def _logit_batches(self, weights: Tensor, split: Split) -> Iterator[Tensor]:
        runs, samples = self._runs_at_once or CPU_RUNS_AT_ONCE, EVALUATION_BATCH
        if self._memory is not None:
            runs = min(len(weights), self._runs_at_once or len(weights))
            runs, samples = evaluation_shape(self._memory, runs, self.data.max_tokens)
        for indices in torch.arange(len(split), device=self.device).split(samples):
            inputs, lengths = self._inputs(split, indices, None)
            rows = chunks(len(weights), runs)
            yield torch.cat([self._model.logits(weights[part], self._buffers, inputs, lengths, None) for part in rows])

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


def chunks(runs: int, width: int) -> Iterator[slice]:
    return (slice(start, start + width) for start in range(0, runs, width))


def gpu_memory(device: torch.device, share: float) -> int:
    """Return how many bytes of a GPU an engine may plan with.

    Of the memory that the GPU has, not of what is free: rounding depends on the width, and results should not depend on
    what else runs there.
    """
    _, memory = torch.cuda.mem_get_info(device)
    return int(GPU_MEMORY_SHARE * share * memory)


def runs_that_fit(memory: int, samples: int, tokens: int) -> int:
    """Return for how many runs so many bytes hold a training step of `samples` samples of `tokens` tokens."""
    return max(1, memory // (samples * _sample_bytes(TRAINING_BYTES, tokens)))


def evaluation_shape(memory: int, runs: int, tokens: int) -> tuple[int, int]:
    """Return how many runs, at most `runs`, and how many samples so many bytes hold in an evaluation.

    All runs go together where 128 samples of each fit.
    """
    fitting = memory // _sample_bytes(EVALUATION_BYTES, tokens)
    runs = min(runs, max(1, fitting // 128))
    return runs, max(1, fitting // runs)


def _sample_bytes(rates: tuple[int, int], tokens: int) -> int:
    a_token, a_pair = rates
    return tokens * (a_token + tokens * a_pair)
