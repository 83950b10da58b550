"""The dataset card: Hub metadata, a description in which every figure comes from the index, and plots."""

import hashlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import pyarrow as pa
import pyarrow.compute as pc
from datasets import DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData
from matplotlib.figure import Figure

from generators.architecture import parameter_count, tensor_table
from generators.optimizers import KINDS
from zoo.schema import CURVES, INDEX_COLUMNS, SCALARS, checkpoint_schema, index_schema
from zoo.shards import SPLITS, Tables, counts
from zoo.shipped import shipped_folder

TEMPLATE = "dataset_card.md"
INDEX_SPLIT = "train"
"""The index has one split; datasets' habit is to call it train."""


def text(tables: Tables, provenance: dict[str, Any], assets: Sequence[str]) -> str:
    """Return README.md: metadata between dashes, then the filled template."""
    body = Template(_template()).substitute(
        summary=_summary(tables),
        default_task=tables.tasks[0],
        counts=_count_tables(tables.index),
        recipe=_recipe(tables),
        columns=_column_table(),
        tensors="\n\n".join(_tensor_table(task) for task in tables.tasks),
        plots="\n".join(f"![{_caption(path)}]({path})" for path in assets),
        data=_data(provenance),
        engines=", ".join(provenance["engines"]),
        versions=", ".join(f"{name} {'/'.join(found)}" for name, found in provenance["versions"].items()),
    )
    return f"---\n{_metadata(tables).to_yaml()}\n---\n\n{body}"


def _metadata(tables: Tables) -> DatasetCardData:
    """Explicit file names per split, a version that follows from the content, features, one default."""
    configs = []
    infos = {}
    for number, task in enumerate(tables.tasks):
        files = {split: [s.path for s in tables.shards if (s.task, s.split) == (task, split)] for split in SPLITS}
        configs.append(_config(task, files, default=number == 0))
        infos[task] = DatasetInfo(features=Features.from_arrow_schema(checkpoint_schema(task)))
    configs.append(_config("index", {INDEX_SPLIT: [tables.index_path]}, default=False))
    infos["index"] = DatasetInfo(features=Features.from_arrow_schema(index_schema()))
    data = DatasetCardData(
        pretty_name="Small Transformer Zoo",
        license="mit",
        task_categories=["other"],
        tags=["model-zoo", "weight-space", "neural-functional-networks", "transformers", "hyperparameters"],
        size_categories=[_size_category(tables.index.num_rows)],
        configs=configs,
    )
    DatasetInfosDict(infos).to_dataset_card_data(data)
    return data


def _config(name: str, files: dict[str, list[str]], default: bool) -> dict[str, Any]:
    """A configuration; splits without rows are not declared, since an empty one cannot be loaded."""
    names = [path for paths in files.values() for path in paths]
    config: dict[str, Any] = {"config_name": name}
    if default:
        config["default"] = True
    config["version"] = content_version(names)
    config["data_files"] = [{"split": split, "path": paths} for split, paths in files.items() if paths]
    return config


def content_version(names: Iterable[str]) -> str:
    """Return a version that follows from file names (which carry digests), so that caches see every change."""
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return f"1.0.{int.from_bytes(digest[:4], 'big')}"


def _size_category(rows: int) -> str:
    bounds = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
    return next((name for bound, name in bounds if rows < bound), "1M<n<10M")


def _summary(tables: Tables) -> str:
    parts = []
    for task in tables.tasks:
        rows = sum(shard.rows for shard in tables.shards if shard.task == task)
        runs = sum(len(plan.runs) for plan in tables.plans if plan.task == task)
        accuracy = pc.min_max(tables.index.filter(pc.equal(tables.index["task"], task))["test_accuracy"])
        low, high = accuracy["min"].as_py(), accuracy["max"].as_py()
        parts.append(
            f"- `{task}`: {rows:,} checkpoints of {runs:,} runs, {parameter_count(task):,} parameters each, "
            f"test accuracy {low:.3f} to {high:.3f}"
        )
    return "\n".join(parts)


