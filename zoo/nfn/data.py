"""What a predictor is trained on: the weights of checkpoints as one matrix, and what is known of each."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from generators.architecture import CLASSES, COMPONENTS, flatten, tensor_table
from generators.streams import permutation, stream_key
from zoo.dataset import Checkpoints, open_zoo
from zoo.errors import NFNError
from zoo.filters import Condition
from zoo.splits import SPLIT_SHARES, SPLITS


@dataclass(frozen=True)
class WeightData:
    """N checkpoints of one task.

    weights: float32 [N, P] in the order of the tensor table. metadata: a row a checkpoint, with `checkpoint_id` at
    least; `test_accuracy` (fractions in [0, 1]) where the accuracy is known, hyperparameters where they are.
    """

    task: str
    weights: Tensor
    metadata: pa.Table

    @classmethod
    def of(cls, checkpoints: Checkpoints) -> "WeightData":
        """Read a selection of a zoo."""
        data = cls(checkpoints.task, flatten(checkpoints.task, checkpoints.tensors()), checkpoints.metadata)
        data.require_finite()
        return data

    def __len__(self) -> int:
        return len(self.weights)

    @cached_property
    def accuracy(self) -> Tensor:
        """Test accuracy of each checkpoint, float64 [N]."""
        return torch.from_numpy(self.metadata["test_accuracy"].to_numpy().copy())

    @property
    def names(self) -> list[str]:
        return self.metadata["checkpoint_id"].to_pylist()

    def select(self, rows: np.ndarray) -> "WeightData":
        """Choose checkpoints by position."""
        return WeightData(self.task, self.weights[torch.from_numpy(rows)], self.metadata.take(pa.array(rows)))

    def at_least(self, threshold: float) -> "WeightData":
        """Choose the checkpoints whose test accuracy is `threshold` or more; no copy is made where all are chosen."""
        chosen = self.accuracy.numpy() >= threshold
        return self if chosen.all() else self.select(np.flatnonzero(chosen))

    def digest(self) -> str:
        """16 hexadecimal digits that name these checkpoints, their accuracies and every bit of their weights."""
        digest = hashlib.sha256(json.dumps([self.task, self.names]).encode())
        digest.update(self.accuracy.numpy().tobytes())
        digest.update(self.weights.contiguous().numpy().data)
        return digest.hexdigest()[:16]

    def require_finite(self) -> None:
        """Raise NFNError if a weight is not a finite number, naming the checkpoint."""
        broken = (~torch.isfinite(self.weights).all(dim=1)).nonzero().flatten().tolist()
        if broken:
            raise NFNError(
                f"{self.names[broken[0]]}: found a weight that is no finite number ({len(broken)} such checkpoints); "
                f"leave it out of the selection"
            )


@dataclass(frozen=True)
class Splits:
    """Training, validation and test part of the checkpoints."""

    train: WeightData
    validation: WeightData
    test: WeightData

    def require_rankable(self) -> None:
        """Raise NFNError where a part is too small or too uniform for a rank correlation."""
        for name in SPLITS:
            part: WeightData = getattr(self, name)
            different = len(part.accuracy.unique())
            if different < 2:
                raise NFNError(
                    f"{name} part: found {len(part)} checkpoints of {different} different accuracies, expected 2 or "
                    f"more of each; use more runs, --resplit, a lower threshold or another epoch label"
                )


def component_columns(task: str) -> dict[str, slice]:
    """Where each component lies in a row of `WeightData.weights`; a component's tensors are neighbours."""
    columns: dict[str, slice] = {}
    end = 0
    for spec in tensor_table(task):
        start, end = end, end + spec.numel
        columns[spec.component] = slice(columns.get(spec.component, slice(start, 0)).start, end)
    return columns


def component_tensors(task: str, component: str, flat: Tensor) -> dict[str, Tensor]:
    """Split the columns of one component, [N, F], into its tensors by name, [N, *shape]."""
    specs = [spec for spec in tensor_table(task) if spec.component == component]
    parts = flat.split([spec.numel for spec in specs], dim=1)
    return {spec.name: part.unflatten(1, spec.shape) for spec, part in zip(specs, parts, strict=True)}


