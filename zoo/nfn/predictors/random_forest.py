"""A random forest of scikit-learn on flattened weights, kept as plain arrays so that loading one runs no code."""

import numpy as np
import torch
from torch import Tensor

from zoo.nfn.predictors.base import TreePredictor, library, register

TREES = 100
FIELDS = ("left", "right", "feature", "threshold", "value")


@register("random-forest")
class RandomForestPredictor(TreePredictor):
    """100 trees of depth 10, at least 50 checkpoints a leaf and at most 256 leaves; each split tries sqrt(F) columns.

    Kept as arrays over the nodes of all trees: children (-1 at a leaf), column, threshold, mean accuracy; `roots`.
    """

    def fit(self, inputs: np.ndarray, accuracy: np.ndarray, seed: int) -> None:
        forest = library("sklearn.ensemble").RandomForestRegressor(
            n_estimators=TREES,
            max_depth=10,
            min_samples_leaf=50,
            max_leaf_nodes=256,
            max_features="sqrt",
            random_state=seed,
            n_jobs=torch.get_num_threads(),
        )
        trees = [member.tree_ for member in forest.fit(inputs, accuracy).estimators_]
        self.roots = np.cumsum([0] + [tree.node_count for tree in trees[:-1]])
        self.nodes = {
            "left": _join([tree.children_left for tree in trees], self.roots),
            "right": _join([tree.children_right for tree in trees], self.roots),
            "feature": np.concatenate([tree.feature for tree in trees]),
            "threshold": np.concatenate([tree.threshold for tree in trees]),
            "value": np.concatenate([tree.value[:, 0, 0] for tree in trees]),
        }

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        place = np.tile(self.roots, (len(inputs), 1))
        rows = np.arange(len(inputs))[:, None]
        while True:
            inner = self.nodes["left"][place] >= 0
            if not inner.any():
                return self.nodes["value"][place].mean(axis=1)
            goes_left = inputs[rows, np.where(inner, self.nodes["feature"][place], 0)] <= self.nodes["threshold"][place]
            child = np.where(goes_left, self.nodes["left"][place], self.nodes["right"][place])
            place = np.where(inner, child, place)

    @property
    def parameters_trained(self) -> int:
        return len(self.nodes["value"])

    def state(self) -> dict[str, Tensor]:
        arrays = self.nodes | {"roots": self.roots}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.roots = state["roots"].numpy()
        self.nodes = {name: state[name].numpy() for name in FIELDS}


def _join(children: list[np.ndarray], roots: np.ndarray) -> np.ndarray:
    """Children of all trees' nodes as numbers over all nodes; -1 stays."""
    return np.concatenate([np.where(part < 0, -1, part + root) for part, root in zip(children, roots, strict=True)])
