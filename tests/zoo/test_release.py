"""The authors' release, written here in its layout, honest and hostile, and what an import makes of it."""

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from release_tools import Release, checkpoint, found, run_import, saved, state_dict, two_runs

from generators.architecture import SmallTransformer
from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.release import import_release
from zoo.store import Store
from zoo.verify_sweep import verify_sweep


@pytest.fixture
def release() -> Release:
    return two_runs()


# What an honest release becomes


def test_weights_arrive_bit_by_bit_under_their_labels(release: Release, tmp_path: Path) -> None:
    report, store = run_import(release, tmp_path)
    assert (report.checkpoints, report.runs, report.populations, report.findings) == (8, 2, 1, [])
    (plan,) = store.plans()
    assert plan.labels == ("50", "75", "100", "best")
    assert plan.origin == "imported"
    for position, label in enumerate(("epoch-50", "epoch-75", "epoch-100", "best")):
        header, tensors = checkpoint(store, label)
        assert header["run_ids"] == [run.run_id for run in plan.runs]
        assert header["epochs"] == ([None, None] if label == "best" else [int(label[6:])] * 2)
        for run, start in enumerate((0, 4)):
            expected = state_dict("mnist", start + position)
            for name, stacked in tensors.items():
                assert torch.equal(stacked[run], expected[name]), (label, name)


def test_hyperparameters_follow_from_the_row_and_the_authors_recipe(release: Release, tmp_path: Path) -> None:
    _, store = run_import(release, tmp_path)
    run = store.plans()[0].runs[0]
    assert run.to_dict() == {
        "task": "mnist",
        "optimizer": "adam",
        "learning_rate": 1e-3,
        "init_std": 0.2,
        "l2": 1e-6,
        "dropout": 0.05,
        "train_fraction": 0.9,
        "seed": 3,
        "epochs": 100,
        "batch_size": 128,
        "warmup_epochs": 10,
        "min_learning_rate": 1e-5,
        "best_by": "test",
        "initialisation": "shared",
        "data_digest": run.data_digest,
        "stream_version": 0,
    }
    assert store.plans()[0].data["assumed"] == {"batch_size": 128, "warmup_epochs": 10}


def test_accuracies_stand_at_their_epochs_and_nothing_else_is_claimed(release: Release, tmp_path: Path) -> None:
    _, store = run_import(release, tmp_path)
    (commit,) = store.commits()
    metrics = pq.read_table(store.attempt_folder(commit.population, commit.attempt) / "metrics.parquet").to_pylist()
    known = {epoch: value for epoch, value in enumerate(metrics[1]["test_accuracy"]) if value == value}
    assert known == {50: 0.92, 75: 0.9400000000000001, 100: 0.93}
    assert len(metrics[1]["test_accuracy"]) == 101
    assert metrics[1]["best_test_accuracy"] == 0.95
    assert all(value != value for value in metrics[0]["test_loss"] + metrics[0]["train_accuracy"])


def test_the_text_of_a_report_names_ten_of_a_kind(release: Release, tmp_path: Path) -> None:
    names = [f"orphan{number:02d}_50_1000.pt" for number in range(12)]
    release.files |= {f"mnist/{name}": b"" for name in names}
    report, _ = run_import(release, tmp_path)
    lines = report.text().splitlines()
    assert lines[0].startswith("mnist: 8 checkpoints of 2 runs imported, from 8 rows and 20 files; 1 populations")
    assert lines[2] == "file without a row: 12"
    assert [line.split(":")[0].strip() for line in lines[3:13]] == names[:10]
    assert lines[13] == "  and 2 more; --json names all"


def test_the_sweep_is_whole_and_builds_into_a_dataset(release: Release, tmp_path: Path) -> None:
    release.add("broken", "50", 0.5, state=b"broken", lr=5e-3)
    run_import(release, tmp_path)
    assert verify_sweep(tmp_path / "sweep") == []
    build([tmp_path / "sweep"], tmp_path / "dataset", progress=False)
    best = open_zoo(tmp_path / "dataset").checkpoints("mnist", [("epoch_label", "==", "best")])
    (top, second) = best.metadata.to_pylist()
    assert (top["test_accuracy"], top["epoch"], top["origin"], top["test_loss"]) == (0.95, None, "imported", None)
    assert second["test_accuracy"] == 0.94
    weights = best.tensors()
    assert torch.equal(weights["classifier.fc2.bias"][0], state_dict("mnist", 7)["classifier.fc2.bias"])
    model = best.models()[1]
    theirs = SmallTransformer("mnist")
    theirs.load_state_dict(state_dict("mnist", 3))
    images = torch.rand(3, 1, 28, 28)
    assert torch.equal(model(images), theirs.eval()(images))


