"""Commands whose output nobody reads, through real pipes."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from sweep_tools import assert_undisturbed, tiny_content

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def zoo(*arguments: str, stdout: int, stderr: int, unbuffered: str = "") -> tuple[int, str]:
    """Return the exit code and what came on stderr, where that is read."""
    command = [sys.executable, "-m", "zoo.cli", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["plan mnist", "status SWEEP --watch", "plan --help"])
def test_a_command_that_only_tells_ends_quietly(command: str, unbuffered: str, unread: int, undisturbed: Path) -> None:
    arguments = command.replace("SWEEP", str(undisturbed)).split()
    assert zoo(*arguments, stdout=unread, stderr=subprocess.PIPE, unbuffered=unbuffered) == (0, "")


def test_a_sweep_goes_on_when_nobody_reads_its_progress(
    unread: int, tmp_path: Path, digits_dir: Path, expected: dict
) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(tiny_content()))
    arguments = ("--sweep-dir", str(tmp_path / "s"), "--data-dir", str(digits_dir), "--workers", "0")
    assert zoo("generate", str(tmp_path / "tiny.yaml"), *arguments, stdout=unread, stderr=unread)[0] == 0
    assert_undisturbed(tmp_path / "s", expected)
