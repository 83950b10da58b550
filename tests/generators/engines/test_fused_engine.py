"""The fused engine against the torch engine in float64 (autograd on the model itself), and what must change no bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generators.architecture import parameter_count, tensor_table, unflatten
from generators.engines.base import Batch
from generators.engines.fused_engine import FusedEngine
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.streams import dropout_numbers
from generators.tasks.data import Split, TaskData, crop

KEY = 0xF1234567_89ABCDEF
LONGEST = 64


@pytest.fixture(scope="module")
def lengths_1_to_64() -> TaskData:
    """Texts of every length from 1 to 64, which fill the library's capacity."""
    generator = np.random.default_rng(3)
    lengths = np.arange(1, LONGEST + 1)
    tokens = generator.integers(1, 51, (LONGEST, LONGEST))
    tokens[np.arange(LONGEST) >= lengths[:, None]] = 0
    labels = torch.from_numpy(generator.integers(0, 4, LONGEST))
    split = Split(torch.from_numpy(tokens.astype(np.int32)), labels, torch.from_numpy(lengths))
    vectors = torch.from_numpy(generator.normal(0, 1, (51, 32)).astype(np.float32))
    return TaskData("ag_news", split, split, word_vectors=vectors)


@pytest.fixture(params=["mnist", "ag_news"])
def data(request, digits: TaskData, texts: TaskData) -> TaskData:
    return digits if request.param == "mnist" else texts


def stacked_weights(task: str, runs: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    scales = torch.linspace(0.1, 0.4, runs)[:, None]
    return torch.randn(runs, parameter_count(task), generator=generator) * scales


def make_batch(data: TaskData, dropout: float, samples: int = 24) -> Batch:
    generator = torch.Generator().manual_seed(6)
    crops = torch.randint(0, 5, (samples, 2), generator=generator) if data.task == "mnist" else None
    return Batch(torch.randperm(len(data.train), generator=generator)[:samples], crops, dropout, KEY)


def worst_tensor_errors(task: str, found: Tensor, exact: Tensor) -> Tensor:
    """For each run the largest relative error of a tensor's gradient, [R]."""
    pairs = zip(unflatten(task, found.double()).values(), unflatten(task, exact).values(), strict=True)
    errors = [(a - b).flatten(1).norm(dim=1) / b.flatten(1).norm(dim=1) for a, b in pairs]
    return torch.stack(errors).amax(dim=0)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.5])
def test_gradients_equal_autograd_in_float64(data: TaskData, dropout: float):
    """A ReLU whose input is within rounding of zero may fall on the other side in float32 and moves a run's gradient
    by more than rounding does. That happens to few runs, in torch's float32 too, so most must be exact and all near."""
    weights, batch = stacked_weights(data.task, runs=8), make_batch(data, dropout)
    found = FusedEngine(data).train_step(weights, batch)
    exact = TorchEngine(data, dtype=torch.float64).train_step(weights.double(), batch)
    errors = worst_tensor_errors(data.task, found.gradient, exact.gradient)
    assert (errors < 1e-5).sum() >= 6
    assert errors.max() < 1e-2
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=2e-6, atol=0)
    assert torch.equal(found.correct, exact.correct)
    assert found.loss.dtype == found.gradient.dtype == torch.float32


def test_gradients_of_every_length(lengths_1_to_64: TaskData):
    engine, exact_engine = FusedEngine(lengths_1_to_64), TorchEngine(lengths_1_to_64, dtype=torch.float64)
    weights = stacked_weights("ag_news", runs=1)
    errors = []
    for index in range(LONGEST):
        batch = Batch(torch.tensor([index]), None, 0.2, KEY + index)
        found, exact = engine.train_step(weights, batch), exact_engine.train_step(weights.double(), batch)
        torch.testing.assert_close(found.loss.double(), exact.loss, rtol=1e-5, atol=1e-6)
        # Dropout may take out all of a short text, or leave attention nothing to choose from: then a gradient is 0.
        torch.testing.assert_close(found.gradient.double(), exact.gradient, rtol=1e-2, atol=1e-3)
        errors.append((found.gradient - exact.gradient).norm() / exact.gradient.norm())
    assert (torch.stack(errors) < 1e-5).sum() >= LONGEST - 3  # see the test above


