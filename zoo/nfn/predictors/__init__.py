"""The predictors; importing the package fills the registry with every module in it."""

import importlib
import pkgutil

from zoo.nfn.predictors.base import (
    NetworkPredictor,
    Predictor,
    TreePredictor,
    make_predictor,
    predictor_class,
    predictor_names,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["NetworkPredictor", "Predictor", "TreePredictor", "make_predictor", "predictor_class", "predictor_names"]
