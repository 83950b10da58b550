"""Populations: what they measure, what they keep, who is trained on what, and that they can start again."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from generators.architecture import parameter_count
from generators.engines.base import Batch, Evaluation, StepResult
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.hyperparameters import OPTIMIZERS, Hyperparameters
from generators.initialisation import initial_weights
from generators.population import (
    METRICS,
    PopulationState,
    epoch_batches,
    split_training_data,
    train_population,
)
from generators.streams import permutation, stream_key
from generators.tasks.data import Split, TaskData

NAN = float("nan")


class ScriptedEngine:
    """An engine that computes nothing: it answers evaluations from a script and records what it is asked.

    accuracies: [R][E + 1] of the split that chooses the best epoch; losses likewise, 1.0 where not given.
    """

    name = "scripted"
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self,
        data: TaskData,
        accuracies: Sequence[Sequence[float]] = (),
        losses: Sequence[Sequence[float]] | None = None,
        step_losses: Sequence[float] = (),
    ) -> None:
        self.data = data
        self.accuracies = torch.tensor(accuracies, dtype=torch.float64)
        self.losses = torch.ones_like(self.accuracies) if losses is None else torch.tensor(losses, dtype=torch.float64)
        self.step_losses = list(step_losses)
        self.batches: list[Batch] = []
        self.validation: list[Split] = []
        self.epoch = -1

    def train_step(self, weights: Tensor, batch: Batch) -> StepResult:
        self.batches.append(batch)
        loss = self.step_losses.pop(0) if self.step_losses else 1.0
        correct = torch.arange(len(weights)) + 1
        return StepResult(torch.full((len(weights),), loss), correct, torch.ones_like(weights))

    def logits(self, weights: Tensor, split: Split) -> Tensor:
        raise NotImplementedError

    def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
        if split is not self.data.test:
            self.validation.append(split)
            return Evaluation(torch.ones(len(weights)).double(), torch.zeros(len(weights)).double())
        self.epoch += 1
        if not self.accuracies.numel():
            return Evaluation(torch.ones(len(weights)).double(), torch.zeros(len(weights)).double())
        return Evaluation(self.losses[:, self.epoch], self.accuracies[:, self.epoch])


def through_safetensors(state: PopulationState) -> PopulationState:
    return PopulationState.from_tensors(load(save(state.to_tensors())), torch.device("cpu"))


def state_bytes(state: PopulationState) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.to_tensors().items()}


def training_batches(runs: Sequence[Hyperparameters], data: TaskData) -> list[Batch]:
    engine = ScriptedEngine(data)
    list(train_population(runs, engine))
    return engine.batches


def all_mnist() -> TaskData:
    """As many images as MNIST has, one and the same, without their memory."""
    images, labels = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(60_000, dtype=torch.int64)
    return TaskData("mnist", Split(images.expand(60_000, 28, 28), labels), Split(images, labels[:1]))


# What is measured


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [
        ([0.1, 0.2, 0.5, 0.4, 0.3], 2),
        ([0.9, 0.2, 0.5, 0.4, 0.3], 2),  # the initialisation is never the best
        ([0.1, 0.5, 0.5, 0.4, 0.5], 1),  # the earliest on a tie
        ([0.1, 0.3, 0.4, 0.5, 0.5], 3),
        ([0.0, 0.0, 0.0, 0.0, 0.0], 1),
        ([0.1, 0.2, 0.3, 0.4, 0.5], 4),
    ],
)
@pytest.mark.parametrize("restart", [None, 1, 2, 3])
def test_best_is_the_earliest_epoch_of_highest_accuracy(
    digits: TaskData, make_run, accuracies: list[float], best: int, restart: int | None
):
    runs = [make_run(optimizer="sgd")]
    weights = {}
    engine = ScriptedEngine(digits, [accuracies])
    for state in train_population(runs, engine):
        weights[state.epoch] = state.weights.clone()
        if state.epoch == restart:
            break
    if restart is not None:
        restored = through_safetensors(state)
        for state in train_population(runs, engine, state=restored):
            weights[state.epoch] = state.weights.clone()
    assert state.best_epoch.tolist() == [best]
    assert torch.equal(state.labelled("best"), weights[best])
    assert not torch.equal(weights[best], weights[best - 1])
    assert state.label_epochs("best").tolist() == [best]


def test_nan_is_never_best_and_a_run_that_diverged_keeps_its_best(digits: TaskData, make_run):
    accuracies = [[0.1, 0.3, NAN, 0.9, 0.9], [0.1, 0.3, 0.9, 0.8, 0.7], [0.1, 0.2, 0.3, 0.9, 0.4]]
    losses = [[1, 1, NAN, 1, 1], [1, 1, torch.inf, 1, 1], [1, 1, 1, 1, 1]]
    runs = [make_run(learning_rate=rate) for rate in (1e-3, 2e-3, 3e-3)]
    *_, state = train_population(runs, ScriptedEngine(digits, accuracies, losses), save_epochs=[1, 2, 4])
    assert state.diverged_epoch.tolist() == [2, 2, -1]
    assert state.best_epoch.tolist() == [1, 1, 3]
    assert torch.equal(state.best_weights[:2], state.checkpoints["1"][:2])
    assert state.weights.isnan().all(dim=1).tolist() == [True, True, False]
    assert state.checkpoints["2"].isnan().all(dim=1).tolist() == [True, True, False]
    for name in ("test_loss", "test_accuracy", "train_loss", "train_accuracy"):
        measured = state.metrics[name].isfinite().tolist()
        since = name.startswith("train")  # nothing is trained before epoch 0
        assert measured[0] == measured[1] == [not since, True, False, False, False], name
        assert measured[2] == [not since, True, True, True, True], name


def test_a_run_without_a_finite_epoch_has_no_best(digits: TaskData, make_run):
    engine = ScriptedEngine(digits, [[0.1, NAN, NAN, NAN, NAN]], [[1, NAN, NAN, NAN, NAN]])
    *_, state = train_population([make_run()], engine)
    assert state.best_epoch.tolist() == [0]
    assert state.diverged_epoch.tolist() == [1]


@pytest.mark.parametrize("value", [torch.inf, NAN])
def test_one_step_with_a_non_finite_loss_marks_the_run(digits: TaskData, make_run, value: float):
    steps = [1.0] * 6 + [1.0, value] + [1.0] * 16  # six steps an epoch
    *_, state = train_population([make_run()], ScriptedEngine(digits, step_losses=steps))
    assert state.diverged_epoch.tolist() == [2]


def test_training_figures_are_means_over_the_batches(digits: TaskData, make_run):
    runs = [make_run(epochs=2, l2=l2) for l2 in (0.0, 1e-4)]
    engine = ScriptedEngine(digits, step_losses=[0.0, 1.0, 2.0, 3.0, 4.0, 8.0] + [0.5] * 6)
    *_, state = train_population(runs, engine)
    assert state.metrics["train_loss"][:, 1:].tolist() == [[3.0, 0.5]] * 2
    assert state.metrics["train_accuracy"][:, 1:].tolist() == [[1 / 50] * 2, [2 / 50] * 2]
    assert state.metrics["train_loss"][:, 0].isnan().all()
    assert state.metrics["validation_loss"].isnan().all()
    assert set(state.metrics) == set(METRICS)


# What is kept


@pytest.mark.parametrize("initialisation", ["per_run", "shared"])
def test_epoch_0_is_the_initialisation_byte_for_byte(digits: TaskData, make_run, initialisation: str):
    runs = [make_run(initialisation=initialisation, init_std=std, epochs=2) for std in (0.1, 0.3)]
    *_, state = train_population(runs, TorchEngine(digits), save_epochs=[0])
    expected = torch.stack([initial_weights(run) for run in runs])
    assert state.labelled("0").numpy().tobytes() == expected.numpy().tobytes()
    assert state.labelled("0").shape == (2, parameter_count("mnist"))
    assert state.label_epochs("0").tolist() == [0, 0]


def test_only_the_asked_epochs_are_kept(digits: TaskData, make_run):
    seen = {}
    for state in train_population([make_run()], ScriptedEngine(digits), save_epochs=[0, 2, 4]):
        seen[str(state.epoch)] = state.weights.clone()
    assert list(state.checkpoints) == ["0", "2", "4"]
    assert list(seen) == ["0", "1", "2", "3", "4"]
    for label, weights in state.checkpoints.items():
        assert torch.equal(weights, seen[label])


# Who is trained on what


def test_everyone_sees_the_same_batches_in_any_company(digits: TaskData, make_run):
    rates = [1e-3 * (i + 1) for i in range(64)]
    runs = [make_run(learning_rate=rate, dropout=0.1, epochs=2) for rate in rates]
    alone = training_batches(runs[5:6], digits)
    assert len(alone) == 2 * 6
    for company in (runs[:8], runs):
        together = training_batches(company, digits)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a.indices, b.indices) and torch.equal(a.crops, b.crops)
            assert (a.dropout, a.dropout_key) == (b.dropout, b.dropout_key)


def test_an_epoch_visits_each_sample_at_most_once_in_its_own_order(digits: TaskData, make_run):
    batches = training_batches([make_run(batch_size=64)], digits)  # 300 images: 4 batches, 44 dropped
    epochs = [torch.cat([b.indices for b in batches[4 * e : 4 * e + 4]]).tolist() for e in range(4)]
    assert all(len(set(epoch)) == 256 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert set(epochs[0]) != set(epochs[1])  # others are dropped
    assert len({b.dropout_key for b in batches}) == 16
    crops = torch.cat([b.crops for b in batches])
    assert crops.min() == 0 and crops.max() == 4
    other_seed = training_batches([make_run(batch_size=64, seed=4)], digits)
    assert not {b.dropout_key for b in batches} & {b.dropout_key for b in other_seed}
    assert not torch.equal(batches[0].indices, other_seed[0].indices)
    assert not torch.equal(batches[0].crops, other_seed[0].crops)


def test_golden_batches(digits: TaskData, make_run):
    """The first batch of a run follows from its names, whatever the code between them does."""
    run = make_run(train_fraction=0.9)
    train, _ = split_training_data(run, digits)
    assert train[:5].tolist() == [34, 103, 233, 40, 89]
    indices, crops = epoch_batches(run, train, epoch=1, steps=2)
    assert indices[0, :5].tolist() == [13, 5, 206, 226, 126]
    assert crops[0, :3].tolist() == [[4, 2], [0, 0], [1, 1]]
    by_hand = train[torch.from_numpy(permutation(stream_key("order", 3, "mnist", 1), 270)[:100])]
    assert torch.equal(indices.flatten(), by_hand)


@pytest.mark.parametrize("best_by", ["test", "validation"])
def test_train_fractions_nest(make_run, best_by: str):
    data, available = all_mnist(), 60_000 if best_by == "test" else 55_000
    previous: set[int] = set()
    for fraction in (0.7, 0.8, 0.9, 1.0):
        rows, _ = split_training_data(make_run(train_fraction=fraction, best_by=best_by), data)
        assert len(rows) == round(fraction * available)
        assert previous < set(rows.tolist())
        previous = set(rows.tolist())
    assert len(previous) == available
    subset, _ = split_training_data(make_run(train_fraction=0.7, best_by=best_by, seed=4), data)
    assert abs(len(set(subset.tolist()) & set(rows[: len(subset)].tolist())) / len(subset) - 0.7) < 0.01


def test_a_fraction_is_rounded_to_the_nearest_count(digits: TaskData, make_run):
    data = TaskData("mnist", digits.train.head(90), digits.test)
    assert 0.7 * 90 < 63  # in binary
    assert len(split_training_data(make_run(train_fraction=0.7), data)[0]) == 63


def test_subset_of_digits_is_random_and_of_texts_the_head(digits: TaskData, texts: TaskData, make_run):
    rows, _ = split_training_data(make_run(train_fraction=0.7), digits)
    assert sorted(rows.tolist()) != list(range(210)) and len(set(rows.tolist())) == 210
    rows, _ = split_training_data(make_run(task="ag_news", train_fraction=0.7), texts)
    assert rows.tolist() == list(range(84))


def test_texts_get_no_crops_and_a_new_order_each_epoch(texts: TaskData, make_run):
    batches = training_batches([make_run(task="ag_news", batch_size=60, epochs=2)], texts)
    assert [b.crops for b in batches] == [None] * 4
    orders = [torch.cat([b.indices for b in batches[i : i + 2]]) for i in (0, 2)]
    assert not torch.equal(*orders) and torch.equal(orders[0].sort().values, torch.arange(120))


@pytest.mark.parametrize("task", ["mnist", "ag_news"])
def test_held_out_samples_are_fixed_and_never_trained_on(digits: TaskData, texts: TaskData, make_run, task: str):
    data = digits if task == "mnist" else texts
    held_out_inputs, kept = [], set()
    for seed, fraction, optimizer in ((3, 1.0, "adam"), (4, 1.0, "sgd"), (5, 0.7, "rmsprop")):
        run = make_run(
            task=task, best_by="validation", seed=seed, train_fraction=fraction, optimizer=optimizer, batch_size=10
        )
        engine = ScriptedEngine(data)
        *_, state = train_population([run], engine)
        assert len(engine.validation) == 5  # epochs 0 to 4
        held_out_inputs.append(engine.validation[-1].inputs)
        kept |= set(torch.cat([batch.indices for batch in engine.batches]).tolist())
        assert state.metrics["validation_loss"].isfinite().all()
    assert all(torch.equal(held_out_inputs[0], other) for other in held_out_inputs)
    expected = round(len(data.train) / 12)
    assert len(held_out_inputs[0]) == expected
    assert len(kept) == len(data.train) - expected
    left = torch.tensor(sorted(set(range(len(data.train))) - kept))
    assert torch.equal(data.train.inputs[left], held_out_inputs[0])


def test_held_out_part_of_mnist_has_5000_images(make_run):
    rows, validation = split_training_data(make_run(best_by="validation"), all_mnist())
    assert (len(validation), len(rows)) == (5000, 55_000)
    assert split_training_data(make_run(), all_mnist())[1] is None


def test_best_by_validation_looks_at_validation_only(digits: TaskData, make_run):
    class Split2(ScriptedEngine):
        def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
            result = super().evaluate(weights, split)
            if split is self.data.test:
                return result
            return Evaluation(result.loss, torch.tensor([[0.9, 0.1, 0.2, 0.6, 0.5][len(self.validation) - 1]]).double())

    engine = Split2(digits, [[0.1, 0.9, 0.2, 0.3, 0.4]])
    *_, state = train_population([make_run(best_by="validation")], engine)
    assert state.best_epoch.tolist() == [3]


# Neighbours and restarts


def short_runs(make_run, optimizer: str, rates: Sequence[float]) -> list[Hyperparameters]:
    return [
        make_run(optimizer=optimizer, learning_rate=rate, dropout=0.1, batch_size=30, epochs=3, best_by="validation")
        for rate in rates
    ]


@pytest.fixture(scope="module")
def few_digits(digits: TaskData) -> TaskData:
    return TaskData("mnist", digits.train.head(110), digits.test.head(20))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("runs_at_once", [1, 3])
def test_a_diverging_neighbour_changes_no_bit(few_digits: TaskData, make_run, train, optimizer: str, runs_at_once: int):
    engine = TorchEngine(few_digits, runs_at_once=runs_at_once)
    calm = train(short_runs(make_run, optimizer, (1e-3, 2e-3, 3e-3)), engine, save_epochs=[0, 2])
    wild = train(short_runs(make_run, optimizer, (1e-3, 1e30, 3e-3)), engine, save_epochs=[0, 2])
    assert calm.diverged_epoch.tolist() == [-1, -1, -1]
    assert wild.diverged_epoch.tolist() == [-1, 1, -1]
    assert wild.weights[1].isnan().all()
    others = calm.to_tensors(), wild.to_tensors()
    assert others[0].keys() == others[1].keys()
    for name, tensor in others[0].items():
        if tensor.dim():
            assert tensor[[0, 2]].numpy().tobytes() == others[1][name][[0, 2]].numpy().tobytes(), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_restart_at_any_epoch_boundary_ends_bit_identical(few_digits: TaskData, make_run, train, optimizer: str):
    runs = short_runs(make_run, optimizer, (1e-3, 1e30, 3e-2))
    engine = TorchEngine(few_digits)
    saved = []
    for state in train_population(runs, engine, save_epochs=[0, 1, 3]):
        saved.append(save(state.to_tensors()))
    expected = state_bytes(state)
    assert state.diverged_epoch.tolist() == [-1, 1, -1]
    for epoch in range(3):
        restored = PopulationState.from_tensors(load(saved[epoch]), torch.device("cpu"))
        assert restored.epoch == epoch
        again = train(runs, TorchEngine(few_digits), save_epochs=[0, 1, 3], state=restored)
        assert state_bytes(again) == expected
    finished = PopulationState.from_tensors(load(saved[3]), torch.device("cpu"))
    assert list(train_population(runs, engine, state=finished)) == []
    assert state_bytes(finished) == expected


def test_a_restored_state_owns_its_memory(few_digits: TaskData, make_run):
    states = train_population(short_runs(make_run, "adam", [1e-3]), TorchEngine(few_digits), save_epochs=[0])
    state = next(states)
    restored = PopulationState.from_tensors(state.to_tensors(), torch.device("cpu"))
    before = state_bytes(restored)
    next(states)
    assert state_bytes(restored) == before


# What is refused


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("optimizer", ("adam", "sgd")),
        ("dropout", (0.0, 0.1)),
        ("train_fraction", (1.0, 0.9)),
        ("seed", (3, 4)),
        ("epochs", (4, 5)),
        ("batch_size", (50, 51)),
        ("best_by", ("test", "validation")),
        ("initialisation", ("per_run", "shared")),
        ("data_digest", ("a", "b")),
    ],
)
def test_runs_that_cannot_train_together_are_refused(digits: TaskData, make_run, name: str, values: tuple):
    runs = [make_run(**{name: value}) for value in values]
    with pytest.raises(InputError, match=rf"^{name}: found {values[0]!r} and {values[1]!r}, expected one value"):
        next(train_population(runs, ScriptedEngine(digits)))


def test_runs_may_differ_in_rate_scale_and_decay(digits: TaskData, make_run):
    runs = [make_run(), make_run(learning_rate=0.1), make_run(init_std=0.1), make_run(l2=0.1)]
    assert next(train_population(runs, ScriptedEngine(digits))).weights.shape == (4, 18_506)


def test_a_batch_larger_than_the_data_is_refused(digits: TaskData, make_run):
    runs = [make_run(batch_size=211, train_fraction=0.7)]
    with pytest.raises(InputError, match=r"^batch_size: found 211, expected at most 210, .* train_fraction 0\.7"):
        next(train_population(runs, ScriptedEngine(digits)))
    assert next(train_population([make_run(batch_size=210, train_fraction=0.7)], ScriptedEngine(digits))).epoch == 0


def test_runs_of_other_streams_are_refused(digits: TaskData, make_run):
    with pytest.raises(InputError, match=r"^stream_version: found 2, expected 1; use the version of this package"):
        next(train_population([make_run(stream_version=2)], ScriptedEngine(digits)))


def test_crops_are_numbered_by_position(make_run, digits: TaskData):
    """Crops belong to places in the epoch, not to samples, so every train fraction has the same."""
    whole = epoch_batches(make_run(), torch.arange(300), epoch=0, steps=2)[1]
    part = epoch_batches(make_run(train_fraction=0.5), torch.arange(150), epoch=0, steps=2)[1]
    assert torch.equal(whole, part)
    assert np.bincount(whole.flatten().numpy(), minlength=5).min() > 0
