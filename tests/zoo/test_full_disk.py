"""Disks that fill up under a command: one line names the file and says what to do, and the same command goes on."""

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.dataset import open_zoo

pytest_plugins = ["dataset_fixtures"]


@pytest.mark.parametrize("written", [0, 1, 4])
def test_a_build_on_a_full_disk_names_its_file_and_goes_on_when_there_is_room(
    written: int, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, left, out = os.fsync, iter(range(written)), tmp_path / "zoo"

    def no_space(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and next(left, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", no_space)
        assert main(["build", str(sweep), "--out", str(out), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zoo: error: {out}/")
    assert line.endswith(": No space left on device; make room and run the same command again")
    assert len([path for path in out.rglob("*") if path.is_file()]) == written
    assert main(["build", str(sweep), "--out", str(out), "--quiet"]) == 0
    assert len(open_zoo(out).checkpoints("mnist"))


def test_a_selection_on_a_full_disk_leaves_nothing_and_names_its_file(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", no_space)
        assert main(["select", str(dataset), "--out", str(tmp_path / "chosen")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"zoo: error: .*\.safetensors: No space left on device; make room and run .* again", line)
    assert list(tmp_path.iterdir()) == []
    assert main(["select", str(dataset), "--out", str(tmp_path / "chosen")]) == 0
