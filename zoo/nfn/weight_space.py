"""The encoder of a small transformer as a point of a weight space, and the group that moves it without changing its
function (arXiv 2410.04209, section 4; row-vector convention, x W).

Heads lie side by side, as in nn.Linear: columns K * i to K * i + K - 1 of `q` are W_Q of head i, and rows V * i to
V * i + V - 1 of `o` are W_O of head i. So `q @ k.mT` is the sum over heads of W_Q W_K^T, and `v @ o` that of W_V W_O,
without a contraction over heads; `split_columns` and `split_rows` show the heads one by one.

Dimensions: L block, N checkpoint, H head, D width, K width of a head's queries and keys, V of its values, A MLP width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from generators.architecture import BLOCKS, HEAD_WIDTH, HEADS, MLP_WIDTH, WIDTH

LINEAR_NAMES = {
    "q": "attention.queries.weight",
    "k": "attention.keys.weight",
    "v": "attention.values.weight",
    "o": "attention.out_projection.weight",
    "a": "fc1.weight",
    "a_bias": "fc1.bias",
    "b": "fc2.weight",
    "b_bias": "fc2.bias",
}
"""Field of EncoderWeights -> name inside a block of the state dict."""


@dataclass(frozen=True)
class WeightSpace:
    """Sizes of an encoder; the defaults are those of the small transformer."""

    blocks: int = BLOCKS
    heads: int = HEADS
    width: int = WIDTH
    key_width: int = HEAD_WIDTH
    value_width: int = HEAD_WIDTH
    mlp_width: int = MLP_WIDTH

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field of EncoderWeights behind its leading dimensions."""
        d, keys, values, a = self.width, self.heads * self.key_width, self.heads * self.value_width, self.mlp_width
        return {
            "q": (d, keys),
            "k": (d, keys),
            "v": (d, values),
            "o": (values, d),
            "a": (d, a),
            "a_bias": (a,),
            "b": (a, d),
            "b_bias": (d,),
        }