@pytest.mark.parametrize("column", ["test_accuracy", "test_top1_accuracy"])
def test_ag_news_comes_without_embedding_and_with_either_spelling(column: str, tmp_path: Path) -> None:
    release = Release("ag_news", accuracy_column=column)
    release.add("a", "75", 0.8512)
    release.add("a", "best", 0.86)
    report, store = run_import(release, tmp_path)
    assert report.accuracy_columns == {column: 2}
    assert column in report.text()
    header, tensors = checkpoint(store, "best")
    assert header["task"] == "ag_news"
    assert torch.equal(tensors["classifier.fc2.weight"][0], state_dict("ag_news", 1)["classifier.fc2.weight"])


def test_rows_may_differ_in_the_spelling_of_their_accuracy(tmp_path: Path) -> None:
    release = Release("ag_news")
    release.add("a", "50", 0.8)
    release.accuracy_column = "test_accuracy"
    release.add("a", "75", 0.7)
    contradiction = release.add("a", "100", 0.6, test_top1_accuracy=0.61)
    report, _ = run_import(release, tmp_path)
    assert report.accuracy_columns == {"test_top1_accuracy": 1, "test_accuracy": 1}
    assert found(report) == {"refused row": [contradiction]}


def test_a_folder_gives_the_plan_and_the_weights_of_its_zip(release: Release, tmp_path: Path) -> None:
    _, zipped = run_import(release, tmp_path)
    import_release(release.write_folder(tmp_path / "folder"), "mnist", tmp_path / "other", progress=False)
    folder = Store(tmp_path / "other")
    assert folder.plans()[0].to_json() == zipped.plans()[0].to_json()
    assert next(folder.commits()).files == next(zipped.commits()).files


def test_folders_in_a_zip_are_no_files(release: Release, tmp_path: Path) -> None:
    source = release.write_zip(tmp_path / "release.zip")
    with zipfile.ZipFile(source, "a") as archive:
        archive.mkdir("MNIST-Transformers/mnist")
        archive.mkdir("MNIST-Transformers/empty")
    assert import_release(source, "mnist", tmp_path / "sweep", progress=False).findings == []


def test_runs_that_share_no_batches_are_in_populations_of_their_own(tmp_path: Path) -> None:
    release = Release()
    for number, change in enumerate(({}, {"lr": 1e-3}, {"dropout": 0.0}, {"optimizer": "sgd"}, {"l2_regularize": 0})):
        release.add(f"run{number}", **change)
    _, store = run_import(release, tmp_path)
    sizes = sorted(len(population.runs) for population in store.plans()[0].populations)
    assert sizes == [1, 1, 3]


# What is left out is named


def test_every_row_and_every_file_is_accounted_for(release: Release, tmp_path: Path) -> None:
    lonely_file = "mnist/orphan_50_1000.pt"
    release.files[lonely_file] = saved(state_dict("mnist", 99))
    missing = release.add("gone", "50", 0.5, lr=5e-3)
    del release.files[f"mnist/{missing}"]
    unknown = release.add("odd", "50", 0.5, optimizer="adamw")
    release.rows.append(release.rows[0])
    report, _ = run_import(release, tmp_path)
    assert found(report) == {
        "refused row": [unknown],
        "duplicate": ["run0_50_9100.pt"],
        "file without a row": ["orphan_50_1000.pt"],
        "row without a file": [missing],
    }
    assert (report.rows, report.files, report.checkpoints) == (11, 10, 8)
    assert report.rows == report.checkpoints + 3  # refused, duplicate, without a file
    assert "optimizer: found 'adamw', expected one of sgd, sgd_momentum, adam, rmsprop" in report.text()
    assert [f["name"] for f in json.loads(report.to_json())["findings"]] == [f.name for f in report.findings]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lr": "fast"}, "lr: found 'fast', expected a number"),
        ({"lr": -1}, "learning_rate: found -1.0, expected a number above 0"),
        ({"lr": "nan"}, "lr: found 'nan', expected a number"),
        ({"dropout": 1.0}, "dropout: found 1.0, expected a rate in [0, 1)"),
        ({"train_fraction": 1.5}, "train_fraction: found 1.5, expected a fraction in (0, 1]"),
        ({"seed": 2.5}, "seed: found '2.5', expected a whole number from 0 to 100000"),
        ({"epochs": 10**12}, "epochs: found '1000000000000', expected a whole number from 0 to 100000"),
        ({"epochs": 40}, "ckpt_epoch: found 50, expected at most the run's 40 epochs"),
        ({"n_attention_heads": 1}, "n_attention_heads: found 1, expected 2"),
        ({"ckpt_epoch": "75"}, "ckpt_epoch: found 75, expected 50 as in the file's name"),
        ({"test_top1_accuracy": 91.5}, "test_top1_accuracy: found 91.5, expected a fraction in [0, 1]"),
        ({"test_top1_accuracy": ""}, "found no accuracy, expected one value"),
        ({"ckpt_file": "mnist/../../etc/passwd"}, "expected mnist/RUN_EPOCH_ACCURACY.pt"),
    ],
)
def test_rows_that_no_run_can_have_are_refused_with_their_line(
    release: Release, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    release.add("bad", "50", 0.5, lr=5e-3)
    release.rows[-1] |= changes
    report, _ = run_import(release, tmp_path)
    (refused,) = [finding for finding in report.findings if finding.kind == "refused row"]
    assert refused.reason.startswith("line 10: ")
    assert reason in refused.reason
    assert report.checkpoints == 8


def test_best_and_best1_are_one_label(release: Release, tmp_path: Path) -> None:
    second = release.add("run0", "best", 0.9401, lr=1e-3)
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"duplicate": [second]}
    assert report.checkpoints == 8


