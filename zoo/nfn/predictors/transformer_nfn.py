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

    def fit_inputs(self, inputs: Tensor) -> None:
        for name, part in zip(self.components, inputs.split(self.sizes, dim=1)):
            if name == "encoder":
                self.parts["encoder"].fit_scale(part)

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
        self.register_buffer("scales", torch.ones(8, BLOCKS))
        self.invariant = InvariantLayer(space, channels, FEATURES)
        self.norm = nn.ModuleList(nn.LayerNorm(FEATURES) for _ in range(BLOCKS))
        self.mix = nn.Sequential(
            *(nn.LayerNorm(BLOCKS * FEATURES), nn.Linear(BLOCKS * FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
            *(nn.LayerNorm(FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES)),
        )

    def fit_scale(self, inputs: Tensor) -> None:
        import os

        mode = os.environ.get("SCALE", "0")
        if mode == "0":
            return
        w = encoder_weights(component_tensors(self.task, "encoder", inputs))

        def med(x, dims):
            return x.square().mean(dims).sqrt().median(1).values.clamp(min=1e-6)

        qk = med(w.q @ w.k.mT, (-2, -1))
        vo = med(w.v @ w.o, (-2, -1))
        f = float(os.environ.get("QKF", "32"))
        g = float(os.environ.get("VOF", "32"))
        s = {
            "q": (qk * f) ** 0.5,
            "k": (qk * f) ** 0.5,
            "v": (vo * g) ** 0.5,
            "o": (vo * g) ** 0.5,
            "a": med(w.a, (-2, -1)),
            "b": med(w.b, (-2, -1)),
            "a_bias": med(w.a_bias, (-1,)),
            "b_bias": med(w.b_bias, (-1,)),
        }
        self.scales.copy_(torch.stack([1 / v for v in s.values()]))
        print({k: v.tolist() for k, v in s.items()})

    def forward(self, inputs: Tensor) -> Tensor:
        w = encoder_weights(component_tensors(self.task, "encoder", inputs))
        from zoo.nfn.weight_space import EncoderWeights

        weights = EncoderWeights(
            **{
                n: (t * s.view(-1, *[1] * (t.dim() - 1))).unsqueeze(2)
                for (n, s) in zip(["q", "k", "v", "o", "a", "b", "a_bias", "b_bias"], self.scales)
                for t in [getattr(w, n)]
            }
        )
        if len(self.equivariant) == 1:
            features = invariant_of_equivariant(self.equivariant[0], self.invariant, weights)
        else:
            for layer in self.equivariant:
                weights = layer(weights).relu_mlp()
            features = self.invariant(pooled_features(weights))
        blocks = [norm(block) for norm, block in zip(self.norm, features, strict=True)]
        return self.mix(torch.cat(blocks, dim=1))
