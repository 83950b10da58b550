"""The authors' release in the making: files and table in its layout, as a zip archive or a folder; and its import."""

import csv
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from generators.architecture import sinusoidal_positions, tensor_table
from zoo.release import ReleaseReport, import_release
from zoo.stacked import safetensors_header
from zoo.store import Store

SETTINGS = {
    "optimizer": "adam",
    "lr": 3e-3,
    "w_init_std": 0.2,
    "l2_regularize": 1e-6,
    "dropout": 0.05,
    "train_fraction": 0.9,
    "seed": 3,
    "epochs": 100,
    "n_attention_heads": 2,
}


def state_dict(task: str, number: int) -> dict[str, Tensor]:
    """A checkpoint as the authors save it: MNIST with positions, AG News without any embedding."""
    generator = torch.Generator().manual_seed(number)
    state = {spec.name: torch.randn(spec.shape, generator=generator) for spec in tensor_table(task)}
    if task == "mnist":
        state["embedding.pos_embedding"] = sinusoidal_positions(49)
    return state


def saved(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@dataclass
class Release:
    """A release in the making: files by name, and the rows of the table."""

    task: str = "mnist"
    accuracy_column: str = "test_top1_accuracy"
    top: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, run: str, label: str = "50", accuracy: float = 0.5, state: Any = None, **changes: Any) -> str:
        """Add a checkpoint, file and row; return the file's name."""
        name = f"{run}_{label}_{int(accuracy * 10_000)}.pt"
        content = state if isinstance(state, bytes) else saved(state or state_dict(self.task, len(self.files)))
        self.files[f"{self.task}/{name}"] = content
        row = {**SETTINGS, "ckpt_epoch": label, "ckpt_file": f"{self.task}/{name}", self.accuracy_column: accuracy}
        self.rows.append(row | changes)
        return name

    def table(self) -> bytes:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue().encode()

    def contents(self) -> dict[str, bytes]:
        files = self.files | {f"metadata/{self.task}.csv": self.table()}
        return {f"{self.top}{name}": content for name, content in files.items()}

    def write_zip(self, path: Path, compression: int = zipfile.ZIP_STORED) -> Path:
        with zipfile.ZipFile(path, "w", compression) as archive:
            for name, content in self.contents().items():
                archive.writestr(name, content)
        return path

    def write_folder(self, path: Path) -> Path:
        for name, content in self.contents().items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
        return path


def two_runs() -> Release:
    """Two runs of one population, four checkpoints each."""
    made = Release(top="MNIST-Transformers/")
    for number, rate in enumerate((1e-3, 3e-3)):
        for label, accuracy in (("50", 0.91), ("75", 0.93), ("100", 0.92), ("best1", 0.94)):
            made.add(f"run{number}", label, accuracy + number / 100, lr=rate)
    return made


def run_import(release: Release, folder: Path, **options: Any) -> tuple[ReleaseReport, Store]:
    source = release.write_zip(folder / "release.zip")
    report = import_release(source, release.task, folder / "sweep", progress=False, **options)
    return report, Store(folder / "sweep")


def found(report: ReleaseReport) -> dict[str, list[str]]:
    """Kind of finding -> names."""
    kinds: dict[str, list[str]] = {}
    for finding in report.findings:
        kinds.setdefault(finding.kind, []).append(finding.name)
    return kinds


def checkpoint(store: Store, label: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of the only population's stacked checkpoint."""
    (commit,) = store.commits()
    content = store.read(commit.population, commit.attempt, f"{label}.safetensors")
    return json.loads(safetensors_header(content)), load(content)
