"""Who is trained on what: subsets, held-out samples, order and crops."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine

from generators.engines.base import Batch
from generators.hyperparameters import Hyperparameters
from generators.population import epoch_batches, split_training_data, train_population
from generators.streams import permutation, stream_key
from generators.tasks.data import Split, TaskData


def training_batches(runs: Sequence[Hyperparameters], data: TaskData) -> list[Batch]:
    engine = ScriptedEngine(data)
    list(train_population(runs, engine))
    return engine.batches


def all_mnist() -> TaskData:
    """As many images as MNIST has, one and the same, without their memory."""
    images, labels = torch.zeros(1, 28, 28, dtype=torch.uint8), torch.zeros(60_000, dtype=torch.int64)
    return TaskData("mnist", Split(images.expand(60_000, 28, 28), labels), Split(images, labels[:1]))


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


def test_crops_are_numbered_by_position(make_run, digits: TaskData):
    """Crops belong to places in the epoch, not to samples, so every train fraction has the same."""
    whole = epoch_batches(make_run(), torch.arange(300), epoch=0, steps=2)[1]
    part = epoch_batches(make_run(train_fraction=0.5), torch.arange(150), epoch=0, steps=2)[1]
    assert torch.equal(whole, part)
    assert np.bincount(whole.flatten().numpy(), minlength=5).min() > 0


def test_head_holds_the_first_samples_alone(digits: TaskData, texts: TaskData):
    for split in (digits.train, texts.train):
        head = split.head(7)
        for name in ("inputs", "labels", "lengths"):
            found, whole = getattr(head, name), getattr(split, name)
            if whole is not None:
                assert torch.equal(found, whole[:7])
                assert found.untyped_storage().nbytes() == whole[:7].numel() * whole.element_size()
        assert split.head(len(split)) is split.head(10**6) is split
