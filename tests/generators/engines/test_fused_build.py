"""The build of the fused engine, its cache, and the choice of an engine where it cannot be built."""

import ctypes
import errno
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from generators.cache import cache_folder
from generators.engines import FusedEngine, TorchEngine, fused_engine, make_engine
from generators.engines.fused.build import FusedUnavailableError, build, find_compiler
from generators.errors import InputError
from generators.tasks.data import TaskData

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZOO_CACHE_DIR", str(folder))
    fused_engine._load.cache_clear()
    yield folder
    fused_engine._load.cache_clear()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library that compiles at once."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "engine.cpp").write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER + OFFSET; }\n')
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    return folder


@pytest.fixture
def compiler_log(tmp_path: Path, monkeypatch) -> Path:
    """A file with a line for each library that is compiled; the compiler takes half a second longer."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    compiler = " ".join(find_compiler())
    script.write_text(f'#!/bin/sh\ncase "$*" in *engine.cpp*) echo built >> {log}; sleep 0.5;; esac\n{compiler} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return log


def answer(library: Path) -> int:
    return ctypes.CDLL(str(library)).answer()


def test_a_library_is_compiled_once_for_each_source_and_flag(cache: Path, sources: Path, compiler_log: Path):
    first = build(["-DOFFSET=0"], sources)
    assert build(["-DOFFSET=0"], sources) == first and answer(first) == 42
    assert compiler_log.read_text() == "built\n"
    other = build(["-DOFFSET=1"], sources)
    (sources / "answer.h").write_text("#define ANSWER 7\n")
    changed = build(["-DOFFSET=0"], sources)
    assert answer(other) == 43 and answer(changed) == 7
    assert {path.name for path in cache.iterdir()} == {first.name, other.name, changed.name}
    assert cache.stat().st_mode & 0o777 == 0o700


def test_the_name_covers_what_the_compiler_says_of_itself_and_the_processor(
    cache: Path, sources: Path, tmp_path: Path, monkeypatch
):
    first = build(["-DOFFSET=0"], sources)
    script = tmp_path / "other"
    script.write_text(f'#!/bin/sh\n{" ".join(find_compiler())} -D__another_feature__ "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert build(["-DOFFSET=0"], sources) != first


def test_processes_that_start_at_once_share_a_library(cache: Path, sources: Path, compiler_log: Path):
    program = textwrap.dedent(
        f"""
        import ctypes
        from pathlib import Path
        from generators.engines.fused.build import build
        print(input(), ctypes.CDLL(str(build(["-DOFFSET=0"], Path({str(sources)!r})))).answer())
        """
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, env=os.environ, **pipes) for _ in range(2)]
    assert [p.communicate("go\n", timeout=120)[0] for p in processes] == ["go 42\n"] * 2
    assert len(list(cache.iterdir())) == 1


def test_a_failed_build_tells_the_compilers_error_and_leaves_nothing(cache: Path, sources: Path):
    with pytest.raises(FusedUnavailableError, match=r"failed: .*error.*OFFSET") as caught:
        build([], sources)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(cache: Path, sources: Path):
    cache.write_text("not a folder")
    with pytest.raises(FusedUnavailableError, match=f"cache {cache}: .*; set ZOO_CACHE_DIR"):
        build(["-DOFFSET=0"], sources)


def test_with_a_cache_that_cannot_be_read_auto_takes_torch(cache: Path, digits: TaskData, monkeypatch, caplog):
    exists = Path.exists

    def refused(path: Path) -> bool:
        """What a folder of another user answers; the superuser of a container would be let in."""
        if path.parent == cache:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", refused)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_engine("auto", digits), TorchEngine)
    (record,) = caplog.records
    assert f"cache {cache}: Permission denied; set ZOO_CACHE_DIR" in record.getMessage()


def test_without_a_home_folder_auto_takes_torch(cache: Path, digits: TaskData, monkeypatch, caplog):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("ZOO_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with caplog.at_level(logging.WARNING):
        assert isinstance(make_engine("auto", digits), TorchEngine)
    (record,) = caplog.records
    assert "no cache folder (Could not determine home directory.); set ZOO_CACHE_DIR" in record.getMessage()


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("ZOO_CACHE_DIR", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("ZOO_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/small-transformer-zoo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/c")
    assert cache_folder() == Path("/c/.cache/small-transformer-zoo")


def test_compiler_may_come_with_arguments(monkeypatch):
    plain = find_compiler()
    monkeypatch.setenv("CXX", f"{plain[0]} -g -Wall")
    assert find_compiler() == [plain[0], "-g", "-Wall"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("no-such-compiler", "found none of no-such-compiler"),
        ('g++ "-g', "CXX is 'g++ \"-g' (No closing quotation)"),
        ("g++ \\", "CXX is 'g++ \\\\' (No escaped character)"),
    ],
)
def test_without_a_compiler_auto_warns_once_and_takes_torch(
    words: str, reason: str, cache: Path, digits: TaskData, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", words)
    with caplog.at_level(logging.WARNING):
        engine = make_engine("auto", digits)
    assert isinstance(engine, TorchEngine)
    (record,) = caplog.records
    assert reason in record.getMessage() and "\n" not in record.getMessage()
    with pytest.raises(InputError, match="fused is not available: no C"):
        make_engine("fused", digits)


def test_a_library_that_does_not_load_is_not_available(cache: Path, digits: TaskData, monkeypatch, tmp_path: Path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(fused_engine, "build", lambda definitions: broken)
    with pytest.raises(FusedUnavailableError, match=f"{broken}: cannot be loaded"):
        FusedEngine(digits)


def test_engine_by_name(digits: TaskData):
    assert isinstance(make_engine("auto", digits), FusedEngine)
    assert isinstance(make_engine("fused", digits, threads=2), FusedEngine)
    assert isinstance(make_engine("torch", digits), TorchEngine)
    exact = make_engine("auto", digits, dtype=torch.float64)
    assert isinstance(exact, TorchEngine) and exact.dtype == torch.float64
    with pytest.raises(InputError, match="fused serves float32 on the CPU"):
        make_engine("fused", digits, dtype=torch.float64)
    with pytest.raises(InputError, match="fused serves float32 on the CPU"):
        make_engine("fused", digits, device="cuda")
    with pytest.raises(InputError, match="found 'fast', expected one of auto, torch, compiled, fused"):
        make_engine("fast", digits)
