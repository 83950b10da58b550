"""Reading a zoo: a local folder or a Hub repository -> filtered checkpoints -> tensors or models.

The index answers every question about scalars; weights are read only for the rows that were chosen, only the row
groups and columns that hold them, and go from Arrow to torch without Python lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml
from torch import Tensor

from generators.architecture import COMPONENTS, SmallTransformer, TensorSpec, tensor_table
from zoo.data_record import EMBEDDING, VOCABULARY
from zoo.errors import DatasetError
from zoo.schema import tensor_values

Filters: TypeAlias = Sequence[tuple[str, str, Any]] | Sequence[Sequence[tuple[str, str, Any]]]
"""As pyarrow and datasets take them: a list of (column, operator, value), all of which hold, or a list of such lists,
one of which holds. Operators: ==, =, !=, <, <=, >, >=, in, not in."""

PIECE_ROWS = 2000
"""Rows of a piece: 150 MB of MNIST weights."""


def open_zoo(source: str | Path, revision: str | None = None) -> "Zoo":
    """Open a zoo.

    Args:
        source: a dataset folder, a Hub repository ("user/name" or "hf://datasets/user/name"), or any fsspec URL.
        revision: of the Hub repository: a branch, tag or commit.

    Raises:
        DatasetError: there is no dataset of this toolkit.
    """
    path = str(source)
    if Path(path).is_dir():
        return Zoo(fsspec.filesystem("file"), str(Path(path).absolute()))
    if "://" not in path:
        if path.count("/") != 1 or Path(path).exists():
            raise DatasetError(
                f"{path}: found no such folder, expected a dataset folder (see `zoo build`) or a repository user/name"
            )
        path = f"hf://datasets/{path}"
    if revision is not None:
        path = f"{path}@{revision}"
    filesystem, root = fsspec.core.url_to_fs(path)
    return Zoo(filesystem, root)


class Zoo:
    """A dataset of checkpoints. Nothing but the card is read until it is asked for."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str) -> None:
        self._filesystem = filesystem
        self.root = root
        self._configs = {config["config_name"]: config for config in self._card().get("configs", [])}
        if "index" not in self._configs:
            raise DatasetError(
                f"{root}: README.md: found no index among its configs, expected a dataset of `zoo build`"
            )

    def _card(self) -> dict[str, Any]:
        try:
            content = self._filesystem.cat_file(f"{self.root}/README.md").decode()
            metadata = yaml.safe_load(content.split("---\n")[1])
        except (OSError, IndexError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DatasetError(
                f"{self.root}: README.md: not a readable dataset card ({error}); see `zoo build`"
            ) from error
        return metadata if isinstance(metadata, dict) else {}

    @property
    def tasks(self) -> list[str]:
        return [name for name in self._configs if name != "index"]

    @cached_property
    def index(self) -> pa.Table:
        """The scalars of every run and label; `file` is null where a diverged run has no checkpoint."""
        files = [path for split in self._configs["index"]["data_files"] for path in split["path"]]
        return pa.concat_tables(self.parquet(path).read() for path in files)

    def parquet(self, path: str) -> pq.ParquetFile:
        """Open a Parquet file of the dataset; reads fetch what they need and no more."""
        return pq.ParquetFile(self._filesystem.open(f"{self.root}/{path}", cache_type="none"), pre_buffer=True)

    def read_bytes(self, path: str) -> bytes:
        """Return a small file of the dataset."""
        return self._filesystem.cat_file(f"{self.root}/{path}")

    def embedding(self, task: str) -> tuple[Tensor, tuple[str, ...]]:
        """Return the frozen word vectors [V, 32] of a text task and its vocabulary (word i belongs to row i + 1).

        Raises:
            DatasetError: the dataset holds no embedding for the task (imported checkpoints come without).
        """
        from safetensors.torch import load

        try:
            vectors = load(self.read_bytes(f"{task}/{Path(EMBEDDING).name}"))["word_vectors"]
            words = self.read_bytes(f"{task}/{Path(VOCABULARY).name}").decode().split("\n")[:-1]
        except FileNotFoundError as error:
            raise DatasetError(
                f"{self.root}: found no {task}/{Path(EMBEDDING).name}; models of {task} need it"
            ) from error
        return vectors, tuple(words)

    def checkpoints(
        self,
        task: str | None = None,
        filters: Filters | None = None,
        split: str | None = None,
        components: Sequence[str] | None = None,
    ) -> "Checkpoints":
        """Choose checkpoints; reads the index only.

        Args:
            task: needed where the dataset holds several.
            filters: conditions on the index's columns, see Filters.
            split: "train", "validation" or "test"; None for all.
            components: of the weights to read: "embedding", "encoder", "classifier"; None for all.

        Raises:
            DatasetError: an unknown task, split, component or column.
        """
        if task is None and len(self.tasks) > 1:
            raise DatasetError(f"task: not given, expected one of {', '.join(self.tasks)}")
        task = task or self.tasks[0]
        _one_of("task", task, self.tasks)
        for component in components or ():
            _one_of("components", component, COMPONENTS)
        chosen = pc.is_valid(pc.field("file")) & (pc.field("task") == task)
        if split is not None:
            _one_of("split", split, ("train", "validation", "test"))
            chosen &= pc.field("split") == split
        if filters:
            chosen &= _expression(filters, self.index.schema)
        specs = [spec for spec in tensor_table(task) if components is None or spec.component in components]
        return Checkpoints(self, task, self.index.filter(chosen), specs)


class Checkpoints:
    """A selection: its metadata is here, its weights are read when they are asked for, always in the same order.

    metadata: a pyarrow table of the index's columns, a row a checkpoint, highest test accuracy first.
    """

    def __init__(self, zoo: Zoo, task: str, metadata: pa.Table, specs: Sequence[TensorSpec]) -> None:
        self.zoo = zoo
        self.task = task
        self.metadata = metadata
        self._specs = specs

    def __len__(self) -> int:
        return self.metadata.num_rows

    def take(self, rows: Sequence[int] | np.ndarray) -> "Checkpoints":
        """Choose by position."""
        return Checkpoints(self.zoo, self.task, self.metadata.take(pa.array(rows, pa.int64())), self._specs)

    def hold_out(self, **values: Any) -> tuple["Checkpoints", "Checkpoints"]:
        """Split by hyperparameters: (the rest, those with all of `values`), for example optimizer="rmsprop"."""
        condition = _expression([(name, "==", value) for name, value in values.items()], self.metadata.schema)
        parts = (self.metadata.filter(~condition), self.metadata.filter(condition))
        rest, held_out = (Checkpoints(self.zoo, self.task, part, self._specs) for part in parts)
        return rest, held_out

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights: state_dict name -> float32 [N, *shape]."""
        weights = {spec.name: np.empty((len(self), *spec.shape), np.float32) for spec in self._specs}
        for targets, values in self._row_groups():
            for name, array in values.items():
                weights[name][targets] = array
        return {name: torch.from_numpy(array) for name, array in weights.items()}

    def pieces(self, rows: int = PIECE_ROWS) -> Iterator["Checkpoints"]:
        """Yield the selection in pieces of at most so many rows, for use within a memory bound."""
        for start in range(0, len(self), rows):
            yield Checkpoints(self.zoo, self.task, self.metadata.slice(start, rows), self._specs)

    def stream(self, seed: int | None = None) -> Iterator[tuple[pa.Table, dict[str, Tensor]]]:
        """Yield (metadata, tensors) of one row group's rows at a time; with a seed, groups and rows are shuffled."""
        generator = None if seed is None else np.random.default_rng(seed)
        for targets, values in self._row_groups(generator):
            order = np.arange(len(targets)) if generator is None else generator.permutation(len(targets))
            tensors = {name: torch.from_numpy(array[order]) for name, array in values.items()}
            yield self.metadata.take(pa.array(targets[order])), tensors

    def models(self) -> list[SmallTransformer]:
        """Return a model a checkpoint, ready to use, in evaluation mode."""
        vectors = self.zoo.embedding(self.task)[0] if self.task == "ag_news" else None
        tensors = self.tensors()
        models = []
        for row in range(len(self)):
            model = SmallTransformer(self.task, vectors)
            model.load_tensors({name: values[row] for name, values in tensors.items()})
            models.append(model.eval())
        return models

    def dataset(self, target: str = "test_accuracy") -> "CheckpointDataset":
        """Return a torch Dataset of (tensors, target) pairs."""
        return CheckpointDataset(self, target)

    def _row_groups(
        self, shuffle: np.random.Generator | None = None
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield (positions in this selection, name -> arrays of these rows) for every row group that holds some."""
        files = self.metadata["file"].to_pylist()
        groups = self.metadata["row_group"].to_pylist()
        rows = self.metadata["row"].to_numpy()
        members: dict[tuple[str, int], list[int]] = {}
        for position, place in enumerate(zip(files, groups, strict=True)):
            members.setdefault(place, []).append(position)
        places = sorted(members)
        if shuffle is not None:
            shuffle.shuffle(places)
        opened: dict[str, tuple[pq.ParquetFile, np.ndarray]] = {}
        for file, group in places:
            if file not in opened:
                parquet = self.zoo.parquet(file)
                sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.metadata.num_row_groups)]
                opened[file] = (parquet, np.cumsum([0, *sizes]))
            parquet, starts = opened[file]
            targets = np.array(members[file, group])
            inside = rows[targets] - starts[group]
            table = parquet.read_row_group(group, columns=[spec.name for spec in self._specs])
            yield targets, {s.name: tensor_values(table[s.name], s.shape)[inside] for s in self._specs}


class CheckpointDataset(torch.utils.data.Dataset):
    """Checkpoints as a torch Dataset: item i is (name -> tensor, value of the target column)."""

    def __init__(self, checkpoints: Checkpoints, target: str) -> None:
        _one_of("target", target, checkpoints.metadata.column_names)
        self._tensors = checkpoints.tensors()
        self._target = checkpoints.metadata[target].to_pylist()

    def __len__(self) -> int:
        return len(self._target)

    def __getitem__(self, row: int) -> tuple[Mapping[str, Tensor], Any]:
        return {name: values[row] for name, values in self._tensors.items()}, self._target[row]


def parse_filter(text: str) -> tuple[str, str, Any]:
    """Read a condition such as "test_accuracy>=0.9", "epoch_label==best" or "optimizer in adam,sgd".

    The value stays text until it meets its column, see Zoo.checkpoints.
    """
    for operator in (" not in ", " in ", "==", "!=", "<=", ">=", "<", ">", "="):
        column, found, value = text.partition(operator)
        if found and column.strip() and value.strip():
            operator = operator.strip()
            values = [part.strip() for part in value.split(",")]
            return column.strip(), operator, values if operator.endswith("in") else value.strip()
    raise DatasetError(f"--filter {text!r}: expected column, operator and value, for example test_accuracy>=0.9")


def _expression(filters: Filters, schema: pa.Schema) -> pc.Expression:
    """Return filters as a pyarrow expression, values converted to their columns' types."""
    groups: Any = [filters] if isinstance(filters[0][0], str) else filters
    typed = [[_typed(condition, schema) for condition in group] for group in groups]
    try:
        return pq.filters_to_expression(typed)
    except ValueError as error:
        raise DatasetError(f"filters: {error}") from error


def _typed(condition: tuple[str, str, Any], schema: pa.Schema) -> tuple[str, str, Any]:
    name, operator, value = condition
    _one_of("filters", name, schema.names)
    kind = schema.field(name).type
    values = list(value) if operator in ("in", "not in") else [value]
    if pa.types.is_string(kind) or any(isinstance(v, str) for v in values):
        convert: Any = str if pa.types.is_string(kind) else float if pa.types.is_floating(kind) else int
        try:
            values = [convert(v) for v in values]
        except ValueError as error:
            raise DatasetError(f"filters: {name}: found {value!r}, expected a value of type {kind}") from error
    return name, operator, values if operator in ("in", "not in") else values[0]


def _one_of(what: str, found: str, known: Sequence[str]) -> None:
    if found not in known:
        raise DatasetError(f"{what}: found {found!r}, expected one of {', '.join(known)}")
