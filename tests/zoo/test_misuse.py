"""Mistakes in calls and arguments: one clear line; and what other programs expect of a zoo's objects."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.dataset import Checkpoints, open_zoo
from zoo.errors import DatasetError

pytest_plugins = ["dataset_fixtures"]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda c: list(c.pieces(0)), "rows: found 0, expected 1 or more"),
        (lambda c: list(c.pieces(-1)), "rows: found -1, expected 1 or more"),
        (lambda c: list(c.stream(groups=0)), "groups: found 0, expected 1 or more"),
        (lambda c: list(c.stream(groups=-1)), "groups: found -1, expected 1 or more"),
        (lambda c: c.take([0, 99_999]), r"rows: found 99999, expected whole numbers from 0, below \d+"),
        (lambda c: c.take([-1]), r"rows: found -1, expected whole numbers from 0, below \d+"),
        (lambda c: c.take([True] * len(c)), r"rows: found True, expected whole numbers"),
        (
            lambda c: c.hold_out(learning_rate=7.0),
            r"hold_out: found no checkpoint that has all of \{'learning_rate': 7",
        ),
        (lambda c: c.hold_out(optimizer="adamw"), "filters: optimizer: found 'adamw', which no row has, expected one"),
        (lambda c: c.hold_out(optimiser="adam"), "filters: found 'optimiser', .*did you mean optimizer"),
    ],
)
def test_a_selection_says_what_it_takes(use: Callable[[Checkpoints], Any], message: str, dataset: Path) -> None:
    with pytest.raises(DatasetError, match=f"^{message}"):
        use(open_zoo(dataset).checkpoints("mnist"))


def test_nothing_may_be_taken(dataset: Path) -> None:
    assert len(open_zoo(dataset).checkpoints("mnist").take([])) == 0


def test_an_empty_name_is_no_dataset() -> None:
    with pytest.raises(DatasetError, match=r"^dataset: found an empty name"):
        open_zoo("")


def test_a_zoo_and_its_selections_go_to_other_processes(dataset: Path) -> None:
    zoo = open_zoo(dataset)
    chosen = zoo.checkpoints("mnist").take([0, 3])
    expected = chosen.tensors()  # files are open now
    for copy in (pickle.loads(pickle.dumps(zoo)).checkpoints("mnist").take([0, 3]), pickle.loads(pickle.dumps(chosen))):
        assert copy.metadata.equals(chosen.metadata)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in copy.tensors().items())


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    for name, shown in (("z\u00f6o", "z\\xf6o"), (os.fsdecode(b"z\xffo"), "z\\udcffo")):
        command = [sys.executable, "-m", "zoo", "verify", str(tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert f"{tmp_path}/{shown}: found no such folder" in line
