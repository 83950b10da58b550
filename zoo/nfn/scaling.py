"""One number a tensor that brings the weights of a zoo to a common size before a network reads them.

Weights of a zoo differ in size by tensor (biases start at 0) and an untrained network's quadratic terms grow with the
square of it, so that without scaling a few terms decide all units. A tensor is divided by the median over the training
checkpoints of its root mean square; a median, for diverging runs have weights of any size. W_Q and W_K of a block share
the number that gives their QK sum a Frobenius norm of about 1, W_V and W_O that of their VO sum.

The group acts linearly on every tensor, so a number commutes with it, and the numbers come from what the group leaves
alone (norms of W_A, W_B, biases and of the QK and VO sums): a scaled network is as invariant as one without.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.nfn.data import component_tensors
from zoo.nfn.weight_space import LINEAR_NAMES, EncoderWeights, encoder_weights

CHECKPOINTS = 4096
"""Medians are taken over no more checkpoints than this."""


def tensor_scales(task: str, components: Sequence[str], parts: Sequence[Tensor]) -> Tensor:
    """Return the factor of every input column, [F], from the components' flat weights, each [N, F of the component]."""
    factors = []
    # Evenly over all rows, which a zoo sorts by accuracy.
    parts = [part[:: len(part) // CHECKPOINTS + 1] for part in parts]
    for component, part in zip(components, parts, strict=True):
        tensors = component_tensors(task, component, part)
        sizes = {name: _median_size(tensor) for name, tensor in tensors.items()}
        if component == "encoder":
            sizes |= _attention_sizes(encoder_weights(tensors))
        factors += [(1 / sizes[name]).expand(tensor[0].numel()) for name, tensor in tensors.items()]
    return torch.cat(factors)


def _attention_sizes(weights: EncoderWeights) -> dict[str, Tensor]:
    """State-dict name -> what to divide by, for the four matrices of each block."""
    sizes: dict[str, Tensor] = {}
    pairs = {("q", "k"): zip(weights.q, weights.k, strict=True), ("v", "o"): zip(weights.v, weights.o.mT, strict=True)}
    for fields, blocks in pairs.items():
        for block, (left, right) in enumerate(blocks):
            size = (_median_size(left @ right.mT) * left.shape[-2]).sqrt()
            sizes |= {f"encoder.{block}.{LINEAR_NAMES[field]}": size for field in fields}
    return sizes


def _median_size(tensors: Tensor) -> Tensor:
    """Median over checkpoints of the root mean square, of [N, ...]; 1 where it is 0 (untrained biases)."""
    size = tensors.flatten(1).square().mean(dim=-1).sqrt().median()
    return torch.where(size > 0, size, 1.0)