def test_gradient_is_the_slope_of_the_loss_under_dropout(data: TaskData):
    engine, batch = FusedEngine(data), make_batch(data, 0.2)
    weights = stacked_weights(data.task, runs=1)
    gradient = engine.train_step(weights, batch).gradient
    step = 1e-3 * gradient / gradient.norm()
    above, below = (engine.train_step(weights + sign * step, batch).loss for sign in (1, -1))
    assert ((above - below) / 2e-3).item() == pytest.approx(gradient.norm().item(), rel=0.01)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_and_width_change_no_bit(data: TaskData, threads: int):
    engine, several = FusedEngine(data), FusedEngine(data, threads)
    weights, batch = stacked_weights(data.task, runs=5), make_batch(data, 0.1)
    step, test = engine.train_step(weights, batch), engine.evaluate(weights, data.test)
    for width in (1, 2, 5):
        for first in range(0, 5, width):
            rows = slice(first, first + width)
            found, after = several.train_step(weights[rows], batch), several.evaluate(weights[rows], data.test)
            assert torch.equal(found.gradient, step.gradient[rows])
            assert torch.equal(found.loss, step.loss[rows]) and torch.equal(found.correct, step.correct[rows])
            assert torch.equal(after.loss, test.loss[rows]) and torch.equal(after.accuracy, test.accuracy[rows])
            assert torch.equal(several.logits(weights[rows], data.test), engine.logits(weights, data.test)[rows])


def test_evaluation_in_several_pieces(digits: TaskData):
    """A split longer than one piece of work, dealt to threads, sums up as the logits say."""
    split = digits.test.select(torch.arange(1100) % len(digits.test))
    weights = stacked_weights("mnist", runs=2)
    found = FusedEngine(digits, threads=2).evaluate(weights, split)
    logits = FusedEngine(digits).logits(weights, split).double()
    loss = torch.stack([F.cross_entropy(run, split.labels) for run in logits])
    torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=0)
    assert torch.equal(found.accuracy, (logits.argmax(dim=-1) == split.labels).double().mean(dim=1))
    alone = FusedEngine(digits).evaluate(weights, split)
    assert torch.equal(found.loss, alone.loss) and torch.equal(found.accuracy, alone.accuracy)


def test_evaluation_and_logits_equal_torch(data: TaskData):
    weights = stacked_weights(data.task)
    engine, exact_engine = FusedEngine(data), TorchEngine(data, dtype=torch.float64)
    logits, exact_logits = engine.logits(weights, data.test), exact_engine.logits(weights.double(), data.test)
    assert logits.shape == exact_logits.shape
    torch.testing.assert_close(logits.double(), exact_logits, rtol=1e-5, atol=1e-5)
    found, exact = engine.evaluate(weights, data.test), exact_engine.evaluate(weights.double(), data.test)
    assert found.loss.dtype == found.accuracy.dtype == torch.float64
    torch.testing.assert_close(found.loss, exact.loss, rtol=2e-6, atol=0)
    assert torch.equal(found.accuracy, exact.accuracy)


def test_saturated_attention_equals_torch(data: TaskData):
    """Scores of hundreds, whose powers would overflow if the largest were not taken off."""
    weights = stacked_weights(data.task, runs=2)
    for name, tensor in unflatten(data.task, weights).items():
        if "queries" in name or "keys" in name:
            tensor *= 10
    logits = FusedEngine(data).logits(weights, data.test).double()
    exact = TorchEngine(data, dtype=torch.float64).logits(weights.double(), data.test)
    close = (logits - exact).abs().amax(dim=2) < 1e-3
    assert close.double().mean() > 0.99  # rounding may choose another of two nearly equal scores


def test_logits_of_a_sample_do_not_depend_on_its_neighbours(lengths_1_to_64: TaskData, digits: TaskData):
    for data in (lengths_1_to_64, digits):
        engine, weights = FusedEngine(data), stacked_weights(data.task)
        together = engine.logits(weights, data.test)
        for indices in (torch.tensor([5]), torch.arange(len(data.test)).flip(0), torch.tensor([59, 0, 59, 1])):
            assert torch.equal(engine.logits(weights, data.test.select(indices)), together[:, indices])


def test_ids_behind_a_text_change_no_bit(texts: TaskData):
    split = texts.test
    behind = torch.arange(split.inputs.shape[1]) >= split.lengths[:, None]
    noisy = replace(split, inputs=torch.where(behind, 50 - split.inputs, split.inputs))
    engine, weights = FusedEngine(texts), stacked_weights("ag_news")
    assert torch.equal(engine.logits(weights, noisy), engine.logits(weights, split))


def test_every_crop_equals_the_cropped_image(digits: TaskData):
    offsets = torch.cartesian_prod(torch.arange(5), torch.arange(5))
    indices = torch.arange(25) * 7
    cropped = Split(crop(digits.train.inputs[indices], offsets), digits.train.labels[indices])
    weights = stacked_weights("mnist")
    found = FusedEngine(digits).train_step(weights, Batch(indices, offsets, 0.1, KEY))
    expected = FusedEngine(replace(digits, train=cropped)).train_step(weights, Batch(torch.arange(25), None, 0.1, KEY))
    assert torch.equal(found.gradient, expected.gradient) and torch.equal(found.loss, expected.loss)
    uncropped = FusedEngine(digits).train_step(weights, Batch(indices, None, 0.1, KEY))
    assert not torch.equal(found.loss, uncropped.loss)


