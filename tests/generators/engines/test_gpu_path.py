"""The torch engine's way on a GPU, followed without one: tensors of the meta device have shapes but no values, so
whatever waits for a value fails, and a dispatch mode watches over what crosses between devices."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from generators import population
from generators.architecture import parameter_count
from generators.engines import torch_engine
from generators.engines.base import Batch
from generators.engines.stacked_model import Mode, stacked_model
from generators.engines.torch_engine import GRAPH_RUNS, TorchEngine
from generators.optimizers import KINDS, make_optimizer
from generators.tasks.data import TaskData

RUNS = 5
STEPS = 3


class Crossings(TorchDispatchMode):
    """Counts copies from the CPU to the device, and refuses any other operation on tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor) and leaf.dim() > 0]
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1:
            assert func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default), (func, devices)
            self.copies += 1
        return result


@pytest.fixture(params=["mnist", "ag_news"])
def data(request, digits: TaskData, texts: TaskData) -> TaskData:
    return digits if request.param == "mnist" else texts


@pytest.fixture
def make_engine(data: TaskData, monkeypatch) -> Callable[..., TorchEngine]:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 << 30))
    return lambda **options: TorchEngine(data, "meta", **options)


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: tensor[torch.tensor([1])],
        lambda tensor: tensor @ torch.zeros(3),
    ],
)
def test_waiting_and_mixing_are_noticed(use: Callable):
    with pytest.raises((RuntimeError, AssertionError)), Crossings():
        use(torch.zeros(3, device="meta"))


@pytest.mark.parametrize("runs_at_once", [None, 2])
@pytest.mark.parametrize("optimizer_name", KINDS)
def test_an_epoch_waits_for_nothing_and_copies_only_its_order(
    data: TaskData, make_run, make_engine, optimizer_name: str, runs_at_once: int | None
):
    engine = make_engine(runs_at_once=runs_at_once)
    recipe = make_run(task=data.task, optimizer=optimizer_name, dropout=0.1, batch_size=16)
    weights = torch.zeros(RUNS, parameter_count(data.task), device="meta")
    column = torch.ones(RUNS, 1, device="meta")
    optimizer = make_optimizer(optimizer_name, weights, column)
    train, _ = population.split_training_data(recipe, data)
    with Crossings() as crossings:
        loss, accuracy = population._train_epoch(weights, optimizer, column, recipe, engine, train, 0, STEPS)
    assert crossings.copies == (2 if data.task == "mnist" else 1)  # the samples' order, and crops
    for figure in (loss, accuracy):
        assert figure.device.type == "meta" and figure.shape == (RUNS,) and figure.dtype == torch.float64


def test_an_evaluation_waits_for_nothing(data: TaskData, make_engine):
    engine = make_engine()
    weights = torch.zeros(RUNS, parameter_count(data.task), device="meta")
    with Crossings() as crossings:
        evaluation = engine.evaluate(weights, engine.data.test)
    assert crossings.copies == 0
    assert evaluation.loss.shape == evaluation.accuracy.shape == (RUNS,)


@pytest.mark.parametrize(
    ("runs", "runs_at_once", "compiled", "mode"),
    [
        (GRAPH_RUNS, None, True, Mode.GRAPH),
        (GRAPH_RUNS + 1, None, True, Mode.COMPILED),
        (GRAPH_RUNS, GRAPH_RUNS - 1, True, Mode.COMPILED),  # a second chunk would overwrite what the first returned
        (GRAPH_RUNS, None, False, Mode.EAGER),
    ],
)
def test_a_narrow_population_is_replayed_as_a_graph(
    data: TaskData, make_engine, monkeypatch, runs: int, runs_at_once: int | None, compiled: bool, mode: Mode
):
    asked = []

    def eager_model(task: str, mode: Mode):
        asked.append(mode)
        return stacked_model(task, Mode.EAGER)

    monkeypatch.setattr(torch_engine, "stacked_model", eager_model)
    monkeypatch.setattr(torch_engine, "check_compiler", lambda device: None)
    engine = make_engine(runs_at_once=runs_at_once, compiled=compiled)
    weights = torch.zeros(runs, parameter_count(data.task), device="meta")
    crops = torch.zeros(16, 2, dtype=torch.int64, device="meta") if data.task == "mnist" else None
    engine.train_step(weights, Batch(torch.zeros(16, dtype=torch.int64, device="meta"), crops, 0.1, 1))
    assert asked[-1] is mode