def settle_components(task: str, components: Sequence[str] | None) -> tuple[str, ...]:
    """Return the components to read in their fixed order; None stands for all that the task has.

    Raises:
        NFNError: an unknown task or component, none at all, or the embedding of a task whose embedding is frozen.
    """
    if task not in CLASSES:
        raise NFNError(f"task: found {task!r}, expected one of {', '.join(CLASSES)}")
    available = tuple(name for name in COMPONENTS if name in component_columns(task))
    if components is None:
        return available
    for name in components:
        if name not in available:
            raise NFNError(f"components: found {name!r}, expected some of {', '.join(available)} for task {task}")
    if not components:
        raise NFNError(f"components: found none, expected some of {', '.join(available)}")
    return tuple(name for name in available if name in components)


def load_checkpoints(dataset: str, task: str, epoch_label: str, filters: tuple[str, ...] = ()) -> WeightData:
    """Read the checkpoints of one label that fulfil all filters from a dataset folder or repository.

    Raises:
        NFNError: there are none.
        DatasetError: a label that no checkpoint has, or a filter that does not fit the columns.
    """
    zoo = open_zoo(dataset)
    conditions: list[str | Condition] = [("epoch_label", "==", epoch_label), *filters]
    found = zoo.checkpoints(task, filters=conditions)
    if not len(found):
        labels = sorted(set(zoo.checkpoints(task).metadata["epoch_label"].to_pylist()))
        fulfilling = f" that fulfils {' and '.join(filters)}" if filters else ""
        raise NFNError(
            f"epoch_label: found no checkpoint of {epoch_label!r}{fulfilling} in {dataset}, expected labels "
            f"{', '.join(labels)}{' and wider filters' if filters else ''}"
        )
    return WeightData.of(found)


def split(data: WeightData, resplit_seed: int | None = None) -> Splits:
    """Split checkpoints into training, validation and test part.

    The zoo's pinned splits (all checkpoints of a run are in one) unless `resplit_seed` is given, which draws 70/15/15
    anew: the paper's protocol, after its filter by accuracy.
    """
    if resplit_seed is None:
        pinned = np.array(data.metadata["split"].to_pylist())
        return Splits(*(data.select(np.flatnonzero(pinned == name)) for name in SPLITS))
    order = permutation(stream_key("nfn-split", resplit_seed), len(data))
    ends = np.round(np.cumsum(SPLIT_SHARES) * len(data)).astype(int)
    return Splits(*(data.select(part) for part in np.split(order, ends[:-1])))


def read_checkpoint_files(paths: Sequence[Path], task: str) -> WeightData:
    """Read single checkpoints (safetensors files with the tensors of the tensor table, one checkpoint a file).

    Raises:
        NFNError: no file, a file that is not safetensors, or tensors of other names or shapes than the task's.
    """
    if not paths:
        raise NFNError("checkpoints: found no file, expected at least one safetensors file")
    rows = [_read_checkpoint(Path(path), task) for path in paths]
    data = WeightData(task, torch.stack(rows), pa.table({"checkpoint_id": [str(path) for path in paths]}))
    data.require_finite()
    return data


def _read_checkpoint(path: Path, task: str) -> Tensor:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        reason = re.sub(r"\s+", " ", str(error))
        raise NFNError(f"{path}: not a readable safetensors file ({reason})") from error
    for spec in tensor_table(task):
        found = tuple(tensors[spec.name].shape) if spec.name in tensors else "no tensor"
        if found != spec.shape:
            raise NFNError(f"{path}: {spec.name}: found {found}, expected {spec.shape} in a checkpoint of task {task}")
        if not tensors[spec.name].is_floating_point():
            raise NFNError(f"{path}: {spec.name}: found {tensors[spec.name].dtype}, expected floating-point weights")
    return flatten(task, {name: tensor.float() for name, tensor in tensors.items()})
