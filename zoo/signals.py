"""SIGINT and SIGTERM as a request: the first one asks a sweep to stop, the second one ends it at once."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A second signal came; like KeyboardInterrupt, it is no error to be handled on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


class Stop:
    """Whether, and by which signal, a stop was asked for. `on_request` is called when it is."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.on_request: Callable[[], None] = lambda: None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise Interrupted(number)
        self.signal = number
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
