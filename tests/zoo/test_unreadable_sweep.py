"""A sweep of which something cannot be read: verify goes on and names it, repair throws nothing away for it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from zoo.cli import main
from zoo.files import LocalStorage
from zoo.repair import repair_sweep
from zoo.store import Store
from zoo.verify_sweep import verify_sweep

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture
def copy(sweep: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sweep, tmp_path / "sweep"))


def test_a_folder_in_the_place_of_a_commit_hides_no_other_damage(copy: Path) -> None:
    first, second, *_ = sorted((copy / "commits").iterdir())
    first.unlink()
    first.mkdir()
    second.write_text("{}")
    problems = verify_sweep(copy)
    assert [problem for problem in problems if problem.startswith(f"commits/{first.name}: cannot be read (Is a dir")]
    assert [problem for problem in problems if problem.startswith(f"commits/{second.name}: not a readable commit")]
    repair = repair_sweep(copy, apply=True, orphans=True, orphan_seconds=0.0)
    assert list(repair.damaged) == [second.stem]
    assert first.name in " ".join(repair.beyond)
    assert not any(first.stem in orphan.name for orphan in repair.orphans)


def test_a_folder_in_the_place_of_a_file_is_damage(copy: Path) -> None:
    commit = next(Store(copy).commits())
    path = copy / "populations" / commit.population / commit.attempt / "best.safetensors"
    path.unlink()
    path.mkdir()
    (problem,) = verify_sweep(copy)
    assert problem.endswith("best.safetensors: found something else in its place, expected a file")
    assert list(repair_sweep(copy).damaged) == [commit.population]


def test_what_a_disk_does_not_give_now_is_not_trained_again(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LocalStorage.read

    def failing(self: LocalStorage, name: str) -> bytes:
        if name.endswith("best.safetensors"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, name)

    monkeypatch.setattr(LocalStorage, "read", failing)
    problems = verify_sweep(copy)
    assert len(problems) == len(list((copy / "commits").iterdir()))
    assert all("best.safetensors: cannot be read (Input/output error)" in problem for problem in problems)
    assert repair_sweep(copy, apply=True).damaged == {}


@pytest.mark.parametrize("name", ["plans/000.json", "commits", "quarantine/any.json"])
def test_deeply_nested_json_is_a_line(name: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((copy / name).iterdir()) if name == "commits" else copy / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("[" * 100_000)
    for command in ("status", "verify"):
        assert main([command, str(copy)]) in (1, 2)
    output = capsys.readouterr()
    assert "Traceback" not in output.out + output.err
    assert path.name in output.out + output.err
