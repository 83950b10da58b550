"""What a command does when nobody reads its output any more, as in `zoo ... 2>&1 | head -1`."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class _Lasting:
    """A text stream that goes on into nothing once its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let progress on stderr go unread in the block, as it is not worth the work that it tells of.

    On stdout is what the command is for, so a print raises BrokenPipeError; only what is still in its buffer at the end
    of the block is dropped without a word.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, PTH123 - lives as long as the process
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal, or a name that is no UTF-8
    stdout = sys.stdout
    try:
        with contextlib.redirect_stderr(cast(TextIO, _Lasting(sys.stderr))):
            yield
    finally:
        _Lasting(stdout).flush()


def _discard(stream: TextIO) -> None:
    """Let a stream, and what it still has in its buffer, go nowhere; Python would complain of it at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
