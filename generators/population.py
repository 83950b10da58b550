"""Training a population: runs of one optimizer, dropout, train fraction and seed, trained together as one program.

All runs of a population see the same batches, crops and dropout numbers; only learning rate, L2 and initial weights
differ. Nothing that a run computes depends on which others are beside it, beyond float rounding.

Dimensions: R run, P parameter, E epoch, S step, B sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from generators.engines.base import Batch, Engine
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from generators.initialisation import initial_weights
from generators.optimizers import Optimizer, make_optimizer
from generators.schedules import learning_rate
from generators.streams import STREAM_VERSION, integers, permutation, stream_key
from generators.tasks.data import CROP_PADDING, Split, TaskData

METRICS = (
    "train_loss",
    "train_accuracy",
    "validation_loss",
    "validation_accuracy",
    "test_loss",
    "test_accuracy",
)
HELD_OUT_SHARE = 1 / 12
"""Share of the training data held out where the best epoch is chosen by validation: 5,000 of MNIST's 60,000 images."""
PER_RUN_FIELDS = ("learning_rate", "init_std", "l2")
"""Hyperparameters in which the runs of one population may differ."""


@dataclass
class PopulationState:
    """A population at an epoch boundary: all that is needed to go on, and all results so far.

    weights: [R, P]; optimizer: the optimizer's tensors.
    metrics: name -> float64 [R, E + 1]; column e holds the value after e passes over the training data (losses in nats,
        accuracies as fractions), NaN where it was not measured or not finite. Training figures are means over the
        epoch's batches, in training mode.
    checkpoints: epoch label ("0", "25" ...) -> weights [R, P] at that epoch.
    best_epoch: int64 [R], the epoch >= 1 of highest accuracy, the earliest on a tie; 0 while there is none.
    diverged_epoch: int64 [R], the epoch in which a loss or a weight first was not finite; -1 where there is none.
        From then on the run's weights are NaN.
    """

    epoch: int
    weights: Tensor
    optimizer: dict[str, Tensor]
    metrics: dict[str, Tensor]
    best_epoch: Tensor
    best_weights: Tensor
    diverged_epoch: Tensor
    checkpoints: dict[str, Tensor] = field(default_factory=dict)

    def to_tensors(self) -> dict[str, Tensor]:
        """Return everything as named CPU tensors, for safetensors."""
        tensors = {name: getattr(self, name) for name in ("weights", "best_epoch", "best_weights", "diverged_epoch")}
        for group in ("optimizer", "metrics", "checkpoints"):
            tensors |= {f"{group}.{name}": tensor for name, tensor in getattr(self, group).items()}
        tensors["epoch"] = torch.tensor(self.epoch)
        return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], device: torch.device) -> "PopulationState":
        """Inverse of `to_tensors`."""
        groups: dict[str, dict[str, Tensor]] = {"optimizer": {}, "metrics": {}, "checkpoints": {}}
        plain = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            if rest:
                # A step count stays on the CPU, where reading it does not wait for the device.
                on_device = group == "optimizer" and tensor.dim() > 0
                groups[group][rest] = tensor.to(device, copy=True) if on_device else tensor.clone()
            elif name != "epoch":
                plain[name] = tensor.to(device, copy=True)
        return cls(epoch=int(tensors["epoch"]), **plain, **groups)  # type: ignore[arg-type]

    def labelled(self, label: str) -> Tensor:
        """Return the weights [R, P] of an epoch label: a saved epoch or "best"."""
        return self.best_weights if label == "best" else self.checkpoints[label]

    def label_epochs(self, label: str) -> Tensor:
        """Return the epoch of a label for every run, int64 [R]."""
        return self.best_epoch.cpu() if label == "best" else torch.full_like(self.best_epoch.cpu(), int(label))


