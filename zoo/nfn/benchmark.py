"""The paper's tables on any zoo: predictors by accuracy threshold, components, and sizes of Transformer-NFN.

A cell is one training. Its result is one file under OUT/cells, written whole when the training ends; a benchmark that
starts again trains only the cells whose files are missing. Cells are independent and are dealt over a cluster, whose
workers read the dataset themselves and train only on the checkpoints that the files will name.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

from tqdm import tqdm

from zoo.cluster import Cluster, Failure, FailureKind, connect
from zoo.errors import NFNError, ZooError
from zoo.files import write
from zoo.nfn.data import WeightData, load_checkpoints, settle_components
from zoo.nfn.fit import PAPER, Recipe
from zoo.nfn.predictors import predictor_class, predictor_names
from zoo.nfn.record import TrainingResult, read_record, require_same
from zoo.nfn.report import Cell, write_report
from zoo.nfn.train import Setting, split_for, train_on

THRESHOLDS = (0.0, 0.2, 0.4, 0.6, 0.8)
SIZES = ((3, 1), (5, 1), (10, 1), (3, 2), (10, 2))
"""(channels, layers) of the table of sizes."""
WAIT_SECONDS = 1.0


@dataclass(frozen=True)
class BenchmarkResult:
    """files: what was written, by kind (md, csv, json, plots). rows: the tables' rows. failed: cell -> one line."""

    files: dict[str, Any]
    rows: list[dict[str, Any]]
    failed: dict[str, str]


def benchmark(
    dataset: str | Path,
    *,
    task: str,
    epoch_label: str,
    out: str | Path,
    predictors: Sequence[str] | None = None,
    thresholds: Sequence[float] = THRESHOLDS,
    components: Sequence[Sequence[str]] | None = None,
    sizes: Sequence[tuple[int, int]] = SIZES,
    seeds: int = 5,
    filters: Sequence[str] = (),
    resplit: bool = False,
    recipe: Recipe | None = None,
    device: str = "auto",
    workers: int | None = 0,
    address: str | None = None,
    progress: bool = True,
) -> BenchmarkResult:
    """Train all cells that are not trained yet and write the tables.

    Args:
        dataset: a dataset folder or Hub repository that every worker can read, a folder under the same path.
        task, epoch_label: which checkpoints take part; one a run.
        out: folder of the cells and tables. Cells of other checkpoints or settings are refused.
        predictors: rows of the table by threshold; None for all, () for no such table.
        thresholds: its columns, smallest test accuracies in [0, 1).
        components: rows of Transformer-NFN's table by components; None for every subset, () for no such table.
        sizes: rows (channels, layers) of its table of sizes; () for no such table.
        seeds: trainings a row, with seeds 0, 1 ...
        filters: conditions on columns that a checkpoint fulfils to take part, for example "initialisation==shared".
        resplit: split 70/15/15 anew for each seed, after the filter (the paper's protocol).
        recipe: of networks; the paper's if not given.
        device: of each training.
        workers: trainings at once on Ray; None for one a GPU or core, 0 trains in this process.
        address: of a running Ray cluster.
        progress: show a bar on stderr.

    Raises:
        NFNError: settings or `out` do not fit. A cell that cannot be trained (too few checkpoints above a threshold, a
            library that is not installed) is reported in the tables and in `failed`.
    """
    if seeds < 1:
        raise NFNError(f"seeds: found {seeds}, expected 1 or more")
    names = predictor_names() if predictors is None else [*predictors]
    subsets = _subsets(task) if components is None else [settle_components(task, subset) for subset in components]
    shared: dict[str, Any] = {
        "task": task,
        "epoch_label": epoch_label,
        "filters": tuple(filters),
        "resplit": resplit,
        "recipe": recipe or PAPER,
    }
    cells = [
        Cell(table, label, _without_idle_seed(Setting(**shared, **changes, seed=seed)))
        for table, label, changes in _rows(names, thresholds, subsets, sizes)
        for seed in range(seeds)
    ]
    out = Path(out)
    # Workers have working directories of their own.
    source = str(Path(dataset).absolute() if Path(dataset).is_dir() else dataset)
    digest = load_checkpoints(source, task, epoch_label, tuple(filters)).digest()
    settings = {cell_name(cell.setting): cell.setting for cell in cells}
    found = {name: _read_cell(out, name, _config(setting, digest)) for name, setting in settings.items()}
    results = {name: result for name, result in found.items() if result is not None}
    todo = {name: setting for name, setting in settings.items() if name not in results}
    failed: dict[str, str] = {}
    if todo:
        cluster = connect(workers, address)
        try:
            trained = _deal(cluster, partial(_train_cell, source, digest, device=device), todo)
            for name, outcome in tqdm(trained, total=len(todo), desc="benchmark", unit="cell", disable=not progress):
                if isinstance(outcome, str):
                    failed[name] = outcome
                    continue
                record = {"config": _config(settings[name], digest), "result": asdict(outcome)}
                write(_cell_file(out, name), (json.dumps(record) + "\n").encode())
                results[name] = outcome
        finally:
            cluster.close()
    files, rows = write_report(out, [(cell, results.get(cell_name(cell.setting))) for cell in cells], failed)
    return BenchmarkResult(files, rows, failed)


