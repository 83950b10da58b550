"""Equivariant and invariant polynomial layers over encoder weights (arXiv 2410.04209, section 5 and appendices).

A term that reads more than one entry reads either a *pooled feature* of the whole block (the entries of
sum_h W_Q W_K^T; the row sums of sum_h W_V W_O; sums of W_A and b_A; column sums of W_B; b_B) or a *unit feature* of one
hidden unit of the MLP (its column sum of W_A, its row of W_B, its entry of b_A). Both are computed once and meet all
their coefficients in one matrix product, whatever output they go to. Blocks are a batch dimension, each with its own
coefficients.

Dimensions: L block, N checkpoint, C channel in, E channel out, D width, A MLP width, P pooled feature, U unit feature,
O output of a product (several kinds of outputs side by side), H*K and H*V the joined heads.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.nfn.weight_space import EncoderWeights, WeightSpace

BY_COORDINATE = ("q", "k", "v", "b", "b_bias")
"""Outputs whose coefficients depend on a coordinate of the output."""
WHOLE_BLOCK_GAIN = 0.1


def pooled_sizes(width: int) -> dict[str, int]:
    """Pooled features of one channel, in their order: name -> count."""
    return {"qk": width * width, "vo_rows": width, "a_sum": 1, "b_columns": width, "a_bias_sum": 1, "b_bias": width}


def scaled_sum(x: Tensor, *dims: int) -> Tensor:
    """Sum over n entries, divided by sqrt(n)."""
    return x.sum(dims) / math.sqrt(math.prod(x.shape[dim] for dim in dims))


def pooled_features(weights: EncoderWeights) -> Tensor:
    """Invariant features of weights with channels, [L, N, C, ...] -> [L, N, C, P] in the order of `pooled_sizes`."""
    return torch.cat(
        [
            (weights.q @ weights.k.mT).flatten(-2),
            (weights.v @ scaled_sum(weights.o, -1)[..., None]).squeeze(-1),
            scaled_sum(weights.a, -2, -1)[..., None],
            scaled_sum(weights.b, -2),
            scaled_sum(weights.a_bias, -1)[..., None],
            weights.b_bias,
        ],
        dim=-1,
    )


def unit_features(weights: EncoderWeights) -> Tensor:
    """What the terms of each hidden unit read, [L, N, C, ...] -> [L, N, A, C * U]."""
    features = torch.cat([scaled_sum(weights.a, -2)[..., None], weights.b, weights.a_bias[..., None]], dim=-1)
    return features.transpose(2, 3).flatten(3)


def row_features(weights: EncoderWeights) -> Tensor:
    """What the terms of each row of W_A read, its column of the VO sum and its sum: [L, N, D, C * (D + 1)]."""
    features = torch.cat([(weights.v @ weights.o).mT, scaled_sum(weights.a, -1)[..., None]], dim=-1)
    return features.transpose(2, 3).flatten(3)


class InvariantLayer(nn.Module):
    """Weights of C channels -> E numbers a block that no element of the group changes.

    All entries of the QK sum, row sums of the VO sum, the sum of W_A, column sums of W_B, the sum of b_A and entries of
    b_B, each with its own coefficient, and a bias.
    """

    def __init__(self, space: WeightSpace, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.space = space
        features = sum(pooled_sizes(space.width).values())
        self.pooled = nn.Parameter(torch.empty(space.blocks, channels_out, channels_in, features))
        self.bias = nn.Parameter(torch.empty(space.blocks, channels_out))
        initialise(self._terms())

    def coefficients(self) -> dict[str, Tensor]:
        """The coefficients by input, [L, E, C, (features)]; "bias" is [L, E]."""
        return paper_coefficients(self._terms(), self.space)

    def _terms(self) -> dict[str, Tensor]:
        return pooled_views(self.pooled, self.space.width) | {"bias": self.bias}

    def forward(self, features: Tensor) -> Tensor:
        """`pooled_features` [L, N, C, P] -> [L, N, E]."""
        return affine(features, self.pooled, self.bias)


class MLPTerms(NamedTuple):
    """Parts of an equivariant layer's output; A is the number of hidden units.

    W_A of channel e is a_row [L, N, E, D] over its rows plus a_unit [L, N, E, A] over its columns, plus a multiple of
    the input's W_A. W_B is b_column [L, N, E*D] over its columns plus a product of units [L, N, A, U]. a_bias
    [L, N, E, A] and b_bias [L, N, E*D] are whole.
    """

    units: Tensor
    a_row: Tensor
    a_unit: Tensor
    a_bias: Tensor
    b_column: Tensor
    b_bias: Tensor


class EquivariantLayer(nn.Module):
    """Weights of C channels -> weights of E channels; moving the input by a group element moves the output likewise.

    `pooled`, `unit` and `bias` hold the coefficients of several outputs side by side: 0 to E - 1 for W_A, E to 2E - 1
    for b_A, then (e, column k) for W_B and, in `pooled` and `bias`, (e, k) for b_B.
    """

    def __init__(self, space: WeightSpace, channels_in: int, channels_out: int) -> None:
        super().__init__()
        blocks, width, c, e = space.blocks, space.width, channels_in, channels_out
        self.space, self.channels_out = space, channels_out
        self.mix_q = nn.Parameter(torch.empty(blocks, e, width, c, width))
        self.mix_k = nn.Parameter(torch.empty(blocks, e, width, c, width))
        self.mix_v = nn.Parameter(torch.empty(blocks, e, width, c, width))
        self.o_row = nn.Parameter(torch.empty(blocks, e, c))
        self.o_entry = nn.Parameter(torch.empty(blocks, e, c))
        self.a_row = nn.Parameter(torch.empty(blocks, e, c, width + 1))
        self.a_entry = nn.Parameter(torch.empty(blocks, e, c))
        self.unit = nn.Parameter(torch.empty(blocks, e * (2 + width), c, width + 2))
        features = sum(pooled_sizes(width).values())
        self.pooled = nn.Parameter(torch.empty(blocks, e * (2 + 2 * width), c, features))
        self.bias = nn.Parameter(torch.empty(blocks, e * (2 + 2 * width)))
        initialise(self._terms())

    def coefficients(self) -> dict[str, Tensor]:
        """The coefficients of every term by its name, "output.input": [L, E, (D,) C, (features)].

        The first D is there where the coefficient depends on the row (q, k, v) or the column (b, b_bias) of the output.
        """
        return paper_coefficients(self._terms(), self.space)

    def _terms(self) -> dict[str, Tensor]:
        views = {
            "q.q": self.mix_q,
            "k.k": self.mix_k,
            "v.v": self.mix_v,
            "o.o_row": self.o_row,
            "o.o_entry": self.o_entry,
            "a.vo_column": self.a_row[..., :-1],
            "a.a_row": self.a_row[..., -1],
            "a.a_entry": self.a_entry,
        }
        for output, unit in self._by_output(self.unit).items():
            views[f"{output}.a_column"] = unit[..., 0]
            views[f"{output}.b_row"] = unit[..., 1:-1]
            views[f"{output}.a_bias_entry"] = unit[..., -1]
        for output, pooled in self._by_output(self.pooled).items():
            views |= {f"{output}.{name}": view for name, view in pooled_views(pooled, self.space.width).items()}
        return views | {f"{output}.bias": view for output, view in self._by_output(self.bias).items()}

    def _by_output(self, coefficients: Tensor) -> dict[str, Tensor]:
        """Split dimension 1 into the outputs that it serves."""
        e, d = self.channels_out, self.space.width
        a, a_bias, b, b_bias = coefficients.tensor_split([e, 2 * e, e * (2 + d)], dim=1)
        outputs = {"a": a, "a_bias": a_bias, "b": b.unflatten(1, (e, d))}
        if b_bias.shape[1]:
            outputs["b_bias"] = b_bias.unflatten(1, (e, d))
        return outputs

    def forward(self, weights: EncoderWeights) -> EncoderWeights:
        """[L, N, C, ...] -> [L, N, E, ...]."""
        e, d = self.channels_out, self.space.width
        terms = self.mlp_terms(weights, pooled_features(weights))
        b = per_row(terms.units, self.unit[:, 2 * e :]) + terms.b_column[:, :, None]
        return EncoderWeights(
            q=_mix_rows(self.mix_q, weights.q),
            k=_mix_rows(self.mix_k, weights.k),
            v=_mix_rows(self.mix_v, weights.v),
            o=_mix_channels(self.o_entry, weights.o) + _mix_channels(self.o_row, scaled_sum(weights.o, -1)[..., None]),
            a=_mix_channels(self.a_entry, weights.a) + terms.a_row[..., None] + terms.a_unit[..., None, :],
            a_bias=terms.a_bias,
            b=b.unflatten(-1, (e, d)).transpose(2, 3),
            b_bias=terms.b_bias.unflatten(-1, (e, d)),
        )

    def mlp_terms(self, weights: EncoderWeights, pooled: Tensor) -> MLPTerms:
        """What the MLP part of the output is made of; `pooled` are the `pooled_features` of the weights."""
        e, d = self.channels_out, self.space.width
        to_a, to_b, b_bias = affine(pooled, self.pooled, self.bias).split([2 * e, e * d, e * d], dim=-1)
        units = unit_features(weights)
        a_unit, a_bias = (per_row(units, self.unit[:, : 2 * e]) + to_a[:, :, None]).mT.split(e, dim=2)
        a_row = per_row(row_features(weights), self.a_row).mT
        return MLPTerms(units, a_row, a_unit, a_bias, to_b, b_bias)


def pooled_views(pooled: Tensor, width: int) -> dict[str, Tensor]:
    """Coefficients [..., P] -> by feature, sums without a dimension of their own, QK as [..., D, D]."""
    sizes = pooled_sizes(width)
    views = dict(zip(sizes, pooled.split([*sizes.values()], dim=-1), strict=True))
    views["qk"] = views["qk"].unflatten(-1, (width, width))
    return {name: view.squeeze(-1) if name.endswith("sum") else view for name, view in views.items()}


def affine(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Features [L, N, C, P], weight [L, O, C, P], bias [L, O] -> [L, N, O]."""
    # In this orientation the gradient of the weight comes out row by row, several times as fast as transposed.
    return torch.baddbmm(bias[..., None], weight.flatten(2), features.flatten(2).mT).mT.contiguous()


