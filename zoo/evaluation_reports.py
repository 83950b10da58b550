"""What `zoo evaluate` and `zoo rerun` found, as values, JSON and text."""

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass

from zoo.config import label_order

LOSS_TOLERANCE = 1e-3
"""Relative difference of a loss that rounding explains; absolute below a loss of 1."""
SHOWN_DISAGREEING = 20
"""Checkpoints that the text of a report names; its JSON names all."""


@dataclass(frozen=True)
class Comparison:
    """A checkpoint's recorded and newly measured test accuracy (fraction) and loss (nats; None: not recorded).

    examples: test examples by which the accuracies differ.
    """

    checkpoint_id: str
    label: str
    recorded_accuracy: float
    accuracy: float
    examples: int
    recorded_loss: float | None
    loss: float

    @property
    def loss_difference(self) -> float:
        """Difference of the losses, relative to the recorded one where that is above 1; 0 if none is recorded."""
        if self.recorded_loss is None:
            return 0.0
        return abs(self.loss - self.recorded_loss) / max(1.0, abs(self.recorded_loss))


@dataclass(frozen=True)
class EvaluationReport:
    """What an evaluation found.

    available: checkpoints of the task (after the filters), of which `comparisons` has those that were evaluated.
    tolerance: test examples by which an accuracy was allowed to differ.
    not_evaluated: why the others were not; "" where there are none.
    data: whether the data is known to be the one of the training.
    """

    task: str
    available: int
    comparisons: list[Comparison]
    tolerance: int
    engine: str
    recorded_engines: list[str]
    test_samples: int
    data: str
    not_evaluated: str
    seconds: float

    @property
    def disagreeing(self) -> list[Comparison]:
        """Comparisons whose accuracy or loss differs by more than rounding explains (NaN differs from everything)."""
        return [
            c for c in self.comparisons if not (c.examples <= self.tolerance and c.loss_difference <= LOSS_TOLERANCE)
        ]

    @property
    def identical(self) -> int:
        """Checkpoints with exactly the recorded accuracy."""
        return sum(c.examples == 0 for c in self.comparisons)

    @property
    def worst_examples(self) -> int:
        return max((c.examples for c in self.comparisons), default=0)

    @property
    def worst_loss(self) -> float:
        return max((c.loss_difference for c in self.comparisons), default=0.0)

    def to_json(self) -> str:
        summary = {
            "identical": self.identical,
            "worst_examples": self.worst_examples,
            "worst_loss": self.worst_loss,
            "disagreeing": [c.checkpoint_id for c in self.disagreeing],
        }
        return json.dumps(dataclasses.asdict(self) | summary, indent=1)

    def text(self) -> str:
        """Return totals, a table by epoch label, and the first checkpoints that disagree."""
        lines = [f"{self.task}: {len(self.comparisons)} of {self.available} checkpoints evaluated"]
        if self.not_evaluated:
            lines.append(f"not evaluated: {self.available - len(self.comparisons)}: {self.not_evaluated}")
        if not self.comparisons:
            return "\n".join(lines)
        lines[0] += (
            f" on {self.test_samples} test samples with engine {self.engine} "
            f"(recorded: {', '.join(self.recorded_engines)}), {self.data}"
        )
        lines.append(f"{'label':<8}{'checkpoints':>12}{'identical':>12}{'worst':>8}{'worst loss':>12}")
        counts = Counter(c.label for c in self.comparisons)
        for label in sorted(counts, key=label_order):
            of_label = [c for c in self.comparisons if c.label == label]
            identical, worst = sum(c.examples == 0 for c in of_label), max(c.examples for c in of_label)
            loss = max(c.loss_difference for c in of_label)
            lines.append(f"{label:<8}{counts[label]:>12}{identical:>12}{worst:>8}{loss:>12.1e}")
        disagreeing = self.disagreeing
        lines.append(f"disagreeing (more than {self.tolerance} examples, or loss): {len(disagreeing)}")
        lines += [
            f"  {c.checkpoint_id}: accuracy {c.accuracy:.4f}, recorded {c.recorded_accuracy:.4f}; "
            f"loss {c.loss:.6g}, recorded {'nothing' if c.recorded_loss is None else format(c.recorded_loss, '.6g')}"
            for c in disagreeing[:SHOWN_DISAGREEING]
        ]
        if len(disagreeing) > SHOWN_DISAGREEING:
            lines.append(f"  and {len(disagreeing) - SHOWN_DISAGREEING} more; --json names all")
        return "\n".join(lines)


@dataclass(frozen=True)
class LabelDifference:
    """A published checkpoint and its counterpart of the new training.

    weights: largest absolute difference of a weight; 0 if all bits are equal; NaN where the new run has none.
    """

    label: str
    weights: float
    recorded_epoch: int
    epoch: int
    recorded_accuracy: float
    accuracy: float


@dataclass(frozen=True)
class RerunReport:
    """What training a run again gave. diverged: the new run's weights became non-finite."""

    run_id: str
    task: str
    engine: str
    recorded_engine: str
    diverged: bool
    labels: list[LabelDifference]
    seconds: float

    @property
    def identical(self) -> bool:
        """Whether all weights are equal bit by bit."""
        return all(label.weights == 0 for label in self.labels)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self) | {"identical": self.identical}, indent=1)

    def text(self) -> str:
        """Return a table with a line a label."""
        lines = [
            f"run {self.run_id} ({self.task}) trained again with engine {self.engine} (recorded: "
            f"{self.recorded_engine}): {'bit-identical' if self.identical else 'different'}"
            f"{', diverged' if self.diverged else ''}",
            f"{'label':<8}{'largest difference':>20}{'epoch':>8}{'recorded':>10}{'accuracy':>10}{'recorded':>10}",
        ]
        lines += [
            f"{d.label:<8}{'none' if d.weights == 0 else format(d.weights, '.3g'):>20}{d.epoch:>8}"
            f"{d.recorded_epoch:>10}{d.accuracy:>10.4f}{d.recorded_accuracy:>10.4f}"
            for d in self.labels
        ]
        if not self.identical and self.engine != self.recorded_engine:
            lines.append("engines round differently, which training amplifies; --engine recorded gives equal weights")
        elif not self.identical:
            lines.append("equal weights are expected only on the kind of processor or GPU that trained the run")
        return "\n".join(lines)
