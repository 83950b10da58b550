"""The card's plots: accuracies by epoch label and hyperparameter, and learning curves. Equal rows give equal bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from generators.hyperparameters import OPTIMIZERS
from zoo.config import label_order
from zoo.shards import Tables

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
VARIED = ("optimizer", "learning_rate", "init_std", "l2", "dropout", "train_fraction")
COLOUR = "tab:blue"
DOTS_PER_INCH = 110


@dataclass(frozen=True)
class Plot:
    """A picture of the card. name: of its file, without digest and ending. caption: one sentence. content: PNG."""

    name: str
    caption: str
    content: bytes


def make_plots(tables: Tables) -> Iterator[Plot]:
    """Yield the plots of every task; what has no data has no plot."""
    for task in tables.tasks:
        chosen = np.flatnonzero(pc.equal(tables.index["task"], task).to_numpy(zero_copy_only=False))
        rows, curve_rows = tables.index.take(chosen), tables.curve_rows[chosen]
        found = rows.filter(pc.field("file").is_valid())["epoch_label"].unique().to_pylist()
        labels = sorted(found, key=label_order)
        caption = f"{task}: test accuracy of the checkpoints at each epoch label; counts are logarithmic"
        yield Plot(f"{task}-accuracy-by-epoch-label", caption, _png(_histograms(rows, labels)))
        last = rows.filter(pc.equal(rows["epoch_label"], labels[-1]))
        caption = (
            f"{task}: test accuracy at epoch label {labels[-1]} by each hyperparameter: median, quartiles, deciles"
        )
        yield Plot(f"{task}-accuracy-by-hyperparameter", caption, _png(_by_hyperparameter(last)))
        _, first = np.unique(curve_rows, return_index=True)
        curves = curve_matrix(tables.curves["test_accuracy_by_epoch"].take(pa.array(curve_rows[first])))
        caption = f"{task}: test accuracy after each epoch by optimizer: median, quartiles, deciles of the runs"
        figure = _learning_curves(curves, np.array(rows["optimizer"].take(pa.array(first)).to_pylist()))
        yield Plot(f"{task}-learning-curves", caption, _png(figure))


def curve_matrix(curves: pa.ChunkedArray) -> np.ndarray:
    """Return lists of numbers as float64 [N, longest], NaN where a list has null or ends."""
    lists = [np.array(curve or [], float) for curve in curves.to_pylist()]
    matrix = np.full((len(lists), max(map(len, lists), default=0)), np.nan)
    for row, values in enumerate(lists):
        matrix[row, : len(values)] = values
    return matrix


def _histograms(rows: pa.Table, labels: Sequence[str]) -> Figure:
    figure = Figure(figsize=(2.8 * len(labels), 2.6), layout="constrained")
    panels = figure.subplots(1, len(labels), sharex=True, sharey=True, squeeze=False)[0]
    for panel, label in zip(panels, labels, strict=True):
        accuracy = rows.filter(pc.equal(rows["epoch_label"], label))["test_accuracy"].drop_null().to_numpy()
        panel.hist(accuracy, bins=50, range=(0, 1), log=True, color=COLOUR)
        panel.set_title(f"{label} ({len(accuracy):,})", fontsize=9)
        panel.set_xlabel("test accuracy")
    panels[0].set_ylim(bottom=0.5)
    panels[0].set_ylabel("checkpoints")
    return figure


def _by_hyperparameter(rows: pa.Table) -> Figure:
    figure = Figure(figsize=(9, 5), layout="constrained")
    panels = figure.subplots(2, 3, sharey=True)
    accuracy = rows["test_accuracy"].to_numpy()
    for panel, name in zip(panels.flat, VARIED, strict=True):
        column = np.array(rows[name].to_pylist())
        values = [v for v in OPTIMIZERS if v in column] if name == "optimizer" else list(np.unique(column))
        groups = [accuracy[column == value] for value in values]
        _quantile_bars(panel, [group[~np.isnan(group)] for group in groups])
        panel.set_xticks(range(len(values)), [_tick(value) for value in values], fontsize=7)
        panel.set_title(name, fontsize=9)
        panel.set_ylim(0, 1)
    for panel in panels[:, 0]:
        panel.set_ylabel("test accuracy")
    return figure


def _tick(value: Any) -> str:
    return str(value).replace("sgd_momentum", "momentum") if isinstance(value, str) else f"{value:g}"


def _quantile_bars(panel: Axes, groups: Sequence[np.ndarray]) -> None:
    """Draw deciles as a line, quartiles as a bar, the median as a dot, for every group."""
    for x, group in enumerate(groups):
        if len(group):
            q10, q25, q50, q75, q90 = np.quantile(group, QUANTILES)
            panel.vlines(x, q10, q90, color=COLOUR, linewidth=1)
            panel.vlines(x, q25, q75, color=COLOUR, linewidth=6, alpha=0.5)
            panel.plot(x, q50, "o", color="black", markersize=3)
    panel.set_xlim(-0.6, len(groups) - 0.4)


def _learning_curves(curves: np.ndarray, optimizer: np.ndarray) -> Figure:
    """curves: [runs, epochs + 1]; optimizer: name of each run."""
    names = [name for name in OPTIMIZERS if name in optimizer]
    figure = Figure(figsize=(2.8 * len(names), 2.6), layout="constrained")
    panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        chosen = curves[optimizer == name]
        known = ~np.isnan(chosen).all(axis=0)
        epochs = np.flatnonzero(known)
        q10, q25, q50, q75, q90 = np.nanquantile(chosen[:, known], QUANTILES, axis=0)
        marker = "." if len(epochs) < 10 else None
        panel.fill_between(epochs, q10, q90, color=COLOUR, alpha=0.2, linewidth=0)
        panel.fill_between(epochs, q25, q75, color=COLOUR, alpha=0.4, linewidth=0)
        panel.plot(epochs, q50, color="black", linewidth=1, marker=marker)
        panel.set_title(f"{name} ({len(chosen):,} runs)", fontsize=9)
        panel.set_xlabel("epoch")
        panel.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylim(0, 1)
    panels[0].set_ylabel("test accuracy")
    return figure


def _png(figure: Figure) -> bytes:
    """Return a figure as PNG, without the library version that would change its bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()
