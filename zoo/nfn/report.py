"""Tables and plots of a benchmark, from the results of its cells."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zoo.files import write
from zoo.nfn.record import FEW_TEST_CHECKPOINTS, TrainingResult
from zoo.nfn.train import Setting

TITLES = {
    "threshold": "Kendall's tau by predictor and smallest test accuracy",
    "components": "Kendall's tau of transformer-nfn by components",
    "size": "Kendall's tau of transformer-nfn by channels and layers",
}
LONGEST_REASON = 300
CONSTANT = "†"
NOTHING = "–"  # noqa: RUF001 (an en dash, as tables print it)


@dataclass(frozen=True)
class Cell:
    """One training of a table's row. table: a key of TITLES. label: the columns that name the row."""

    table: str
    label: dict[str, Any]
    setting: Setting


def write_report(
    out: Path, cells: Sequence[tuple[Cell, TrainingResult | None]], failed: dict[str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Write benchmark.md, .csv and .json and a scatter plot a predictor; return the files and the tables' rows."""
    groups: dict[tuple[str, str], list[tuple[Cell, TrainingResult | None]]] = {}
    for cell, result in cells:
        groups.setdefault((cell.table, json.dumps(cell.label)), []).append((cell, result))
    rows = [_row(group) for group in groups.values()]
    plots = _write_plots(out, groups.values())
    files = {name: str(out / f"benchmark.{name}") for name in ("md", "csv", "json")} | {"plots": plots}
    write(out / "benchmark.md", _markdown(rows, failed).encode())
    write(out / "benchmark.csv", _csv(rows).encode())
    record = {"rows": rows, "failed": failed, "cells": [_cell_record(cell, result) for cell, result in cells]}
    write(out / "benchmark.json", (json.dumps(record, indent=1) + "\n").encode())
    return files, rows


def _row(group: Sequence[tuple[Cell, TrainingResult | None]]) -> dict[str, Any]:
    """Mean and sample standard deviation over the seeds that have a result; None where there is nothing to compute."""
    cell = group[0][0]
    results = [result for _, result in group if result is not None]

    def statistic(function: Any, values: list[float], least: int = 1) -> float | None:
        return float(function(values)) if len(values) >= least else None

    taus = [result.test_tau for result in results]
    return {
        "table": cell.table,
        **{name: cell.label.get(name) for name in ("predictor", "threshold", "components", "channels", "layers")},
        "seeds": len(results),
        "test_tau_mean": statistic(np.mean, taus),
        "test_tau_std": statistic(lambda values: np.std(values, ddof=1), taus, 2),
        "validation_tau_mean": statistic(np.mean, [result.validation_tau for result in results]),
        "parameters": results[0].parameters if results else None,
        "seconds_mean": statistic(np.mean, [result.seconds for result in results]),
        "train_checkpoints": results[0].checkpoints["train"] if results else None,
        "test_checkpoints": results[0].checkpoints["test"] if results else None,
        "constant_seeds": sum(result.is_constant for result in results),
    }


def _cell_record(cell: Cell, result: TrainingResult | None) -> dict[str, Any]:
    """A cell for benchmark.json: without the epochs and predictions, which its own file has."""
    kept = ("parameters", "checkpoints", "validation_tau", "test_tau", "best_epoch", "seconds")
    values = None if result is None else {name: getattr(result, name) for name in kept}
    return {"table": cell.table, "label": cell.label, "setting": asdict(cell.setting), "result": values}


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown(rows: Sequence[dict[str, Any]], failed: dict[str, str]) -> str:
    lines = ["# Predictors of test accuracy", "", "Test part; mean ± standard deviation over seeds; tau-b.", ""]
    for table, title in TITLES.items():
        chosen = [row for row in rows if row["table"] == table]
        if chosen:
            lines += [
                f"## {title}",
                "",
                *(_by_threshold(chosen) if table == "threshold" else _one_a_row(table, chosen)),
                "",
            ]
    lines += _notes(rows)
    if failed:
        names: dict[str, list[str]] = {}
        for name, reason in failed.items():
            names.setdefault(reason, []).append(name)
        lines += ["## Cells without a result", ""]
        for reason, cells in names.items():
            more = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            lines += [f"- `{cells[0]}`{more}: {reason[:LONGEST_REASON]}"]
        lines += [""]
    return "\n".join(lines)


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Say where a tau says little."""
    lines = []
    if any(row["constant_seeds"] for row in rows):
        lines += [
            f"{CONSTANT} a seed's predictor gives one value for all: its tau is undefined and counts as 0 (too few "
            "checkpoints to learn from).",
            "",
        ]
    fewest = min((row["test_checkpoints"] for row in rows if row["test_checkpoints"]), default=FEW_TEST_CHECKPOINTS)
    if fewest < FEW_TEST_CHECKPOINTS:
        lines += [f"The smallest test part has {fewest} checkpoints: Kendall's tau is noisy.", ""]
    return lines


def _by_threshold(rows: Sequence[dict[str, Any]]) -> list[str]:
    thresholds = list(dict.fromkeys(row["threshold"] for row in rows))
    table = [["predictor", *(f"≥ {100 * threshold:g} %" for threshold in thresholds), "parameters", "seconds"]]
    for name in dict.fromkeys(row["predictor"] for row in rows):
        found = {row["threshold"]: row for row in rows if row["predictor"] == name}
        first = found[thresholds[0]]
        table.append([name, *(_tau(found[threshold]) for threshold in thresholds), *_costs(first)])
    counts = {row["threshold"]: row["train_checkpoints"] for row in rows if row["train_checkpoints"] is not None}
    table.append(["*training checkpoints*", *(_number(counts.get(threshold)) for threshold in thresholds), "", ""])
    return _lines(table)


def _one_a_row(table: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    names = ["components"] if table == "components" else ["channels", "layers"]
    body = [[*(str(row[name]) for name in names), _tau(row), *_costs(row)] for row in rows]
    return _lines([[*names, "tau", "parameters", "seconds"], *body])


def _lines(table: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], "|" + "---|" * len(table[0]), *lines[1:]]


def _tau(row: dict[str, Any]) -> str:
    if row["test_tau_mean"] is None:
        return NOTHING
    deviation = "" if row["test_tau_std"] is None else f" ± {row['test_tau_std']:.3f}"
    return f"{row['test_tau_mean']:.3f}{deviation}{f' {CONSTANT}' if row['constant_seeds'] else ''}"


def _costs(row: dict[str, Any]) -> list[str]:
    return [_number(row["parameters"]), NOTHING if row["seconds_mean"] is None else f"{row['seconds_mean']:.1f}"]


def _number(value: int | None) -> str:
    return NOTHING if value is None else f"{value:,}"


def _write_plots(out: Path, groups: Any) -> list[str]:
    """One scatter plot a predictor: the first seed's test part at the first given threshold that has a result."""
    first: dict[str, TrainingResult] = {}
    for group in groups:
        cell, result = group[0]
        if cell.table == "threshold" and result is not None:
            first.setdefault(cell.label["predictor"], result)
    paths = []
    for name, result in first.items():
        path = out / "scatter" / f"{name}.png"
        write(path, scatter_plot(name, result))
        paths.append(str(path))
    return paths


def scatter_plot(name: str, result: TrainingResult) -> bytes:
    figure = Figure(figsize=(4, 4), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    accuracy, predicted = ([row[key] for row in result.predictions] for key in ("accuracy", "predicted"))
    axes.scatter(accuracy, predicted, s=8, alpha=0.5, edgecolors="none")
    axes.set(
        xlim=(0, 1), ylim=(0, 1), xlabel="test accuracy", ylabel="predicted", title=f"{name}, tau {result.test_tau:.3f}"
    )
    image = io.BytesIO()
    canvas.print_png(image)
    return image.getvalue()