def per_row(features: Tensor, weight: Tensor) -> Tensor:
    """Features [L, N, R, C*U] of rows or hidden units R, weight [L, O, C, U] -> [L, N, R, O]."""
    return (features.flatten(1, 2) @ weight.flatten(2).mT).unflatten(1, features.shape[1:3])


def _mix_channels(coefficients: Tensor, x: Tensor) -> Tensor:
    """coefficients [L, E, C], x [L, N, C, ...] -> [L, N, E, ...]."""
    return (coefficients[:, None] @ x.flatten(3)).unflatten(-1, x.shape[3:])


def _mix_rows(mix: Tensor, x: Tensor) -> Tensor:
    """mix [L, E, D, C, D], x [L, N, C, D, M] -> [L, N, E, D, M]."""
    left = mix.flatten(3).flatten(1, 2)
    return (left[:, None] @ x.flatten(2, 3)).unflatten(2, mix.shape[1:3])


def paper_coefficients(terms: dict[str, Tensor], space: WeightSpace) -> dict[str, Tensor]:
    """Divide each term's coefficients by the square root of the number of entries that its input sums."""
    d, a = space.width, space.mlp_width
    entries = {"vo_rows": d, "a_sum": d * a, "b_columns": a, "a_bias_sum": a, "a_row": a, "a_column": d, "o_row": d}
    return {name: view / math.sqrt(entries.get(name.split(".")[-1], 1)) for name, view in terms.items()}


@torch.no_grad()
def initialise(terms: dict[str, Tensor]) -> None:
    """Draw coefficients [L, E, (D,) C, (features)]: Xavier-normal by fan-in C * features and fan-out E * D.

    With two exceptions in equivariant layers, where a ReLU follows, for weights of size 1. Biases are standard normal:
    without them the layers are homogeneous in the weights, and the LayerNorms behind them hide how large weights are.
    Terms that read a whole block begin at a tenth: they are one number for all entries of W_A (or of a column of W_B),
    nearly random for random weights, and at full size would alone decide which ReLUs are active.
    """
    for name, view in terms.items():
        output, _, source = name.rpartition(".")
        if source == "bias":
            view.normal_(0, 1.0 if output else 0.0)
            continue
        channels = 3 if output in BY_COORDINATE else 2
        fan_out, fan_in = math.prod(view.shape[1:channels]), math.prod(view.shape[channels:])
        gain = WHOLE_BLOCK_GAIN if output and source in pooled_sizes(1) else 1.0
        view.normal_(0, gain * math.sqrt(2 / (fan_in + fan_out)))