@pytest.mark.parametrize("key", [KEY, KEY + 1])
def test_a_rate_near_1_keeps_what_torch_keeps(digits: TaskData, key: int):
    """The rate is nearer to 1 than to any 1/65536 below, yet the largest of the 16-bit numbers is kept."""
    batch = replace(make_batch(digits, 1 - 2.0**-18, samples=256), dropout_key=key)
    numbers = dropout_numbers(key, 256, 5, 49, 32, 49, torch.device("cpu"))
    assert (numbers[-1] == 65535).any()  # a unit behind the last block, which shows in the loss
    weights = stacked_weights("mnist")
    found = FusedEngine(digits).train_step(weights, batch)
    exact = TorchEngine(digits, dtype=torch.float64).train_step(weights.double(), batch)
    torch.testing.assert_close(found.loss.double(), exact.loss, rtol=2e-6, atol=0)
    torch.testing.assert_close(found.gradient.double(), exact.gradient, rtol=1e-4, atol=1e-6)
    assert (found.gradient != 0).any(dim=1).all()


def test_dropout_follows_the_key_and_zero_rate_does_not(data: TaskData):
    engine, weights = FusedEngine(data), stacked_weights(data.task)
    for dropout in (0.0, 0.2):
        batch = make_batch(data, dropout)
        for key in (KEY + 1, KEY + (1 << 32)):
            other = engine.train_step(weights, replace(batch, dropout_key=key))
            assert torch.equal(other.gradient, engine.train_step(weights, batch).gradient) == (dropout == 0)


def test_a_run_that_is_not_finite_changes_no_bit_of_its_neighbours(data: TaskData):
    engine = FusedEngine(data)
    weights, batch = stacked_weights(data.task), make_batch(data, 0.1)
    expected, evaluation = engine.train_step(weights, batch), engine.evaluate(weights, data.test)
    for bad in (torch.nan, torch.inf, 1e38):
        weights[1] = bad
        found, after = engine.train_step(weights, batch), engine.evaluate(weights, data.test)
        assert found.loss.isnan().tolist() == after.loss.isnan().tolist() == [False, True, False]
        for run in (0, 2):
            assert torch.equal(found.gradient[run], expected.gradient[run])
            assert found.loss[run] == expected.loss[run]
            assert after.loss[run] == evaluation.loss[run]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_one_weight_that_is_not_finite_shows_in_the_loss(data: TaskData, bad: float):
    """ReLU, softmax and the maximum within it must not swallow a NaN, and treat infinity as torch does."""
    engine, reference, batch = FusedEngine(data), TorchEngine(data), make_batch(data, 0.0)
    table = tensor_table(data.task)
    weights = stacked_weights(data.task, runs=1).repeat(len(table), 1)
    for run, tensor in enumerate(unflatten(data.task, weights).values()):
        tensor[run].view(-1)[3] = bad
    loss, test_loss = engine.train_step(weights, batch).loss, engine.evaluate(weights, data.test).loss
    assert torch.equal(loss.isnan(), reference.train_step(weights, batch).loss.isnan())
    assert torch.equal(test_loss.isnan(), reference.evaluate(weights, data.test).loss.isnan())
    if bad != torch.inf:
        assert loss.isnan().all() and test_loss.isnan().all()


def test_a_non_finite_logit_gives_loss_nan(digits: TaskData):
    weights = stacked_weights("mnist")
    split = digits.test.select(torch.nonzero(digits.test.labels != 0)[:, 0])
    for bad in (torch.inf, -torch.inf, torch.nan):
        weights[1, -10] = bad  # bias of a class that no sample of the split has
        assert FusedEngine(digits).evaluate(weights, split).loss.isnan().tolist() == [False, True, False]


def test_a_split_of_longer_texts_is_refused(texts: TaskData, lengths_1_to_64: TaskData):
    with pytest.raises(InputError, match="texts of up to 64 tokens, expected at most 12"):
        FusedEngine(texts).logits(stacked_weights("ag_news"), lengths_1_to_64.test)


def test_weights_may_be_a_view(digits: TaskData):
    weights = stacked_weights("mnist", runs=4)
    engine, batch = FusedEngine(digits), make_batch(digits, 0.1)
    every_other = engine.train_step(weights[::2], batch)
    assert torch.equal(every_other.gradient, engine.train_step(weights, batch).gradient[::2])


