"""StatNN: layer-wise statistics of the weights (arXiv 2410.04209, section 6; the idea is arXiv 2002.11448's)."""

import torch
from torch import Tensor, nn

from generators.architecture import tensor_table
from zoo.nfn.data import WeightData, component_columns, component_tensors
from zoo.nfn.predictors.base import NetworkPredictor, register

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
QUANTILE_ENTRIES = 1 << 22
"""torch.quantile takes 2**24 entries at most."""
WIDTH = 256
EMBEDDING_WIDTH = 64


@register("statnn")
class StatNN(NetworkPredictor):
    """Mean, variance and five quantiles of each tensor of encoder and classifier; the embedding as it is."""

    def __init__(self, task: str, components: tuple[str, ...]) -> None:
        super().__init__(task, components)
        self.sizes, widths = [], []
        self.parts = nn.ModuleDict()
        for name in components:
            if name == "embedding":
                columns = component_columns(task)[name]
                size, width = columns.stop - columns.start, EMBEDDING_WIDTH
                self.parts[name] = nn.Linear(size, width)
            else:
                size, width = (
                    (2 + len(QUANTILES)) * len([spec for spec in tensor_table(task) if spec.component == name]),
                    WIDTH,
                )
                self.parts[name] = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
            self.sizes.append(size)
            widths.append(width)
        self.head = nn.Linear(sum(widths), 1)

    def inputs(self, data: WeightData) -> Tensor:
        columns = component_columns(self.task)
        return torch.cat([self._read(name, data.weights[:, columns[name]]) for name in self.components], dim=1)

    def _read(self, component: str, flat: Tensor) -> Tensor:
        if component == "embedding":
            return flat
        tensors = component_tensors(self.task, component, flat).values()
        return torch.cat([statistics(tensor.flatten(1)) for tensor in tensors], dim=1)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = zip(self.components, inputs.split(self.sizes, dim=1), strict=True)
        return self.head(torch.cat([self.parts[name](part) for name, part in parts], dim=1)).squeeze(1)


def statistics(rows: Tensor) -> Tensor:
    """[N, M] -> mean, variance (biased) and quantiles (linear interpolation) of each row, [N, 7]."""
    levels = torch.tensor(QUANTILES, dtype=rows.dtype, device=rows.device)
    parts = rows.split(max(1, QUANTILE_ENTRIES // rows.shape[1]))
    quantiles = torch.cat([torch.quantile(part, levels, dim=1).T for part in parts])
    return torch.cat([rows.mean(1, keepdim=True), rows.var(1, correction=0, keepdim=True), quantiles], dim=1)
