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

    def listen(self) -> None:
        """Take over both signals (again, where something else has taken them since)."""
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            raise Interrupted(number)
        self.signal = number
        self.on_request()


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn signals into requests while the block runs. In a thread other than the main one nothing is changed."""
    stop = Stop()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop.listen()
    try:
        yield stop
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