def train_population(
    runs: Sequence[Hyperparameters],
    engine: Engine,
    save_epochs: Sequence[int] = (),
    state: PopulationState | None = None,
) -> Iterator[PopulationState]:
    """Train and yield the state after every epoch, first of all epoch 0 (the initialisation).

    The yielded object is the live state: save it before asking for the next one.

    Args:
        runs: R runs that differ at most in PER_RUN_FIELDS.
        engine: made for the task's data.
        save_epochs: epochs whose weights are kept in `checkpoints`.
        state: where to start again; then the first yield is the epoch after it.

    Raises:
        InputError: the runs do not form a population or have other streams than this version's, the training data has
            less than one batch, or there is nothing to validate or test on.
    """
    recipe = _common_recipe(runs)
    train, validation = split_training_data(recipe, engine.data)
    steps = len(train) // recipe.batch_size
    if steps == 0:
        raise InputError(
            f"batch_size: found {recipe.batch_size}, expected at most {len(train)}, the training samples of "
            f"train_fraction {recipe.train_fraction}; lower batch_size, raise train_fraction or use more data"
        )
    for name, split in (("validation", validation), ("test", engine.data.test)):
        if split is not None and len(split) == 0:
            raise InputError(f"{name} samples: found 0, expected 1 or more; use more data")
    l2 = torch.tensor([[run.l2] for run in runs], dtype=engine.dtype, device=engine.device)
    if state is None:
        state = _initial_state(runs, engine)
        optimizer = make_optimizer(recipe.optimizer, state.weights, l2)
        state.optimizer = optimizer.state
        _measure(state, recipe, engine, validation)
        _keep(state, save_epochs)
        yield state
    else:
        optimizer = make_optimizer(recipe.optimizer, state.weights, l2)
        optimizer.state = state.optimizer
    for epoch in range(state.epoch, recipe.epochs):
        rates = [learning_rate(r.learning_rate, epoch, r.epochs, r.warmup_epochs, r.min_learning_rate) for r in runs]
        column = torch.tensor(rates, dtype=engine.dtype, device=engine.device)[:, None]
        loss, accuracy = _train_epoch(state.weights, optimizer, column, recipe, engine, train, epoch, steps)
        state.epoch = epoch + 1
        state.metrics["train_loss"][:, state.epoch] = loss.cpu()
        state.metrics["train_accuracy"][:, state.epoch] = accuracy.cpu()
        _measure(state, recipe, engine, validation)
        _keep(state, save_epochs)
        yield state


def split_training_data(recipe: Hyperparameters, data: TaskData) -> tuple[Tensor, Split | None]:
    """Return the rows of the training split to train on, int64, and the held-out samples (None with best_by "test").

    The held-out part is fixed for a task. The subset of a train fraction is the head of one list, so that fractions
    nest: MNIST a permutation from the seed, AG News the file's own order.
    """
    rows = np.arange(len(data.train))
    validation = None
    if recipe.best_by == "validation":
        held_out = np.sort(
            permutation(stream_key("held_out", recipe.task), len(rows))[: round(len(rows) * HELD_OUT_SHARE)]
        )
        validation = data.train.select(torch.from_numpy(held_out).to(data.train.labels.device))
        rows = np.setdiff1d(rows, held_out)
    if recipe.task == "mnist":
        rows = rows[permutation(stream_key("subset", recipe.seed, recipe.task), len(rows))]
    return torch.from_numpy(rows[: round(recipe.train_fraction * len(rows))]), validation


def epoch_batches(recipe: Hyperparameters, train: Tensor, epoch: int, steps: int) -> tuple[Tensor, Tensor | None]:
    """Return the rows of each step's batch, int64 [S, B], and for MNIST their crops, int64 [S, B, 2]."""
    used = steps * recipe.batch_size
    order = permutation(stream_key("order", recipe.seed, recipe.task, epoch), len(train))[:used]
    indices = train[torch.from_numpy(order)].view(steps, recipe.batch_size)
    if recipe.task != "mnist":
        return indices, None
    offsets = integers(stream_key("crops", recipe.seed, recipe.task, epoch), 2 * used, 2 * CROP_PADDING + 1)
    return indices, torch.from_numpy(offsets).view(steps, recipe.batch_size, 2)


