"""Gradient-boosted trees of LightGBM on flattened weights."""

import numpy as np
import torch
from torch import Tensor

from zoo.nfn.predictors.base import TreePredictor, library, register

ROUNDS = 100
HISTOGRAM_MEGABYTES = 2048
"""Without a limit the histograms of 256 leaves over 20,000 columns take 20 GB; it changes speed only."""


@register("lightgbm")
class LightGBMPredictor(TreePredictor):
    """Trees of depth 10, minimum child weight 50 (the Hessian of squared error: checkpoints) and at most 256 leaves."""

    has_chance = False

    def fit(self, inputs: np.ndarray, accuracy: np.ndarray, seed: int) -> None:
        lightgbm = library("lightgbm")
        settings = {
            "objective": "regression",
            "max_depth": 10,
            "min_sum_hessian_in_leaf": 50,
            "min_data_in_leaf": 1,
            "num_leaves": 256,
            "histogram_pool_size": HISTOGRAM_MEGABYTES,
            "seed": seed,
            "deterministic": True,
            "force_col_wise": True,
            "num_threads": torch.get_num_threads(),
            "verbosity": -1,
        }
        self.booster = lightgbm.train(settings, lightgbm.Dataset(inputs, accuracy), ROUNDS)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return np.asarray(self.booster.predict(inputs, num_threads=torch.get_num_threads()))

    @property
    def parameters_trained(self) -> int:
        leaves = sum(tree["num_leaves"] for tree in self.booster.dump_model()["tree_info"])
        return 2 * leaves - self.booster.num_trees()

    def state(self) -> dict[str, Tensor]:
        return {"booster": torch.frombuffer(bytearray(self.booster.model_to_string().encode()), dtype=torch.uint8)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.booster = library("lightgbm").Booster(model_str=state["booster"].numpy().tobytes().decode())
