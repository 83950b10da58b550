"""Published runs, trained again from nothing but the dataset and its data."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from evaluation_tools import change_index, top
from sweep_tools import block, tiny

from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.errors import DatasetError
from zoo.evaluation import evaluate, rerun
from zoo.sweep import generate

pytest_plugins = ["evaluation_fixtures"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_of_a_population_is_trained_again_alone_bit_by_bit(
    tiny_dataset: Path, digits_dir: Path, dropout: float, engine_here: str
) -> None:
    rows = open_zoo(tiny_dataset).checkpoints("mnist", [("dropout", "==", dropout)]).metadata.to_pylist()
    run_id = rows[0]["run_id"]
    report = rerun(tiny_dataset, run_id, digits_dir, progress=False)
    assert report.identical
    assert [d.label for d in report.labels] == ["0", "2", "4", "best"]
    recorded = {row["epoch_label"]: row for row in rows if row["run_id"] == run_id}
    for d in report.labels:
        assert d.weights == 0
        assert (d.epoch, d.accuracy) == (recorded[d.label]["epoch"], recorded[d.label]["test_accuracy"])
        assert (d.recorded_epoch, d.recorded_accuracy) == (d.epoch, d.accuracy)
    assert (report.engine, report.recorded_engine, report.diverged) == (engine_here, engine_here, False)
    assert "bit-identical" in report.text()


def test_another_engine_starts_from_the_same_weights_and_differs_by_rounding(
    tiny_dataset: Path, digits_dir: Path, engine_here: str
) -> None:
    if engine_here == "torch":
        pytest.skip("no compiler here, so there is one engine only")
    slow = open_zoo(tiny_dataset).checkpoints("mnist", [("learning_rate", "==", 3e-3)]).metadata
    report = rerun(tiny_dataset, slow["run_id"][0].as_py(), digits_dir, engine="torch", progress=False)
    start, middle, *_ = report.labels
    assert (report.engine, report.recorded_engine) == ("torch", "fused")
    assert start.weights == 0
    assert 0 < middle.weights < 1e-3
    assert not report.identical
    assert json.loads(report.to_json())["labels"][1]["weights"] == middle.weights
    assert "engines round differently" in report.text()


def test_a_run_that_diverges_does_so_again(digits_dir: Path, tmp_path: Path) -> None:
    config = tiny(grid=[block(optimizer=["sgd"], learning_rate=[1e30], dropout=[0.0])])
    generate(config, tmp_path / "sweep", digits_dir, workers=0, progress=False)
    build([tmp_path / "sweep"], tmp_path / "dataset", progress=False)
    report = rerun(tmp_path / "dataset", top(tmp_path / "dataset")["run_id"], digits_dir, progress=False)
    assert report.diverged
    assert [(d.label, d.weights) for d in report.labels] == [("0", 0.0)]
    assert "diverged" in report.text()
    assert evaluate(tmp_path / "dataset", "mnist", digits_dir, progress=False).identical == 1


def test_changed_weights_show_as_their_difference(tiny_copy: Path, digits_dir: Path) -> None:
    row = top(tiny_copy)
    path = tiny_copy / row["file"]
    table = pq.read_table(path)
    column = table.schema.get_field_index("classifier.fc2.bias")
    values = table["classifier.fc2.bias"].to_pylist()
    values[row["row"]][3] += 0.25
    pq.write_table(
        table.set_column(column, table.schema.field(column), pa.array(values, table.schema.field(column).type)),
        path,
        row_group_size=pq.ParquetFile(path).metadata.row_group(0).num_rows,
    )
    report = rerun(tiny_copy, row["run_id"], digits_dir, progress=False)
    different = [d for d in report.labels if d.weights]
    assert [d.label for d in different] == [row["epoch_label"]]
    assert different[0].weights == pytest.approx(0.25, rel=1e-5)
    assert "equal weights are expected only on the kind of processor or GPU that trained the run" in report.text()


def test_a_row_that_does_not_make_its_run_id_is_refused(tiny_copy: Path, digits_dir: Path) -> None:
    run_id = top(tiny_copy)["run_id"]
    change_index(tiny_copy, lambda row: row.update(learning_rate=1.0))
    with pytest.raises(DatasetError, match=f"run {run_id}: its columns make run [0-9a-f]{{16}}; the row was changed"):
        rerun(tiny_copy, run_id, digits_dir, progress=False)


def test_an_unknown_run_is_named(tiny_dataset: Path, digits_dir: Path) -> None:
    with pytest.raises(DatasetError, match="run_id: found no checkpoint of 'feed', expected a run_id of the index"):
        rerun(tiny_dataset, "feed", digits_dir, progress=False)


def test_checks_leave_torchs_threads_as_they_were(tiny_dataset: Path, digits_dir: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        evaluate(tiny_dataset, "mnist", digits_dir, threads=os.cpu_count() or 1, limit=1, progress=False)
        rerun(tiny_dataset, top(tiny_dataset)["run_id"], digits_dir, progress=False)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
