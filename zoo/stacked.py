"""Stacked checkpoint files: the header that describes one, and reading through a memory map, so that rows of it cost
only what they hold."""

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zoo.errors import StoreError

CHECKPOINT_FORMAT = 1
HEADER_KEY = "zoo"
"""The one key of a safetensors header that holds all of ours as JSON: the order of several keys is not fixed."""


def safetensors_header(content: bytes) -> str:
    """Return our JSON from the header of a safetensors file in memory."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])["__metadata__"][HEADER_KEY]


class StackedCheckpoints:
    """A population's checkpoints of one epoch label, in a safetensors file of tensors [R, *shape].

    Raises:
        StoreError: the file is not one, or is shorter than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._length = int.from_bytes(file.read(8), "little")
                self._entries: dict[str, Any] = json.loads(file.read(self._length))
            self.header: dict[str, Any] = json.loads(self._entries.pop("__metadata__")[HEADER_KEY])
        except (OSError, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise StoreError(f"{path}: not a readable checkpoint file ({error!r}); see `zoo verify`") from error

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> float32 [R, *shape], backed by the file."""
        with self.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        data = np.frombuffer(content, np.uint8, offset=8 + self._length)
        tensors = {}
        for name, entry in self._entries.items():
            start, end = entry["data_offsets"]
            if end > len(data):
                raise StoreError(
                    f"{self.path}: found {len(data)} bytes of tensors, expected {end} for {name}; see `zoo verify`"
                )
            tensors[name] = data[start:end].view(np.float32).reshape(entry["shape"])
        return tensors

    def row(self, position: int) -> dict[str, np.ndarray]:
        """Return the tensors of one run."""
        return {name: values[position] for name, values in self.tensors.items()}
