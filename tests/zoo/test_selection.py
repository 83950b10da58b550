import csv
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from dataset_tools import Stored
from safetensors import safe_open
from safetensors.torch import load_file
from sweep_tools import start

from generators.architecture import SmallTransformer, tensor_table
from zoo import selection as module
from zoo.dataset import Zoo, open_zoo
from zoo.errors import DatasetError
from zoo.files import held
from zoo.selection import select, write_checkpoint

pytest_plugins = ["dataset_fixtures"]


def header(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        (content,) = file.metadata().items()
    assert content[0] == "zoo"  # one key: the order of several would differ from process to process
    return json.loads(content[1])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def select_and_die(dataset: Path, out: Path, rename: int) -> None:
    """Target of a process that is killed right before one of the renames of a selection."""
    calls, real = iter(range(1, 3)), Path.rename
    Path.rename = lambda *call: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == rename else real(*call)
    select(open_zoo(dataset).checkpoints(split="validation"), out)


class TestSelect:
    def test_files_hold_the_stored_weights_and_their_row(self, zoo: Zoo, stored: Stored, tmp_path: Path) -> None:
        chosen = zoo.checkpoints(filters=[("epoch_label", "==", "best"), ("optimizer", "==", "adam")])
        paths = select(chosen, tmp_path / "out")
        rows = chosen.metadata.to_pylist()
        assert [path.name for path in paths] == [f"{row['checkpoint_id']}.safetensors" for row in rows]
        assert len(paths) == 6
        for path, row in zip(paths, rows, strict=True):
            tensors = load_file(path)
            assert tensors.keys() == stored[row["checkpoint_id"]].keys()
            for name, values in stored[row["checkpoint_id"]].items():
                assert tensors[name].numpy().tobytes() == values.tobytes()
            expected = {key: value for key, value in row.items() if key not in ("file", "row_group", "row")}
            assert header(path) == {"format": 1, **expected}

    def test_table(self, zoo: Zoo, tmp_path: Path) -> None:
        chosen = zoo.checkpoints(filters=[("epoch_label", "==", "0")])
        paths = select(chosen, tmp_path)
        with (tmp_path / "checkpoints.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["filename"] for row in rows] == [path.name for path in paths]
        assert [float(row["test_accuracy"]) for row in rows] == chosen.metadata["test_accuracy"].to_pylist()
        assert {row["train_loss"] for row in rows} == {""}

    def test_files_load_into_models(self, zoo: Zoo, tmp_path: Path) -> None:
        chosen = zoo.checkpoints(filters=[("epoch_label", "==", "best")]).take([0])
        (path,) = select(chosen, tmp_path / "out")
        model = SmallTransformer("mnist")
        model.load_tensors(load_file(path))
        images = torch.randn(3, 1, 28, 28)
        assert torch.equal(model.eval()(images), chosen.models()[0](images))

    def test_equal_selections_are_equal_bytes(self, zoo: Zoo, tmp_path: Path) -> None:
        for out in ("a", "b"):
            select(zoo.checkpoints(split="test"), tmp_path / out)
        assert names(tmp_path / "a") == names(tmp_path / "b")
        for name in names(tmp_path / "a"):
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    def test_any_member_of_a_stack_exports_and_loads_safetensors_469(self, tmp_path: Path) -> None:
        """Rows of a stack, transposed ones, and tensors that share memory."""
        stack = torch.randn(5, 4, 3)
        tensors = {"row": stack[2], "transposed": stack[1].T, "column": stack[:, 0, 1], "again": stack[2]}
        write_checkpoint(tmp_path / "one.safetensors", tensors, {})
        found = load_file(tmp_path / "one.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


class TestFolder:
    def test_an_earlier_selection_is_replaced_as_a_whole(self, zoo: Zoo, tmp_path: Path) -> None:
        out = tmp_path / "out"
        select(zoo.checkpoints(filters=[("epoch_label", "==", "0")]), out)
        paths = select(zoo.checkpoints(filters=[("epoch_label", "==", "1")]), out)
        assert names(out) == {path.name for path in paths} | {"checkpoints.csv"}
        assert names(tmp_path) == {"out"}

    def test_an_error_leaves_the_earlier_selection(
        self, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        select(zoo.checkpoints(filters=[("epoch_label", "==", "0")]), out)
        before = names(out)
        monkeypatch.setattr(module, "write_checkpoint", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            select(zoo.checkpoints(filters=[("epoch_label", "==", "1")]), out)
        assert names(out) == before
        assert names(tmp_path) == {"out"}

    @pytest.mark.parametrize("rename", [1, 2])
    def test_the_next_call_tidies_up_after_a_killed_one_and_puts_the_earlier_selection_back(
        self, rename: int, dataset: Path, zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "out"
        select(zoo.checkpoints(split="test"), out)
        before = names(out)
        process = start(select_and_die, dataset, out, rename)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert names(tmp_path) == ({"out", ".tmp-out"} if rename == 1 else {".tmp-out"})
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(module, "write_checkpoint", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            select(zoo.checkpoints(), out)
        assert (names(out), names(tmp_path)) == (before, {"out"})

    def test_two_calls_at_once_do_not_mix(self, zoo: Zoo, tmp_path: Path) -> None:
        with held(tmp_path / ".tmp-out"), pytest.raises(DatasetError, match="another selection is being written there"):
            select(zoo.checkpoints(), tmp_path / "out")
        assert names(tmp_path) == {".tmp-out"}

    def test_other_files_are_never_lost(self, zoo: Zoo, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("mine")
        chosen = zoo.checkpoints(split="test")
        with pytest.raises(DatasetError, match=r"found files and no checkpoints\.csv"):
            select(chosen, tmp_path)
        select(chosen, tmp_path / "out")
        (tmp_path / "out" / "notes.txt").write_text("mine")
        with pytest.raises(DatasetError, match=r"found notes\.txt, which is no part of the selection"):
            select(chosen, tmp_path / "out")
        assert (tmp_path / "out" / "notes.txt").read_text() == "mine"

    def test_a_file_and_an_empty_selection_are_refused(self, zoo: Zoo, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DatasetError, match="found a file"):
            select(zoo.checkpoints(), tmp_path / "file")
        with pytest.raises(DatasetError, match="found no checkpoint that fulfils them"):
            select(zoo.checkpoints(filters=[("test_accuracy", ">", 1)]), tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_component_selections_hold_that_component(zoo: Zoo, tmp_path: Path) -> None:
    (path, *_) = select(zoo.checkpoints(split="test", components=["classifier"]), tmp_path / "out")
    assert set(load_file(path)) == {spec.name for spec in tensor_table("mnist") if spec.component == "classifier"}
