"""Rows say on what they were computed, and what was computed elsewhere is not expected to be equal bit for bit."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from dataset_tools import train

from zoo.builder import build
from zoo.cli import main
from zoo.dataset import open_zoo
from zoo.evaluation import evaluate, rerun
from zoo.store import Store

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture(scope="module")
def from_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of a sweep whose commits say that it was made with torch on a GPU. (In truth, fused on a CPU.)"""
    folder = tmp_path_factory.mktemp("gpu")
    block = {"optimizer": ["adam"], "learning_rate": [1e-3, 1e-2], "init_std": [0.2], "l2": [0.0], "dropout": [0.0]}
    store = Store(train(folder / "sweep", [block | {"train_fraction": [1.0]}]))
    assert {(commit.engine, commit.device) for commit in store.commits()} == {("fused", "cpu")}
    for commit in list(store.commits()):
        content = replace(commit, engine="torch", device="cuda").to_json()
        (Path(store.root) / "commits" / f"{commit.population}.json").write_text(content)
    return build(store.root, folder / "zoo", progress=False).folder


def test_the_device_is_a_column(from_a_gpu: Path) -> None:
    zoo = open_zoo(from_a_gpu)
    assert set(zoo.index["device"].to_pylist()) == set(zoo.checkpoints().metadata["device"].to_pylist()) == {"cuda"}


def test_provenance_and_card_name_it(from_a_gpu: Path) -> None:
    assert json.loads((from_a_gpu / "provenance.json").read_text())["engines"] == ["torch on cuda"]
    assert "\nEngine: torch on cuda. Versions: " in (from_a_gpu / "README.md").read_text()


def test_a_run_of_a_gpu_trained_again_on_a_cpu_may_differ(from_a_gpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_id = open_zoo(from_a_gpu).index["run_id"][0].as_py()
    report = rerun(from_a_gpu, run_id, progress=False)
    assert (report.engine, report.recorded_engine, report.identical) == ("torch", "torch on cuda", False)
    assert main(["rerun", str(from_a_gpu), run_id]) == 0
    assert "engine torch (recorded: torch on cuda): different" in capsys.readouterr().out
    assert main(["rerun", str(from_a_gpu), run_id, "--engine", "fused"]) == 0


def test_an_evaluation_names_both(from_a_gpu: Path) -> None:
    report = evaluate(from_a_gpu, engine="torch", limit=2, progress=False)
    assert (report.engine, report.recorded_engines) == ("torch", ["torch on cuda"])


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", [["evaluate"], ["rerun"]])
def test_a_gpu_that_is_not_there_is_told(
    from_a_gpu: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = [open_zoo(from_a_gpu).index["run_id"][0].as_py()] if command == ["rerun"] else []
    assert main([*command, str(from_a_gpu), *run, "--device", "cuda"]) == 2
    assert "device: found cuda, expected cpu or auto" in capsys.readouterr().err
