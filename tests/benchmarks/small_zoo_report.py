"""What small_zoo.py measured, as files for the repository: a record, tables, and the README's two plots."""

import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zoo.dataset import open_zoo

RESULTS = Path(__file__).resolve().parent / "results"
TASKS = {"mnist": "MNIST", "ag_news": "AG News"}
OPTIMIZERS = ("sgd", "sgd_momentum", "adam", "rmsprop")
BINS = np.linspace(0, 1, 41)


def write_results(record: dict[str, Any], dataset: Path, tables: dict[str, Path]) -> None:
    """Write small_zoo.json, a CSV file a table, and two plots to tests/benchmarks/results/.

    Args:
        record: what each step measured.
        dataset: the dataset's folder.
        tables: name -> folder of a `zoo nfn benchmark`.
    """
    RESULTS.mkdir(exist_ok=True)
    checksums = hashlib.sha256((dataset / "SHA256SUMS").read_bytes()).hexdigest()
    record = {**record, "dataset": {**record["dataset"], "sha256 of SHA256SUMS": checksums}}
    (RESULTS / "small_zoo.json").write_text(json.dumps(record, indent=1) + "\n")
    for name, folder in tables.items():
        if (folder / "benchmark.csv").exists():
            shutil.copyfile(folder / "benchmark.csv", RESULTS / f"{name}.csv")
    _save(_accuracies(dataset), RESULTS / "accuracies.png")
    _save(_predictors(), RESULTS / "predictors.png")


def _accuracies(dataset: Path) -> Figure:
    """Test accuracies of the best checkpoints, stacked by optimizer, a panel a task."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    zoo = open_zoo(dataset)
    for axes, (task, title) in zip(figure.subplots(1, len(TASKS)), TASKS.items(), strict=True):
        conditions = [("epoch_label", "==", "best"), ("initialisation", "==", "per_run")]
        table = zoo.checkpoints(task, conditions).metadata.to_pandas()
        parts = [table["test_accuracy"][table["optimizer"] == name] for name in OPTIMIZERS]
        axes.hist(parts, BINS, stacked=True, label=OPTIMIZERS)
        axes.set(title=f"{title}, {len(table)} runs", xlabel="test accuracy at the best epoch", ylabel="runs")
    axes.legend()
    return figure


def _predictors() -> Figure:
    """Kendall's tau by predictor and smallest test accuracy, with standard deviations over seeds."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for axes, (task, title) in zip(panels, TASKS.items(), strict=True):
        with (RESULTS / f"{task}.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["table"] == "threshold" and row["test_tau_mean"]]
        for name in dict.fromkeys(row["predictor"] for row in rows):
            own = [row for row in rows if row["predictor"] == name]
            x, mean, deviation = (
                [float(row[key] or 0) for row in own] for key in ("threshold", "test_tau_mean", "test_tau_std")
            )
            axes.errorbar(x, mean, deviation, marker="o", markersize=3, capsize=2, label=name)
        axes.set(title=title, xlabel="smallest test accuracy")
    panels[0].set_ylabel("Kendall's tau")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right")
    return figure


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure).print_png(path)
