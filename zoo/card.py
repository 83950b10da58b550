"""The dataset card: Hub metadata, and a description in which every figure comes from the rows."""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import DatasetInfo, Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCardData

from generators.architecture import parameter_count, tensor_table
from generators.hyperparameters import OPTIMIZERS
from zoo.config import label_order
from zoo.schema import CURVES, INDEX_COLUMNS, SCALARS, checkpoint_schema, index_schema
from zoo.shards import Tables
from zoo.shipped import shipped_folder
from zoo.splits import SPLITS

TEMPLATE = "dataset_card.md"
INDEX_SPLIT = "train"
"""The index has one split; datasets' habit is to call it train."""
TAGS = (
    "model-zoo",
    "weight-space-learning",
    "neural-functional-networks",
    "transformers",
    "learning-curves",
    "hyperparameters",
    "arxiv:2410.04209",
)
SIZE_CATEGORIES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))
DATA_SOURCES = {
    "mnist": "MNIST: Y. LeCun, C. Cortes, C. J. C. Burges; CC BY-SA 3.0.",
    "ag_news": (
        "AG News: AG's corpus of news articles (A. Gulli), free for any non-commercial use; the four classes are those "
        "of X. Zhang, J. Zhao, Y. LeCun, NeurIPS 2015. Word vectors of Google News, where "
        "they are used: Apache License 2.0."
    ),
}
"""Sources and licences of the data that the models were trained on."""


def card_text(tables: Tables, provenance: dict[str, Any], plots: Mapping[str, str]) -> str:
    """Return README.md: metadata between dashes, then the filled template. `plots`: path -> caption."""
    body = Template((shipped_folder("cards") / TEMPLATE).read_text(encoding="utf-8")).substitute(
        summary=_summary(tables),
        default_task=tables.tasks[0],
        good_accuracy=_good_accuracy(tables),
        counts="\n\n".join(_count_tables(tables, task) for task in tables.tasks),
        recipe=_recipe(tables),
        columns=_column_table(),
        tensors="\n\n".join(_tensor_table(task) for task in tables.tasks),
        plots="\n\n".join(f"![{caption}]({path})\n*{caption}*" for path, caption in plots.items()),
        data="\n".join(_data(task, provenance) for task in tables.tasks),
        sources="\n".join(f"- {DATA_SOURCES[task]}" for task in tables.tasks),
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
    configs.append(_config("index", {INDEX_SPLIT: [tables.index_file.path]}, default=False))
    infos["index"] = DatasetInfo(features=Features.from_arrow_schema(index_schema()))
    data = DatasetCardData(
        pretty_name="Small Transformer Zoo",
        license="mit",
        task_categories=["other"],
        tags=[*TAGS, *tables.tasks],
        size_categories=[size_category(sum(shard.rows for shard in tables.shards))],
        configs=configs,
    )
    DatasetInfosDict(infos).to_dataset_card_data(data)
    return data


def _config(name: str, files: dict[str, list[str]], default: bool) -> dict[str, Any]:
    """A configuration; splits without rows are not declared, since an empty one cannot be loaded."""
    config: dict[str, Any] = {"config_name": name}
    if default:
        config["default"] = True
    config["version"] = content_version(path for paths in files.values() for path in paths)
    config["data_files"] = [{"split": split, "path": paths} for split, paths in files.items() if paths]
    return config


def content_version(names: Iterable[str]) -> str:
    """Return a version that follows from file names (which carry digests), so that caches see every change."""
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    return f"1.0.{int.from_bytes(digest[:4], 'big')}"


def size_category(rows: int) -> str:
    """Return the Hub's name for so many rows."""
    return next((name for bound, name in SIZE_CATEGORIES if rows < bound), "1M<n<10M")


def _present(tables: Tables, task: str) -> pa.Table:
    """The index's rows of a task that have a checkpoint."""
    return tables.index.filter((pc.field("task") == task) & pc.field("file").is_valid())


def _summary(tables: Tables) -> str:
    lines = []
    for task in tables.tasks:
        rows = _present(tables, task)
        runs = len(pc.unique(tables.index.filter(pc.field("task") == task)["run_id"]))
        accuracy = pc.min_max(rows["test_accuracy"])
        low, high = accuracy["min"].as_py(), accuracy["max"].as_py()
        lines.append(
            f"- `{task}`: {len(rows):,} checkpoints of {runs:,} runs, {parameter_count(task):,} parameters each, "
            f"test accuracy {low:.3f} to {high:.3f}"
        )
    return "\n".join(lines)


def _good_accuracy(tables: Tables) -> str:
    """A round threshold for the card's snippets that a tenth or so of the default task's checkpoints pass."""
    accuracy = _present(tables, tables.tasks[0])["test_accuracy"].to_numpy()
    return f"{math.floor(20 * float(np.quantile(accuracy, 0.9))) / 20:.2f}"


def _count_tables(tables: Tables, task: str) -> str:
    """Checkpoints by epoch label and optimizer, checkpoints by split, runs by status."""
    rows = _present(tables, task)
    pairs = (
        rows.select(["epoch_label", "optimizer"]).group_by(["epoch_label", "optimizer"]).aggregate([([], "count_all")])
    )
    counts = {(row["epoch_label"], row["optimizer"]): row["count_all"] for row in pairs.to_pylist()}
    optimizers = [name for name in OPTIMIZERS if any(name == optimizer for _, optimizer in counts)]
    body = []
    for label in sorted({label for label, _ in counts}, key=label_order):
        row = [counts.get((label, name), 0) for name in optimizers]
        body.append([label, *(f"{count:,}" for count in (*row, sum(row)))])
    by_split = _value_counts(rows["split"])
    runs = tables.index.filter(pc.field("task") == task).group_by("run_id").aggregate([("status", "min")])
    status = _value_counts(runs["status_min"])
    return "\n\n".join(
        [
            f"`{task}`, checkpoints by epoch label and optimizer:",
            _markdown(["epoch label", *optimizers, "all"], body),
            "By split: " + ", ".join(f"{split} {by_split[split]:,}" for split in SPLITS if split in by_split) + ".",
            "Runs: " + ", ".join(f"{name} {count:,}" for name, count in sorted(status.items())) + ".",
        ]
    )


def _value_counts(column: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column).to_pylist()}


