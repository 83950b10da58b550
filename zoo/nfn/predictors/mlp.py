"""The paper's MLP: flattened weights, no symmetry."""

import torch
from torch import Tensor, nn

from zoo.nfn.data import component_columns
from zoo.nfn.predictors.base import NetworkPredictor, register

WIDTH = 50
LAYERS = {"embedding": 1, "encoder": 2, "classifier": 3}


@register("mlp")
class MLP(NetworkPredictor):
    """Each component flattened, then linear layers of width 50 with ReLU (none behind the embedding's one), then one head."""

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        super().__init__(task, components)
        columns = component_columns(task)
        self.sizes = [columns[name].stop - columns[name].start for name in components]
        self.parts = nn.ModuleDict(
            {name: _linear_layers(size, LAYERS[name]) for name, size in zip(components, self.sizes, strict=True)}
        )
        self.head = nn.Linear(WIDTH * len(components), 1)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = zip(self.components, inputs.split(self.sizes, dim=1), strict=True)
        return self.head(torch.cat([self.parts[name](part) for name, part in parts], dim=1)).squeeze(1)


def _linear_layers(size: int, layers: int) -> nn.Module:
    if layers == 1:
        return nn.Linear(size, WIDTH)
    modules: list[nn.Module] = []
    for width in [size] + [WIDTH] * (layers - 1):
        modules += [nn.Linear(width, WIDTH), nn.ReLU()]
    return nn.Sequential(*modules)
