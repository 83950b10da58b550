"""SIGINT and SIGTERM as a request: the first one asks a sweep to stop, the second one ends it at once, and any further
one changes nothing: what is left is to clean up and to say what is done."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ANSWER = b"\nzoo: saving states at the end of the epoch; once more ends at once\n"
STDERR = 2


class Interrupted(BaseException):
    """A second signal came; like KeyboardInterrupt, it is no error to be handled on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class Stop:
    """Whether, and by which signal, a stop was asked for. `on_request` is called when it is, after a word on stderr."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.on_request: Callable[[], None] = lambda: None
        self._ends_at_once = False

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: Any) -> None:
        if self._ends_at_once:
            return
        if self.requested:
            self._ends_at_once = True
            raise Interrupted(number)
        self.signal = number
        # No `print`, as the signal may have come in the middle of one; and the reader of a pipe has heard Ctrl-C too.
        with contextlib.suppress(OSError):
            os.write(STDERR, ANSWER)
        self.on_request()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn signals into requests while the block runs. In a thread other than the main one nothing is changed."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.handle) for number in SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Terminated(BaseException):
    """SIGTERM came; like KeyboardInterrupt, it lets everything on the way clean up."""


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise Terminated while the block runs. In a thread other than the main one nothing is changed."""

    def handle(number: int, frame: Any) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
