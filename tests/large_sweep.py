"""A sweep directory with weights of the real shape that nobody trained, made quickly and in any size."""

from pathlib import Path

import numpy as np
import torch

from generators.architecture import parameter_count
from generators.hyperparameters import OPTIMIZERS, Hyperparameters
from generators.population import METRICS
from zoo.commit import Commit, RunRecord
from zoo.plan import Plan, Population
from zoo.stacked import checkpoint_bytes, metrics_bytes
from zoo.store import METRICS_FILE, Store, checkpoint_file

POPULATION = 16


def write_large_sweep(
    folder: Path,
    runs: int,
    epochs: int = 50,
    labels: tuple[str, ...] = ("0", "25", "50", "best"),
    task: str = "mnist",
    seed: int = 0,
    digest: str = "0123456789abcdef",
) -> Store:
    """Seal populations of 16 runs: normal weights for every run and label, accuracies that rise with the epochs.

    Equal arguments make equal runs; another seed makes other weights for the same runs, another digest other runs.
    """
    store = Store(folder)
    all_runs = [_run(task, epochs, number, digest) for number in range(runs)]
    starts = range(0, runs, POPULATION)
    populations = tuple(Population.of(all_runs[start : start + POPULATION]) for start in starts)
    store.add_plan(Plan(populations, labels, POPULATION, {"source": "random"}), 0)
    generator = torch.Generator().manual_seed(seed)
    for population in populations:
        _seal(store, population, labels, generator)
    return store


def _run(task: str, epochs: int, number: int, digest: str) -> Hyperparameters:
    return Hyperparameters(
        task=task,
        optimizer=OPTIMIZERS[number // POPULATION % 4],
        learning_rate=1e-3 * (1 + number % 8),
        init_std=0.1 * (1 + number // 8 % 5),
        l2=1e-8 * 10 ** (number // 40 % 5),
        dropout=0.05 * (number // 200 % 5),
        train_fraction=1 - 0.1 * (number // 1000 % 4),
        seed=number // 4000,
        epochs=epochs,
        batch_size=128,
        warmup_epochs=min(10, epochs),
        min_learning_rate=1e-5,
        best_by="test",
        initialisation="per_run",
        data_digest=digest,
    )


def _seal(store: Store, population: Population, labels: tuple[str, ...], generator: torch.Generator) -> None:
    count, epochs = len(population.runs), population.runs[0].epochs
    parameters = parameter_count(population.runs[0].task)
    reached = torch.rand(count, 1, generator=generator, dtype=torch.float64)
    rising = 1 - torch.exp(-torch.arange(epochs + 1) / (epochs / 4))
    noise = torch.randn(count, epochs + 1, generator=generator, dtype=torch.float64)
    accuracy = (0.1 + 0.88 * reached * rising + 0.005 * noise).clamp(0, 1)
    metrics = {name: accuracy if name.endswith("accuracy") else -torch.log(accuracy + 0.01) for name in METRICS}
    metrics = {name: values.clone() for name, values in metrics.items()}
    for name in ("validation_loss", "validation_accuracy"):
        metrics[name][:] = torch.nan
    for name in ("train_loss", "train_accuracy"):
        metrics[name][:, 0] = torch.nan
    best_epoch = (accuracy[:, 1:].argmax(dim=1) + 1).tolist()
    run_ids, attempt, records = [run.run_id for run in population.runs], "20260101T000000-00000000", {}
    std = torch.tensor(np.linspace(0.1, 0.5, count), dtype=torch.float32)[:, None]
    for label in labels:
        weights = std * torch.randn(count, parameters, generator=generator)
        label_epochs = best_epoch if label == "best" else [int(label)] * count
        content = checkpoint_bytes(population.runs[0].task, label, run_ids, label_epochs, weights)
        records[checkpoint_file(label)] = store.write(population.id, attempt, checkpoint_file(label), content)
    content = metrics_bytes(run_ids, {name: values.tolist() for name, values in metrics.items()})
    records[METRICS_FILE] = store.write(population.id, attempt, METRICS_FILE, content)
    outcome = {run.run_id: RunRecord("finished", None, list(labels)) for run in population.runs}
    store.seal(Commit(population.id, attempt, records, outcome, "torch", "cpu", {"torch": "2"}, 1.0))
