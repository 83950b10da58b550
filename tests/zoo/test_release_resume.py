"""Imports that are interrupted, repeated or pointed at something else, and what cannot be read."""

from pathlib import Path
from typing import Any

import pytest
from release_tools import Release, found, run_import, two_runs
from torch import Tensor

from zoo.cli import main
from zoo.errors import ReleaseError, StoreError
from zoo.release import import_release
from zoo.release_archive import ReleaseArchive
from zoo.repair import repair_sweep
from zoo.store import Store
from zoo.verify_sweep import verify_sweep


@pytest.fixture
def release() -> Release:
    return two_runs()


@pytest.fixture
def three_populations() -> Release:
    made = Release()
    for number, dropout in enumerate((0.0, 0.05, 0.1)):
        made.add(f"run{number}", "50", 0.5, dropout=dropout)
        made.add(f"run{number}", "75", 0.6, dropout=dropout)
    made.add("broken", "50", 0.5, state=b"broken", lr=1e-2, dropout=0.0)
    return made


def test_an_interrupted_import_goes_on_with_what_is_missing(
    three_populations: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = three_populations.write_zip(tmp_path / "release.zip")
    whole = import_release(source, "mnist", tmp_path / "whole", progress=False)
    read = ReleaseArchive.read_weights
    names: list[str] = []

    def interrupted(self: ReleaseArchive, entry: Any, task: str) -> Tensor:
        if len(names) == 4:
            raise KeyboardInterrupt
        names.append(entry.file)
        return read(self, entry, task)

    monkeypatch.setattr(ReleaseArchive, "read_weights", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_release(source, "mnist", tmp_path / "sweep", progress=False)
    store = Store(tmp_path / "sweep")
    assert len(store.sealed()) == 1
    assert [len(store.attempts(population.id)) for population in store.todo()] == [0, 0]
    monkeypatch.setattr(ReleaseArchive, "read_weights", lambda s, e, t: names.append(e.file) or read(s, e, t))
    names.clear()
    again = import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert sorted(names) == ["run1_50_5000.pt", "run1_75_6000.pt", "run2_50_5000.pt", "run2_75_6000.pt"]
    assert again.skipped == 1
    assert (again.checkpoints, again.findings) == (whole.checkpoints, whole.findings)
    commits = {commit.population: commit.files for commit in Store(tmp_path / "whole").commits()}
    assert {commit.population: commit.files for commit in store.commits()} == commits


def test_a_file_that_cannot_be_read_now_is_not_sealed_as_unreadable(
    three_populations: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = three_populations.write_zip(tmp_path / "release.zip")
    read = ReleaseArchive._read

    def denied(self: ReleaseArchive, entry: Any) -> bytes:
        if entry.file == "run1_75_6000.pt":
            raise PermissionError(13, "Permission denied")
        return read(self, entry)

    with monkeypatch.context() as patch:
        patch.setattr(ReleaseArchive, "_read", denied)
        with pytest.raises(ReleaseError, match=r"zip: run1_75_6000\.pt: cannot be read now \(Permission denied\)"):
            import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert import_release(source, "mnist", tmp_path / "sweep", progress=False).checkpoints == 6


def test_an_import_of_nothing_is_a_failed_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Release()
    made.add("broken", "50", 0.5, state=b"broken")
    source = made.write_zip(tmp_path / "release.zip")
    assert main(["import-release", str(source), "--task", "mnist", "--out", str(tmp_path / "s"), "--quiet"]) == 1
    assert "0 checkpoints" in (text := capsys.readouterr().out)
    assert "for a better copy of the archive use another --out" in text


def test_a_second_call_reads_no_weights_and_reports_the_same(
    three_populations: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = run_import(three_populations, tmp_path)
    monkeypatch.delattr(ReleaseArchive, "read_weights")
    second, _ = run_import(three_populations, tmp_path)
    assert (second.skipped, second.populations) == (3, 3)
    assert found(second) == found(first) == {"unreadable": ["broken_50_5000.pt"]}
    assert second.checkpoints == first.checkpoints == 6


def test_a_directory_of_another_release_is_left_alone(
    release: Release, three_populations: Release, tmp_path: Path
) -> None:
    run_import(release, tmp_path)
    with pytest.raises(ReleaseError, match="found the plan of another sweep or release"):
        run_import(three_populations, tmp_path)
    assert len(Store(tmp_path / "sweep").plans()) == 1


def test_a_folder_of_something_else_is_left_alone(release: Release, tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep/notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"found notes\.txt, expected a sweep directory .*; use another --out$"):
        run_import(release, tmp_path)
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["notes.txt"]


def test_verify_and_repair_name_the_command_that_imports_again(release: Release, tmp_path: Path) -> None:
    _, store = run_import(release, tmp_path)
    (commit,) = store.commits()
    store.storage.remove(f"populations/{commit.population}/{commit.attempt}/best.safetensors")
    line = f"moved: commits/{commit.population}.json to removed/; `zoo import-release` makes the population again"
    assert line in repair_sweep(store.root, apply=True).text().splitlines()
    [problem] = verify_sweep(store.root)
    assert problem.endswith("found 0 of 1 populations, expected all of the plan; run `zoo import-release` again")
    run_import(release, tmp_path)
    assert verify_sweep(store.root) == []
