"""Gradient-boosted trees of XGBoost on flattened weights."""

import numpy as np
import torch
from torch import Tensor

from zoo.nfn.predictors.base import TreePredictor, library, register

ROUNDS = 100


@register("xgboost")
class XGBoostPredictor(TreePredictor):
    """Trees of depth 10, minimum child weight 50 and at most 256 leaves, on squared error."""

    has_chance = False

    def fit(self, inputs: np.ndarray, accuracy: np.ndarray, seed: int) -> None:
        xgboost = library("xgboost")
        settings = {
            "max_depth": 10,
            "min_child_weight": 50,
            "max_leaves": 256,
            "grow_policy": "lossguide",
            "tree_method": "hist",
            "seed": seed,
            "nthread": torch.get_num_threads(),
        }
        self.booster = xgboost.train(settings, xgboost.DMatrix(inputs, accuracy), ROUNDS)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return self.booster.predict(library("xgboost").DMatrix(inputs))

    @property
    def parameters_trained(self) -> int:
        return (
            int((self.booster.trees_to_dataframe()["Feature"] == "Leaf").sum()) * 2 - self.booster.num_boosted_rounds()
        )

    def state(self) -> dict[str, Tensor]:
        return {"booster": torch.frombuffer(self.booster.save_raw("ubj"), dtype=torch.uint8).clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.booster = library("xgboost").Booster()
        self.booster.load_model(bytearray(state["booster"].numpy().tobytes()))
