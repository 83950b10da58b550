"""Stacked optimizers against torch.optim, run by run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from generators.hyperparameters import OPTIMIZERS
from generators.optimizers import KINDS, make_optimizer

TORCH: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "sgd_momentum": lambda parameters, **options: torch.optim.SGD(parameters, momentum=0.9, **options),
    "adam": lambda parameters, **options: torch.optim.Adam(parameters, betas=(0.9, 0.999), eps=1e-8, **options),
    "rmsprop": lambda parameters, **options: torch.optim.RMSprop(parameters, alpha=0.99, eps=1e-8, **options),
}
RATES = torch.tensor([[1e-3], [3e-2], [0.5]], dtype=torch.float64)
L2 = torch.tensor([[0.0], [1e-4], [1e-1]], dtype=torch.float64)
STEPS = 30


def gradients(weights: Tensor, step: int) -> Tensor:
    """The gradient of a step, with entries of very different sizes; the last one is always 0."""
    sizes = torch.logspace(-12, 2, weights.shape[1], dtype=weights.dtype)
    sizes[-1] = 0
    return torch.sin(torch.arange(weights.numel(), dtype=weights.dtype).view_as(weights) + step) * sizes


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, 3 * 20, dtype=torch.float64).view(3, 20).to(dtype)


def factor(step: int) -> float:
    """The learning rate changes on the way."""
    return 0.1 if step < 5 else 1.0


def ours(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    weights = start(dtype)
    optimizer = make_optimizer(name, weights, L2.to(dtype))
    for step in range(STEPS):
        optimizer.step(weights, gradients(weights, step), (RATES * factor(step)).to(dtype))
    return weights


def torchs(name: str, run: int, dtype: torch.dtype = torch.float64) -> Tensor:
    weights = start(dtype)[run : run + 1].clone().requires_grad_()
    optimizer = TORCH[name]([weights], lr=1.0, weight_decay=L2[run].item())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATES[run].item() * factor(step)
        weights.grad = gradients(start(dtype), step)[run : run + 1]
        optimizer.step()
    return weights.detach()[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch_in_float64(name: str):
    weights = ours(name)
    for run in range(3):
        assert (weights[run] - start()[run]).abs().max() > 1e-3
        torch.testing.assert_close(weights[run], torchs(name, run), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_torch_in_float32(name: str):
    weights = ours(name, torch.float32)
    for run in range(3):
        torch.testing.assert_close(weights[run], torchs(name, run, torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_l2_is_coupled_and_acts_without_a_gradient(name: str):
    weights = torch.full((2, 1), 2.0, dtype=torch.float64)
    optimizer = make_optimizer(name, weights, torch.tensor([[0.0], [0.1]], dtype=torch.float64))
    optimizer.step(weights, torch.zeros(2, 1, dtype=torch.float64), torch.full((2, 1), 0.5, dtype=torch.float64))
    # Coupled decay goes through the optimizer: Adam's first step has the size of the rate, RMSprop's ten times that.
    step = {"sgd": 0.1, "sgd_momentum": 0.1, "adam": 0.5, "rmsprop": 5.0}[name]
    assert weights.flatten().tolist() == pytest.approx([2.0, 2.0 - step])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_all_that_a_restart_needs(name: str):
    weights = start()
    optimizer = make_optimizer(name, weights, L2)
    for step in range(STEPS):
        if step == STEPS // 2:
            state = {key: tensor.clone() for key, tensor in optimizer.state.items()}
            optimizer = make_optimizer(name, weights, L2)
            optimizer.state = state
        optimizer.step(weights, gradients(weights, step), RATES * factor(step))
    assert torch.equal(weights, ours(name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_not_finite_changes_no_bit_of_its_neighbours(name: str):
    weights = start()
    optimizer = make_optimizer(name, weights, L2)
    for step in range(STEPS):
        gradient = gradients(weights, step)
        gradient[1] = [torch.inf, torch.nan, -torch.inf][step % 3]
        optimizer.step(weights, gradient, RATES * factor(step))
    assert not weights[1].isfinite().any()
    assert torch.equal(weights[[0, 2]], ours(name)[[0, 2]])


def test_every_optimizer_of_the_hyperparameters_exists():
    assert tuple(KINDS) == OPTIMIZERS
