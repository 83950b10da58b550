"""The zoo that the README shows: made, killed on the way, built, checked, published, trained again, and read.

    make small-zoo ARGS="--data FOLDER --out FOLDER [--only sweeps dataset reruns predictors report]"

FOLDER of the data has mnist/ and ag_news/, as the tests' has. Every step goes on where it stopped: what an earlier call
has finished is not done again. The record of all steps, the tables and the plots go to tests/benchmarks/results/.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # ahead of tests/, which has folders of the same names

import pytest
import torch
from loopback_hub import LoopbackHub
from small_zoo_report import write_results

from generators.architecture import flatten
from generators.streams import permutation, stream_key
from zoo.bench import machine
from zoo.builder import build
from zoo.config import GridBlock, SweepConfig, load_config
from zoo.dataset import Checkpoints, open_zoo
from zoo.evaluation import evaluate
from zoo.hub import publish
from zoo.sweep import generate
from zoo.verify_dataset import verify_dataset
from zoo.versions import versions

SWEEPS = {"mnist_small": "mnist", "ag_news_small": "ag_news", "mnist_small_shared": "mnist"}
"""Preset -> task."""
KILLS = (90.0, 120.0)
"""A sweep and all its processes are killed so many seconds after its first and its second start."""
OWN_STARTS = ("mnist_small", "ag_news_small")
"""The presets whose runs each draw their initial weights."""
CONFIGURATION = ("optimizer", "learning_rate", "init_std", "l2", "dropout", "train_fraction")
RERUNS = 50
OTHER_SEED = 4
TENSOR = "classifier.fc2.weight"
REPO = "user/small-transformer-zoo"
FINAL = {"mnist": "8", "ag_news": "4"}
"""The label of the last epoch: one checkpoint a run, whatever its accuracy did on the way."""
PER_RUN, SHARED = "initialisation==per_run", "initialisation==shared"
LOAD = """
import hashlib, json, sys
import numpy as np
from datasets import load_dataset
repo, task, tensor = sys.argv[1:]
rows = load_dataset(repo, task, split="train").with_format("numpy")
weights = np.ascontiguousarray(np.stack(list(rows[tensor])), np.float32)
print(json.dumps([list(map(str, rows["checkpoint_id"])), hashlib.sha256(weights.tobytes()).hexdigest()]))
"""
"""Ids and a tensor of all training rows, as a user gets them; runs in a process that knows the loopback Hub only."""
STEPS = ("sweeps", "dataset", "reruns", "predictors", "report")
READERS = ("transformer-nfn", "mlp", "statnn", "lightgbm", "hyperparameters")
TABLES: dict[str, list[str]] = {
    **{
        f"mnist_{name}": [
            *("--task", "mnist", "--filter", condition, "--filter", "dropout==0"),
            *("--predictors", *READERS, "--thresholds", "0", "--components", "--no-sizes"),
        ]
        for name, condition in (("own_start", PER_RUN), ("shared_start", SHARED))
    },
    "mnist": ["--task", "mnist", "--filter", PER_RUN],
    "ag_news": ["--task", "ag_news", "--no-sizes"],
}
"""Table -> arguments of `zoo nfn benchmark`. The first two compare the same 480 configurations."""


class Cycle:
    """The steps on one folder. `record` is kept in it, as JSON: step -> what was measured."""

    def __init__(self, data: Path, out: Path) -> None:
        self.data, self.out = data, out
        self.dataset = out / "small-transformer-zoo"
        self._file = out / "record.json"
        self.record: dict[str, Any] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def sweeps(self) -> None:
        for preset, task in SWEEPS.items():
            self._timed("sweeps", preset, self._generate, preset, task)

    def _generate(self, preset: str, task: str) -> dict[str, Any]:
        sweep = self._sweep(preset)
        command = ["generate", preset, "--sweep-dir", str(sweep), "--data-dir", str(self.data / task)]
        for after in (*KILLS, None):
            process = subprocess.Popen([sys.executable, "-m", "zoo.cli", *command], start_new_session=True)
            try:
                code = process.wait(after)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            raise SystemExit(f"zoo {' '.join(command)}: exit code {code}")
        return {"kills": len(KILLS), "bytes": _bytes(sweep)}

    def make_dataset(self) -> None:
        self._timed("dataset", "build", self._build)
        self._timed("dataset", "verify", self._verify)
        for task in FINAL:
            self._timed("dataset", f"evaluate {task}", self._evaluate, task)
        self._timed("dataset", "publish and load", self._publish)

    def _build(self) -> dict[str, Any]:
        _run("build", *(str(self._sweep(preset)) for preset in SWEEPS), "--out", str(self.dataset))
        return {"bytes": _bytes(self.dataset)}

    def _verify(self) -> dict[str, Any]:
        return {"problems": len(verify_dataset(self.dataset))}

    def _evaluate(self, task: str) -> dict[str, Any]:
        report = evaluate(self.dataset, task, self.data / task, threads=os.cpu_count() or 1, tolerance=0)
        return {"checkpoints": len(report.comparisons), "disagreeing": len(report.disagreeing)}

    def _publish(self) -> dict[str, Any]:
        """Publish to a Hub on this machine, load from it, and compare with the folder."""
        with LoopbackHub(self.out / "home") as hub:
            with pytest.MonkeyPatch.context() as patched:
                hub.connect(patched)
                publish(self.dataset, REPO)
            loaded = {task: hub.run(LOAD, REPO, task, TENSOR) for task in FINAL}
        for task, found in loaded.items():
            local = open_zoo(self.dataset).checkpoints(task, split="train")
            weights = local.tensors()[TENSOR].numpy()
            expected = [local.metadata["checkpoint_id"].to_pylist(), hashlib.sha256(weights.tobytes()).hexdigest()]
            if found != expected:
                raise SystemExit(f"{REPO}: {task}: other rows than in {self.dataset}")
        return {f"equal train rows of {task}": len(names) for task, (names, _) in loaded.items()}

    def reruns(self) -> None:
        for preset in OWN_STARTS:
            self._timed("reruns", SWEEPS[preset], self._rerun, preset, SWEEPS[preset])

    def _rerun(self, preset: str, task: str) -> dict[str, Any]:
        """Train random runs again from their rows: as they were, with the other engine, and with another seed."""
        chosen = self._random_runs(task)
        before = _final_accuracies(chosen)
        measured: dict[str, Any] = {"runs": len(before), "checkpoints": len(chosen)}
        changes: dict[str, dict[str, Any]] = {"again": {}, "torch": {"engine": "torch"}, "seed": {"seed": OTHER_SEED}}
        for name, change in changes.items():
            folder = self.out / "reruns" / task / name
            generate(replace(_only(load_config(preset), chosen), **change), folder / "sweep", self.data / task)
            build([folder / "sweep"], folder / "dataset")
            trained = open_zoo(folder / "dataset").checkpoints(task)
            if name == "again":
                measured["identical checkpoints"] = _count_equal(chosen, trained)
            after = _final_accuracies(trained)
            measured[f"median accuracy difference: {name}"] = median(abs(before[key] - after[key]) for key in before)
        return measured

    def _random_runs(self, task: str) -> Checkpoints:
        zoo = open_zoo(self.dataset)
        conditions = [("initialisation", "==", "per_run"), ("epoch_label", "==", FINAL[task])]
        runs = sorted(zoo.checkpoints(task, conditions).metadata["run_id"].to_pylist())
        order = permutation(stream_key("reruns", 0), len(runs))
        return zoo.checkpoints(task, [("run_id", "in", [runs[i] for i in order[: RERUNS // len(OWN_STARTS)]])])

    def predictors(self) -> None:
        for table, arguments in TABLES.items():
            self._timed("predictors", table, self._benchmark, table, arguments)

    def _benchmark(self, table: str, arguments: list[str]) -> dict[str, Any]:
        label = FINAL[arguments[arguments.index("--task") + 1]]
        more = ["--epoch-label", label, "--seeds", "5", "--workers", str(os.cpu_count())]
        _run("nfn", "benchmark", str(self.dataset), *arguments, *more, "--out", str(self._table(table)))
        return {}

    def report(self) -> None:
        self.record["about"] = {"machine": machine(), **versions()}
        write_results(self.record, self.dataset, {table: self._table(table) for table in TABLES})

    def _sweep(self, preset: str) -> Path:
        return self.out / "sweeps" / preset

    def _table(self, table: str) -> Path:
        return self.out / "predictors" / table

    def _timed(self, step: str, name: str, work: Callable[..., dict[str, Any]], *arguments: Any) -> None:
        """Do a piece of work unless the record has it, and record its seconds and what it measured."""
        if name in self.record.get(step, {}):
            return
        started = time.monotonic()
        measured = work(*arguments)
        self.record.setdefault(step, {})[name] = {"seconds": round(time.monotonic() - started, 1), **measured}
        self._file.write_text(json.dumps(self.record, indent=1) + "\n")
        print(f"{step}: {name}: {json.dumps(self.record[step][name])}", flush=True)


def _run(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "zoo.cli", *arguments], check=True)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _only(config: SweepConfig, chosen: Checkpoints) -> SweepConfig:
    """The configuration with the runs of some rows only, a block a run."""
    runs = {row["run_id"]: {name: (row[name],) for name in CONFIGURATION} for row in chosen.metadata.to_pylist()}
    return replace(config, grid=tuple(GridBlock(**values) for values in runs.values()))


def _count_equal(chosen: Checkpoints, trained: Checkpoints) -> int:
    """How many checkpoints have the same bits, by their id."""
    ours, theirs = (
        dict(zip(part.metadata["checkpoint_id"].to_pylist(), flatten(part.task, part.tensors()), strict=True))
        for part in (chosen, trained)
    )
    return sum(key in theirs and torch.equal(weights, theirs[key]) for key, weights in ours.items())


def _final_accuracies(checkpoints: Checkpoints) -> dict[str, float]:
    """The last epoch's test accuracy of each configuration, whatever its seed."""
    label = FINAL[checkpoints.task]
    return {
        json.dumps([row[name] for name in CONFIGURATION]): row["test_accuracy"]
        for row in checkpoints.metadata.to_pylist()
        if row["epoch_label"] == label
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("ZOO_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")
    parser.add_argument("--data", type=Path, default=default, help="folder with mnist/ and ag_news/")
    parser.add_argument("--out", type=Path, default=Path("small-zoo"))
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cycle = Cycle(options.data, options.out)
    steps = (cycle.sweeps, cycle.make_dataset, cycle.reruns, cycle.predictors, cycle.report)
    for name, step in zip(STEPS, steps, strict=True):
        if name in options.only:
            step()


if __name__ == "__main__":
    main()
