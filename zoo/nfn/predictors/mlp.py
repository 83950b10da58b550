"""The paper's MLP: flattened weights, no symmetry (arXiv 2410.04209, section 6)."""

from torch import nn

from zoo.nfn.predictors.base import WeightNetwork, register

WIDTH = 50
LAYERS = {"embedding": 1, "encoder": 2, "classifier": 3}


@register("mlp")
class MLP(WeightNetwork):
    """Linear layers of width 50 a flattened component, with ReLU (but for the embedding's single one), and a head.

    Its inputs are scaled like those of Transformer-NFN, which the paper's are not: a fair comparison, and a better MLP.
    """

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        super().__init__(task, components)
        for name, size in zip(components, self.sizes, strict=True):
            self.parts[name] = linear_layers(size, LAYERS[name])
        self.head = nn.Linear(WIDTH * len(components), 1)


def linear_layers(size: int, layers: int) -> nn.Module:
    if layers == 1:
        return nn.Linear(size, WIDTH)
    modules: list[nn.Module] = []
    for width in [size] + [WIDTH] * (layers - 1):
        modules += [nn.Linear(width, WIDTH), nn.ReLU()]
    return nn.Sequential(*modules)
