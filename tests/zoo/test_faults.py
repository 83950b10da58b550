"""Faults are injected, and each ends with: commits equal the plan, keys unique, digests valid, rows undisturbed."""

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crash_points import at_steps, fail_at, kill_at, record
from sweep_tools import assert_undisturbed, block, drive, kill, kill_when, rows, start, tiny

from zoo import driver
from zoo.errors import StoreError
from zoo.store import Store, new_attempt
from zoo.sweep import generate

SHORT = tiny(epochs=2, save_epochs=[0, "best"], grid=[block(dropout=[0.0])])
"""One population of two epochs: every kind of step once."""


FOLDERS = ["fsync populations/*", "fsync populations", "fsync ."]


def run(sweep: Path, digits_dir: Path) -> None:
    generate(SHORT, sweep, digits_dir, workers=0, progress=False)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> list[str]:
    """The steps of a whole sweep, in order."""
    sweep, seen = tmp_path_factory.mktemp("steps") / "s", []
    with at_steps(sweep, record(seen, sweep)):
        run(sweep, digits_dir)
    return seen


@pytest.fixture(scope="module")
def short_rows(tmp_path_factory: pytest.TempPathFactory, digits_dir: Path) -> dict[str, Any]:
    sweep = tmp_path_factory.mktemp("short") / "s"
    run(sweep, digits_dir)
    return rows(sweep)


def drive_to_a_step(sweep: Path, digits_dir: Path, step: int) -> None:
    """Target of a process that dies at a step."""
    with at_steps(sweep, kill_at(step)):
        run(sweep, digits_dir)


def test_the_steps_are_those_of_the_protocol(steps: list[str]) -> None:
    """A seal comes after all files and the folders that hold them are flushed."""
    sealed = next(i for i, step in enumerate(steps) if step == "link commits/*.json")
    before = steps[:sealed]
    for name in ("epoch-0.safetensors", "best.safetensors", "metrics.parquet"):
        written = before.index(f"rename populations/*/*/{name}")
        assert before[written - 1].startswith("fsync populations/*/*/.tmp-")
        assert before[written + 1 :].count("fsync populations/*/*") >= 1
    settled = steps.index("mkdir commits")
    assert steps[settled - 3 : settled] == FOLDERS
    assert not any(step.startswith("rename populations") and "progress" not in step for step in steps[sealed:])


def test_a_kill_at_any_step_loses_nothing(
    steps: list[str], short_rows: dict[str, Any], digits_dir: Path, tmp_path: Path
) -> None:
    # A step follows from the one before it; unlinking one's own temporary file or making a folder decides nothing.
    first = {step: number for number, step in reversed(list(enumerate(steps)))}
    chosen = sorted(number for step, number in first.items() if not re.match(r"unlink .*\.tmp-|mkdir", step))
    assert len(chosen) > 20
    for step in chosen:
        process = start(drive_to_a_step, tmp_path / str(step), digits_dir, step)
        process.join()
        assert process.exitcode == -signal.SIGKILL, steps[step]
        sweep = tmp_path / str(step)
        for commit in Store(sweep).commits():  # what is sealed is whole, even before the next start
            for name, file in commit.files.items():
                assert len(Store(sweep).read(commit.population, commit.attempt, name)) == file.size, steps[step]
        run(sweep, digits_dir)
        assert_undisturbed(sweep, short_rows)


def test_a_flush_that_fails_at_any_step_loses_nothing(
    steps: list[str], short_rows: dict[str, Any], digits_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "LONGEST_PAUSE", 0.0)
    for step in [number for number, name in enumerate(steps) if name.startswith("fsync")][::2]:
        sweep = tmp_path / str(step)
        with at_steps(sweep, fail_at(step, errno.EIO)):
            try:
                run(sweep, digits_dir)
            except StoreError as error:
                assert str(sweep) in str(error)
                assert "Input/output error" in str(error)
        run(sweep, digits_dir)
        assert_undisturbed(sweep, short_rows)


def test_a_disk_that_fills_up_at_any_step_ends_cleanly_and_goes_on_after_room_is_made(
    steps: list[str], short_rows: dict[str, Any], digits_dir: Path, tmp_path: Path
) -> None:
    for step in [number for number, name in enumerate(steps) if name.startswith("fsync")][::4]:
        sweep = tmp_path / str(step)
        with (
            at_steps(sweep, fail_at(step, errno.ENOSPC, for_ever=True)),
            pytest.raises(StoreError, match=rf"^{sweep}: (no space left, .*make room|cannot be written)") as caught,
        ):
            run(sweep, digits_dir)
        assert "\n" not in str(caught.value)
        run(sweep, digits_dir)
        assert_undisturbed(sweep, short_rows)


def drive_with_small_files(sweep: Path, digits_dir: Path, limit: int, report: Path) -> None:
    """Target of a process whose files cannot grow beyond a limit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    except StoreError as error:
        os.write(os.open(report, os.O_CREAT | os.O_WRONLY), str(error).encode())


def test_files_that_cannot_grow_end_the_sweep_on_one_line(
    expected: dict[str, Any], digits_dir: Path, tmp_path: Path
) -> None:
    process = start(drive_with_small_files, tmp_path / "s", digits_dir, 100_000, tmp_path / "report")
    process.join()
    assert process.exitcode == 0
    report = (tmp_path / "report").read_text()
    assert report.startswith(f"{tmp_path / 's'}: no space left, ")
    generate(tiny(), tmp_path / "s", digits_dir, workers=0, progress=False)
    assert_undisturbed(tmp_path / "s", expected)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("room", [50_000, 400_000, 1_000_000, 2_000_000])
def test_a_full_disk_ends_the_sweep_on_one_line_and_the_same_command_goes_on_after_room_is_made(
    room: int, small_disk: Path, expected: dict[str, Any], digits_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(*_: Any) -> None:
        (small_disk / "others").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - room))

    sweep = small_disk / "s"
    with monkeypatch.context() as patched:
        patched.setattr("zoo.sweep.check_room", fill)
        with pytest.raises(StoreError, match=rf"^{sweep}: (no space left, .*make room|cannot be written)") as caught:
            generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match=r"found 0\.00 GB free, .* for \d populations to come; make room"):
        generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    (small_disk / "others").unlink()
    generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    assert_undisturbed(sweep, expected)


def test_ten_kills_of_the_driver_at_random_moments_lose_nothing(digits_dir: Path, tmp_path: Path) -> None:
    config = tiny(epochs=60, save_epochs=[0, 30, "best"], population_size=1)
    generator, kills, process = random.Random(4), 0, None
    sweep = tmp_path / "s"
    while kills < 10:
        process = start(drive, config, sweep, digits_dir)
        process.join(generator.uniform(0.1, 0.6))
        if process.exitcode is None:
            kill(process)
            kills += 1
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
    assert kills >= 3
    generate(config, sweep, digits_dir, workers=0, progress=False)
    generate(config, tmp_path / "whole", digits_dir, workers=0, progress=False)
    assert_undisturbed(sweep, rows(tmp_path / "whole"))


def test_a_clock_that_is_set_back_between_two_calls_changes_nothing(
    digits_dir: Path, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "s"
    process = start(drive, tiny(), sweep, digits_dir)
    store = Store(sweep)
    kill_when(process, lambda: any(store.states(p) for p in store.begun()))
    now, earlier = new_attempt(), time.gmtime(time.time() - 1e6)
    monkeypatch.setattr(time, "gmtime", lambda: earlier)
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() - 1e6)
    assert new_attempt() < now
    generate(tiny(), sweep, digits_dir, workers=0, progress=False)
    assert_undisturbed(sweep, expected)