def _recipe(tables: Tables) -> str:
    """What all runs of a plan share, a line a plan."""
    lines = []
    for plan in tables.plans:
        run = plan.runs[0]
        used = {run.optimizer for run in plan.runs}
        lines.append(
            f"- `{plan.task}` ({plan.origin}, {len(plan.runs):,} runs planned): {run.epochs} epochs, "
            f"batch {run.batch_size}, linear warm-up over {run.warmup_epochs}, then a cosine to "
            f"{run.min_learning_rate:g}; optimizers {', '.join(name for name in OPTIMIZERS if name in used)}; "
            f"initialisation {run.initialisation}; best epoch by {run.best_by} accuracy; "
            f"epoch labels {', '.join(plan.labels)}"
        )
    return "\n".join(lines)


def _column_table() -> str:
    rows = [(f"`{c.name}`", str(c.type), c.meaning) for c in (*SCALARS, *CURVES)]
    rows += [(f"`{c.name}` (index only)", str(c.type), c.meaning) for c in INDEX_COLUMNS]
    return _markdown(("column", "type", "meaning"), rows)


def _tensor_table(task: str) -> str:
    rows = [(f"`{spec.name}`", " x ".join(map(str, spec.shape)), spec.component) for spec in tensor_table(task)]
    return _markdown((f"tensor ({task})", "shape", "component"), rows)


def _data(task: str, provenance: dict[str, Any]) -> str:
    """One line: how much data, its digest, and for texts what was cut and what is unknown."""
    record = provenance["data"].get(task)
    if record is None:
        return f"- `{task}`: imported checkpoints; their data is not part of this dataset."
    origin = record["origin"]
    line = (
        f"- `{task}`: {record['train_samples']:,} training and {record['test_samples']:,} test samples "
        f"(source: {origin['source']}), digest `{record['data_digest']}`."
    )
    if task == "ag_news":
        cut, unknown = origin["cut_texts"], origin["unknown_tokens"]
        vectors = ", ".join(
            f"{key} {value}" for key, value in origin["word_vectors"].items() if not isinstance(value, dict)
        )
        line += (
            f" Texts: {origin['tokens']}; {cut['train']:.2%} of the training texts and {cut['test']:.2%} of the "
            f"test texts have more than {origin['max_tokens']} tokens and were cut; {unknown['train']:.2%} and "
            f"{unknown['test']:.2%} of their tokens have no vector. "
            f"Word vectors of {origin['vocabulary']:,} words: {vectors}."
        )
    return line


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
