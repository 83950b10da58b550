"""The MLP that is taught the symmetries instead of built from them: what equivariance is worth beyond augmentation."""

import torch
from torch import Tensor

from zoo.nfn.data import component_tensors
from zoo.nfn.predictors.base import register
from zoo.nfn.predictors.mlp import MLP
from zoo.nfn.weight_space import WeightSpace, apply_group, encoder_tensors, encoder_weights, sample_group


@register("mlp-augmented")
class AugmentedMLP(MLP):
    """An MLP that in training sees every checkpoint's encoder moved by a random element of the group."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and "encoder" in self.components:
            parts = dict(zip(self.components, inputs.split(self.sizes, dim=1), strict=True))
            parts["encoder"] = move_randomly(self.task, parts["encoder"])
            inputs = torch.cat([*parts.values()], dim=1)
        return super().forward(inputs)


def move_randomly(task: str, encoder: Tensor) -> Tensor:
    """Move each flat encoder [N, F] by its own random group element, from torch's generator."""
    tensors = component_tensors(task, "encoder", encoder)
    space = WeightSpace()
    element = sample_group(space, (space.blocks, len(encoder)), device=encoder.device)
    moved = encoder_tensors(apply_group(element, encoder_weights(tensors)))
    return torch.cat([moved[name].flatten(1) for name in tensors], dim=1)