@dataclass(frozen=True)
class EncoderWeights:
    """The weights of all blocks: each field [L, ..., *shape] with the shapes of `WeightSpace.shapes`.

    q, k: [L, ..., D, H*K]; v: [L, ..., D, H*V]; o: [L, ..., H*V, D]; a: [L, ..., D, A] (the paper's W_A), a_bias:
    [L, ..., A]; b: [L, ..., A, D] (W_B), b_bias: [L, ..., D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    a: Tensor
    a_bias: Tensor
    b: Tensor
    b_bias: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> "EncoderWeights":
        return EncoderWeights(*(function(getattr(self, field.name)) for field in fields(self)))

    def relu_mlp(self) -> "EncoderWeights":
        """ReLU on W_A, b_A, W_B and b_B: what the permutations that act on them allow, and matrices M and N do not."""
        mlp = {name: getattr(self, name).relu() for name in ("a", "a_bias", "b", "b_bias")}
        return replace(self, **mlp)


def encoder_weights(tensors: Mapping[str, Tensor], blocks: int = BLOCKS) -> EncoderWeights:
    """Collect the encoder of one state dict, or of N stacked ones: tensors [*shape] or [N, *shape] -> [L, (N,) ...]."""

    def collect(name: str) -> Tensor:
        parts = [tensors[f"encoder.{block}.{name}"] for block in range(blocks)]
        return torch.stack(parts if name.endswith("bias") else [part.mT for part in parts])

    return EncoderWeights(**{field: collect(name) for field, name in LINEAR_NAMES.items()})


def encoder_tensors(weights: EncoderWeights) -> dict[str, Tensor]:
    """Return the `encoder.*` part of the state dict; the inverse of `encoder_weights`."""
    tensors = {}
    for block in range(len(weights.q)):
        for field, name in LINEAR_NAMES.items():
            tensor = getattr(weights, field)[block]
            tensors[f"encoder.{block}.{name}"] = tensor if name.endswith("bias") else tensor.mT.contiguous()
    return tensors


def split_columns(matrix: Tensor, heads: int) -> Tensor:
    """[..., D, H*K] -> [..., H, D, K]."""
    return matrix.unflatten(-1, (heads, -1)).transpose(-2, -3)


def split_rows(matrix: Tensor, heads: int) -> Tensor:
    """[..., H*V, D] -> [..., H, V, D]."""
    return matrix.unflatten(-2, (heads, -1))


def join_columns(matrices: Tensor) -> Tensor:
    """[..., H, D, K] -> [..., D, H*K]."""
    return matrices.transpose(-2, -3).flatten(-2)


@dataclass(frozen=True)
class GroupElement:
    """An element of the group, or a stack of them over leading dimensions that broadcast with those of the weights.

    heads: int64 [..., H], place i gets head heads[i]. m: [..., H, K, K] and n: [..., H, V, V], invertible, one a head.
    out: int64 [..., D] and hidden: int64 [..., A], the column j of `x P` is column out[j] of x.
    """

    heads: Tensor
    m: Tensor
    n: Tensor
    out: Tensor
    hidden: Tensor


def sample_group(
    space: WeightSpace,
    leading: tuple[int, ...],
    generator: torch.Generator | None = None,
    condition: float = 4.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GroupElement:
    """Draw elements [*leading]: uniform permutations, and matrices of condition number `condition` at most.

    A matrix is U diag(s) V with U and V uniform over orthogonal matrices and log s uniform on an interval around 0.
    `leading` starts with L, for every block has its own group.
    """

    def permutations(count: int) -> Tensor:
        return torch.rand(*leading, count, generator=generator, device=device).argsort(-1)

    def invertible(size: int) -> Tensor:
        shape = (*leading, space.heads, size)
        normal = torch.randn(2, *shape, size, generator=generator, dtype=dtype, device=device)
        left, right = torch.linalg.qr(normal).Q
        exponent = torch.rand(*shape, generator=generator, dtype=dtype, device=device) - 0.5
        return (left * (exponent * math.log(condition)).exp()[..., None, :]) @ right

    return GroupElement(
        heads=permutations(space.heads),
        m=invertible(space.key_width),
        n=invertible(space.value_width),
        out=permutations(space.width),
        hidden=permutations(space.mlp_width),
    )


def apply_group(element: GroupElement, weights: EncoderWeights) -> EncoderWeights:
    """Move weights by an element; every block computes the same function before and after.

    W_Q -> W_Q M^T, W_K -> W_K M^-1, W_V -> W_V N, W_O -> N^-1 W_O P_O, W_A -> P_O^-1 W_A P_A, b_A -> b_A P_A,
    W_B -> P_A^-1 W_B, with heads renamed after M and N (arXiv 2410.04209, equation 12).
    """
    heads = element.heads.shape[-1]
    order = element.heads[..., None, None]
    out, hidden = element.out[..., None, :], element.hidden[..., None, :]

    def reorder(matrices: Tensor) -> Tensor:
        return torch.take_along_dim(matrices, order, dim=-3)

    q = split_columns(weights.q, heads) @ element.m.mT
    k = torch.linalg.solve(element.m, split_columns(weights.k, heads), left=False)
    v = split_columns(weights.v, heads) @ element.n
    o = torch.linalg.solve(element.n, split_rows(weights.o, heads))
    rows_moved = torch.take_along_dim(weights.a, out.mT, dim=-2)
    return EncoderWeights(
        q=join_columns(reorder(q)),
        k=join_columns(reorder(k)),
        v=join_columns(reorder(v)),
        o=torch.take_along_dim(reorder(o).flatten(-3, -2), out, dim=-1),
        a=torch.take_along_dim(rows_moved, hidden, dim=-1),
        a_bias=torch.take_along_dim(weights.a_bias, element.hidden, dim=-1),
        b=torch.take_along_dim(weights.b, hidden.mT, dim=-2),
        b_bias=weights.b_bias,
    )