def _count_tables(index: pa.Table) -> str:
    """Checkpoints by task, split, epoch label and optimizer; runs by status."""
    tables = []
    for column in ("task", "split", "epoch_label", "optimizer"):
        rows = sorted(counts(index, column).items())
        tables.append(_markdown((column, "checkpoints"), [(value, f"{count:,}") for value, count in rows]))
    runs = index.select(["run_id", "status"]).group_by("run_id").aggregate([("status", "min")])
    statuses = sorted((e["values"], e["counts"]) for e in pc.value_counts(runs["status_min"]).to_pylist())
    tables.append(_markdown(("status", "runs"), [(value, f"{count:,}") for value, count in statuses]))
    return "\n\n".join(tables)


def _recipe(tables: Tables) -> str:
    """What all runs of a plan share, a line a plan."""
    lines = []
    for plan in tables.plans:
        run = plan.runs[0]
        optimizers = [name for name in KINDS if any(r.optimizer == name for r in plan.runs)]
        lines.append(
            f"- `{plan.task}` ({plan.origin}, {len(plan.runs):,} runs): {run.epochs} epochs, batch {run.batch_size}, "
            f"{run.warmup_epochs} epochs of warm-up, then a cosine to {run.min_learning_rate:g}; "
            f"optimizers {', '.join(optimizers)}; initialisation {run.initialisation}; "
            f"best epoch by {run.best_by} accuracy; labels {', '.join(plan.labels)}"
        )
    return "\n".join(lines)


def _column_table() -> str:
    columns = (*SCALARS, *CURVES)
    rows = [(f"`{c.name}`", str(c.type), c.meaning) for c in columns]
    rows += [(f"`{c.name}` (index only)", str(c.type), c.meaning) for c in INDEX_COLUMNS]
    return _markdown(("column", "type", "meaning"), rows)


def _tensor_table(task: str) -> str:
    rows = [(f"`{spec.name}`", "x".join(map(str, spec.shape)), spec.component) for spec in tensor_table(task)]
    return _markdown((f"tensor ({task})", "shape", "component"), rows)


def _data(provenance: dict[str, Any]) -> str:
    lines = []
    for task, record in sorted(provenance["data"].items()):
        origin = ", ".join(f"{key} {value}" for key, value in sorted(record["origin"].items()))
        lines.append(
            f"- `{task}`: {record['train_samples']:,} training and {record['test_samples']:,} test samples, "
            f"digest `{record['data_digest']}` ({origin})"
        )
    return "\n".join(lines) or "- imported checkpoints; their data is not part of this dataset"


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _template() -> str:
    return (shipped_folder("cards") / TEMPLATE).read_text(encoding="utf-8")


def _caption(path: str) -> str:
    return Path(path).stem.rpartition("-")[0].replace("-", " ")


def plots(tables: Tables) -> dict[str, bytes]:
    """Return name -> PNG: accuracy histograms by epoch label and by optimizer, a pair a task."""
    images = {}
    for task in tables.tasks:
        rows = tables.index.filter(pc.equal(tables.index["task"], task))
        for column in ("epoch_label", "optimizer"):
            images[f"{task}-accuracy-by-{column.replace('_', '-')}"] = _histograms(rows, column)
    return images


def _histograms(rows: pa.Table, column: str) -> bytes:
    """Histograms of test accuracy with a logarithmic count, a panel a value of `column`."""
    values = sorted(counts(rows, column), key=lambda value: (not value.isdigit(), value.zfill(6)))
    figure = Figure(figsize=(3 * len(values), 2.6), layout="constrained")
    panels = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for panel, value in zip(panels, values, strict=True):
        accuracy = rows.filter(pc.equal(rows[column], value))["test_accuracy"].drop_null()
        panel.hist(accuracy.to_numpy(), bins=40, range=(0, 1), log=True)
        panel.set_title(f"{column} {value}", fontsize=9)
        panel.set_xlabel("test accuracy")
    panels[0].set_ylabel("checkpoints")
    return png(figure)


def png(figure: Figure) -> bytes:
    """Return a figure as PNG, without the time and the library version that would change its bytes."""
    buffer = BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "zoo"}):
        figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()
