"""Stacked checkpoint files: the header that describes one, and reading through a memory map, so that rows of it cost
only what they hold."""

import json
import mmap
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from generators.architecture import tensor_table
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

    places: run_id -> its row and its epoch (None where nobody knows it).

    Raises:
        StoreError: the file is not one: damaged, or with another header or other tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "numpy") as file:  # checks the types and places of the tensors, and the file's length
                header = json.loads(file.metadata()[HEADER_KEY])
                entries = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                found = {name: (entry.get_dtype(), *entry.get_shape()) for name, entry in entries.items()}
            places = enumerate(header["epochs"])
            self.places: dict[str, tuple[int, int | None]] = dict(zip(header["run_ids"], places, strict=True))
            expected = {spec.name: ("F32", len(self.places), *spec.shape) for spec in tensor_table(header["task"])}
            if found != expected:
                raise ValueError("tensors of other names, shapes or types than those of its runs")
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path}: not a readable checkpoint file ({error!r}); see `zoo verify`") from error

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        """Name -> float32 [R, *shape], backed by the file."""
        with self.path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        del entries["__metadata__"]
        data = np.frombuffer(content, np.uint8, offset=start)
        return {
            name: data[slice(*entry["data_offsets"])].view(np.float32).reshape(entry["shape"])
            for name, entry in entries.items()
        }

    def row(self, position: int) -> dict[str, np.ndarray]:
        """Return the tensors of one run."""
        return {name: values[position] for name, values in self.tensors.items()}
