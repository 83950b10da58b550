"""Random encoder weights of any size, moves that are no symmetries, and a term-by-term evaluation of the layers."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zoo.nfn.layers import EquivariantLayer, InvariantLayer
from zoo.nfn.weight_space import EncoderWeights, WeightSpace, split_columns, split_rows

SPACES = [
    WeightSpace(blocks=1, heads=1, width=4, key_width=2, value_width=3, mlp_width=3),
    WeightSpace(blocks=2, heads=2, width=6, key_width=3, value_width=2, mlp_width=5),
    WeightSpace(blocks=3, heads=3, width=5, key_width=4, value_width=1, mlp_width=7),
]
SMALL = SPACES[1]


def random_weights(space: WeightSpace, leading: tuple[int, ...], seed: int = 0) -> EncoderWeights:
    """Normal weights in float64, [L, *leading, ...]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = space.shapes().values()
    return EncoderWeights(
        *(torch.randn(space.blocks, *leading, *shape, generator=generator, dtype=torch.float64) for shape in shapes)
    )


def random_parameters(*layers: torch.nn.Module, seed: int = 0) -> None:
    """Make layers float64, with all parameters normal, so that no term is small."""
    generator = torch.Generator().manual_seed(seed)
    for layer in layers:
        layer.double()
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, 0, 0.3, generator=generator)


def largest_difference(first: EncoderWeights, second: EncoderWeights) -> float:
    """Largest difference of any entry, relative to the largest entry of its field."""
    pairs = [(getattr(first, name), getattr(second, name)) for name in vars(first)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def _random_matrix(size: int) -> Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def permute_a_columns(w: EncoderWeights, heads: int) -> EncoderWeights:
    """A permutation of hidden units that W_B and b_A do not follow."""
    return replace(w, a=w.a.flip(-1))


def mix_hidden_units(w: EncoderWeights, heads: int) -> EncoderWeights:
    """An invertible matrix where only permutations of hidden units keep the function."""
    mix = _random_matrix(w.a.shape[-1])
    return replace(w, a=w.a @ mix, a_bias=w.a_bias @ mix, b=torch.linalg.solve(mix, w.b))


def m_without_inverse(w: EncoderWeights, heads: int) -> EncoderWeights:
    """M acts on the queries alone."""
    return replace(w, q=w.q @ _random_matrix(w.q.shape[-1]))


def different_p_o(w: EncoderWeights, heads: int) -> EncoderWeights:
    """The columns of W_O and the rows of W_A are permuted in two different ways."""
    return replace(w, o=w.o.flip(-1), a=w.a.roll(1, dims=-2))


ILLEGAL: list[Callable[[EncoderWeights, int], EncoderWeights]] = [
    permute_a_columns,
    mix_hidden_units,
    m_without_inverse,
    different_p_o,
]


def evaluate_equivariant(layer: EquivariantLayer, w: EncoderWeights, heads: int) -> EncoderWeights:
    """Every term of the equivariant layer by its own contraction over heads (letters: l block, n checkpoint, h head,
    c and e channel in and out, p and q summed coordinates, j and k the output's)."""
    c = layer.coefficients()
    q, k, v, o = split_columns(w.q, heads), split_columns(w.k, heads), split_columns(w.v, heads), split_rows(w.o, heads)
    e = torch.einsum

    def pooled(output: str, letters: str) -> Tensor:
        """Terms that read the whole block; `letters` are the output's own coordinates in the coefficients."""
        at, to = f"le{letters}", f"->lne{letters}"
        return (
            e(f"{at}cpq,lnchpx,lnchqx{to}", c[f"{output}.qk"], q, k)
            + e(f"{at}cp,lnchpx,lnchxq{to}", c[f"{output}.vo_rows"], v, o)
            + e(f"{at}c,lncpq{to}", c[f"{output}.a_sum"], w.a)
            + e(f"{at}cq,lncpq{to}", c[f"{output}.b_columns"], w.b)
            + e(f"{at}c,lncp{to}", c[f"{output}.a_bias_sum"], w.a_bias)
            + e(f"{at}cq,lncq{to}", c[f"{output}.b_bias"], w.b_bias)
            + c[f"{output}.bias"][:, None]
        )

    def unit(output: str, letters: str) -> Tensor:
        """Terms of hidden unit u."""
        at, to = f"le{letters}", f"->lneu{letters}"
        return (
            e(f"{at}c,lncpu{to}", c[f"{output}.a_column"], w.a)
            + e(f"{at}cq,lncuq{to}", c[f"{output}.b_row"], w.b)
            + e(f"{at}c,lncu{to}", c[f"{output}.a_bias_entry"], w.a_bias)
        )

    row = (
        e("lecp,lnchpx,lnchxj->lnej", c["a.vo_column"], v, o)
        + e("lec,lncjq->lnej", c["a.a_row"], w.a)
    )  # fmt: skip
    o_rows = e("lec,lnchxq->lnehx", c["o.o_row"], o)[..., None]
    return EncoderWeights(
        q=e("lejcp,lnchpx->lnejhx", c["q.q"], q).flatten(-2),
        k=e("lejcp,lnchpx->lnejhx", c["k.k"], k).flatten(-2),
        v=e("lejcp,lnchpx->lnejhx", c["v.v"], v).flatten(-2),
        o=(e("lec,lnchxk->lnehxk", c["o.o_entry"], o) + o_rows).flatten(3, 4),
        a=pooled("a", "")[..., None, None]
        + row[..., None]
        + unit("a", "")[..., None, :]
        + e("lec,lncjk->lnejk", c["a.a_entry"], w.a),
        a_bias=pooled("a_bias", "")[..., None] + unit("a_bias", ""),
        b=pooled("b", "k")[..., None, :] + unit("b", "k"),
        b_bias=pooled("b_bias", "k"),
    )


def evaluate_invariant(layer: InvariantLayer, w: EncoderWeights, heads: int) -> Tensor:
    """Every term of the invariant layer by its own contraction over heads, [L, N, E]."""
    c = layer.coefficients()
    q, k, v, o = split_columns(w.q, heads), split_columns(w.k, heads), split_columns(w.v, heads), split_rows(w.o, heads)
    e = torch.einsum
    return (
        e("lecpq,lnchpx,lnchqx->lne", c["qk"], q, k)
        + e("lecp,lnchpx,lnchxq->lne", c["vo_rows"], v, o)
        + e("lec,lncpq->lne", c["a_sum"], w.a)
        + e("lecq,lncpq->lne", c["b_columns"], w.b)
        + e("lec,lncp->lne", c["a_bias_sum"], w.a_bias)
        + e("lecq,lncq->lne", c["b_bias"], w.b_bias)
        + c["bias"][:, None]
    )