def test_a_run_whose_rows_disagree_keeps_what_agrees_with_its_first(release: Release, tmp_path: Path) -> None:
    odd = release.add("run0", "25", 0.5, lr=5e-3)
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"refused row": [odd]}
    assert "learning_rate: other values than in the first row of run run0" in report.findings[0].reason


def test_of_runs_with_one_configuration_the_one_with_most_checkpoints_is_kept(tmp_path: Path) -> None:
    release = Release()
    dropped = release.add("first", "50", 0.5)
    release.add("second", "50", 0.6)
    release.add("second", "75", 0.7)
    report, store = run_import(release, tmp_path)
    assert found(report) == {"duplicate": [dropped]}
    assert "run first has the configuration of run second" in report.findings[0].reason
    _, tensors = checkpoint(store, "epoch-50")
    assert torch.equal(tensors["classifier.fc1.bias"][0], state_dict("mnist", 1)["classifier.fc1.bias"])


def test_what_is_there_gives_way_to_nothing_that_is_not(tmp_path: Path) -> None:
    release = Release()
    for label in ("50", "75"):
        del release.files[f"mnist/{release.add('lost', label)}"]
    release.add("run", "50", 0.6)
    del release.files[f"mnist/{release.add('run', 'best', 0.7)}"]
    release.add("run", "best1", 0.7)
    report, store = run_import(release, tmp_path)
    assert found(report) == {"row without a file": ["lost_50_5000.pt", "lost_75_5000.pt", "run_best_7000.pt"]}
    assert store.plans()[0].labels == ("50", "best")


def test_a_file_that_stands_twice_in_the_archive_counts_once(release: Release, tmp_path: Path) -> None:
    source = release.write_zip(tmp_path / "release.zip")
    name = "MNIST-Transformers/mnist/run0_50_9100.pt"
    with zipfile.ZipFile(source, "a") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        archive.writestr(name, saved(state_dict("mnist", 50)))
    report = import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert found(report) == {"duplicate": [name]}
    _, tensors = checkpoint(Store(tmp_path / "sweep"), "epoch-50")
    assert torch.equal(tensors["classifier.fc1.bias"][0], state_dict("mnist", 0)["classifier.fc1.bias"])


def test_rows_that_hold_the_folder_twice_find_their_file(release: Release, tmp_path: Path) -> None:
    release.rows[3]["ckpt_file"] = "mnist/model/mnist/run0_best1_9400.pt"
    report, _ = run_import(release, tmp_path)
    assert (report.checkpoints, report.findings) == (8, [])


def test_an_accuracy_that_contradicts_the_files_name_is_told(release: Release, tmp_path: Path) -> None:
    release.rows[0]["test_top1_accuracy"] = 0.2
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"name disagrees": ["run0_50_9100.pt"]}
    assert report.checkpoints == 8


def test_files_of_the_other_task_and_the_embedding_are_set_aside_by_name(tmp_path: Path) -> None:
    release = Release("ag_news")
    release.add("a", "50", 0.5)
    release.files |= {"ag_news/embedding.pt": b"", "mnist/b_50_5000.pt": b"", "metadata/mnist.csv": b""}
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"set aside": ["ag_news/embedding.pt", "mnist/b_50_5000.pt", "metadata/mnist.csv"]}
    assert report.files == 1
