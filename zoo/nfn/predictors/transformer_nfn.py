"""Transformer-NFN (arXiv 2410.04209, section 6): predictions that the encoder's symmetries cannot change."""

import torch
from torch import Tensor, nn

from generators.architecture import BLOCKS
from zoo.nfn.data import component_columns, component_tensors
from zoo.nfn.fused import invariant_of_equivariant
from zoo.nfn.layers import EquivariantLayer, InvariantLayer, pooled_features
from zoo.nfn.predictors.base import NetworkPredictor, register
from zoo.nfn.weight_space import WeightSpace, encoder_weights

FEATURES = 10


@register("transformer-nfn")
class TransformerNFN(NetworkPredictor):
    """Equivariant layers and an invariant one for the encoder, linear layers for classifier and embedding.

    Options: `channels` of the equivariant layers (10 in the paper) and their number, `layers` (1).
    """

    options = {"channels": 10, "layers": 1}

    def __init__(self, task: str, components: tuple[str, ...], channels: int, layers: int) -> None:
        super().__init__(task, components)
        columns = component_columns(task)
        sizes = {name: columns[name].stop - columns[name].start for name in components}
        self.parts = nn.ModuleDict()
        if "encoder" in components:
            self.parts["encoder"] = EncoderNFN(task, channels, layers)
        if "classifier" in components:
            self.parts["classifier"] = nn.Sequential(
                *(nn.Linear(sizes["classifier"], FEATURES), nn.ReLU()),
                *(nn.Linear(FEATURES, FEATURES), nn.ReLU()),
                *(nn.Linear(FEATURES, FEATURES), nn.ReLU()),
            )
        if "embedding" in components:
            self.parts["embedding"] = nn.Linear(sizes["embedding"], FEATURES)
        self.sizes = [sizes[name] for name in components]
        self.head = nn.Linear(FEATURES * len(components), 1)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = zip(self.components, inputs.split(self.sizes, dim=1), strict=True)
        return self.head(torch.cat([self.parts[name](part) for name, part in parts], dim=1)).squeeze(1)


class EncoderNFN(nn.Module):
    """Flat encoder weights [N, F] -> invariant features [N, 10]."""

    def __init__(self, task: str, channels: int, layers: int) -> None:
        super().__init__()
        self.task = task
        space = WeightSpace()
        widths = [1] + [channels] * layers
        self.equivariant = nn.ModuleList(EquivariantLayer(space, c, e) for c, e in zip(widths, widths[1:]))
        self.invariant = InvariantLayer(space, channels, FEATURES)
        self.norm = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(BLOCKS))
        self.mix = nn.Sequential(
            *(nn.LayerNorm(BLOCKS * FEATURES), nn.Linear(BLOCKS * FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        weights = encoder_weights(component_tensors(self.task, "encoder", inputs)).map(lambda tensor: tensor.unsqueeze(2))
        if len(self.equivariant) == 1:
            features = invariant_of_equivariant(self.equivariant[0], self.invariant, weights)
        else:
            for layer in self.equivariant:
                weights = layer(weights).relu_mlp()
            features = self.invariant(pooled_features(weights))
        blocks = [norm(block) for norm, block in zip(self.norm, features, strict=True)]
        return self.mix(torch.cat(blocks, dim=1))