def _train_epoch(
    weights: Tensor,
    optimizer: Optimizer,
    rates: Tensor,
    recipe: Hyperparameters,
    engine: Engine,
    train: Tensor,
    epoch: int,
    steps: int,
) -> tuple[Tensor, Tensor]:
    """Update `weights` over one pass; return mean loss and accuracy over the batches, float64 [R]."""
    indices, crops = epoch_batches(recipe, train, epoch, steps)
    indices = indices.to(engine.device)
    crops = None if crops is None else crops.to(engine.device)
    loss = torch.zeros(len(weights), dtype=torch.float64, device=engine.device)
    correct = torch.zeros(len(weights), dtype=torch.int64, device=engine.device)
    for step in range(steps):
        key = stream_key("dropout", recipe.seed, recipe.task, epoch, step)
        batch = Batch(indices[step], None if crops is None else crops[step], recipe.dropout, key)
        result = engine.train_step(weights, batch)
        loss += result.loss
        correct += result.correct
        optimizer.step(weights, result.gradient, rates)
    return loss / steps, correct.double() / (steps * recipe.batch_size)


def _initial_state(runs: Sequence[Hyperparameters], engine: Engine) -> PopulationState:
    weights = torch.stack([initial_weights(run) for run in runs]).to(engine.device, engine.dtype)
    shape = (len(runs), runs[0].epochs + 1)
    return PopulationState(
        epoch=0,
        weights=weights,
        optimizer={},
        metrics={name: torch.full(shape, torch.nan, dtype=torch.float64) for name in METRICS},
        best_epoch=torch.zeros(len(runs), dtype=torch.int64, device=engine.device),
        best_weights=weights.clone(),
        diverged_epoch=torch.full((len(runs),), -1, device=engine.device),
    )


def _measure(state: PopulationState, recipe: Hyperparameters, engine: Engine, validation: Split | None) -> None:
    """Evaluate, mark runs that diverged in this epoch, and update the best epoch."""
    losses = [state.metrics["train_loss"][:, state.epoch]] if state.epoch > 0 else []
    for name, split in (("validation", validation), ("test", engine.data.test)):
        if split is not None:
            result = engine.evaluate(state.weights, split)
            losses.append(result.loss.cpu())
            state.metrics[f"{name}_loss"][:, state.epoch] = losses[-1]
            state.metrics[f"{name}_accuracy"][:, state.epoch] = result.accuracy.cpu()
    finite = torch.isfinite(torch.stack(losses)).all(dim=0)
    finite &= torch.isfinite(state.weights).all(dim=1).cpu()
    for metric in state.metrics.values():
        metric[~finite, state.epoch] = torch.nan
    finite = finite.to(engine.device)
    state.diverged_epoch[~finite & (state.diverged_epoch < 0)] = state.epoch
    state.weights[~finite] = torch.nan
    if state.epoch > 0:
        scores = state.metrics[f"{recipe.best_by}_accuracy"]
        so_far = scores[:, 1 : state.epoch].nan_to_num(-1).max(dim=1).values if state.epoch > 1 else torch.tensor(-1.0)
        better = (scores[:, state.epoch].nan_to_num(-1) > so_far).to(engine.device)
        state.best_epoch[better] = state.epoch
        state.best_weights[better] = state.weights[better]


def _keep(state: PopulationState, save_epochs: Sequence[int]) -> None:
    if state.epoch in save_epochs:
        state.checkpoints[str(state.epoch)] = state.weights.cpu().clone()


def _common_recipe(runs: Sequence[Hyperparameters]) -> Hyperparameters:
    """Return the first run, after checking that the others share what a population must share."""
    first = runs[0]
    for name, value in first.to_dict().items():
        others = {getattr(run, name) for run in runs} - {value}
        if name not in PER_RUN_FIELDS and others:
            raise InputError(f"{name}: found {value!r} and {others.pop()!r}, expected one value in a population")
    if first.stream_version != STREAM_VERSION:
        raise InputError(
            f"stream_version: found {first.stream_version}, expected {STREAM_VERSION}; "
            f"use the version of this package that these runs were planned with"
        )
    return first
