"""Transformer-NFN (arXiv 2410.04209, section 6): predictions that the encoder's symmetries cannot change."""

from itertools import pairwise
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from generators.architecture import BLOCKS
from zoo.errors import NFNError
from zoo.nfn.data import component_tensors
from zoo.nfn.fused import invariant_of_equivariant
from zoo.nfn.layers import EquivariantLayer, InvariantLayer, pooled_features
from zoo.nfn.predictors.base import WeightNetwork, register
from zoo.nfn.weight_space import WeightSpace, encoder_weights

FEATURES = 10


@register("transformer-nfn")
class TransformerNFN(WeightNetwork):
    """Equivariant layers and an invariant one for the encoder, linear layers for classifier and embedding.

    Options: `channels` of the equivariant layers (10 in the paper) and their number, `layers` (1).
    """

    options: ClassVar[dict[str, int]] = {"channels": 10, "layers": 1}

    def __init__(self, task: str, components: tuple[str, ...], channels: int, layers: int) -> None:
        super().__init__(task, components)
        for option, value in (("channels", channels), ("layers", layers)):
            if value < 1:
                raise NFNError(f"{option}: found {value!r}, expected 1 or more")
        for name, size in zip(components, self.sizes, strict=True):
            if name == "encoder":
                self.parts[name] = EncoderNFN(task, channels, layers)
            elif name == "classifier":
                self.parts[name] = nn.Sequential(
                    *(nn.Linear(size, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES), nn.ReLU()),
                    *(nn.Linear(FEATURES, FEATURES), nn.ReLU()),
                )
            else:
                self.parts[name] = nn.Linear(size, FEATURES)
        self.head = nn.Linear(FEATURES * len(components), 1)


class EncoderNFN(nn.Module):
    """Flat encoder weights [N, F] -> invariant features [N, 10]."""

    def __init__(self, task: str, channels: int, layers: int) -> None:
        super().__init__()
        self.task = task
        space = WeightSpace()
        self.equivariant = nn.ModuleList(EquivariantLayer(space, c, e) for c, e in pairwise([1] + [channels] * layers))
        self.invariant = InvariantLayer(space, channels, FEATURES)
        self.norm = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(BLOCKS))
        self.mix = nn.Sequential(
            *(nn.LayerNorm(BLOCKS * FEATURES), nn.Linear(BLOCKS * FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        tensors = component_tensors(self.task, "encoder", inputs)
        weights = encoder_weights(tensors).map(lambda tensor: tensor.unsqueeze(2))  # one channel
        if len(self.equivariant) == 1:
            first = cast(EquivariantLayer, self.equivariant[0])
            features = invariant_of_equivariant(first, self.invariant, weights)
        else:
            for layer in self.equivariant:
                weights = layer(weights).relu_mlp()
            features = self.invariant(pooled_features(weights))
        return self.mix(torch.cat([norm(block) for norm, block in zip(self.norm, features, strict=True)], dim=1))
