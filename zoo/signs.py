"""Signs of life: what a working attempt leaves behind after every epoch, for `zoo status` and for other drivers."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass

STALE_SECONDS = 300.0
"""An attempt is taken for dead after so long a silence, or after EPOCHS_OF_SILENCE of its epochs if that is longer."""
EPOCHS_OF_SILENCE = 3
FIRST_EPOCH_SECONDS = 1800.0
"""The same before the attempt has finished an epoch, when its pace is not known."""
MOST_COUNT = 2**31 - 1
"""The system takes no higher number of a process; 0 and negative ones would stand for groups of processes."""
MOST_TIME = 2**40
"""In Unix seconds; what computes a pace from times must not overflow."""


@dataclass(frozen=True)
class Sign:
    """A sign of life of one attempt.

    epoch: the last finished one. time: when, in Unix seconds by the worker's clock.
    first_epoch, started: where and when the attempt began; its pace follows from them.
    host, pid: the process that trains.
    """

    epoch: int
    time: float
    first_epoch: int
    started: float
    host: str
    pid: int

    @classmethod
    def now(cls, epoch: int, first: "Sign | None" = None) -> "Sign":
        """Return a sign of this process at this moment; `first` is the attempt's first one."""
        moment = time.time()
        began = (first.epoch, first.time) if first else (epoch, moment)
        return cls(epoch, moment, *began, socket.gethostname(), os.getpid())

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> "Sign":
        """Read a sign back; ValueError or TypeError for what is none."""
        try:
            sign = cls(**json.loads(content))
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        counts = (sign.epoch, sign.first_epoch, sign.pid)
        if not all(type(count) is int and 0 <= count <= MOST_COUNT for count in counts) or sign.pid == 0:
            raise ValueError("found an epoch or a process that is none")
        if not all(type(moment) in (int, float) and 1 <= moment <= MOST_TIME for moment in (sign.time, sign.started)):
            raise ValueError("found a time that is none")
        if not isinstance(sign.host, str):
            raise ValueError("found a host that is no name")
        return sign

    def age(self) -> float:
        """Seconds since the sign was left; 0 where it seems to come from the future (a clock was set back)."""
        return max(time.time() - self.time, 0.0)

    def is_alive(self) -> bool:
        """Whether the attempt may still be at work: not silent for too long, its process not known to be gone."""
        return self.age() < self.patience() and not (self.host == socket.gethostname() and _is_gone(self.pid))

    def patience(self) -> float:
        """Seconds of silence after which the attempt is taken for dead."""
        pace = self.epochs_per_second()
        return FIRST_EPOCH_SECONDS if pace is None else max(STALE_SECONDS, EPOCHS_OF_SILENCE / pace)

    def epochs_per_second(self) -> float | None:
        """Pace of the attempt; None before its first epoch is done."""
        if self.epoch <= self.first_epoch or self.time <= self.started:
            return None
        return (self.epoch - self.first_epoch) / (self.time - self.started)


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
