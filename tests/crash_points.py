"""Faults inside the write protocol: every call that changes a file system counts as a step, and a chosen one fails.

A process that is killed at a step has done all steps before it. A file that is killed or fails at its flush loses the
second half of its content first, as after a power cut.
"""

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS = ("fsync", "rename", "link", "unlink", "mkdir", "rmdir")
Fault = Callable[[str, Any], None]


@contextlib.contextmanager
def at_steps(root: Path, fault: Callable[[int, str, Path, Any], None]) -> Iterator[None]:
    """Call `fault(number, step, path, first argument)` before every step below `root` while the block runs."""
    count = iter(range(1_000_000))
    originals = {step: getattr(os, step) for step in STEPS}

    def wrap(step: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            target = arguments[-1] if step in ("rename", "link") else arguments[0]
            path = Path(f"/proc/self/fd/{target}").readlink() if step == "fsync" else Path(os.fsdecode(target))
            # shutil.rmtree removes by names relative to an open folder.
            if not path.is_absolute() or path.is_relative_to(root):
                fault(next(count), step, path, arguments[0])
            return originals[step](*arguments, **options)

        return call

    for step in STEPS:
        setattr(os, step, wrap(step))
    try:
        yield
    finally:
        for step, original in originals.items():
            setattr(os, step, original)


def record(seen: list[str], root: Path) -> Callable[[int, str, Path, Any], None]:
    """Note each step with the kind of its file."""

    def note(number: int, step: str, path: Path, argument: Any) -> None:
        name = path.relative_to(root).as_posix() if path.is_absolute() else path.name
        seen.append(f"{step} {re.sub(r'[0-9a-f]{16,}|[0-9T]{15}-[0-9a-f]{8}|^[0-9]{5}-', '*', name)}")

    return note


def kill_at(chosen: int) -> Callable[[int, str, Path, Any], None]:
    """Kill this process at a step, without any clean-up."""

    def strike(number: int, step: str, path: Path, argument: Any) -> None:
        if number == chosen:
            _tear(step, path, argument)
            os.kill(os.getpid(), signal.SIGKILL)

    return strike


def fail_at(chosen: int, code: int, for_ever: bool = False) -> Callable[[int, str, Path, Any], None]:
    """Let a flush fail with an errno: the chosen one, or all from there on."""

    def strike(number: int, step: str, path: Path, argument: Any) -> None:
        if step == "fsync" and (number == chosen or (for_ever and number > chosen)):
            _tear(step, path, argument)
            raise OSError(code, os.strerror(code))

    return strike


def _tear(step: str, path: Path, argument: Any) -> None:
    if step == "fsync" and path.is_file():
        os.ftruncate(argument, os.fstat(argument).st_size // 2)
