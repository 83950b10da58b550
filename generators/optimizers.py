"""SGD, SGD with momentum, Adam and RMSprop over stacked runs.

The update rules are torch.optim's, with coupled weight decay; learning rate and L2 differ from run to run. All runs of
a population have one optimizer, so an update is a few operations on [R, P].

Dimensions: R run, P parameter.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

MOMENTUM = 0.9
ADAM_BETAS = (0.9, 0.999)
RMSPROP_ALPHA = 0.99
EPSILON = 1e-8


class Optimizer(Protocol):
    state: dict[str, Tensor]
    """Tensors that a later step needs; saved and restored with the weights."""

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: Tensor) -> None:
        """Update `weights` [R, P] in place; `gradient` [R, P] is used up; `learning_rate` [R, 1]."""
        ...


class SGD:
    """w -= lr * (g + l2 * w)."""

    def __init__(self, weights: Tensor, l2: Tensor) -> None:
        self._l2 = l2
        self.state: dict[str, Tensor] = {}

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: Tensor) -> None:
        gradient.addcmul_(weights, self._l2)
        weights.addcmul_(gradient, -learning_rate)


class MomentumSGD:
    """v = 0.9 * v + g + l2 * w; w -= lr * v. (torch starts v at the first gradient, which is the same.)"""

    def __init__(self, weights: Tensor, l2: Tensor) -> None:
        self._l2 = l2
        self.state = {"velocity": torch.zeros_like(weights)}

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: Tensor) -> None:
        gradient.addcmul_(weights, self._l2)
        velocity = self.state["velocity"].mul_(MOMENTUM).add_(gradient)
        weights.addcmul_(velocity, -learning_rate)


class Adam:
    """Adam with bias correction; the step count is part of the state."""

    def __init__(self, weights: Tensor, l2: Tensor) -> None:
        self._l2 = l2
        self.state = {
            "first_moment": torch.zeros_like(weights),
            "second_moment": torch.zeros_like(weights),
            "steps": torch.zeros((), dtype=torch.int64),
        }

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: Tensor) -> None:
        self.state["steps"] += 1
        steps = int(self.state["steps"])
        gradient.addcmul_(weights, self._l2)
        first = self.state["first_moment"].lerp_(gradient, 1 - ADAM_BETAS[0])
        second = self.state["second_moment"].mul_(ADAM_BETAS[1]).addcmul_(gradient, gradient, value=1 - ADAM_BETAS[1])
        corrected = torch.sqrt(second, out=gradient).div_((1 - ADAM_BETAS[1] ** steps) ** 0.5).add_(EPSILON)
        weights.addcmul_(first / corrected, -learning_rate / (1 - ADAM_BETAS[0] ** steps))


class RMSprop:
    """s = 0.99 * s + 0.01 * g^2; w -= lr * g / (sqrt(s) + eps)."""

    def __init__(self, weights: Tensor, l2: Tensor) -> None:
        self._l2 = l2
        self.state = {"square_average": torch.zeros_like(weights)}

    def step(self, weights: Tensor, gradient: Tensor, learning_rate: Tensor) -> None:
        gradient.addcmul_(weights, self._l2)
        square = self.state["square_average"].mul_(RMSPROP_ALPHA)
        square.addcmul_(gradient, gradient, value=1 - RMSPROP_ALPHA)
        weights.addcmul_(gradient.div_(square.sqrt().add_(EPSILON)), -learning_rate)


KINDS: dict[str, Callable[[Tensor, Tensor], Optimizer]] = {
    "sgd": SGD,
    "sgd_momentum": MomentumSGD,
    "adam": Adam,
    "rmsprop": RMSprop,
}


def make_optimizer(name: str, weights: Tensor, l2: Tensor) -> Optimizer:
    """Return an optimizer at its first step for `weights` [R, P]; `l2` [R, 1] in the weights' dtype and device."""
    return KINDS[name](weights, l2)
