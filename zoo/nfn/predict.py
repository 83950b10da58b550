"""Rank checkpoints by the accuracy that a trained predictor reads from their weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zoo.errors import NFNError
from zoo.nfn.data import WeightData, load_checkpoints, read_checkpoint_files
from zoo.nfn.fit import kendall_tau
from zoo.nfn.saved import load_predictor
from zoo.nfn.train import pick_device


@dataclass(frozen=True)
class Prediction:
    """One checkpoint: its name (checkpoint_id or file), predicted accuracy, and what its dataset says of it: the true
    accuracy and the split. None for files."""

    name: str
    predicted: float
    accuracy: float | None
    split: str | None = None


@dataclass(frozen=True)
class Ranking:
    """Predictions, best first, and Kendall's tau-b with the true accuracies where they are known and differ.

    tau: over all. test_tau: over the `test_checkpoints` of the dataset's test split alone; the others may have trained
    the predictor, if it comes from the same runs. resplit: the predictor was trained on splits of its own, so that
    checkpoints of the test split may have trained it too.
    """

    predictions: list[Prediction]
    tau: float | None
    test_tau: float | None = None
    test_checkpoints: int = 0
    resplit: bool = False


def predict(
    predictor: str | Path,
    *,
    checkpoints: Sequence[str | Path] = (),
    dataset: str | Path | None = None,
    epoch_label: str | None = None,
    filters: Sequence[str] = (),
    device: str = "auto",
) -> Ranking:
    """Rank checkpoints given as files, or those of a dataset.

    Args:
        predictor: folder that `train` wrote.
        checkpoints: safetensors files, one checkpoint each.
        dataset: a dataset folder or Hub repository, in place of files; checkpoints of the predictor's task.
        epoch_label: of the dataset's checkpoints; the label that the predictor was trained on if not given.
        filters: conditions on columns that the dataset's checkpoints fulfil; "split==validation" for one split's tau.

    Raises:
        NFNError: no checkpoints, both kinds, checkpoints that do not fit the predictor, or a prediction that is not
            finite.
    """
    if bool(checkpoints) == (dataset is not None):
        found = "files and a dataset" if checkpoints else "neither"
        raise NFNError(f"checkpoints: found {found}, expected either checkpoint files or a dataset")
    if checkpoints and (epoch_label or filters):
        raise NFNError("checkpoints: found files with an epoch label or filters, expected those with a dataset only")
    saved = load_predictor(predictor, pick_device(device))
    if dataset is None:
        data = read_checkpoint_files([Path(path) for path in checkpoints], saved.task)
    else:
        label = epoch_label or saved.config["epoch_label"]
        data = load_checkpoints(str(dataset), saved.task, label, tuple(filters))
    return rank(data, saved.predict(data), saved.config["resplit"])


def rank(data: WeightData, predicted: np.ndarray, resplit: bool = False) -> Ranking:
    """Sort predictions [N] for `data`, best first; equal ones by name. resplit: see Ranking."""
    known = "test_accuracy" in data.metadata.column_names
    accuracy: Sequence[float | None] = data.accuracy.tolist() if known else [None] * len(data)
    split = data.metadata["split"].to_pylist() if "split" in data.metadata.column_names else [None] * len(data)
    rows = [Prediction(*row) for row in zip(data.names, map(float, predicted), accuracy, split, strict=True)]
    ranked = sorted(rows, key=lambda row: (-row.predicted, row.name))
    if not known:
        return Ranking(ranked, None, resplit=resplit)
    test = np.array([name == "test" for name in split])
    true = data.accuracy.numpy()
    return Ranking(ranked, _tau(predicted, true), _tau(predicted[test], true[test]), int(test.sum()), resplit)


def _tau(predicted: np.ndarray, true: np.ndarray) -> float | None:
    return kendall_tau(predicted, true) if len(np.unique(true)) > 1 else None
