"""The authors' release as files: a zip archive, or the folder that it unpacks to, read without trusting it.

    [TOP/]mnist/RUN_EPOCH_ACCURACY.pt    pickled state dicts; EPOCH is a number of epochs, "best" or "best1"
    [TOP/]metadata/mnist.csv             a row a checkpoint

Nothing is unpacked to the disk, so no name in an archive can reach outside it; an archive that tries to (absolute
names, "..", links), or that holds anything but the files above, is refused before any of them is read. No file is read
that is larger than what it can be, and no more of it than the archive's directory says.
"""

import os
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from generators.architecture import CLASSES, IMAGE_TOKENS, flatten, parameter_count, sinusoidal_positions, tensor_table
from zoo.errors import ReleaseError, one_line

CHECKPOINT_NAME = re.compile(r"(?P<run>[\w.-]+)_(?P<epoch>\d{1,6}|best1?)_(?P<accuracy>\d{1,5})\.pt", re.ASCII)
"""File name of a checkpoint; ACCURACY is int(accuracy * 10000)."""
EMBEDDING_FILE = "embedding.pt"
"""The frozen AG News embedding, under the name that the authors' training leaves beside its checkpoints."""
POSITIONS = "embedding.pos_embedding"
PICKLE_BYTES = 1 << 16
"""What a checkpoint may hold besides its weights: pickle, zip directory, alignment, positions (14 kB seen)."""
METADATA_BYTES = 1 << 28
LONGEST_REASON = 200
UNSAFE = re.compile(r"^[/\\]|^[A-Za-z]:|\\|\0|(^|/)\.\.?(/|$)|//")


@dataclass(frozen=True)
class Entry:
    """One file of a release: its name there, its size in bytes once decompressed, and where it is."""

    name: str
    size: int
    place: zipfile.ZipInfo | Path

    @property
    def file(self) -> str:
        """The name without folders."""
        return self.name.rpartition("/")[2]


class ReleaseArchive:
    """The files of one task in a release; a context manager.

    metadata: the table of checkpoints.
    checkpoints: file name -> entry.
    doubled: names that the archive holds twice (the first one counts).
    set_aside: names that belong to the release but not to this task's checkpoints.

    Raises:
        ReleaseError: no such release, or one that is unsafe or holds files that no release holds.
    """

    def __init__(self, source: Path, task: str) -> None:
        if task not in CLASSES:
            raise ReleaseError(f"task: found {task!r}, expected one of {', '.join(CLASSES)}")
        self.source = source
        self.checkpoints: dict[str, Entry] = {}
        self.doubled: list[str] = []
        self.set_aside: list[str] = []
        self._zip = None if source.is_dir() else _open_zip(source)
        try:
            entries = list(_folder_entries(source) if self._zip is None else _zip_entries(source, self._zip))
            self._sort(entries, task)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ReleaseArchive":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._zip is not None:
            self._zip.close()

    def _sort(self, entries: list[Entry], task: str) -> None:
        """Find out what each file is; one that can be nothing is an error."""
        table = re.compile(rf"(?P<top>[^/]+/)?metadata/{task}\.csv")
        found = [(entry, match["top"] or "") for entry in entries if (match := table.fullmatch(entry.name))]
        if len(found) != 1:
            names = ", ".join(entry.name for entry, _ in found) or "no table of checkpoints"
            raise ReleaseError(
                f"{self.source}: found {names}, expected one metadata/{task}.csv, at the top or in one folder; "
                f"name the archive, or the folder that it unpacks to"
            )
        self.metadata, top = found[0]
        others = "|".join(other for other in CLASSES if other != task)
        beside = re.compile(rf"({others})/[^/]+|metadata/({others})\.csv|{task}/{EMBEDDING_FILE}")
        for entry in entries:
            folder, _, rest = entry.name.removeprefix(top).partition("/")
            if not entry.name.startswith(top):
                folder = ""
            if folder == task and CHECKPOINT_NAME.fullmatch(rest):
                if rest in self.checkpoints:
                    self.doubled.append(entry.name)
                self.checkpoints.setdefault(rest, entry)
            elif beside.fullmatch(f"{folder}/{rest}"):
                self.set_aside.append(entry.name)
            elif entry != self.metadata:
                raise ReleaseError(
                    f"{self.source}: {entry.name!r}: unknown file, expected {top}{task}/RUN_EPOCH_ACCURACY.pt and "
                    f"{top}metadata/{task}.csv; remove it if you know where it comes from"
                )

    def read_metadata(self) -> bytes:
        if self.metadata.size > METADATA_BYTES:
            raise ReleaseError(
                f"{self.source}: {self.metadata.name}: found {self.metadata.size} bytes, expected at most "
                f"{METADATA_BYTES}; this is no table of a release"
            )
        try:
            return self._read(self.metadata)
        except Exception as error:  # a broken or hostile archive raises anything, besides what the disk does
            raise ReleaseError(
                f"{self.source}: {self.metadata.name}: cannot be read ({_reason(error)}); get it again"
            ) from error

    def read_weights(self, entry: Entry, task: str) -> Tensor:
        """Return a checkpoint's weights, float32 [P] in the order of the tensor table.

        Raises:
            ReleaseError: this file is no checkpoint of the task's transformer; the message names no file.
            OSError: it cannot be read now.
        """
        limit = 4 * parameter_count(task) + PICKLE_BYTES
        if entry.size > limit:
            raise ReleaseError(f"found {entry.size} bytes, expected at most {limit}")
        try:
            content = self._read(entry)
            with zipfile.ZipFile(BytesIO(content)) as inner:  # what torch.save writes is a zip itself
                expanded = sum(part.file_size for part in inner.infolist())
            if expanded > limit:
                raise ReleaseError(f"found {expanded} bytes inside, expected at most {limit}")
            state = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        except ReleaseError:
            raise
        except Exception as error:  # a broken or hostile pickle raises anything
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk, which says nothing about the checkpoint (bz2 raises one without a number)
            raise ReleaseError(
                f"cannot be read ({type(error).__name__}: {one_line(error)[:LONGEST_REASON]})"
            ) from error
        return _weights(state, task)

    def _read(self, entry: Entry) -> bytes:
        """Return a file, and never more than its size says."""
        if isinstance(entry.place, Path):
            with entry.place.open("rb") as file:
                return file.read(entry.size)
        return self._zip.read(entry.place)  # type: ignore[union-attr]


