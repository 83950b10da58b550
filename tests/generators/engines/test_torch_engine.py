"""The reference engine against autograd on the model itself, one run at a time."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from generators.architecture import SmallTransformer, flatten, parameter_count, unflatten
from generators.engines import torch_engine
from generators.engines.base import Batch
from generators.engines.torch_engine import TorchEngine
from generators.streams import dropout_numbers
from generators.tasks.data import Split, TaskData, crop, scale

KEY = 0x9D2C5680_EFC60000
RUNS = 3


def stacked_weights(task: str, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    scales = torch.tensor([[0.1], [0.2], [0.4]], dtype=torch.float64)
    return (torch.randn(RUNS, parameter_count(task), generator=generator, dtype=torch.float64) * scales).to(dtype)


def make_batch(data: TaskData, dropout: float) -> Batch:
    generator = torch.Generator().manual_seed(6)
    crops = torch.randint(0, 5, (16, 2), generator=generator) if data.task == "mnist" else None
    return Batch(torch.randperm(len(data.train), generator=generator)[:16], crops, dropout, KEY)


def model_of(data: TaskData, weights: Tensor) -> SmallTransformer:
    vectors = None if data.word_vectors is None else data.word_vectors.double()
    model = SmallTransformer(data.task, vectors, max_tokens=data.max_tokens).double()
    model.load_tensors(unflatten(data.task, weights))
    return model.eval()


def model_inputs(split: Split, batch: Batch) -> tuple[Tensor, Tensor | None]:
    samples = split.inputs[batch.indices]
    if split.lengths is None:
        return scale(crop(samples, batch.crops), torch.float64), None
    return samples, split.lengths[batch.indices]


def dropout_masks(data: TaskData, batch: Batch, threshold: int) -> list[Tensor]:
    """Factors of the five sites by the definition: 0 below the threshold, else the inverse of the kept share."""
    tokens = data.max_tokens
    numbers = dropout_numbers(KEY, len(batch.indices), 5, tokens, 32, tokens, torch.device("cpu"))
    return [torch.where(n < threshold, 0.0, 1 / (1 - threshold / 65536)).double() for n in numbers]


@pytest.fixture(params=["mnist", "ag_news"])
def data(request, digits: TaskData, texts: TaskData) -> TaskData:
    return digits if request.param == "mnist" else texts


@pytest.mark.parametrize("runs_at_once", [None, 1, 2, 3])
@pytest.mark.parametrize(("dropout", "threshold"), [(0.0, None), (0.1, 6554)])
def test_training_step_equals_autograd(data: TaskData, dropout: float, threshold: int | None, runs_at_once: int | None):
    engine = TorchEngine(data, dtype=torch.float64, runs_at_once=runs_at_once)
    weights, batch = stacked_weights(data.task), make_batch(data, dropout)
    before = weights.clone()
    result = engine.train_step(weights, batch)
    assert torch.equal(weights, before)
    assert result.loss.shape == (RUNS,) and result.gradient.shape == weights.shape
    inputs, lengths = model_inputs(data.train, batch)
    labels = data.train.labels[batch.indices]
    masks = None if threshold is None else dropout_masks(data, batch, threshold)
    for run in range(RUNS):
        model = model_of(data, weights[run])
        logits = model(inputs, lengths, masks)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        gradient = flatten(data.task, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        torch.testing.assert_close(result.loss[run], loss.detach(), rtol=1e-11, atol=0)
        torch.testing.assert_close(result.gradient[run], gradient, rtol=1e-8, atol=1e-13)
        assert result.correct[run] == (logits.argmax(dim=1) == labels).sum()


def test_training_step_in_float32_is_close(data: TaskData):
    batch = make_batch(data, 0.1)
    exact = TorchEngine(data, dtype=torch.float64).train_step(stacked_weights(data.task), batch)
    single = TorchEngine(data).train_step(stacked_weights(data.task, torch.float32), batch)
    assert single.loss.dtype == single.gradient.dtype == torch.float32
    torch.testing.assert_close(single.loss.double(), exact.loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(single.gradient.double(), exact.gradient, rtol=1e-3, atol=1e-4)


def test_dropout_depends_on_the_key_and_zero_rate_does_not(digits: TaskData):
    engine, weights = TorchEngine(digits), stacked_weights("mnist", torch.float32)
    for dropout in (0.0, 0.2):
        first = make_batch(digits, dropout)
        second = Batch(first.indices, first.crops, dropout, KEY + 1)
        same = torch.equal(engine.train_step(weights, first).gradient, engine.train_step(weights, second).gradient)
        assert same == (dropout == 0)


def test_evaluation_is_the_mean_over_all_samples(data: TaskData, monkeypatch):
    monkeypatch.setattr(torch_engine, "EVALUATION_BATCH", 7)  # which divides no split of the fixtures
    engine, weights = TorchEngine(data, dtype=torch.float64), stacked_weights(data.task)
    found = engine.evaluate(weights, data.test)
    assert found.loss.dtype == found.accuracy.dtype == torch.float64
    inputs = scale(data.test.inputs, torch.float64) if data.task == "mnist" else data.test.inputs
    for run in range(RUNS):
        logits = model_of(data, weights[run])(inputs, data.test.lengths)
        loss = F.cross_entropy(logits, data.test.labels)
        torch.testing.assert_close(found.loss[run], loss.detach(), rtol=1e-11, atol=0)
        assert found.accuracy[run] == (logits.argmax(dim=1) == data.test.labels).double().mean()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logits_of_a_sample_are_the_same_in_any_batch(
    data: TaskData, dtype: torch.dtype, tolerance: float, monkeypatch
):
    monkeypatch.setattr(torch_engine, "EVALUATION_BATCH", 16)
    engine, weights = TorchEngine(data, dtype=dtype), stacked_weights(data.task, dtype)
    together = engine.logits(weights, data.test)
    assert together.shape == (RUNS, len(data.test), 10 if data.task == "mnist" else 4)
    for indices in (torch.tensor([5]), torch.tensor([30, 5, 1]), torch.arange(len(data.test)).flip(0)):
        alone = engine.logits(weights, data.test.select(indices))
        torch.testing.assert_close(alone, together[:, indices], rtol=tolerance, atol=tolerance)


def test_ids_behind_a_text_change_no_bit(texts: TaskData):
    split = texts.test
    behind = torch.arange(split.inputs.shape[1]) >= split.lengths[:, None]
    noisy = Split(torch.where(behind, 50 - split.inputs, split.inputs), split.labels, split.lengths)
    engine, weights = TorchEngine(texts), stacked_weights("ag_news", torch.float32)
    assert torch.equal(engine.logits(weights, noisy), engine.logits(weights, split))


def test_a_non_finite_logit_gives_loss_nan(digits: TaskData):
    weights = stacked_weights("mnist", torch.float32)
    bias = weights[1, -10:]  # of the last layer
    engine = TorchEngine(digits)
    clean = engine.evaluate(weights, digits.test)
    split = digits.test.select(torch.nonzero(digits.test.labels != 0)[:, 0])
    for bad in (torch.inf, -torch.inf, torch.nan):
        bias[0] = bad  # a class that no sample of the split has
        loss = engine.evaluate(weights, split).loss
        assert loss.isnan().tolist() == [False, True, False]
    assert clean.loss.isfinite().all()


@pytest.mark.parametrize("runs_at_once", [1, 3])
def test_a_run_that_is_not_finite_changes_no_bit_of_its_neighbours(data: TaskData, runs_at_once: int):
    engine = TorchEngine(data, runs_at_once=runs_at_once)
    weights, batch = stacked_weights(data.task, torch.float32), make_batch(data, 0.1)
    expected, evaluation = engine.train_step(weights, batch), engine.evaluate(weights, data.test)
    for bad in (torch.nan, torch.inf, 1e38):
        weights[1] = bad
        found, after = engine.train_step(weights, batch), engine.evaluate(weights, data.test)
        assert not found.gradient[1].isfinite().all()
        for run in (0, 2):
            assert torch.equal(found.gradient[run], expected.gradient[run])
            assert found.loss[run] == expected.loss[run]
            assert after.loss[run] == evaluation.loss[run]


def test_data_stays_integers_on_the_device(data: TaskData):
    engine = TorchEngine(data)
    assert engine.name == "torch"
    assert engine.data.train.inputs.dtype == (torch.uint8 if data.task == "mnist" else torch.int32)


GIB = 1 << 30


@pytest.mark.parametrize("tokens", [49, 64, 512])
@pytest.mark.parametrize("runs", [1, 7, 200])
def test_half_the_memory_of_a_gpu_holds_about_half_the_samples(tokens: int, runs: int):
    """After a lack of memory its share is halved, which must help in evaluation as well as in training."""

    def evaluated(memory: int) -> int:
        runs_, samples = torch_engine.evaluation_shape(memory, runs, tokens)
        return runs_ * samples

    for memory in (64 * GIB, 8 * GIB, GIB):
        assert 0.4 < evaluated(memory // 2) / evaluated(memory) < 0.6
        trained = [torch_engine.runs_that_fit(part, 128, tokens) for part in (memory, memory // 2)]
        assert trained[1] == max(1, trained[0] // 2)


@pytest.mark.parametrize(
    ("tokens", "training_bytes", "evaluation_bytes"),
    [(49, 8_200 * 49, 83_000), (64, 9_100 * 64, 120_000), (128, 12_100 * 128, None), (512, 33_600 * 512, None)],
)
@pytest.mark.parametrize("size", [8 * GIB, 139 * GIB])
@pytest.mark.parametrize("batch_size", [16, 128, 512])
def test_what_was_measured_fits_into_a_gpu(
    tokens: int, training_bytes: int, evaluation_bytes: int | None, size: int, batch_size: int, monkeypatch
):
    """A training step fills a third to 0.8 of the memory; evaluation no more than that."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, size))
    memory = torch_engine.gpu_memory(torch.device("cuda"), 1.0)
    width = torch_engine.runs_that_fit(memory, batch_size, tokens)
    assert 0.3 < width * batch_size * training_bytes / size < 0.8 or width == 1
    if evaluation_bytes is not None:
        for runs in (1, 200, 10_000):
            together, samples = torch_engine.evaluation_shape(memory, runs, tokens)
            assert 0.3 < together * samples * evaluation_bytes / size < 0.8


def test_the_memory_to_plan_with_follows_the_whole_memory_and_the_share(monkeypatch):
    for free in (0, 3 * GIB, 8 * GIB):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 8 * GIB))
        for share in (1.0, 0.25):
            assert torch_engine.gpu_memory(torch.device("cuda"), share) == int(0.8 * share * 8 * GIB)


def test_memory_orders_a_step_in_chunks_of_runs(digits: TaskData, monkeypatch):
    """On the meta device, whose tensors have no values: 10 runs of 16 images where memory holds 4 of them."""
    needed = 16 * torch_engine._sample_bytes(torch_engine.TRAINING_BYTES, 49)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, round(4.5 * needed / 0.8)))
    engine = TorchEngine(digits, "meta")
    widths, gradients = [], engine._model.gradients

    def watched(weights: Tensor, *arguments):
        widths.append(len(weights))
        return gradients(weights, *arguments)

    engine._model = engine._model._replace(gradients=watched)
    batch = Batch(torch.zeros(16, dtype=torch.int64, device="meta"), None, 0.0, 1)
    engine.train_step(torch.zeros(10, parameter_count("mnist"), device="meta"), batch)
    assert widths == [4, 4, 2]
