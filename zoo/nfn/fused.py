"""An equivariant layer, ReLU on the MLP part and an invariant layer in one, without forming the weights between them.

Two identities make this short. The attention part passes no ReLU, so an invariant layer's coefficients for the QK and
VO sums of the output can be pulled back through the equivariant layer, once for all checkpoints, to coefficients for
the sums of the input. And a sum of ReLUs is linear on its active set, which has no gradient: the sums over W_A and W_B
are taken of the layer's input, with the active set as a constant.

For checkpoints as they are, with one channel (several would need the QK and VO sums of every pair of channels).

Dimensions: those of zoo.nfn.layers; p and q rows and columns of the QK sum, x and y the same before the layer.
"""

import math

import torch
from torch import Tensor

from zoo.nfn.layers import (
    EquivariantLayer,
    InvariantLayer,
    affine,
    per_row,
    pooled_features,
    scaled_sum,
)
from zoo.nfn.weight_space import EncoderWeights


def invariant_of_equivariant(
    equivariant: EquivariantLayer, invariant: InvariantLayer, weights: EncoderWeights
) -> Tensor:
    """Return `invariant(equivariant(weights).relu_mlp())` for weights of one channel, [L, N, 1, ...] -> [L, N, E]."""
    features = pooled_features(weights)
    mlp = _pooled_mlp(equivariant, weights, features)
    coefficients = invariant.pooled.split([features.shape[-1] - mlp.shape[-1], mlp.shape[-1]], dim=-1)
    attention = _pull_back(equivariant, coefficients[0])
    from_mlp = affine(mlp, coefficients[1], invariant.bias)
    return from_mlp + features[:, :, 0, : attention.shape[-1]] @ attention.mT


def _pull_back(layer: EquivariantLayer, coefficients: Tensor) -> Tensor:
    """Coefficients [L, E, C, D*D + D] of QK sum and VO row sums behind the layer -> those before it, without C."""
    d = layer.space.width
    qk, vo_rows = coefficients[..., : d * d].unflatten(-1, (d, d)), coefficients[..., d * d :]
    mix_q, mix_k, mix_v = (mix.squeeze(3) for mix in (layer.mix_q, layer.mix_k, layer.mix_v))
    # [L, C, p * E, q] @ [L, C, q, y], then over C and p at once.
    right = qk.permute(0, 2, 3, 1, 4).flatten(2, 3) @ mix_k
    qk = mix_q.flatten(1, 2).mT @ right.view(len(qk), mix_q.shape[1] * d, -1)
    row_scale = layer.o_entry + math.sqrt(d) * layer.o_row
    vo_rows = (vo_rows * row_scale[:, None]).flatten(2) @ mix_v.flatten(1, 2)
    return torch.cat([qk.unflatten(2, (-1, d)).transpose(1, 2).flatten(2), vo_rows], dim=-1)


def _pooled_mlp(layer: EquivariantLayer, weights: EncoderWeights, pooled: Tensor) -> Tensor:
    """Pooled features of the MLP part of the output, [L, N, E, 1 + D + 1 + D], from those of the input."""
    e, d = layer.channels_out, layer.space.width
    terms = layer.mlp_terms(weights, pooled)
    hidden = terms.units.shape[2]
    b_columns = _relu_column_sums(terms.units, layer.unit[:, 2 * e :], terms.b_column).unflatten(-1, (e, d))
    features = [
        _relu_sum(weights.a[:, :, 0], layer.a_entry[..., 0], terms.a_row, terms.a_unit)[..., None]
        / math.sqrt(hidden * d),
        b_columns / math.sqrt(hidden),
        scaled_sum(terms.a_bias.relu(), -1)[..., None],
        terms.b_bias.relu().unflatten(-1, (e, d)),
    ]
    return torch.cat(features, dim=-1)


def _relu_sum(a: Tensor, entry: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """Sum over D and A of relu(entry * a + row + column): a [L, N, D, A], entry [L, E], row [L, N, E, D], column
    [L, N, E, A] -> [L, N, E]."""
    with torch.no_grad():
        active = entry[:, None, :, None, None] * a[:, :, None]
        # Contiguous, for a comparison with other strides takes ten times as long.
        active.add_(row[..., None]).gt_(-column.contiguous()[..., None, :])
    from_entries = (a.flatten(2)[:, :, None] @ active.flatten(3).mT).squeeze(2) * entry[:, None]
    return from_entries + (active.sum(-1) * row).sum(-1) + (active.sum(-2) * column).sum(-1)


def _relu_column_sums(units: Tensor, weight: Tensor, constant: Tensor) -> Tensor:
    """Sum over A of relu(units @ weight + constant): units [L, N, A, U], weight [L, O, 1, U], constant [L, N, O] ->
    [L, N, O]."""
    with torch.no_grad():
        active = per_row(units, weight).gt_(-constant[:, :, None])
    return ((units.mT @ active).mT * weight.transpose(1, 2)).sum(-1) + active.sum(2) * constant