def _open_zip(source: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(source)
    except FileNotFoundError as error:
        raise ReleaseError(f"{source}: no such file, expected a zip archive or a folder; check the path") from error
    except Exception as error:  # see read_metadata
        raise ReleaseError(
            f"{source}: cannot be read ({_reason(error)}), expected a zip archive or a folder; get the archive again"
        ) from error


def _reason(error: Exception) -> str:
    return one_line(error)[:LONGEST_REASON] or type(error).__name__


def _zip_entries(source: Path, archive: zipfile.ZipFile) -> Iterator[Entry]:
    for info in archive.infolist():
        name = info.orig_filename  # `filename` ends at a NUL
        mode = info.external_attr >> 16
        if info.is_dir():
            _refuse_unsafe(source, name.removesuffix("/"))
            continue
        _refuse_unsafe(source, name)
        if stat.S_IFMT(mode) not in (0, stat.S_IFREG):
            raise ReleaseError(f"{source}: {name!r}: found a link or special file, expected plain files; do not use it")
        if info.flag_bits & 1:
            raise ReleaseError(f"{source}: {name!r}: found an encrypted file, expected plain files; decrypt it first")
        yield Entry(name, info.file_size, info)


def _folder_entries(source: Path) -> Iterator[Entry]:
    def fail(error: OSError) -> None:
        raise ReleaseError(f"{source}: cannot be read ({error}); check its permissions") from error

    for folder, folders, files in os.walk(source, onerror=fail):
        folders.sort()
        for name in sorted(folders + files):
            path = Path(folder, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            relative = path.relative_to(source).as_posix()
            if not stat.S_ISREG(status.st_mode):
                raise ReleaseError(
                    f"{source}: {relative!r}: found a link or special file, expected plain files; do not use it"
                )
            yield Entry(relative, status.st_size, path)


def _refuse_unsafe(source: Path, name: str) -> None:
    if UNSAFE.search(name):
        raise ReleaseError(f"{source}: {name!r}: found a name that leads elsewhere, expected plain ones; do not use it")


def _weights(state: object, task: str) -> Tensor:
    """Check names, types and shapes of a state dict before its numbers are used; return them, float32 [P]."""
    if not isinstance(state, dict):
        raise ReleaseError(f"found a {type(state).__name__}, expected a state dict")
    expected = {spec.name: spec.shape for spec in tensor_table(task)}
    if task == "mnist" and POSITIONS in state:
        expected[POSITIONS] = (IMAGE_TOKENS, 32)
    if state.keys() != expected.keys():
        name = sorted(map(str, state.keys() ^ expected.keys()))[0]
        raise ReleaseError(
            f"{name}: found {'a' if name in state else 'no'} tensor, expected the tensors of task {task}"
        )
    for name, shape in expected.items():
        tensor = state[name]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ReleaseError(f"{name}: found a {type(tensor).__name__}, expected a plain tensor")
        if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
            raise ReleaseError(
                f"{name}: found {tensor.dtype} of shape {tuple(tensor.shape)}, expected torch.float32 of shape {shape}"
            )
    # Another encoding would be another function of the same weights.
    if POSITIONS in state and not torch.allclose(state[POSITIONS], _positions(), atol=1e-4):
        raise ReleaseError(f"{POSITIONS}: found other values than the sinusoidal encoding of base 10000")
    return flatten(task, {name: tensor.detach() for name, tensor in state.items()})


@cache
def _positions() -> Tensor:
    return sinusoidal_positions(IMAGE_TOKENS)
