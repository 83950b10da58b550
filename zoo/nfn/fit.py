"""Training one network predictor: binary cross-entropy on the accuracy, Adam, and the epoch of the best validation tau.

The recipe is that of arXiv 2410.04209 (appendix on experiments); the paper's authors report the test tau of the last
epoch, while here the validation part chooses the epoch. Batches and every random number of an epoch follow from
(seed, epoch), so training that starts again at an epoch boundary gives the same predictor.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import kendalltau
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from generators.schedules import learning_rate
from generators.streams import permutation, stream_key
from zoo.errors import NFNError
from zoo.nfn.data import Splits
from zoo.nfn.predictors import NetworkPredictor

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. Raises NFNError, naming the field, for a value outside its range."""

    epochs: int = 50
    warmup_epochs: int = 10
    batch_size: int = 16
    learning_rate: float = 1e-3
    """Peak, after the linear warm-up."""
    min_learning_rate: float = 1e-5
    """Where the cosine ends."""

    def __post_init__(self) -> None:
        ranges = {
            "epochs": (self.epochs >= 1, "1 or more"),
            "warmup_epochs": (0 <= self.warmup_epochs <= self.epochs, f"0 to {self.epochs}, the epochs"),
            "batch_size": (self.batch_size >= 1, "1 or more"),
            "learning_rate": (0 < self.learning_rate < math.inf, "a number above 0"),
            "min_learning_rate": (0 <= self.min_learning_rate <= self.learning_rate, "0 to learning_rate"),
        }
        for name, (fulfilled, expected) in ranges.items():
            if not fulfilled:
                raise NFNError(f"{name}: found {getattr(self, name)!r}, expected {expected}")


PAPER = Recipe()
QUICK = Recipe(epochs=12, warmup_epochs=2)
"""For a first look and for demonstrations."""


@dataclass
class FitState:
    """Where training is, at an epoch boundary: everything that the rest of it depends on.

    history: a record an epoch: `epoch` (1-based), `loss` (mean over batches, nats), `validation_tau`.
    """

    epoch: int
    network: dict[str, Tensor]
    optimizer: dict[str, Any]
    best: dict[str, Tensor]
    best_epoch: int
    history: list[dict[str, float]] = field(default_factory=list)
    seconds: float = 0.0


def kendall_tau(predicted: np.ndarray, accuracy: np.ndarray) -> float:
    """Kendall's tau-b of finite predictions and accuracies; 0 for constant predictions, which rank nothing."""
    tau = float(kendalltau(predicted, accuracy).statistic)
    return 0.0 if math.isnan(tau) else tau


@contextmanager
def seeded(device: torch.device, *parts: str | int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of `device` by a named stream, and put them back afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(stream_key(*parts))  # torch.manual_seed would seed every GPU too
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(stream_key(*parts))
        yield


def fit_network(
    network: NetworkPredictor,
    splits: Splits,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    start: FitState | None = None,
    at_epoch: Callable[[FitState], None] | None = None,
    progress: bool = True,
) -> FitState:
    """Train and return the last state; its `best` is the state_dict of the epoch of highest validation tau.

    Args:
        network: moved to `device`; holds the best epoch's parameters afterwards.
        start: state to go on from.
        at_epoch: called with the state after every epoch.

    Raises:
        NFNError: the loss or a prediction is not finite.
    """
    inputs, targets = network.inputs(splits.train), splits.train.accuracy.float().to(device)
    held_out, names = network.inputs(splits.validation), splits.validation.names
    accuracy = splits.validation.accuracy.numpy()
    if start is None:
        network.fit_inputs(inputs)
    network.to(device)
    inputs = inputs.to(device)
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    state = start or FitState(0, {}, {}, {}, 0)
    if start is not None:
        network.load_state_dict(start.network)
        optimizer.load_state_dict(start.optimizer)
    with tqdm(total=recipe.epochs, initial=state.epoch, desc=network.name, unit="epoch", disable=not progress) as bar:
        for epoch in range(state.epoch, recipe.epochs):
            began = time.perf_counter()
            loss = _train_epoch(network, optimizer, inputs, targets, recipe, seed, epoch)
            tau = kendall_tau(predict_network(network, held_out, names), accuracy)
            state = _next_state(state, network, optimizer, loss, tau, time.perf_counter() - began)
            bar.update()
            bar.set_postfix(loss=f"{loss:.4f}", validation_tau=f"{tau:.3f}")
            if at_epoch is not None:
                at_epoch(state)
    network.load_state_dict(state.best)
    return state


def _train_epoch(
    network: NetworkPredictor,
    optimizer: torch.optim.Optimizer,
    inputs: Tensor,
    targets: Tensor,
    recipe: Recipe,
    seed: int,
    epoch: int,
) -> float:
    """Take one pass over the training part and return the mean of its losses."""
    rate = learning_rate(recipe.learning_rate, epoch, recipe.epochs, recipe.warmup_epochs, recipe.min_learning_rate)
    for group in optimizer.param_groups:
        group["lr"] = rate
    order = torch.from_numpy(permutation(stream_key("nfn-batches", seed, epoch), len(inputs))).to(inputs.device)
    network.train()
    losses = []
    with seeded(inputs.device, "nfn-epoch", seed, epoch):
        for rows in order.split(recipe.batch_size):
            loss = F.binary_cross_entropy_with_logits(network(inputs[rows]), targets[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return _finite_mean(torch.stack(losses), epoch, rate)


def _next_state(
    state: FitState,
    network: NetworkPredictor,
    optimizer: torch.optim.Optimizer,
    loss: float,
    tau: float,
    seconds: float,
) -> FitState:
    is_best = tau > max((record["validation_tau"] for record in state.history), default=-math.inf)
    epoch = state.epoch + 1
    return FitState(
        epoch=epoch,
        network=_copy(network),
        optimizer=optimizer.state_dict(),
        best=_copy(network) if is_best else state.best,
        best_epoch=epoch if is_best else state.best_epoch,
        history=[*state.history, {"epoch": epoch, "loss": loss, "validation_tau": tau}],
        seconds=state.seconds + seconds,
    )


def _copy(network: NetworkPredictor) -> dict[str, Tensor]:
    """The network's tensors as they are now: what `state_dict` returns changes with the network."""
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@torch.no_grad()
def predict_network(network: NetworkPredictor, inputs: Tensor, names: Sequence[str]) -> np.ndarray:
    """Return predicted accuracies, float32 [N], of `network.inputs(...)` of the checkpoints called `names`.

    Raises:
        NFNError: a prediction is not finite.
    """
    network.eval()
    device = next(network.parameters()).device
    parts = [network(rows.to(device)).sigmoid().cpu() for rows in inputs.split(EVALUATION_BATCH)]
    predicted = torch.cat(parts).numpy()
    broken = np.flatnonzero(~np.isfinite(predicted))
    if len(broken):
        raise NFNError(
            f"{names[broken[0]]}: found the prediction {predicted[broken[0]]} ({len(broken)} such of {len(predicted)}),"
            " expected a finite number; leave out checkpoints with huge weights"
        )
    return predicted


def _finite_mean(losses: Tensor, epoch: int, rate: float) -> float:
    broken = (~torch.isfinite(losses)).nonzero().flatten().tolist()
    if broken:
        raise NFNError(
            f"loss: found {losses[broken[0]].item()} in epoch {epoch + 1}, step {broken[0] + 1}, at learning rate "
            f"{rate:.2g}; expected a finite number; lower learning_rate, or leave out checkpoints with huge weights"
        )
    return losses.mean().item()
