"""The layers against a term-by-term evaluation, under group elements, and under moves that are no symmetries."""

import pytest
import torch
from torch import Tensor
from weight_tools import (
    ILLEGAL,
    SMALL,
    SPACES,
    evaluate_equivariant,
    evaluate_invariant,
    largest_difference,
    random_parameters,
    random_weights,
)

from zoo.nfn.fused import invariant_of_equivariant
from zoo.nfn.layers import EquivariantLayer, InvariantLayer, pooled_features
from zoo.nfn.weight_space import EncoderWeights, WeightSpace, apply_group, sample_group

CHANNELS = [(1, 3), (3, 2)]
N = 4


def layers(space: WeightSpace, c: int, e: int) -> tuple[EquivariantLayer, InvariantLayer]:
    equivariant, invariant = EquivariantLayer(space, c, e), InvariantLayer(space, e, 2)
    random_parameters(equivariant, invariant)
    return equivariant, invariant


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("c", "e"), CHANNELS)
def test_equal_to_the_sum_of_all_terms(space: WeightSpace, c: int, e: int):
    equivariant, invariant = layers(space, c, e)
    weights = random_weights(space, (N, c))
    expected = evaluate_equivariant(equivariant, weights, space.heads)
    assert largest_difference(equivariant(weights), expected) < 1e-12
    features = evaluate_invariant(invariant, expected, space.heads)
    torch.testing.assert_close(invariant(pooled_features(expected)), features, rtol=1e-12, atol=1e-10)


def test_equal_to_the_sum_of_all_terms_in_single_precision():
    space = WeightSpace()
    torch.manual_seed(0)
    equivariant = EquivariantLayer(space, 1, 10)
    weights = random_weights(space, (N, 1)).map(lambda tensor: 0.2 * tensor)
    single = equivariant(weights.map(Tensor.float))
    expected = evaluate_equivariant(equivariant.double(), weights, space.heads)
    assert largest_difference(single.map(Tensor.double), expected) < 1e-5


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("c", "e"), CHANNELS)
def test_group_elements_pass_through_or_vanish(space: WeightSpace, c: int, e: int):
    equivariant, invariant = layers(space, c, e)
    weights = random_weights(space, (N, c))
    element = sample_group(space, (space.blocks, N, 1), torch.Generator().manual_seed(1), dtype=torch.float64)
    moved = apply_group(element, weights)
    assert largest_difference(moved, weights) > 0.1
    assert largest_difference(equivariant(moved), apply_group(element, equivariant(weights))) < 1e-8
    assert (
        largest_difference(equivariant(moved).relu_mlp(), apply_group(element, equivariant(weights).relu_mlp())) < 1e-8
    )
    invariants = [invariant(pooled_features(equivariant(w).relu_mlp())) for w in (weights, moved)]
    torch.testing.assert_close(invariants[1], invariants[0], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("illegal", ILLEGAL)
def test_other_moves_do_not_pass_through(illegal):
    equivariant, invariant = layers(SMALL, 1, 3)
    weights = random_weights(SMALL, (N, 1))
    moved = illegal(weights, SMALL.heads)
    assert largest_difference(equivariant(moved), illegal(equivariant(weights), SMALL.heads)) > 1e-2
    before, after = (invariant(pooled_features(equivariant(w).relu_mlp())) for w in (weights, moved))
    assert ((before - after).abs() / before.abs()).max() > 1e-3


@pytest.mark.parametrize("space", SPACES)
def test_fused_layers_equal_the_layers_one_by_one(space: WeightSpace):
    equivariant, invariant = layers(space, 1, 4)
    weights = random_weights(space, (N, 1))
    parameters = [*equivariant.parameters(), *invariant.parameters()]
    plain = invariant(pooled_features(equivariant(weights).relu_mlp()))
    fused = invariant_of_equivariant(equivariant, invariant, weights)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
    direction = torch.randn(plain.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for found, expected in zip(
        torch.autograd.grad(fused, parameters, direction),
        torch.autograd.grad(plain, parameters, direction),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_those_of_finite_differences(fused: bool):
    space = SPACES[0]
    equivariant, invariant = layers(space, 1, 2)
    parameters = [*equivariant.parameters(), *invariant.parameters()]

    def forward(*tensors: Tensor) -> Tensor:
        weights = EncoderWeights(*tensors[:8])
        if fused:
            return invariant_of_equivariant(equivariant, invariant, weights)
        return invariant(pooled_features(equivariant(weights).relu_mlp()))

    weights = random_weights(space, (2, 1)).map(lambda tensor: tensor.requires_grad_())
    assert torch.autograd.gradcheck(forward, (*vars(weights).values(), *parameters))


def test_every_term_reaches_its_output_and_no_other():
    c, e = 2, 3
    equivariant, _ = layers(SMALL, c, e)
    output = equivariant(random_weights(SMALL, (1, c)))
    gradients, _ = layers(SMALL, c, e)
    reached = set()
    for name, value in vars(output).items():
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        found = torch.autograd.grad(value, [*equivariant.parameters()], direction, retain_graph=True, allow_unused=True)
        with torch.no_grad():
            for holder, gradient in zip(gradients.parameters(), found, strict=True):
                holder.copy_(torch.zeros_like(holder) if gradient is None else gradient)
        for term, gradient in gradients.coefficients().items():
            if term.split(".")[0] == name:
                reached.add(term)
                assert (gradient.abs() > 1e-9).all(), term
            else:
                assert (gradient == 0).all(), term
    assert reached == set(equivariant.coefficients())


def test_every_feature_reaches_the_invariant_layer():
    _, invariant = layers(SMALL, 1, 2)
    weights = random_weights(SMALL, (1, 2)).map(lambda tensor: tensor.requires_grad_())
    gradients = torch.autograd.grad(invariant(pooled_features(weights)).sum(), [*vars(weights).values()])
    assert all((gradient.abs() > 1e-9).all() for gradient in gradients)


def test_coefficients_count_what_the_paper_counts():
    count = lambda layer: sum(parameter.numel() for parameter in layer.parameters())  # noqa: E731
    assert count(EquivariantLayer(WeightSpace(), 1, 10)) == 2 * 783_820
    assert count(InvariantLayer(WeightSpace(), 10, 10)) == 2 * 112_210