def cell_name(setting: Setting) -> str:
    """A readable name that differs for different settings."""
    options = "".join(f"_{name}{value}" for name, value in sorted(setting.options.items()))
    record = json.dumps(asdict(setting), sort_keys=True)
    short = hashlib.sha256(record.encode()).hexdigest()[:8]
    parts = "+".join(setting.components or ())
    return f"{setting.predictor}{options}_{parts}_{setting.threshold:g}_seed{setting.seed}_{short}"


def _without_idle_seed(setting: Setting) -> Setting:
    """Give seed 0 to a training that no seed changes: it is done once, and counts for every seed."""
    is_idle = not (setting.resplit or predictor_class(setting.predictor).has_chance)
    return replace(setting, seed=0) if is_idle else setting


def _rows(
    names: Sequence[str],
    thresholds: Sequence[float],
    subsets: Sequence[tuple[str, ...]],
    sizes: Sequence[tuple[int, int]],
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (table, what the row says, changes of the setting)."""
    for name in names:
        for threshold in thresholds:
            yield "threshold", {"predictor": name, "threshold": threshold}, {"predictor": name, "threshold": threshold}
    for subset in subsets:
        yield "components", {"components": "+".join(subset)}, {"components": subset}
    for channels, layers in sizes:
        label = {"channels": channels, "layers": layers}
        # The paper's size is the default and needs no training of its own.
        yield "size", label, {} if (channels, layers) == (10, 1) else {"options": label}


def _subsets(task: str) -> list[tuple[str, ...]]:
    available = settle_components(task, None)
    return [subset for size in range(len(available), 0, -1) for subset in combinations(available, size)]


def _config(setting: Setting, digest: str) -> dict[str, Any]:
    return asdict(setting) | {"data": digest}


def _cell_file(out: Path, name: str) -> Path:
    return out / "cells" / f"{name}.json"


def _read_cell(out: Path, name: str, config: dict[str, Any]) -> TrainingResult | None:
    path = _cell_file(out, name)
    record = read_record(path, "remove it to train the cell again")
    if record is None:
        return None
    require_same(path, record["config"], config)
    return TrainingResult(**record["result"])


def _deal(
    cluster: Cluster, train_cell: Callable[[Setting], TrainingResult | str], todo: dict[str, Setting]
) -> Iterator[tuple[str, TrainingResult | str]]:
    """Keep all slots of the cluster busy; yield each cell's name with its result, or a line on why there is none."""
    waiting = list(todo)
    running: dict[Any, str] = {}
    while waiting or running:
        while waiting and len(running) < cluster.slots:
            name = waiting.pop(0)
            running[cluster.submit(train_cell, todo[name])] = name
        for task, outcome in cluster.wait(list(running), WAIT_SECONDS):
            name = running.pop(task)
            if isinstance(outcome, Failure) and outcome.kind == FailureKind.LOST_NODE:
                waiting.append(name)
            elif isinstance(outcome, Failure):
                yield name, f"{outcome.kind.value}: {outcome.detail.strip().splitlines()[-1]}"
            else:
                yield name, outcome


def _train_cell(dataset: str, digest: str, setting: Setting, device: str) -> TrainingResult | str:
    """Train one cell, in whatever process; an error of the settings or the data comes back as its message."""
    try:
        data = _cell_checkpoints(dataset, digest, setting.task, setting.epoch_label, setting.filters)
        return train_on(split_for(setting, data), setting, device, progress=False)
    except ZooError as error:
        return str(error)


@lru_cache(maxsize=1)
def _cell_checkpoints(dataset: str, digest: str, task: str, epoch_label: str, filters: tuple[str, ...]) -> WeightData:
    """Read what the cells of a benchmark share, once in a process.

    Raises:
        NFNError: these are not the checkpoints of `digest`.
    """
    data = load_checkpoints(dataset, task, epoch_label, filters)
    found = data.digest()
    if found != digest:
        raise NFNError(
            f"{dataset}: found the checkpoints {found} where this cell is trained, expected {digest} as where the "
            "benchmark was started; give all machines one dataset that does not change"
        )
    return data
