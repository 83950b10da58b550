"""What a predictor is, and the registry that names them.

A predictor maps checkpoints to predicted accuracies: a network to fractions in (0, 1), trees to any numbers. A new one
is one file in this package with a class of one of the two kinds below under `@register("name")`.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from zoo.errors import NFNError
from zoo.nfn.data import WeightData, component_columns, settle_components
from zoo.nfn.scaling import tensor_scales

_REGISTRY: dict[str, type["Predictor"]] = {}


class Predictor(ABC):
    """A predictor for one task that reads some components of a checkpoint.

    Subclasses take (task, components, **options) and say in `options` which options they know, with their defaults.
    """

    name: ClassVar[str]
    options: ClassVar[dict[str, int]] = {}
    has_chance: ClassVar[bool] = True
    """Whether the seed of a training decides anything but the split."""

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        self.task, self.components = task, components

    def inputs(self, data: WeightData) -> Tensor:
        """Return what the predictor reads of each checkpoint, float32 [N, F]; the components' weights by default."""
        columns = component_columns(self.task)
        if len(self.components) == len(columns):
            return data.weights  # all columns; at full size of a zoo a copy would take gigabytes
        return torch.cat([data.weights[:, columns[name]] for name in self.components], dim=1)

    @property
    @abstractmethod
    def parameters_trained(self) -> int:
        """Number of trained parameters (of trees: leaves and thresholds)."""


class NetworkPredictor(Predictor, nn.Module):
    """A predictor trained by gradient descent on the binary cross-entropy of the accuracy."""

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        nn.Module.__init__(self)
        Predictor.__init__(self, task, components)

    def fit_inputs(self, inputs: Tensor) -> None:
        """Set buffers from the training part's inputs [N, F], before training."""

    @property
    def parameters_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    @abstractmethod
    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs [B, F] -> logits of the accuracy [B]."""


class WeightNetwork(NetworkPredictor):
    """A network of one part a component and a linear head over what the parts return.

    Subclasses fill `parts` (component -> module) and `head`. Inputs are scaled first, see zoo.nfn.scaling.
    """

    scale: Tensor
    head: nn.Module

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        super().__init__(task, components)
        columns = component_columns(task)
        self.sizes = [columns[name].stop - columns[name].start for name in components]
        self.register_buffer("scale", torch.ones(sum(self.sizes)))
        self.parts = nn.ModuleDict()

    def fit_inputs(self, inputs: Tensor) -> None:
        self.scale.copy_(tensor_scales(self.task, self.components, inputs.split(self.sizes, dim=1)))

    def forward(self, inputs: Tensor) -> Tensor:
        parts = zip(self.components, (inputs * self.scale).split(self.sizes, dim=1), strict=True)
        return self.head(torch.cat([self.parts[name](part) for name, part in parts], dim=1)).squeeze(1)


class TreePredictor(Predictor):
    """A predictor of trees, which another library fits in one call."""

    @abstractmethod
    def fit(self, inputs: np.ndarray, accuracy: np.ndarray, seed: int) -> None:
        """Fit to inputs float32 [N, F] and accuracies float64 [N]."""

    @abstractmethod
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """Inputs [N, F] -> predicted accuracies [N]."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The fitted trees as tensors, for `load_state`; nothing of it is executable."""

    @abstractmethod
    def load_state(self, state: dict[str, Tensor]) -> None: ...


def library(name: str) -> ModuleType:
    """Import a library of the extra `trees`. Raises NFNError, saying what to install, where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.split(".")[0]
        raise NFNError(f"{package}: not installed; `pip install 'small-transformer-zoo[trees]'` brings it") from error


def register(name: str) -> Callable[[type[Any]], type[Any]]:
    """Enter a class into the registry."""

    def enter(cls: type[Any]) -> type[Any]:
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return enter


def predictor_names() -> list[str]:
    return list(_REGISTRY)


def predictor_class(name: str) -> type[Predictor]:
    """Look a predictor up. Raises NFNError for an unknown name."""
    if name not in _REGISTRY:
        raise NFNError(f"predictor: found {name!r}, expected one of {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


def make_predictor(name: str, task: str, components: Any = None, **options: int) -> Any:
    """Make an untrained predictor; networks draw their parameters from torch's generator.

    Raises:
        NFNError: an unknown predictor, task, component or option.
    """
    cls = predictor_class(name)
    for option in options:
        if option not in cls.options:
            known = ", ".join(cls.options) or "none"
            raise NFNError(f"options of {name}: found {option!r}, expected some of: {known}")
    make: Callable[..., Any] = cls
    return make(task, settle_components(task, components), **(cls.options | options))
