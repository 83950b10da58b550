"""What the maximal-symmetry theorem says about checkpoints (arXiv 2410.04209, theorem 3.2).

Where W_Q, W_K, W_V, W_O of every head have full rank, no head is wider than the model, and the products W_Q W_K^T of
the heads are pairwise distinct, as are the W_V W_O, two attention layers are the same function exactly when their
products agree head by head up to one order of the heads; with P_O, up to one permutation of the columns of W_V W_O too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from zoo.nfn.weight_space import EncoderWeights, WeightSpace, encoder_weights, split_columns, split_rows


@dataclass(frozen=True)
class BlockSymmetry:
    """The theorem's assumptions for one block.

    smallest_singular_value: of any W_Q, W_K, W_V, W_O of a head, relative to the largest of the same matrix.
    qk_distance, vo_distance: smallest distance of two heads' products, relative to the larger norm; infinite for one
    head.
    full_rank, distinct, narrow_heads: the three assumptions at the tolerance of `symmetry_report`.
    """

    block: int
    smallest_singular_value: float
    qk_distance: float
    vo_distance: float
    full_rank: bool
    distinct: bool
    narrow_heads: bool

    @property
    def maximal(self) -> bool:
        """Whether the theorem applies: the group holds all symmetries of this attention layer."""
        return self.full_rank and self.distinct and self.narrow_heads


def symmetry_report(
    checkpoint: Mapping[str, Tensor], space: WeightSpace | None = None, tolerance: float = 1e-5
) -> list[BlockSymmetry]:
    """Check the theorem's assumptions for each block of one state dict.

    Args:
        checkpoint: state_dict name -> tensor [*shape].
        tolerance: below it a singular value or a distance counts as 0, relative to the largest one.
    """
    space = space or WeightSpace()
    weights = encoder_weights({name: tensor.double() for name, tensor in checkpoint.items()}, space.blocks)
    reports = []
    for block in range(space.blocks):
        q, k, v, o = _heads(weights, space, block)
        smallest = min(
            float((s[:, -1] / s[:, 0].clamp(min=1e-300)).min()) for s in map(torch.linalg.svdvals, (q, k, v, o))
        )
        qk_distance, vo_distance = _closest(q @ k.mT), _closest(v @ o)
        reports.append(
            BlockSymmetry(
                block=block,
                smallest_singular_value=smallest,
                qk_distance=qk_distance,
                vo_distance=vo_distance,
                full_rank=smallest > tolerance,
                distinct=min(qk_distance, vo_distance) > tolerance,
                narrow_heads=max(space.key_width, space.value_width) <= space.width,
            )
        )
    return reports


def same_attention_orbit(
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    space: WeightSpace | None = None,
    tolerance: float = 1e-5,
) -> bool:
    """Return whether a group element takes the attention part of one checkpoint to that of another, in every block.

    That is: for one order of the heads, all W_Q W_K^T agree, and all W_V W_O agree after one permutation of their
    columns that is common to all heads. Distances up to `tolerance` times the largest entry count as agreement.
    """
    space = space or WeightSpace()
    weights = [
        encoder_weights({name: t.double() for name, t in part.items()}, space.blocks) for part in (first, second)
    ]
    pairs = [[_products(part, space, block) for part in weights] for block in range(space.blocks)]
    return all(_same_block(one, other, tolerance) for one, other in pairs)


def _heads(weights: EncoderWeights, space: WeightSpace, block: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W_Q, W_K, W_V [H, D, K] and W_O [H, V, D] of one block."""
    q, k, v = (split_columns(matrix[block], space.heads) for matrix in (weights.q, weights.k, weights.v))
    return q, k, v, split_rows(weights.o[block], space.heads)


def _products(weights: EncoderWeights, space: WeightSpace, block: int) -> tuple[Tensor, Tensor]:
    q, k, v, o = _heads(weights, space, block)
    return q @ k.mT, v @ o


def _closest(products: Tensor) -> float:
    """Smallest distance of two of the matrices [H, D, D], relative to the larger norm of the two."""
    norms = torch.linalg.matrix_norm(products)
    distances = torch.linalg.matrix_norm(products[:, None] - products[None])
    relative = distances / torch.maximum(norms[:, None], norms[None]).clamp(min=1e-300)
    relative.fill_diagonal_(torch.inf)
    return float(relative.min())


def _same_block(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], tolerance: float) -> bool:
    (qk_1, vo_1), (qk_2, vo_2) = first, second
    matches = (qk_1[:, None] - qk_2[None]).abs().amax((-2, -1)) <= tolerance * qk_1.abs().max()
    return any(_same_columns(vo_1, vo_2[order], tolerance) for order in _matchings(matches.tolist(), []))


def _matchings(allowed: list[list[bool]], chosen: list[int]) -> Iterator[list[int]]:
    """Yield every order of heads in which head i may take the place order[i]."""
    if len(chosen) == len(allowed):
        yield chosen
        return
    for place, fits in enumerate(allowed[len(chosen)]):
        if fits and place not in chosen:
            yield from _matchings(allowed, [*chosen, place])


def _same_columns(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether one permutation of columns takes all matrices [H, D, D] to those of `second`."""
    columns_1, columns_2 = (part.flatten(0, 1).T for part in (first, second))
    too_far = torch.cdist(columns_1, columns_2, p=torch.inf) > tolerance * first.abs().max()
    cost = too_far.numpy().astype(np.float64)
    return bool(cost[linear_sum_assignment(cost)].sum() == 0)
