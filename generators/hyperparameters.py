"""The hyperparameters of one run, and the name that follows from them."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

from generators.architecture import CLASSES
from generators.errors import InputError
from generators.streams import STREAM_VERSION

OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "rmsprop")
BEST_BY = ("test", "validation")
INITIALISATIONS = ("per_run", "shared")


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
        self._require("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        self._require("learning_rate", 0 < self.learning_rate < math.inf, "a number above 0")
        self._require("init_std", 0 < self.init_std < math.inf, "a number above 0")
        self._require("l2", 0 <= self.l2 < math.inf, "a number of 0 or more")
        self._require("dropout", 0 <= self.dropout < 1, "a rate in [0, 1)")
        self._require("train_fraction", 0 < self.train_fraction <= 1, "a fraction in (0, 1]")
        self._require("seed", 0 <= self.seed < 2**63, "a whole number of 0 or more")
        self._require("epochs", self.epochs >= 1, "1 or more")
        self._require("batch_size", self.batch_size >= 1, "1 or more")
        self._require("warmup_epochs", 0 <= self.warmup_epochs <= self.epochs, f"0 to {self.epochs}, the epochs")
        self._require("min_learning_rate", 0 <= self.min_learning_rate < math.inf, "a number of 0 or more")
        self._require("best_by", self.best_by in BEST_BY, f"one of {', '.join(BEST_BY)}")
        self._require("initialisation", self.initialisation in INITIALISATIONS, f"one of {', '.join(INITIALISATIONS)}")

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