class TestWhatWouldBeReadWrongly:
    """C++ gets addresses only: what is not as it expects must not reach it."""

    @pytest.mark.parametrize("threads", [0, -1])
    def test_threads(self, digits: TaskData, threads: int) -> None:
        with pytest.raises(InputError, match=f"threads: found {threads}, expected 1 or more"):
            FusedEngine(digits, threads)

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda w: w.double(), r"torch.float64 \[3, 18506\] on cpu"),
            (lambda w: w[:, 1:], r"torch.float32 \[3, 18505\]"),
            (lambda w: w[0], r"torch.float32 \[18506\]"),
            (lambda w: w.to("meta"), r"torch.float32 \[3, 18506\] on meta"),
        ],
    )
    def test_weights(self, digits: TaskData, change, found: str) -> None:
        engine, weights = FusedEngine(digits), change(stacked_weights("mnist"))
        for call in (
            lambda: engine.train_step(weights, make_batch(digits, 0.1)),
            lambda: engine.logits(weights, digits.test),
            lambda: engine.evaluate(weights, digits.test),
        ):
            with pytest.raises(InputError, match=rf"weights: found {found}.*, expected torch.float32 \[any, 18506\]"):
                call()

    @pytest.mark.parametrize("field", ["inputs", "labels", "lengths"])
    def test_a_split_of_another_type(self, data: TaskData, field: str) -> None:
        if getattr(data.test, field) is None:
            return
        split = replace(data.test, **{field: getattr(data.test, field).float()})
        with pytest.raises(InputError, match=f"{field}: found torch.float32 .*, expected torch.(uint8|int32|int64) "):
            FusedEngine(data).evaluate(stacked_weights(data.task), split)
        with pytest.raises(InputError, match=f"{field}: found torch.float32"):
            FusedEngine(replace(data, train=split)).train_step(stacked_weights(data.task), make_batch(data, 0.1, 9))

    def test_a_split_of_another_shape(self, digits: TaskData, texts: TaskData) -> None:
        engine, split = FusedEngine(digits), digits.test
        for inputs in (split.inputs[:-1], split.inputs[:, :-1], split.inputs.flatten(1)):
            with pytest.raises(InputError, match=r"inputs: found torch.uint8 .*, expected torch.uint8 \[60, 28, 28\]"):
                engine.evaluate(stacked_weights("mnist"), replace(split, inputs=inputs))
        with pytest.raises(InputError, match=r"lengths: found torch.int64 \[39\]"):
            FusedEngine(texts).evaluate(
                stacked_weights("ag_news"), replace(texts.test, lengths=texts.test.lengths[:-1])
            )

    def test_a_split_of_the_other_task(self, digits: TaskData, texts: TaskData) -> None:
        with pytest.raises(InputError, match="split: found lengths, expected lengths for texts and none for images"):
            FusedEngine(digits).evaluate(stacked_weights("mnist"), texts.test)
        with pytest.raises(InputError, match="split: found no lengths"):
            FusedEngine(texts).evaluate(stacked_weights("ag_news"), digits.test)

    def test_a_batch(self, digits: TaskData) -> None:
        engine, weights, batch = FusedEngine(digits), stacked_weights("mnist"), make_batch(digits, 0.1)
        with pytest.raises(InputError, match=r"indices: found torch.int32 \[24\]"):
            engine.train_step(weights, replace(batch, indices=batch.indices.int()))
        for crops in (batch.crops.int(), batch.crops[:-1], batch.crops[:, 0]):
            with pytest.raises(InputError, match=r"crops: found .*, expected torch.int64 \[24, 2\]"):
                engine.train_step(weights, replace(batch, crops=crops))

    def test_word_vectors(self, texts: TaskData) -> None:
        with pytest.raises(InputError, match=r"word_vectors: found torch.float64 \[51, 32\]"):
            FusedEngine(replace(texts, word_vectors=texts.word_vectors.double()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": 51}, "inputs: found 0 to 51, expected 0 to 50"),
        ({"inputs": -1}, "inputs: found -1 to 50, expected 0 to 50"),
        ({"lengths": 0}, "lengths: found 0 to 12, expected 1 to 12"),
        ({"lengths": 13}, "lengths: found 1 to 13, expected 1 to 12"),
        ({"labels": 4}, "labels: found 0 to 4, expected 0 to 3"),
    ],
)
def test_values_that_would_be_read_out_of_bounds_are_refused(texts: TaskData, change: dict[str, int], message: str):
    [(name, value)] = change.items()
    tensor = getattr(texts.test, name).clone()
    tensor.view(-1)[3] = value
    bad = replace(texts.test, **{name: tensor})
    with pytest.raises(InputError, match=message):
        FusedEngine(replace(texts, test=bad))
    with pytest.raises(InputError, match=message):
        FusedEngine(texts).logits(torch.zeros(1, 17_764), bad)
