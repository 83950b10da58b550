"""Train a predictor on a zoo: the validation part chooses the epoch, the test part is reported, the predictor kept."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from zoo.errors import NFNError
from zoo.nfn.data import Splits, WeightData, load_checkpoints, settle_components, split
from zoo.nfn.fit import PAPER, FitState, Recipe, fit_network, kendall_tau, predict_network, seeded
from zoo.nfn.predictors import NetworkPredictor, Predictor, TreePredictor, make_predictor, predictor_class
from zoo.nfn.record import TrainingResult
from zoo.nfn.saved import finished_result, load_state, save_predictor, save_state


@dataclass(frozen=True)
class Setting:
    """What decides a training, beside the checkpoints: which predictor, on which part of the zoo, how.

    Raises NFNError for an unknown task, predictor or component, or a threshold outside [0, 1).
    """

    task: str
    epoch_label: str
    predictor: str = "transformer-nfn"
    components: tuple[str, ...] | None = None
    """None becomes all components of the task."""
    options: Mapping[str, int] = field(default_factory=dict)
    """Options of the predictor, for example {"channels": 3} of transformer-nfn."""
    seed: int = 0
    """Names the initial parameters, the batches and, with `resplit`, the split."""
    threshold: float = 0.0
    """Smallest test accuracy of a checkpoint that takes part, a fraction in [0, 1)."""
    filters: tuple[str, ...] = ()
    """Conditions on columns that a checkpoint fulfils to take part, for example "initialisation==shared"."""
    resplit: bool = False
    """Split 70/15/15 anew by `seed`, after the filter (the paper's protocol), in place of the zoo's pinned splits."""
    recipe: Recipe = PAPER

    def __post_init__(self) -> None:
        predictor_class(self.predictor)
        object.__setattr__(self, "components", settle_components(self.task, self.components))
        if not 0 <= self.threshold < 1:
            raise NFNError(f"threshold: found {self.threshold!r}, expected a fraction in [0, 1)")


def train(
    dataset: str | Path,
    *,
    task: str,
    epoch_label: str,
    predictor: str = "transformer-nfn",
    components: Sequence[str] | None = None,
    options: Mapping[str, int] | None = None,
    seed: int = 0,
    threshold: float = 0.0,
    filters: Sequence[str] = (),
    resplit: bool = False,
    recipe: Recipe | None = None,
    device: str = "auto",
    out: str | Path | None = None,
    progress: bool = True,
) -> TrainingResult:
    """Train a predictor of test accuracy on one checkpoint a run; where its tau says little, a line on stderr says why.

    Args:
        dataset: a dataset folder or a Hub repository.
        task, epoch_label, predictor, components, options, seed, threshold, filters, resplit: see Setting.
        recipe: of networks; the paper's if not given.
        device: "auto" (a GPU if there is one), "cpu", "cuda" ...
        out: folder for the predictor (predictor.safetensors and predictor.json). Training goes on from the last epoch
            that it holds, and a finished one is returned at once.
        progress: show a bar on stderr.

    Raises:
        NFNError: settings, data or `out` do not fit, or the loss or a prediction is not finite.
    """
    setting = Setting(
        task=task,
        epoch_label=epoch_label,
        predictor=predictor,
        components=None if components is None else tuple(components),
        options=dict(options or {}),
        seed=seed,
        threshold=threshold,
        filters=tuple(filters),
        resplit=resplit,
        recipe=recipe or PAPER,
    )
    splits = load_splits(dataset, setting)
    result = train_on(splits, setting, device, None if out is None else Path(out), progress)
    for line in result.doubts():
        tqdm.write(f"{predictor}: {line}", file=sys.stderr)
    return result


def load_splits(dataset: str | Path, setting: Setting) -> Splits:
    """Read, filter and split the checkpoints that a setting asks for."""
    return split_for(setting, load_checkpoints(str(dataset), setting.task, setting.epoch_label, setting.filters))


def split_for(setting: Setting, data: WeightData) -> Splits:
    """Split the checkpoints of a setting's label and filters, without those below its threshold."""
    splits = split(data.at_least(setting.threshold), setting.seed if setting.resplit else None)
    splits.require_rankable()
    return splits


def train_on(
    splits: Splits, setting: Setting, device: str = "auto", out: Path | None = None, progress: bool = True
) -> TrainingResult:
    """Train on checkpoints that are in memory; see `train`."""
    config = asdict(setting) | {"data": [part.digest() for part in (splits.train, splits.validation, splits.test)]}
    finished = None if out is None else finished_result(out, config)
    if finished is not None:
        return finished
    with seeded(torch.device("cpu"), "nfn-init", setting.seed):
        predictor = make_predictor(setting.predictor, setting.task, setting.components, **setting.options)
    if isinstance(predictor, NetworkPredictor):
        result = _train_network(predictor, splits, setting, config, pick_device(device), out, progress)
    else:
        result = _train_trees(predictor, splits, setting)
    if out is not None:
        save_predictor(out, predictor, config, asdict(result))
    return result


def _train_network(
    network: NetworkPredictor,
    splits: Splits,
    setting: Setting,
    config: dict[str, Any],
    device: torch.device,
    out: Path | None,
    progress: bool,
) -> TrainingResult:
    start = None if out is None else load_state(out, config)

    def keep(state: FitState) -> None:
        if out is not None:
            save_state(out, config, state)

    state = fit_network(network, splits, setting.recipe, setting.seed, device, start, keep, progress)
    best = state.history[state.best_epoch - 1]
    return _result(
        network,
        splits,
        predict_network(network, network.inputs(splits.test), splits.test.names),
        best["validation_tau"],
        state.seconds,
        state,
    )


def _train_trees(trees: TreePredictor, splits: Splits, setting: Setting) -> TrainingResult:
    began = time.perf_counter()
    trees.fit(trees.inputs(splits.train).numpy(), splits.train.accuracy.numpy(), setting.seed)
    seconds = time.perf_counter() - began
    validation, test = (trees.predict(trees.inputs(part).numpy()) for part in (splits.validation, splits.test))
    return _result(trees, splits, test, kendall_tau(validation, splits.validation.accuracy.numpy()), seconds)


def _result(
    predictor: Predictor,
    splits: Splits,
    predicted: np.ndarray,
    validation_tau: float,
    seconds: float,
    state: FitState | None = None,
) -> TrainingResult:
    accuracy = splits.test.accuracy.numpy()
    return TrainingResult(
        parameters=predictor.parameters_trained,
        checkpoints={name: len(getattr(splits, name)) for name in ("train", "validation", "test")},
        validation_tau=validation_tau,
        test_tau=kendall_tau(predicted, accuracy),
        best_epoch=state.best_epoch if state else None,
        seconds=seconds,
        history=state.history if state else [],
        predictions=[
            {"checkpoint_id": name, "accuracy": float(truth), "predicted": float(value)}
            for name, truth, value in zip(splits.test.names, accuracy, predicted, strict=True)
        ],
    )


def pick_device(device: str) -> torch.device:
    """Turn "auto" into the GPU if there is one. Raises NFNError for a device that torch does not have."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise NFNError(f"device: found {device!r}, which torch cannot use here; expected auto, cpu or cuda") from error
