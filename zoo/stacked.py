"""What a population leaves for each epoch label and of its curves: stacked checkpoints (safetensors) and metrics
(Parquet). Checkpoints are read through a memory map, so that rows of them cost only what they hold."""

import json
import mmap
from collections.abc import Mapping, Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from generators.architecture import tensor_table, unflatten
from generators.population import METRICS
from zoo.errors import StoreError

CHECKPOINT_FORMAT = 1
HEADER_KEY = "zoo"
"""The one key of a safetensors header that holds all of ours as JSON: the order of several keys is not fixed."""


def checkpoint_bytes(
    task: str, label: str, run_ids: Sequence[str], epochs: Sequence[int | None], weights: Tensor
) -> bytes:
    """Return the checkpoints of an epoch label as a safetensors file.

    Args:
        run_ids, epochs: of the R runs; an epoch is None where nobody knows it.
        weights: [R, P].

    Returns:
        Tensors float32 [R, *shape] under their state_dict names, and a header that describes them.
    """
    tensors = {name: tensor.float().contiguous() for name, tensor in unflatten(task, weights).items()}
    header = {
        "format": CHECKPOINT_FORMAT,
        "task": task,
        "label": label,
        "run_ids": list(run_ids),
        "epochs": list(epochs),
    }
    return save(tensors, {HEADER_KEY: json.dumps(header)})


def metrics_bytes(
    run_ids: Sequence[str], metrics: Mapping[str, Sequence[Sequence[float]]], best: Sequence[float | None] | None = None
) -> bytes:
    """Return metrics as a Parquet file with a row a run: run_id and a list a metric, entry e after e epochs.

    Args:
        metrics: name -> a list a run; NaN for what was not measured.
        best: of imported runs, the accuracy of "best", whose epoch nobody knows: a column of its own.
    """
    columns: dict[str, Any] = {"run_id": list(run_ids)}
    columns |= {name: pa.array(metrics[name], pa.list_(pa.float64())) for name in METRICS}
    if best is not None:
        columns["best_test_accuracy"] = pa.array(best, pa.float64())
    sink = BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


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
