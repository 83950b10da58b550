"""torch.compile's engine against the eager one, on the CPU; how it goes on a GPU: test_gpu_path.py."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from generators.architecture import parameter_count
from generators.engines import make_engine, stacked_model
from generators.engines.base import Batch
from generators.engines.torch_engine import TorchEngine
from generators.errors import InputError
from generators.tasks.data import TaskData

RUNS = 3


@pytest.fixture(params=["mnist", "ag_news"])
def data(request, digits: TaskData, texts: TaskData) -> TaskData:
    return digits if request.param == "mnist" else texts


def weights_and_batch(data: TaskData, seed: int, dropout: float) -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(seed)
    weights = 0.3 * torch.randn(RUNS, parameter_count(data.task), generator=generator, dtype=torch.float64)
    crops = torch.randint(0, 5, (16, 2), generator=generator) if data.task == "mnist" else None
    indices = torch.randperm(len(data.train), generator=generator)[:16]
    return weights, Batch(indices, crops, dropout, dropout_key=seed)


def assert_equal_to_eager(compiled: TorchEngine, seed: int, dropout: float) -> None:
    eager = TorchEngine(compiled.data, dtype=compiled.dtype)
    weights, batch = weights_and_batch(compiled.data, seed, dropout)
    expected, found = eager.train_step(weights, batch), compiled.train_step(weights, batch)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-11, atol=0)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-8, atol=1e-13)
    assert torch.equal(found.correct, expected.correct)
    expected, found = eager.evaluate(weights, eager.data.test), compiled.evaluate(weights, eager.data.test)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-11, atol=0)
    assert torch.equal(found.accuracy, expected.accuracy)


def test_results_equal_the_eager_engines_and_a_second_engine_compiles_nothing(data: TaskData):
    engine = make_engine("compiled", data, dtype=torch.float64)
    assert (engine.name, TorchEngine(data).name) == ("compiled", "torch")
    assert_equal_to_eager(engine, seed=1, dropout=0.1)
    with torch.compiler.set_stance("fail_on_recompile"):  # as for each population of a worker
        assert_equal_to_eager(make_engine("compiled", data, dtype=torch.float64), seed=2, dropout=0.25)


def test_a_machine_that_cannot_compile_is_told_so_in_one_line(digits: TaskData, monkeypatch):
    def compile_nothing(function: Callable) -> Callable:
        raise RuntimeError("found no working compiler\nset CXX")

    monkeypatch.setattr(torch, "compile", compile_nothing)
    stacked_model.check_compiler.cache_clear()
    with pytest.raises(InputError) as caught:
        make_engine("compiled", digits)
    assert str(caught.value) == (
        "engine: compiled is not available on cpu: found no working compiler; use torch or auto"
    )
