"""A predictor that sees no weight: the baseline that predictions from weights have to beat."""

import numpy as np
import torch
from torch import Tensor, nn

from generators.hyperparameters import OPTIMIZERS
from zoo.errors import NFNError
from zoo.nfn.data import WeightData
from zoo.nfn.predictors.base import NetworkPredictor, register

LOGARITHMIC = ("learning_rate", "init_std", "l2")
LINEAR = ("dropout", "train_fraction")
WIDTH = 64
SMALLEST = 1e-12
"""Stands for 0 on a logarithmic scale (`l2` may be 0)."""


@register("hyperparameters")
class HyperparametersPredictor(NetworkPredictor):
    """Optimizer (one-hot) and the grid's numbers, standardised over the training part, through two layers of 64."""

    mean: Tensor
    scale: Tensor

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        super().__init__(task, components)
        features = len(OPTIMIZERS) + len(LOGARITHMIC) + len(LINEAR)
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.layers = nn.Sequential(
            *(nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        )

    def inputs(self, data: WeightData) -> Tensor:
        """One row [F] a checkpoint. Raises NFNError where hyperparameters are not known."""
        columns = data.metadata.column_names
        for name in ("optimizer", *LOGARITHMIC, *LINEAR):
            if name not in columns:
                raise NFNError(
                    f"{name}: found no such column, expected the metadata of a zoo; read the dataset instead"
                )
        optimizer = np.array(data.metadata["optimizer"].to_pylist())
        features = [optimizer == name for name in OPTIMIZERS]
        features += [np.log10(np.maximum(data.metadata[name].to_numpy(), SMALLEST)) for name in LOGARITHMIC]
        features += [data.metadata[name].to_numpy() for name in LINEAR]
        return torch.from_numpy(np.stack(features, axis=1).astype(np.float32))

    def fit_inputs(self, inputs: Tensor) -> None:
        spread = inputs.std(dim=0, correction=0)
        self.mean.copy_(inputs.mean(dim=0))
        self.scale.copy_(torch.where(spread > 0, spread, 1.0))  # a constant column says nothing

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers((inputs - self.mean) / self.scale).squeeze(1)
