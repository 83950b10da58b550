"""The benchmark: cells, resuming, tables and plots, on a real small zoo."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DAMAGED_RECORDS, make_data

from zoo.errors import NFNError
from zoo.nfn import benchmark as module
from zoo.nfn.benchmark import BenchmarkResult, benchmark
from zoo.nfn.data import load_checkpoints
from zoo.nfn.fit import Recipe
from zoo.nfn.record import TrainingResult
from zoo.nfn.report import Cell, write_report
from zoo.nfn.train import Setting

ARGUMENTS: dict[str, Any] = {
    "task": "mnist",
    "epoch_label": "best",
    "predictors": ["statnn", "hyperparameters"],
    "thresholds": (0.0, 0.99),
    "components": [("classifier",)],
    "sizes": [(2, 1), (10, 1)],
    "seeds": 2,
    "recipe": Recipe(epochs=2, warmup_epochs=1),
    "device": "cpu",
    "progress": False,
}


def some_result() -> TrainingResult:
    predictions = [{"checkpoint_id": str(row), "accuracy": row / 2, "predicted": row / 2} for row in range(2)]
    return TrainingResult(1, {"train": 9, "validation": 9, "test": 2}, 0.5, 0.5, None, 0.0, [], predictions)


@pytest.fixture(scope="module")
def finished(small_zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BenchmarkResult]:
    out = tmp_path_factory.mktemp("benchmark")
    return out, benchmark(small_zoo, out=out, **ARGUMENTS)


def test_rows_are_means_over_seeds(finished: tuple[Path, BenchmarkResult]):
    out, result = finished
    cells = json.loads((out / "benchmark.json").read_text())["cells"]
    row = next(row for row in result.rows if row["predictor"] == "statnn" and row["threshold"] == 0.0)
    taus = [cell["result"]["test_tau"] for cell in cells if cell["label"] == {"predictor": "statnn", "threshold": 0.0}]
    assert len(taus) == 2
    assert row["test_tau_mean"] == pytest.approx(np.mean(taus))
    assert row["test_tau_std"] == pytest.approx(abs(taus[0] - taus[1]) / np.sqrt(2))
    assert row["parameters"] == 203_393
    assert [row["table"] for row in result.rows] == ["threshold"] * 4 + ["components"] + ["size"] * 2
    assert (result.rows[-1]["channels"], result.rows[-1]["parameters"]) == (10, 1_812_181)


def test_tables_are_written_three_times(finished: tuple[Path, BenchmarkResult]):
    out, result = finished
    with (out / "benchmark.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["test_tau_mean"]) for row in rows if row["test_tau_mean"]] == [
        row["test_tau_mean"] for row in result.rows if row["test_tau_mean"] is not None
    ]
    text = (out / "benchmark.md").read_text()
    row = next(row for row in result.rows if row["predictor"] == "hyperparameters" and row["threshold"] == 0.0)
    cells = f"{row['test_tau_mean']:.3f} ± {row['test_tau_std']:.3f} | – | 4,865 |"  # noqa: RUF001
    assert f"| hyperparameters | {cells}" in text
    assert "| predictor | ≥ 0 % | ≥ 99 % | parameters | seconds |" in text
    assert "| classifier | " in text
    for name in ("statnn", "hyperparameters"):
        assert (out / "scatter" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_predictor_that_gives_one_value_for_all_is_marked(tmp_path: Path):
    predictions = [{"checkpoint_id": str(row), "accuracy": row / 40, "predicted": 0.5} for row in range(40)]
    constant = TrainingResult(1, {"train": 9, "validation": 9, "test": 40}, 0.0, 0.0, 1, 0.0, [], predictions)
    varied = replace(constant, test_tau=1.0, predictions=[row | {"predicted": row["accuracy"]} for row in predictions])
    cells = [
        (Cell("threshold", {"predictor": name, "threshold": 0.0}, Setting("mnist", "best")), result)
        for name, result in (("one", constant), ("two", varied))
    ]
    write_report(tmp_path, cells, {})
    text = (tmp_path / "benchmark.md").read_text()
    assert "| one | 0.000 † |" in text and "| two | 1.000 |" in text
    assert "† a seed's predictor gives one value for all" in text
    assert "noisy" not in text
    write_report(tmp_path, [(cells[1][0], replace(varied, checkpoints={"train": 9, "validation": 9, "test": 8}))], {})
    text = (tmp_path / "benchmark.md").read_text()
    assert "†" not in text
    assert "The smallest test part has 8 checkpoints: Kendall's tau is noisy." in text


def test_cells_that_cannot_be_trained_say_why(finished: tuple[Path, BenchmarkResult]):
    out, result = finished
    assert len(result.failed) == 4
    assert all("_0.99_" in name for name in result.failed)
    assert all(line.startswith("train part: found 0 checkpoints") for line in result.failed.values())
    assert "train part: found 0 checkpoints" in (out / "benchmark.md").read_text()


def test_only_missing_cells_are_trained(
    small_zoo: Path, finished: tuple[Path, BenchmarkResult], monkeypatch: pytest.MonkeyPatch
):
    out, result = finished
    trained = []
    train = module._train_cell

    def counted(dataset: str, digest: str, setting: Any, device: str) -> Any:
        trained.append(setting)
        return train(dataset, digest, setting, device)

    monkeypatch.setattr(module, "_train_cell", counted)
    lost = next(path for path in sorted((out / "cells").iterdir()) if path.name.startswith("hyperparameters"))
    lost.unlink()
    again = benchmark(small_zoo, out=out, **(ARGUMENTS | {"thresholds": (0.0,)}))
    assert [setting.predictor for setting in trained] == ["hyperparameters"]
    assert lost.exists()
    timeless = lambda rows: [  # noqa: E731
        {name: value for name, value in row.items() if name != "seconds_mean"}
        for row in rows
        if row["threshold"] != 0.99
    ]
    assert timeless(again.rows) == timeless(result.rows)


def test_cells_of_other_checkpoints_are_refused(small_zoo: Path, finished: tuple[Path, BenchmarkResult]):
    out, _ = finished
    path = next(iter(sorted((out / "cells").iterdir())))
    content = path.read_text()
    record = json.loads(content)
    record["config"]["data"] = "0" * 16
    path.write_text(json.dumps(record))
    with pytest.raises(NFNError, match=re.escape(f"{path.name}: data: found '{'0' * 16}', expected")):
        benchmark(small_zoo, out=out, **ARGUMENTS)
    path.write_text(content)


@pytest.mark.parametrize(("content", "message"), DAMAGED_RECORDS)
def test_a_damaged_cell_is_refused(
    small_zoo: Path, finished: tuple[Path, BenchmarkResult], content: bytes, message: str
):
    out, _ = finished
    path = next(iter(sorted((out / "cells").iterdir())))
    whole = path.read_bytes()
    path.write_bytes(content)
    with pytest.raises(NFNError, match=f"{re.escape(path.name)}: {message}; remove it to train the cell again"):
        benchmark(small_zoo, out=out, **ARGUMENTS)
    path.write_bytes(whole)


def test_workers_get_an_absolute_folder_and_what_the_driver_saw(
    small_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = []

    def instead(dataset: str, digest: str, setting: Setting, device: str) -> TrainingResult:
        asked.append((dataset, digest))
        return some_result()

    monkeypatch.setattr(module, "_train_cell", instead)
    monkeypatch.chdir(small_zoo.parent)
    benchmark(small_zoo.name, out=tmp_path, **(ARGUMENTS | {"seeds": 1}))
    assert set(asked) == {(str(small_zoo), load_checkpoints(str(small_zoo), "mnist", "best").digest())}


def test_a_cell_is_trained_on_nothing_but_what_the_driver_saw(monkeypatch: pytest.MonkeyPatch):
    """Also in a process that has read another dataset under the same name."""
    before, after = (make_data("mnist", 60, seed) for seed in (0, 1))
    present = [before]
    monkeypatch.setattr(module, "load_checkpoints", lambda *_: present[0])
    recipe = Recipe(epochs=1, warmup_epochs=0)
    setting = Setting("mnist", "best", "statnn", components=("classifier",), resplit=True, recipe=recipe)
    first = module._train_cell("zoo", before.digest(), setting, "cpu")
    present[0] = after
    second = module._train_cell("zoo", after.digest(), setting, "cpu")
    assert isinstance(first, TrainingResult) and isinstance(second, TrainingResult)
    assert [row["accuracy"] for row in first.predictions] != [row["accuracy"] for row in second.predictions]
    message = module._train_cell("zoo", before.digest(), setting, "cpu")
    assert message.startswith(f"zoo: found the checkpoints {after.digest()} where this cell is trained, expected")


def test_cells_are_dealt_over_ray(small_zoo: Path, tmp_path: Path, ray_address: str):
    changes = {"thresholds": (0.0,), "components": (), "sizes": (), "workers": 2, "address": ray_address}
    result = benchmark(small_zoo, out=tmp_path, **(ARGUMENTS | changes))
    assert result.failed == {}
    assert [row["seeds"] for row in result.rows] == [2, 2]
    assert len(list((tmp_path / "cells").iterdir())) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds: found 0"),
        ({"predictors": ["nfn"]}, "predictor: found 'nfn'"),
        ({"components": [["head"]]}, "components: found 'head'"),
        ({"thresholds": [80]}, "threshold: found 80, expected a fraction"),
    ],
)
def test_wrong_settings_are_refused_before_any_training(small_zoo: Path, tmp_path: Path, changes: dict, message: str):
    with pytest.raises(NFNError, match=message):
        benchmark(small_zoo, out=tmp_path, **(ARGUMENTS | changes))
    assert not list(tmp_path.iterdir())


def test_no_predictors_make_no_table_by_threshold(small_zoo: Path, tmp_path: Path):
    changes = {"predictors": (), "sizes": [(2, 1)], "components": (), "seeds": 1}
    result = benchmark(small_zoo, out=tmp_path, **(ARGUMENTS | changes))
    assert [row["table"] for row in result.rows] == ["size"]


@pytest.mark.parametrize("resplit", [False, True])
def test_what_no_seed_changes_is_trained_once(
    resplit: bool, small_zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    trained = []

    def instead(dataset: str, digest: str, setting: Setting, device: str) -> TrainingResult:
        trained.append((setting.predictor, setting.seed))
        return some_result()

    monkeypatch.setattr(module, "_train_cell", instead)
    names = ["xgboost", "lightgbm", "random-forest"]
    changes = {"predictors": names, "thresholds": (0.0,), "components": (), "sizes": (), "seeds": 3}
    result = benchmark(small_zoo, out=tmp_path, **(ARGUMENTS | changes), resplit=resplit)
    counts = {name: sum(predictor == name for predictor, _ in trained) for name in names}
    assert counts == {"xgboost": 3 if resplit else 1, "lightgbm": 3 if resplit else 1, "random-forest": 3}
    assert [row["seeds"] for row in result.rows] == [3, 3, 3]
