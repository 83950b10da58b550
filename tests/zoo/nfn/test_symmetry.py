"""The theorem's assumptions, and who shares an orbit with whom."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from weight_tools import SPACES, random_weights

from zoo.nfn.symmetry import same_attention_orbit, symmetry_report
from zoo.nfn.weight_space import (
    EncoderWeights,
    WeightSpace,
    apply_group,
    encoder_tensors,
    join_columns,
    sample_group,
    split_columns,
    split_rows,
)


def move(space: WeightSpace, weights: EncoderWeights, seed: int = 1) -> EncoderWeights:
    generator = torch.Generator().manual_seed(seed)
    return apply_group(sample_group(space, (space.blocks,), generator, dtype=torch.float64), weights)


def orbit(space: WeightSpace, first: EncoderWeights, second: EncoderWeights) -> bool:
    return same_attention_orbit(encoder_tensors(first), encoder_tensors(second), space)


def with_head(matrix: Tensor, heads: int, source: Tensor, target: int) -> Tensor:
    """Replace one head of q, k or v."""
    parts = split_columns(matrix, heads).clone()
    parts[:, target] = source
    return join_columns(parts)


@pytest.mark.parametrize("space", SPACES)
def test_random_weights_fulfil_the_assumptions(space: WeightSpace):
    reports = symmetry_report(encoder_tensors(random_weights(space, ())), space)
    assert [report.block for report in reports] == list(range(space.blocks))
    assert all(report.maximal for report in reports)
    assert all((report.qk_distance == float("inf")) == (space.heads == 1) for report in reports)


def test_a_report_measures_rank_and_distance():
    space = WeightSpace(blocks=1, heads=2, width=4, key_width=2, value_width=2, mlp_width=3)
    weights = random_weights(space, ())
    q = with_head(weights.q, 2, torch.diag(torch.tensor([1.0, 1e-7]).double())[[0, 1, 0, 1]] * 3, 0)
    report = symmetry_report(encoder_tensors(replace(weights, q=q)), space)[0]
    assert report.smallest_singular_value == pytest.approx(1e-7, rel=1e-6)
    assert not report.full_rank and report.distinct and not report.maximal


def test_equal_heads_are_not_distinct():
    space = SPACES[1]
    weights = random_weights(space, ())
    copies = {
        name: with_head(getattr(weights, name), 2, split_columns(getattr(weights, name), 2)[:, 0], 1) for name in "qk"
    }
    report = symmetry_report(encoder_tensors(replace(weights, **copies)), space)[0]
    assert report.qk_distance < 1e-12 < report.vo_distance
    assert not report.distinct and report.full_rank


def test_heads_wider_than_the_model_are_reported():
    space = WeightSpace(blocks=1, heads=2, width=3, key_width=4, value_width=2, mlp_width=2)
    assert not symmetry_report(encoder_tensors(random_weights(space, ())), space)[0].narrow_heads


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("seed", range(3))
def test_moved_weights_share_the_orbit(space: WeightSpace, seed: int):
    weights = random_weights(space, ())
    assert orbit(space, weights, move(space, weights, seed))


@pytest.mark.parametrize("field", ["q", "k", "v", "o"])
def test_a_changed_entry_leaves_the_orbit(field: str):
    space = SPACES[1]
    weights = random_weights(space, ())
    changed = getattr(weights, field).clone()
    changed[1, 0, 0] += 1e-3
    assert not orbit(space, weights, move(space, replace(weights, **{field: changed})))


def test_heads_must_keep_their_queries_with_their_values():
    space = SPACES[1]
    weights = random_weights(space, ())
    v, o = (split(x, 2).flip(1) for split, x in ((split_columns, weights.v), (split_rows, weights.o)))
    assert not orbit(space, weights, replace(weights, v=join_columns(v), o=o.flatten(1, 2)))


def test_one_column_permutation_is_common_to_all_heads():
    space = SPACES[1]
    weights = random_weights(space, ())
    o = split_rows(weights.o, 2).clone()
    o[:, 0] = o[:, 0].flip(-1)
    assert not orbit(space, weights, replace(weights, o=o.flatten(1, 2)))
    assert orbit(space, weights, replace(weights, o=weights.o.flip(-1)))


def test_equal_queries_and_keys_leave_the_order_of_heads_to_the_values():
    space = SPACES[1]
    weights = random_weights(space, ())
    copies = {
        name: with_head(getattr(weights, name), 2, split_columns(getattr(weights, name), 2)[:, 0], 1) for name in "qk"
    }
    same = replace(weights, **copies)
    v, o = (split(x, 2).flip(1) for split, x in ((split_columns, same.v), (split_rows, same.o)))
    assert orbit(space, same, replace(same, v=join_columns(v), o=o.flatten(1, 2)))
