"""The model as functions of stacked weights: written for one run, mapped over a population by torch.func, and, where
asked for, compiled by torch.compile and replayed as a CUDA graph.

Dimensions: R run, B sample, T token, D width, C class, P parameter.
"""

from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

from generators.architecture import IMAGE_TOKENS, WIDTH, SmallTransformer, sinusoidal_positions, unflatten
from generators.errors import InputError

Buffers = dict[str, Tensor]
Masks = list[Tensor] | None

RECOMPILE_LIMIT = 256
"""Shapes for which a function is compiled in one process: each width of a population, and an evaluation's last batch,
is a shape of its own. torch's own limit of 8 would end a long sweep."""


class Mode(Enum):
    """How the functions run: op by op, compiled, or compiled and replayed as a CUDA graph."""

    EAGER = "eager"
    COMPILED = "compiled"
    GRAPH = "graph"


class StackedModel(NamedTuple):
    """gradients: (weights [R, P], buffers, inputs, lengths, masks, labels) -> gradient [R, P], (loss [R], correct [R]).
    logits: (weights [R, P], buffers, inputs, lengths, masks) -> [R, B, C].

    All but the weights is shared by the runs: `fixed_tensors`, and what SmallTransformer.forward takes. A graph's next
    call overwrites what it returned.
    """

    gradients: Callable[..., tuple[Tensor, tuple[Tensor, Tensor]]]
    logits: Callable[..., Tensor]


def fixed_tensors(word_vectors: Tensor | None, max_tokens: int) -> Buffers:
    """Return the tensors of the model that are not trained: positions and, for texts, word vectors."""
    positions = {"embedding.pos_embedding": sinusoidal_positions(IMAGE_TOKENS if word_vectors is None else max_tokens)}
    return positions if word_vectors is None else positions | {"embedding.word_vectors": word_vectors}


@cache
def stacked_model(task: str, mode: Mode) -> StackedModel:
    """Return the functions of a task; for equal arguments the same ones, as torch.compile would begin anew with others.

    They hold no tensors: the model lies on the meta device, and each call brings weights and fixed tensors.
    """
    with torch.device("meta"):
        model = SmallTransformer(task, torch.empty(1, WIDTH) if task == "ag_news" else None)

    def logits(weights: Tensor, buffers: Buffers, inputs: Tensor, lengths: Tensor | None, masks: Masks) -> Tensor:
        return functional_call(model, unflatten(task, weights) | buffers, (inputs, lengths, masks))

    def loss(
        weights: Tensor, buffers: Buffers, inputs: Tensor, lengths: Tensor | None, masks: Masks, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return one run's loss and, beside it, the number of right answers."""
        found = logits(weights, buffers, inputs, lengths, masks)
        return F.cross_entropy(found, labels), (found.argmax(dim=-1) == labels).sum()

    gradients = vmap(grad_and_value(loss, has_aux=True), (0, None, None, None, None, None))
    forward = vmap(logits, (0, None, None, None, None))
    if mode is Mode.EAGER:
        return StackedModel(gradients, forward)
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    # Batches of an evaluation are large enough to hide their launches; a graph of them would only hold memory.
    return StackedModel(_compiled(gradients, "reduce-overhead" if mode is Mode.GRAPH else None), _compiled(forward))


def _compiled(function: Callable, mode: str | None = None) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False, mode=mode)


@cache
def check_compiler(device: str) -> None:
    """Compile the smallest function there is.

    Raises:
        InputError: it fails, as where the device's compiler (a C++ compiler, or Triton on a GPU) is missing.
    """
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1, device=device))
    except Exception as error:  # torch.compile documents none; a missing compiler is a matter of the machine
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"engine: compiled is not available on {device}: {lines[0]}; use torch or auto") from error
