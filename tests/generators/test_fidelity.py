"""Populations against the usual way: one nn.Module, torch.optim, torch's schedulers, one run at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR
from torchvision.transforms import functional as vision

from generators.architecture import SmallTransformer, flatten, unflatten
from generators.engines.torch_engine import TorchEngine
from generators.hyperparameters import OPTIMIZERS, Hyperparameters
from generators.initialisation import initial_weights
from generators.population import PopulationState, epoch_batches, split_training_data
from generators.streams import dropout_numbers, stream_key
from generators.tasks.data import Split, TaskData
from generators.tasks.mnist import MNISTSource

CPU = torch.device("cpu")
LEARNING_RATES = {"sgd": 7e-2, "sgd_momentum": 1e-2, "adam": 3e-3, "rmsprop": 1e-3}


@dataclass
class PlainResult:
    """Weights [P] after training, and metrics of epochs 1 to E."""

    weights: Tensor
    train_loss: list[float]
    test_loss: list[float]
    test_accuracy: list[float]


def plain_training(run: Hyperparameters, data: TaskData, threshold: int = 0) -> PlainResult:
    """Train one run in float64 without any of our engine, optimizers, schedule, crop or scaling.

    Order and windows come from the run's streams; dropout from its numbers: below `threshold` a unit is dropped.
    """
    vectors = None if data.word_vectors is None else data.word_vectors.double()
    model = SmallTransformer(run.task, vectors, max_tokens=data.max_tokens).double()
    model.load_tensors(unflatten(run.task, initial_weights(run).double()))
    optimizer = make_torch_optimizer(run, model)
    warmup = LinearLR(optimizer, start_factor=1 / run.warmup_epochs, total_iters=run.warmup_epochs - 1)
    cosine = CosineAnnealingLR(optimizer, T_max=run.epochs - run.warmup_epochs, eta_min=run.min_learning_rate)
    train, _ = split_training_data(run, data)
    steps = len(train) // run.batch_size
    result = PlainResult(torch.empty(0), [], [], [])
    for epoch in range(run.epochs):
        indices, windows = epoch_batches(run, train, epoch, steps)
        losses = []
        for step in range(steps):
            rows = indices[step]
            inputs = images(data.train, rows, windows[step]) if windows is not None else data.train.inputs[rows]
            lengths = None if data.train.lengths is None else data.train.lengths[rows]
            key = stream_key("dropout", run.seed, run.task, epoch, step)
            masks = dropout_masks(key, len(rows), data.max_tokens, threshold) if run.dropout else None
            loss = F.cross_entropy(model(inputs, lengths, masks), data.train.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        (warmup if epoch < run.warmup_epochs else cosine).step()
        result.train_loss.append(sum(losses) / steps)
        test_loss, test_accuracy = plain_evaluation(model, data.test)
        result.test_loss.append(test_loss)
        result.test_accuracy.append(test_accuracy)
    result.weights = flatten(run.task, {name: p.detach() for name, p in model.named_parameters()})
    return result


def make_torch_optimizer(run: Hyperparameters, model: SmallTransformer) -> torch.optim.Optimizer:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if run.optimizer in ("sgd", "sgd_momentum"):
        momentum = 0.9 if run.optimizer == "sgd_momentum" else 0.0
        return torch.optim.SGD(parameters, lr=run.learning_rate, momentum=momentum, weight_decay=run.l2)
    if run.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=run.learning_rate, weight_decay=run.l2)
    return torch.optim.RMSprop(parameters, lr=run.learning_rate, weight_decay=run.l2)


def images(split: Split, rows: Tensor, windows: Tensor | None) -> Tensor:
    """Inputs as torchvision makes them, image by image, in float64."""
    made = []
    for i, row in enumerate(rows):
        image = split.inputs[row][None]
        if windows is not None:
            top, left = windows[i].tolist()
            image = vision.crop(vision.pad(image, [2, 2, 2, 2]), top, left, 28, 28)
        made.append(vision.normalize(image.double() / 255, [0.5], [0.5]))
    return torch.stack(made)


def dropout_masks(key: int, samples: int, tokens: int, threshold: int) -> list[Tensor]:
    numbers = dropout_numbers(key, samples, 5, tokens, 32, tokens, CPU)
    return [(site >= threshold).double() / (1 - threshold / 65536) for site in numbers]


def plain_evaluation(model: SmallTransformer, split: Split) -> tuple[float, float]:
    inputs = images(split, torch.arange(len(split)), None) if split.lengths is None else split.inputs
    with torch.no_grad():
        logits = model.eval()(inputs, split.lengths)
    model.train()
    accuracy = (logits.argmax(dim=1) == split.labels).double().mean().item()
    return F.cross_entropy(logits, split.labels).item(), accuracy


def assert_same_training(state: PopulationState, run: Hyperparameters, expected: PlainResult) -> None:
    """Weights and their way from the start agree to 1e-6 relative, metrics too, and training did something."""
    start = initial_weights(run).double()
    way = (expected.weights - start).norm()
    assert way > 0.01 * start.norm()
    assert (state.weights[0] - expected.weights).norm() < 1e-6 * way
    torch.testing.assert_close(state.weights[0], expected.weights, rtol=1e-6, atol=1e-8)
    for name in ("train_loss", "test_loss", "test_accuracy"):
        assert state.metrics[name][0, 1:].tolist() == pytest.approx(getattr(expected, name), rel=1e-6), name
    accuracies = expected.test_accuracy
    assert state.best_epoch.tolist() == [accuracies.index(max(accuracies)) + 1]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dropout", "threshold"), [(0.0, 0), (0.15, 9830)])
def test_one_run_equals_a_plain_loop(digits: TaskData, make_run, train, optimizer: str, dropout: float, threshold: int):
    run = make_run(
        optimizer=optimizer, learning_rate=LEARNING_RATES[optimizer], l2=1e-2, dropout=dropout, train_fraction=0.7
    )
    state = train([run], TorchEngine(digits, dtype=torch.float64))
    assert_same_training(state, run, plain_training(run, digits, threshold))


@pytest.mark.parametrize(("dropout", "threshold"), [(0.0, 0), (0.2, 13107)])
def test_one_run_on_texts_equals_a_plain_loop(texts: TaskData, make_run, train, dropout: float, threshold: int):
    # Batches of four are often shorter than 12 tokens: the engine cuts them, the plain loop does not.
    run = make_run(task="ag_news", dropout=dropout, train_fraction=0.5, batch_size=4)
    train_rows, _ = split_training_data(run, texts)
    assert texts.train.lengths[epoch_batches(run, train_rows, 0, 15)[0]].max(dim=1).values.min() < 12
    state = train([run], TorchEngine(texts, dtype=torch.float64))
    assert_same_training(state, run, plain_training(run, texts, threshold))


@pytest.fixture(scope="module")
def real_digits(test_data: Path) -> TaskData:
    return MNISTSource(train_limit=600, test_limit=200).load(test_data / "mnist")


def test_one_run_on_real_digits_equals_a_plain_loop(real_digits: TaskData, make_run, train):
    run = make_run(batch_size=128, train_fraction=0.9, dropout=0.1, init_std=0.3, epochs=3, warmup_epochs=1)
    state = train([run], TorchEngine(real_digits, dtype=torch.float64))
    assert_same_training(state, run, plain_training(run, real_digits, 6554))


# Grouping


def mixed_runs(make_run, count: int, rates: Sequence[float], **changes) -> list[Hyperparameters]:
    """Runs whose rates, scales and decays go through their lists at different paces."""
    stds, decays = (0.1, 0.2, 0.3), (0.0, 1e-4, 1e-2, 1e-6)
    return [
        make_run(
            learning_rate=rates[i % len(rates)] * (1 + i / count), init_std=stds[i % 3], l2=decays[i % 4], **changes
        )
        for i in range(count)
    ]


GROUPS = [*((optimizer, [8]) for optimizer in OPTIMIZERS if optimizer != "adam"), ("adam", [8, 64, 200])]


@pytest.mark.parametrize(("optimizer", "sizes"), GROUPS)
def test_grouping_changes_nothing_beyond_rounding_in_float64(
    digits: TaskData, make_run, train, optimizer: str, sizes: list[int]
):
    data = TaskData("mnist", digits.train.head(4), digits.test.head(4))
    recipe = {"optimizer": optimizer, "dropout": 0.1, "batch_size": 2, "epochs": 2, "warmup_epochs": 1}
    runs = mixed_runs(make_run, sizes[-1], (1e-3, 1e-2, 5e-2), **recipe)
    alone = train([runs[5]], TorchEngine(data, dtype=torch.float64))
    assert (alone.weights[0] - initial_weights(runs[5])).norm() > 1e-2
    for size in sizes:
        # All runs go through the network in one stacked call, as on a GPU.
        together = train(runs[:size], TorchEngine(data, dtype=torch.float64, runs_at_once=size))
        torch.testing.assert_close(together.weights[5], alone.weights[0], rtol=1e-9, atol=1e-9)
        for name in ("train_loss", "test_loss", "test_accuracy"):
            found, expected = together.metrics[name][5], alone.metrics[name][0]
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize(("optimizer", "sizes"), GROUPS)
def test_grouping_in_float32_changes_losses_by_less_than_a_thousandth(
    digits: TaskData, make_run, train, optimizer: str, sizes: list[int]
):
    data = TaskData("mnist", digits.train.head(24), digits.test.head(20))
    recipe = {"optimizer": optimizer, "dropout": 0.1, "batch_size": 8, "epochs": 2, "warmup_epochs": 1}
    runs = mixed_runs(make_run, sizes[-1], (2.5e-4, 5e-4), **recipe)
    assert 9e-4 < max(run.learning_rate for run in runs) <= 1e-3
    alone = train([runs[5]], TorchEngine(data))
    for size in sizes[:2]:
        together = train(runs[:size], TorchEngine(data, runs_at_once=size))
        for name in ("train_loss", "test_loss"):
            found, expected = together.metrics[name][5], alone.metrics[name][0]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-3, equal_nan=True)


def test_on_a_cpu_company_changes_no_bit(digits: TaskData, make_run, train):
    """The default on a CPU takes runs one after the other, so that there is not even rounding."""
    data = TaskData("mnist", digits.train.head(60), digits.test)
    runs = mixed_runs(make_run, 8, (1e-3, 3e-2), dropout=0.1, batch_size=20, epochs=2)
    alone, together = train([runs[5]], TorchEngine(data)), train(runs, TorchEngine(data))
    assert torch.equal(together.weights[5], alone.weights[0])
    assert torch.equal(together.metrics["test_loss"][5], alone.metrics["test_loss"][0])
