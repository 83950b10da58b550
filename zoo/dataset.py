"""Reading a zoo: a local folder or a Hub repository -> filtered checkpoints -> tensors or models.

The index answers every question about scalars; weights are read only for the rows that were chosen, only the row
groups and columns that hold them, and go from Arrow to torch without Python lists.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from generators.architecture import CLASSES, COMPONENTS, SmallTransformer, TensorSpec, tensor_table
from generators.tasks.texts import encode, tokenize
from zoo.data_record import Embedding, parse_embedding, published_names
from zoo.errors import DatasetError
from zoo.filters import Filters, expression, one_of, require_known_values
from zoo.hub_folder import CARD, PROVENANCE
from zoo.metadata import card_files, read_provenance
from zoo.reading import Source, open_source
from zoo.schema import index_fault, index_schema, tensor_values, tensors_fault
from zoo.splits import SPLITS
from zoo.threads import available_cores

INDEX = "index"
ID = "checkpoint_id"
PIECE_ROWS = 2000
"""Rows of a piece: 150 MB of MNIST weights."""
MIXED_GROUPS = 8
"""Row groups that a shuffled stream mixes: 60 MB of MNIST weights."""


def open_zoo(source: str | Path, revision: str | None = None) -> "Zoo":
    """Open a zoo.

    Args:
        source: a dataset folder, a Hub repository ("user/name" or "hf://datasets/user/name", also with "@revision"), or
            the URL of a folder that fsspec understands.
        revision: of the Hub repository: a branch, tag or commit; the newest commit of main if not given. It is settled
            when the zoo is opened: later commits do not change what is read.

    Raises:
        DatasetError: there is no dataset of this toolkit.
    """
    return Zoo(open_source(source, revision))


class Zoo:
    """A dataset of checkpoints. Nothing but the card is read until it is asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._files = card_files(source)
        if INDEX not in self._files or not self.tasks:
            raise DatasetError(
                f"{source.name}: {CARD}: found no {'tasks' if INDEX in self._files else 'index'} among its configs, "
                f"expected a dataset of `zoo build`"
            )

    def __repr__(self) -> str:
        """Tasks, with their numbers of checkpoints once the index was read: showing a zoo fetches nothing."""
        tasks = self.tasks
        if "index" in self.__dict__:
            rows = self.index.filter(pc.is_valid(pc.field("file")))["task"].to_pylist()
            tasks = [f"{task} ({rows.count(task)} checkpoints)" for task in tasks]
        return f"<Zoo {self.source.name}: {', '.join(tasks)}>"

    @property
    def tasks(self) -> list[str]:
        return [name for name in self._files if name in CLASSES]

    @cached_property
    def index(self) -> pa.Table:
        """The scalars of every run and label; `file` is null where a diverged run has no checkpoint."""
        tables = [self.source.table(path) for path in self._files[INDEX]]
        for path, table in zip(self._files[INDEX], tables, strict=True):
            if fault := index_fault(table):
                raise DatasetError(f"{self.source.name}: {path}: {fault}; get or build the dataset again")
        return pa.concat_tables([table.select(index_schema().names) for table in tables])

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Versions, engines, data and plans of the dataset, as its provenance.json has them."""
        return read_provenance(self.source)

    def embedding(self, task: str) -> Embedding:
        """Return the frozen word vectors [V, 32] of a text task and its vocabulary (word i belongs to row i + 1).

        Raises:
            DatasetError: the dataset holds no embedding for the task (imported checkpoints come without), or one that
                cannot be used.
        """
        digests = self.index.filter(pc.field("task") == task)["data_digest"].drop_null().unique().to_pylist()
        name, vocabulary = published_names(task, digests[0] if digests else "unknown")
        try:
            return parse_embedding(self.source.read_bytes(name), self.source.read_bytes(vocabulary))
        except FileNotFoundError as error:
            raise DatasetError(f"{self.source.name}: found no {name}; models of {task} need it") from error
        except ValueError as error:
            raise DatasetError(f"{self.source.name}/{name}: {error}; fetch or build the dataset again") from error

    def encode(self, texts: Sequence[str], task: str = "ag_news") -> tuple[Tensor, Tensor]:
        """Return texts as the models of a text task read them, `model(ids, lengths)`: tokenized, cut and looked up in
        the dataset's vocabulary as the training data was.

        Returns:
            Token ids, int32 [N, T], and the number of real tokens of each text, int64 [N].

        Raises:
            DatasetError: a single text in place of several, or the dataset lacks the embedding of the task.
        """
        if isinstance(texts, str):
            raise DatasetError("texts: found a single text, expected a list of them")
        vocabulary = self.embedding(task)[1]
        return encode([tokenize(text) for text in texts], vocabulary, self._max_tokens(task))

    def _max_tokens(self, task: str) -> int:
        """Return the tokens at which the texts of the training were cut off."""
        data = self.provenance["data"]
        try:
            return int(data[task]["max_tokens"])
        except (ValueError, LookupError, TypeError) as error:
            raise DatasetError(
                f"{self.source.name}: {PROVENANCE}: found no max_tokens of {task} ({error!r}); see `zoo verify`"
            ) from error

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
            filters: conditions on the index's columns, see Filters: "test_accuracy>=0.4", ("optimizer", "==", "adam"),
                or a list of such.
            split: "train", "validation" or "test"; None for all.
            components: of the weights to read: "embedding", "encoder", "classifier"; None for all.

        Raises:
            DatasetError: an unknown task, split, component or column, a value of another type than its column, or one
                that no row has, where a text column has few values.
        """
        if task is None and len(self.tasks) > 1:
            raise DatasetError(f"task: not given, expected one of {', '.join(self.tasks)}")
        task = task or self.tasks[0]
        one_of("task", task, self.tasks)
        for component in components or ():
            one_of("components", component, COMPONENTS)
        chosen = pc.is_valid(pc.field("file")) & (pc.field("task") == task)
        if split is not None:
            one_of("split", split, SPLITS)
            chosen &= pc.field("split") == split
        if filters:
            chosen &= expression(filters, self.index.schema)
            require_known_values(filters, self.index)
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

    def __repr__(self) -> str:
        return f"<{len(self)} checkpoints of {self.task}>"

    def _part(self, metadata: pa.Table) -> "Checkpoints":
        return Checkpoints(self.zoo, self.task, metadata, self._specs)

    def take(self, rows: Sequence[int] | np.ndarray) -> "Checkpoints":
        """Choose by position, from 0; a mask is no list of positions.

        Raises:
            DatasetError: there is no checkpoint at a position.
        """
        positions = np.asarray(rows)
        wrong = positions
        if positions.dtype.kind in "iu":
            wrong = positions[(positions < 0) | (positions >= len(self))]
        if len(wrong):
            raise DatasetError(f"rows: found {wrong[0]}, expected whole numbers from 0, below {len(self)}")
        return self._part(self.metadata.take(pa.array(positions, pa.int64())))

    def hold_out(self, **values: Any) -> tuple["Checkpoints", "Checkpoints"]:
        """Split by hyperparameters: (the rest, those with all of `values`), for example optimizer="rmsprop".

        Raises:
            DatasetError: an unknown column, or no checkpoint has all of `values`.
        """
        filters = [(name, "==", value) for name, value in values.items()]
        condition = expression(filters, self.metadata.schema)
        require_known_values(filters, self.metadata)
        numbered = self.metadata.append_column("number", pa.array(np.arange(len(self))))
        held_out = numbered.filter(condition)["number"].to_numpy()
        if not len(held_out):
            raise DatasetError(f"hold_out: found no checkpoint that has all of {values}, expected at least one")
        return self.take(np.setdiff1d(np.arange(len(self)), held_out)), self.take(held_out)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights: state_dict name -> float32 [N, *shape]. Row groups are decoded in parallel."""
        weights = {spec.name: np.empty((len(self), *spec.shape), np.float32) for spec in self._specs}

        def fill(place: tuple[str, int], targets: np.ndarray) -> None:
            for name, values, rows in self._read(place, targets):
                weights[name][_as_slice(targets)] = values[_as_slice(rows)]

        places = self._places()
        with ThreadPoolExecutor(available_cores()) as pool:
            for _ in pool.map(fill, places, places.values()):
                pass
        return {name: torch.from_numpy(array) for name, array in weights.items()}

    def pieces(self, rows: int = PIECE_ROWS) -> Iterator["Checkpoints"]:
        """Yield the selection in pieces of at most so many rows, for use within a memory bound."""
        _require_positive("rows", rows)
        for start in range(0, len(self), rows):
            yield self._part(self.metadata.slice(start, rows))

    def stream(
        self, seed: int | None = None, groups: int | None = None
    ) -> Iterator[tuple[pa.Table, dict[str, Tensor]]]:
        """Yield (metadata, tensors) of some row groups' rows at a time; nothing is read ahead.

        Args:
            seed: shuffles row groups, and the rows of those that are yielded together; None keeps the files' order.
            groups: row groups that are yielded together; None for one, or 8 with a seed, as a row group's rows have
                about the same accuracy.
        """
        if groups is not None:
            _require_positive("groups", groups)
        places = self._places()
        order = list(places)
        generator = None if seed is None else np.random.default_rng(seed)
        if generator is not None:
            order = [order[i] for i in generator.permutation(len(order))]
        together = groups or (1 if seed is None else MIXED_GROUPS)
        for start in range(0, len(order), together):
            targets = np.concatenate([places[place] for place in order[start : start + together]])
            part = self.take(targets if generator is None else generator.permutation(targets))
            yield part.metadata, part.tensors()

    def models(self) -> list[SmallTransformer]:
        """Return a model a checkpoint, ready to use, in evaluation mode.

        Raises:
            DatasetError: only some components were chosen, or the dataset lacks the embedding of a text task.
        """
        if len(self._specs) != len(tensor_table(self.task)):
            found = ", ".join(dict.fromkeys(spec.component for spec in self._specs)) or "none"
            raise DatasetError(f"components: found {found}; models() needs all components: give no `components`")
        fixed: dict[str, Any] = {}
        if self.task == "ag_news":
            fixed = {"word_vectors": self.zoo.embedding(self.task)[0], "max_tokens": self.zoo._max_tokens(self.task)}
        tensors = self.tensors()
        models = []
        with torch.random.fork_rng([]):  # a new model draws weights, from the caller's generator
            for row in range(len(self)):
                model = SmallTransformer(self.task, **fixed)
                model.load_tensors({name: values[row] for name, values in tensors.items()})
                models.append(model.eval())
        return models

    def dataset(self, target: str = "test_accuracy") -> "CheckpointDataset":
        """Return a torch Dataset of (tensors, target) pairs; a floating target is float32, ready for a loss."""
        return CheckpointDataset(self, target)

    def _places(self) -> dict[tuple[str, int], np.ndarray]:
        """Return (file, row group) -> positions in this selection of the rows that lie there, in the files' order."""
        files, file = np.unique(self.metadata["file"].to_numpy().astype(str), return_inverse=True)
        group = self.metadata["row_group"].to_numpy()
        order = np.lexsort((group, file))
        changes = (np.diff(file[order], prepend=-1) != 0) | (np.diff(group[order], prepend=-1) != 0)
        parts = np.split(order, np.flatnonzero(changes)[1:]) if len(order) else []
        return {(str(files[file[part[0]]]), int(group[part[0]])): part for part in parts}

    def _read(self, place: tuple[str, int], targets: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Yield name, values of a whole row group, and the rows in it that this selection's `targets` are."""
        file, group = place
        parquet = self.zoo.source.parquet(file)
        with self.zoo.source.readable(file):
            start = sum(parquet.metadata.row_group(before).num_rows for before in range(group))
            columns = [ID, *(spec.name for spec in self._specs)]
            table = parquet.read_row_group(group, columns=columns, use_threads=False)
            if fault := tensors_fault(table, ID, self._specs):
                raise DatasetError(f"{self.zoo.source.name}: {file}: {fault}; see `zoo verify`")
            rows = self.metadata["row"].to_numpy()[targets] - start
            found = table[ID].take(pa.array(rows))
        if not found.equals(self.metadata[ID].take(pa.array(targets))):
            raise DatasetError(f"{self.zoo.source.name}: {file}: rows are not those of the index; see `zoo verify`")
        for spec in self._specs:
            yield spec.name, tensor_values(table[spec.name], spec.shape), rows


def _require_positive(name: str, found: int) -> None:
    if found < 1:
        raise DatasetError(f"{name}: found {found}, expected 1 or more")


def _as_slice(rows: np.ndarray) -> np.ndarray | slice:
    """Return ascending neighbours as a slice, which numpy copies several times as fast."""
    if rows[-1] - rows[0] == len(rows) - 1 and np.all(np.diff(rows) == 1):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


class CheckpointDataset(torch.utils.data.Dataset):
    """Checkpoints as a torch Dataset, all in memory: item i is (name -> tensor, value of the target column).

    Values of a floating column are float32 scalars, as the weights are (null: NaN); others are Python's own.
    """

    def __init__(self, checkpoints: Checkpoints, target: str) -> None:
        one_of("target", target, checkpoints.metadata.column_names)
        self._tensors = checkpoints.tensors()
        column = checkpoints.metadata[target]
        floating = pa.types.is_floating(column.type)
        self._target = torch.tensor(column.to_numpy(), dtype=torch.float32) if floating else column.to_pylist()

    def __len__(self) -> int:
        return len(self._target)

    def __getitem__(self, row: int) -> tuple[Mapping[str, Tensor], Any]:
        return {name: values[row] for name, values in self._tensors.items()}, self._target[row]
