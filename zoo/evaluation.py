"""Checks of published checkpoints with nothing but the dataset and the task's data: `evaluate` measures them again,
`rerun` trains a run again from its row.

What is needed besides the data travels with the dataset: its plans hold the data's settings, and the frozen embedding
of a text task lies beside its rows. The digest of the data is compared before anything is computed.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from generators.architecture import flatten
from generators.engines import make_engine
from generators.engines.base import Engine
from generators.errors import InputError
from generators.hyperparameters import Hyperparameters
from generators.population import train_population
from generators.tasks import SOURCES
from generators.tasks.data import TaskData
from zoo.commit import engine_label
from zoo.config import label_order
from zoo.dataset import Checkpoints, Zoo, open_zoo
from zoo.errors import DatasetError
from zoo.evaluation_reports import Comparison, EvaluationReport, LabelDifference, RerunReport
from zoo.filters import Filters
from zoo.hub_folder import PROVENANCE
from zoo.plain_values import build
from zoo.plan import Plan
from zoo.schema import HYPERPARAMETER_NAMES
from zoo.threads import torch_threads

EVALUATION_ROWS = 100
"""Checkpoints evaluated together."""
TOLERATED_EXAMPLES = 2
"""Test examples by which an accuracy may differ on another engine or machine, whose rounding is another."""
MNIST_TEST_IMAGES = 10_000


def evaluate(
    dataset: str | Path,
    task: str | None = None,
    data_dir: Path | str | None = None,
    limit: int | None = None,
    *,
    filters: Filters | None = None,
    engine: str = "auto",
    device: torch.device | str = "auto",
    threads: int = 1,
    tolerance: int = TOLERATED_EXAMPLES,
    progress: bool = True,
) -> EvaluationReport:
    """Evaluate checkpoints on their test set and compare with what the dataset records.

    Args:
        dataset: a dataset folder or a repository.
        task: needed where the dataset holds several.
        data_dir: folder of the task's data.
        limit: evaluate only so many, spread evenly over the range of accuracies.
        filters: see Zoo.checkpoints.
        device: "auto" for a GPU, where torch finds one and the engine serves it.
        tolerance: test examples by which an accuracy may differ; 0 for the engine and the machine of the training.

    Raises:
        DatasetError: no such dataset, task or column, or the data is not the one that the checkpoints were trained on.
        InputError: the data cannot be loaded, or the engine is not available.
    """
    started = time.monotonic()
    zoo = open_zoo(dataset)
    chosen = zoo.checkpoints(task, filters)
    available = len(chosen)
    if available == 0:
        raise DatasetError(
            f"{zoo.source.name}: filters: found no checkpoint, expected at least one; choose more widely"
        )
    if limit is not None and limit < 1:
        raise DatasetError(f"limit: found {limit}, expected 1 or more")
    recorded_engines = sorted({engine_label(row["engine"], row["device"]) for row in chosen.metadata.to_pylist()})
    plan = _plan(zoo, chosen.task)
    if plan.origin == "imported" and chosen.task == "ag_news":
        reason = "imported AG News checkpoints come without the embedding that they were trained on"
        seconds = time.monotonic() - started
        return EvaluationReport(chosen.task, available, [], tolerance, "", recorded_engines, 0, "", reason, seconds)
    if limit is not None and limit < available:
        chosen = chosen.take(np.linspace(0, available - 1, limit).round().astype(int))
    data, data_note = _load_data(zoo, plan, data_dir)
    measuring = make_engine(engine, data, _device(device, engine, "cuda"), threads)
    comparisons: list[Comparison] = []
    bar = tqdm(total=len(chosen), unit="checkpoint", desc="evaluate", disable=not progress)
    with bar, torch_threads(threads):
        for piece in chosen.pieces(EVALUATION_ROWS):
            comparisons += _compare(piece, measuring, data)
            bar.update(len(piece))
    return EvaluationReport(
        task=chosen.task,
        available=available,
        comparisons=comparisons,
        tolerance=tolerance,
        engine=engine_label(measuring.name, measuring.device.type),
        recorded_engines=recorded_engines,
        test_samples=len(data.test),
        data=data_note,
        not_evaluated="" if len(comparisons) == available else f"limit {limit}",
        seconds=time.monotonic() - started,
    )


def _compare(piece: Checkpoints, engine: Engine, data: TaskData) -> Iterator[Comparison]:
    weights = flatten(piece.task, piece.tensors()).to(engine.device, engine.dtype)
    result = engine.evaluate(weights, data.test)
    columns = ("checkpoint_id", "epoch_label", "test_accuracy", "test_loss")
    rows = piece.metadata.select(columns).to_pylist()
    for row, accuracy, loss in zip(rows, result.accuracy.tolist(), result.loss.tolist(), strict=True):
        recorded = row["test_accuracy"]
        if recorded is None or not 0 <= recorded <= 1:
            raise DatasetError(
                f"{piece.zoo.source.name}: {row['checkpoint_id']}: test_accuracy: found {recorded}, expected a "
                f"fraction; see `zoo verify`"
            )
        examples = round(abs(accuracy - recorded) * len(data.test))
        yield Comparison(row["checkpoint_id"], row["epoch_label"], recorded, accuracy, examples, row["test_loss"], loss)


def _plan(zoo: Zoo, task: str) -> Plan:
    """Return a plan of the task; all of them share the data and its settings, and the origin with it."""
    for name in zoo.provenance["plans"]:
        plan = Plan.from_json(_plan_text(zoo, name), f"{zoo.source.name}/{name}")
        if plan.task == task:
            return plan
    raise DatasetError(
        f"{zoo.source.name}: {PROVENANCE}: found no plan of task {task}, expected one; build the dataset again"
    )


def _plan_text(zoo: Zoo, name: str) -> str:
    try:
        return zoo.source.read_bytes(name).decode()
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{zoo.source.name}/{name}: not readable ({error!r}), expected a plan that {PROVENANCE} names; "
            f"get the dataset again"
        ) from error


def _load_data(zoo: Zoo, plan: Plan, given: Path | str | None) -> tuple[TaskData, str]:
    """Return the task's data, with the dataset's own embedding, and a note on whether it is the one of the training."""
    data_dir = None if given is None else Path(given)
    if plan.origin == "imported":
        data = SOURCES[plan.task]().load(data_dir)
        if len(data.test) != MNIST_TEST_IMAGES:
            raise DatasetError(
                f"{data_dir}: found {len(data.test)} test images, expected the {MNIST_TEST_IMAGES} of MNIST, on which "
                f"the imported accuracies were measured"
            )
        return data, "imported: the data of the training is not recorded"
    source = build(SOURCES[plan.task], plan.data, "data.")
    data = source.load(data_dir, zoo.embedding(plan.task)) if plan.task == "ag_news" else source.load(data_dir)
    found = data.digest()
    if found != plan.data_digest:
        raise DatasetError(
            f"{data_dir or 'no --data-dir'}: data_digest: found {found}, expected {plan.data_digest}, that of the "
            f"dataset; give the folder of the data that it was made from ({PROVENANCE} says which)"
        )
    return data, f"data digest {found} as recorded"


def rerun(
    dataset: str | Path,
    run_id: str,
    data_dir: Path | str | None = None,
    *,
    engine: str = "recorded",
    device: torch.device | str = "auto",
    threads: int = 1,
    progress: bool = True,
) -> RerunReport:
    """Train one published run again, alone, from its row, and compare weights and accuracies.

    Args:
        dataset: a dataset folder or a repository.
        data_dir: folder of the task's data.
        engine: "recorded" for the one that trained it; auto, torch, compiled or fused.
        device: "auto" for the recorded one, where torch finds it.

    Raises:
        DatasetError: no checkpoint of such a run, an imported run, or data that it was not trained on.
        InputError: the data cannot be loaded, or the engine is not available.
    """
    started = time.monotonic()
    zoo = open_zoo(dataset)
    published = _published(zoo, run_id)
    run, row = _hyperparameters(published), published.metadata.to_pylist()[0]
    data, _ = _load_data(zoo, _plan(zoo, run.task), data_dir)
    engine = row["engine"] if engine == "recorded" else engine
    training = make_engine(engine, data, _device(device, engine, row["device"]), threads)
    save_epochs = _save_epochs(published, run.epochs)
    bar = tqdm(total=run.epochs, unit="epoch", desc=f"rerun {run_id}", disable=not progress)
    with bar, torch_threads(threads):
        for state in train_population([run], training, save_epochs):
            bar.update(state.epoch - bar.n)
    labels = []
    weights = flatten(run.task, published.tensors())
    for position, row in enumerate(published.metadata.to_pylist()):
        label = row["epoch_label"]
        epoch = int(state.label_epochs(label)[0])
        labels.append(
            LabelDifference(
                label=label,
                weights=_largest_difference(state.labelled(label)[0].cpu(), weights[position]),
                recorded_epoch=row["epoch"],
                epoch=epoch,
                recorded_accuracy=row["test_accuracy"],
                accuracy=float(state.metrics["test_accuracy"][0, epoch]),
            )
        )
    labels.sort(key=lambda difference: label_order(difference.label))
    diverged = bool(state.diverged_epoch[0] >= 0)
    recorded = engine_label(row["engine"], row["device"])
    used = engine_label(training.name, training.device.type)
    return RerunReport(run_id, run.task, used, recorded, diverged, labels, time.monotonic() - started)


def _device(asked: torch.device | str, engine: str, preferred: str | None) -> torch.device | str:
    """Turn "auto" into the preferred device, where torch finds it and the engine serves it."""
    if str(asked).startswith("cuda") and not torch.cuda.is_available():
        raise DatasetError(f"device: found {asked}, expected cpu or auto, as torch finds no GPU here")
    if asked != "auto":
        return asked
    return "cuda" if preferred == "cuda" and engine != "fused" and torch.cuda.is_available() else "cpu"


def _published(zoo: Zoo, run_id: str) -> Checkpoints:
    """Return the checkpoints of a run, of whichever task."""
    for task in zoo.tasks:
        found = zoo.checkpoints(task, [("run_id", "==", run_id)])
        if len(found):
            return found
    raise DatasetError(
        f"{zoo.source.name}: run_id: found no checkpoint of {run_id!r}, expected a run_id of the index whose status is "
        f"finished (a diverged run may have no checkpoint)"
    )


def _hyperparameters(published: Checkpoints) -> Hyperparameters:
    """Make a run's hyperparameters from its row, and check them against its id."""
    row: dict[str, Any] = published.metadata.to_pylist()[0]
    where = f"{published.zoo.source.name}: run {row['run_id']}"
    if row["origin"] != "generated":
        raise DatasetError(f"{where}: origin: found {row['origin']}, expected generated; it was trained elsewhere")
    try:
        run = Hyperparameters(**{name: row[name] for name in HYPERPARAMETER_NAMES})
    except InputError as error:
        raise DatasetError(f"{where}: {error}") from error
    if run.run_id != row["run_id"]:
        raise DatasetError(f"{where}: its columns make run {run.run_id}; the row was changed, get the dataset again")
    return run


def _save_epochs(published: Checkpoints, epochs: int) -> list[int]:
    """Return the epochs that a run's checkpoints are of; "best" is kept by every training."""
    labels = set(published.metadata["epoch_label"].to_pylist()) - {"best"}
    if odd := labels - set(map(str, range(epochs + 1))):
        raise DatasetError(
            f"{published.zoo.source.name}: epoch_label: found {min(odd)}, expected 0 to {epochs} or best; "
            f"the row was changed, get the dataset again"
        )
    return sorted(map(int, labels))


def _largest_difference(ours: Tensor, published: Tensor) -> float:
    return float((ours.float() - published).abs().max())
