"""What came out of a training, and the JSON record of it: {"config": what decided it, "result": a TrainingResult}."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from zoo.errors import NFNError

FEW_TEST_CHECKPOINTS = 30
"""Kendall's tau of a random ranking of so many has a standard deviation of 0.13."""


@dataclass(frozen=True)
class TrainingResult:
    """What came out of a training.

    parameters: trained parameters. checkpoints: number of training, validation and test checkpoints. validation_tau,
    test_tau: Kendall's tau-b of predicted and true accuracy. best_epoch: 1-based, None for trees. history: a record
    an epoch (networks). seconds: of fitting. predictions: checkpoint_id, accuracy, predicted, of the test part.
    """

    parameters: int
    checkpoints: dict[str, int]
    validation_tau: float
    test_tau: float
    best_epoch: int | None
    seconds: float
    history: list[dict[str, float]]
    predictions: list[dict[str, Any]]

    @property
    def is_constant(self) -> bool:
        """Whether one value is predicted for all, which ranks nothing: tau is undefined, and 0 here."""
        return len({row["predicted"] for row in self.predictions}) == 1

    def doubts(self) -> list[str]:
        """Return why its tau says little, a line a reason."""
        lines = []
        if self.is_constant:
            lines.append(
                "predicts one value for all, tau is undefined and given as 0: too few checkpoints to learn from"
            )
        if self.checkpoints["test"] < FEW_TEST_CHECKPOINTS:
            lines.append(f"{self.checkpoints['test']} test checkpoints: Kendall's tau is noisy")
        return lines


def read_record(path: Path, advice: str) -> dict[str, Any] | None:
    """Return the record in a file, None if there is no file.

    Args:
        advice: what to do about a file that is none.

    Raises:
        NFNError: it is damaged, or of another version.
    """
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8
        raise NFNError(f"{path}: found no JSON ({error}), expected the record of a training; {advice}") from error
    for part in ("config", "result"):
        if not isinstance(record, dict) or not isinstance(record.get(part), dict):
            raise NFNError(f"{path}: found no {part}, expected the record of a training; {advice}")
    names, found = [field.name for field in fields(TrainingResult)], record["result"]
    if set(found) != set(names):
        raise NFNError(f"{path}: result: found {', '.join(found) or 'nothing'}, expected {', '.join(names)}; {advice}")
    return record


def require_same(path: Path, found: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise NFNError where a record was made with another configuration than `config` or on other checkpoints."""
    expected = json.loads(json.dumps(config))
    for name in expected:
        if found.get(name) != expected[name]:
            raise NFNError(
                f"{path}: {name}: found {found.get(name)!r}, expected {expected[name]!r}; choose another folder"
            )
