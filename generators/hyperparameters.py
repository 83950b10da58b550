"""The hyperparameters of one run, and the name that follows from them."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from generators.architecture import CLASSES
from generators.errors import InputError
from generators.streams import STREAM_VERSION

OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "rmsprop")
BEST_BY = ("test", "validation")
INITIALISATIONS = ("per_run", "shared")


class Range(NamedTuple):
    """The values that a hyperparameter may have. expected, plural: what errors call one of them, and several."""

    fits: Callable[[Any], bool]
    expected: str
    plural: str


def _range(fits: Callable[[Any], bool], noun: str, limits: str) -> Range:
    return Range(fits, f"a {noun} {limits}", f"{noun}s {limits}")


def _one_of(names: tuple[str, ...]) -> Range:
    expected = f"one of {', '.join(names)}"
    return Range(lambda v: v in names, expected, expected)


RANGES = {
    "optimizer": _one_of(OPTIMIZERS),
    "learning_rate": _range(lambda v: 0 < v < math.inf, "number", "above 0"),
    "init_std": _range(lambda v: 0 < v < math.inf, "number", "above 0"),
    "l2": _range(lambda v: 0 <= v < math.inf, "number", "of 0 or more"),
    "dropout": _range(lambda v: 0 <= v < 1, "rate", "in [0, 1)"),
    "train_fraction": _range(lambda v: 0 < v <= 1, "fraction", "in (0, 1]"),
    "seed": _range(lambda v: 0 <= v < 2**63, "whole number", "of 0 or more"),
    "epochs": Range(lambda v: v >= 1, "1 or more", "1 or more"),
    "batch_size": Range(lambda v: v >= 1, "1 or more", "1 or more"),
    "min_learning_rate": _range(lambda v: 0 <= v < math.inf, "number", "of 0 or more"),
    "best_by": _one_of(BEST_BY),
    "initialisation": _one_of(INITIALISATIONS),
}
"""Hyperparameter -> its range, where that depends on no other."""


@dataclass(frozen=True)
class Hyperparameters:
    """Everything that decides the trained weights of one run, up to float rounding.

    Whole numbers given for float fields become floats and -0.0 becomes 0.0, so that equal settings have one canonical
    form and one run_id.
    Raises InputError, naming the field, for a value outside its range.
    """

    task: str
    """"mnist" or "ag_news"."""
    optimizer: str
    """"sgd", "sgd_momentum" (0.9), "adam" (0.9, 0.999, eps 1e-8) or "rmsprop" (alpha 0.99, eps 1e-8)."""
    learning_rate: float
    """Peak learning rate, above 0."""
    init_std: float
    """Standard deviation of the normal distribution of initial weights, which is cut at -2 and +2; above 0."""
    l2: float
    """Coupled weight decay (torch.optim's `weight_decay`), 0 or more; on biases too."""
    dropout: float
    """Dropout rate, in [0, 1)."""
    train_fraction: float
    """Share of the training data used, in (0, 1]."""
    seed: int
    """Names the order of the data, the crops and the dropout; with `shared`, the initialisation too."""
    epochs: int
    """Passes over the training data, 1 or more."""
    batch_size: int
    """Samples a step; a last incomplete batch is dropped."""
    warmup_epochs: int
    """Epochs of linear warm-up, 0 to `epochs`."""
    min_learning_rate: float
    """Where the cosine part of the schedule ends, 0 or more. Above `learning_rate` the rate rises to it."""
    best_by: str
    """Which accuracy chooses the "best" checkpoint: "test" or "validation" (a held-out part of the training data)."""
    initialisation: str
    """"per_run" (each run draws its own weights) or "shared" (one draw a seed and task, scaled)."""
    data_digest: str
    """SHA-256 (or a piece of it) of the prepared data that the run is trained on."""
    stream_version: int = STREAM_VERSION
    """Version of the random streams."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float and type(value) in (int, float):
                try:
                    object.__setattr__(self, field.name, value + 0.0)  # -0.0 becomes 0.0
                except OverflowError:
                    self._refuse(field.name, "a number below 1.8e308")
            elif type(value) is not field.type:
                self._refuse(field.name, f"a value of type {field.type.__name__}")  # type: ignore[union-attr]
        self._require("task", self.task in CLASSES, f"one of {', '.join(CLASSES)}")
        for name, allowed in RANGES.items():
            self._require(name, allowed.fits(getattr(self, name)), allowed.expected)
        self._require("warmup_epochs", 0 <= self.warmup_epochs <= self.epochs, f"0 to {self.epochs}, the epochs")

    def _require(self, field: str, fulfilled: bool, expected: str) -> None:
        if not fulfilled:
            self._refuse(field, expected)

    def _refuse(self, field: str, expected: str) -> None:
        raise InputError(f"{field}: found {getattr(self, field)!r}, expected {expected}")

    def to_dict(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def canonical_json(self) -> str:
        """Return the one JSON text of these values: sorted keys, no spaces, floats in shortest round-trip form."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def run_id(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json().encode()).hexdigest()[:16]
