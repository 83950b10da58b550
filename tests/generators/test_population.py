"""Populations: what they measure, what they keep, and that they can start again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save
from scripted_engine import ScriptedEngine
from torch import Tensor

from generators.architecture import parameter_count
from generators.engines.base import Evaluation
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.hyperparameters import OPTIMIZERS, Hyperparameters
from generators.initialisation import initial_weights
from generators.population import METRICS, PopulationState, train_population
from generators.tasks.data import Split, TaskData

NAN = float("nan")


def through_safetensors(state: PopulationState) -> PopulationState:
    return PopulationState.from_tensors(load(save(state.to_tensors())), torch.device("cpu"))


def state_bytes(state: PopulationState) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.to_tensors().items()}


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


def test_best_by_validation_looks_at_validation_only(digits: TaskData, make_run):
    class ValidatedEngine(ScriptedEngine):
        def evaluate(self, weights: Tensor, split: Split) -> Evaluation:
            result = super().evaluate(weights, split)
            if split is self.data.test:
                return result
            return Evaluation(result.loss, torch.tensor([[0.9, 0.1, 0.2, 0.6, 0.5][len(self.validation) - 1]]).double())

    engine = ValidatedEngine(digits, [[0.1, 0.9, 0.2, 0.3, 0.4]])
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
    with pytest.raises(InputError, match=r"^batch_size: found 211, expected at most 210, .* train_fraction 0\.7; "):
        next(train_population(runs, ScriptedEngine(digits)))
    assert next(train_population([make_run(batch_size=210, train_fraction=0.7)], ScriptedEngine(digits))).epoch == 0


def test_a_fraction_of_no_sample_says_what_helps(digits: TaskData, make_run):
    with pytest.raises(InputError, match=r"at most 0, the training samples of train_fraction 1e-09; .* raise train_fr"):
        next(train_population([make_run(train_fraction=1e-9)], ScriptedEngine(digits)))


def test_nothing_to_test_or_validate_on_is_refused(digits: TaskData, make_run):
    nothing = replace(digits, test=digits.test.select(torch.arange(0)))
    with pytest.raises(InputError, match=r"^test samples: found 0, expected 1 or more"):
        next(train_population([make_run()], ScriptedEngine(nothing)))
    five = replace(digits, train=digits.train.head(5))
    run = make_run(best_by="validation", batch_size=2)
    with pytest.raises(InputError, match=r"^validation samples: found 0, expected 1 or more"):
        next(train_population([run], ScriptedEngine(five)))
    seven = replace(digits, train=digits.train.head(7))  # a twelfth of it, rounded, is one
    assert next(train_population([run], ScriptedEngine(seven))).epoch == 0


def test_runs_of_other_streams_are_refused(digits: TaskData, make_run):
    with pytest.raises(InputError, match=r"^stream_version: found 2, expected 1; use the version of this package"):
        next(train_population([make_run(stream_version=2)], ScriptedEngine(digits)))
