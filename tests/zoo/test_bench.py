"""`zoo bench`: what it counts, and what its forecast is made of."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from generators.architecture import SmallTransformer
from generators.errors import InputError
from zoo import bench
from zoo.cli import main
from zoo.config import load_config
from zoo.plan import make_plan
from zoo.threads import torch_threads


@pytest.mark.parametrize(("task", "tokens"), [("mnist", 49), ("ag_news", 31)])
def test_operations_are_those_that_torch_counts(task: str, tokens: int) -> None:
    model = SmallTransformer(task, torch.zeros(9, 32) if task == "ag_news" else None)
    texts = (torch.randint(9, (4, tokens)), torch.full((4,), tokens))
    inputs = (torch.rand(4, 1, 28, 28),) if task == "mnist" else texts
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    assert bench.step_operations(task, tokens, batch_size=4) == pytest.approx(3 * counter.get_total_flops(), rel=0.01)


def test_the_forecast_counts_the_configurations_own_steps_and_its_evaluations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "train_rate", lambda engine, runs, seconds, batch_size: 1000.0 * 32 / batch_size)
    monkeypatch.setattr(bench, "matmul_rate", lambda device: 1e11)
    assert main(["plan", "quickstart", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    more = ["--cores", "10", "--gpus", "4", "--gpu-rate", "2e4", "--engine", "torch", "--json"]
    assert main(["bench", "quickstart", *more]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["batch_size"], report["run_steps_per_second"]) == (32, 1000.0)
    assert report["run_steps"] == planned["run_steps"]
    evaluations = 96 * (planned["epochs"] + 1) * 1000 / 32
    assert report["run_steps_with_evaluations"] == pytest.approx(planned["run_steps"] + 0.37 * evaluations, abs=1)
    hours = report["run_steps_with_evaluations"] / 1000 / 3600
    assert report["hours_here"] == pytest.approx(hours, abs=0.01)
    assert report["hours_on_10_cores"] == pytest.approx(hours * report["threads"] / 10, abs=0.01)
    assert report["hours_on_4_gpus"] == pytest.approx(hours * 1000 / 8e4, abs=0.01)
    assert report["gflops"] == pytest.approx(1000 * bench.step_operations("mnist", 49, 32) / 1e9, abs=0.1)
    assert report["matmul_share"] == pytest.approx(report["gflops"] / 100, abs=0.001)


def test_a_rate_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ag_news", "--engine", "torch", "--runs", "2", "--seconds", "0.1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["run_steps_per_second"] > 0 < report["matmul_gflops"]
    assert (report["task"], report["engine"], report["runs"], report["batch_size"]) == ("ag_news", "torch", 2, 128)


@pytest.mark.parametrize("fails", [False, True])
def test_measuring_leaves_the_callers_number_of_threads(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def rate(*arguments: Any, **options: Any) -> float:
        if fails:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(bench, "train_rate", rate)
    monkeypatch.setattr(bench, "matmul_rate", rate)
    data = bench.random_data("mnist")
    populations = make_plan(load_config("quickstart"), data.digest(), len(data.train)).populations
    with torch_threads(3):
        for call in (
            lambda: bench.measure("mnist", "torch"),
            lambda: bench.first_estimate(populations, data, "torch", 1),
        ):
            with pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
                call()
            assert torch.get_num_threads() == 3


@pytest.mark.parametrize(
    ("options", "named"), [({"runs": 0}, "--runs: found 0"), ({"seconds": 0}, "--seconds: found 0")]
)
def test_nothing_to_measure_is_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=named):
        bench.measure("mnist", **options)


def test_a_gpus_rate_forecasts_no_cores() -> None:
    report = bench.BenchReport("A100", "mnist", "torch", "cpu", 4, 8, 128, 1000.0, 1.0, 1.0)
    assert (report.hours(3.6e6), report.hours(3.6e6, cores=8)) == (1.0, 0.5)
    with pytest.raises(InputError, match="--cores: found 0, expected 1 or more"):
        report.hours(1.0, cores=0)
    on_gpu = replace(report, device="cuda")
    assert on_gpu.hours(3.6e6) == 1.0
    with pytest.raises(InputError, match=r"--cores: found a GPU \(A100\), whose rate tells nothing about cores"):
        on_gpu.hours(3.6e6, cores=8)


def test_the_command_refuses_cores_where_it_has_measured_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench.BenchReport("A100", "mnist", "torch", "cuda", 4, 8, 128, 1000.0, 1.0, 1.0)
    monkeypatch.setattr(bench, "measure", lambda *_: report)
    assert main(["bench", "quickstart"]) == 0
    assert main(["bench", "quickstart", "--cores", "64"]) == 2
    assert "--cores: found a GPU (A100)" in capsys.readouterr().err


def test_gpus_need_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mnist", "--gpus", "4"]) == 2
    assert "--gpus and --gpu-rate go together" in capsys.readouterr().err
