"""Where a dataset is read from: a local folder, or one commit of a Hub repository, or any other file system.

Reads fetch the bytes that are asked for and no more: no read-ahead, no cache on disk.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import HfApi, HfFileSystem

# HTTPError is the base of the HTTP client's own errors: which client that is differs between the library's versions.
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError, RevisionNotFoundError

from zoo.errors import DatasetError, one_line

HUB_PREFIX = "hf://datasets/"


class Source:
    """A dataset's files, by their names relative to it. Safe for use in several threads."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, name: str) -> None:
        self.name = name
        self._filesystem = filesystem
        self._root = root
        self._footers: dict[str, pq.FileMetaData] = {}
        self._opened = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without open files, as workers of a DataLoader need it."""
        return Source, (self._filesystem, self._root, self.name)

    def read_bytes(self, path: str) -> bytes:
        """Return the content of a small file; FileNotFoundError where there is none."""
        return self._filesystem.cat_file(f"{self._root}/{path}")

    def table(self, path: str) -> pa.Table:
        """Return a small Parquet file whole.

        Raises:
            DatasetError: the file is missing or no Parquet file.
        """
        _require_inside(path, self.name)
        with self.readable(path):
            # In this thread: one of Arrow's own may let go of Python's bytes while the interpreter ends, and abort it.
            return pq.ParquetFile(pa.BufferReader(self.read_bytes(path))).read(use_threads=False)

    def parquet(self, path: str) -> pq.ParquetFile:
        """Open a Parquet file; each thread has a handle of its own, the footer is read once.

        Raises:
            DatasetError: the file is missing or no Parquet file.
        """
        handles = self._opened.__dict__
        if path not in handles:
            _require_inside(path, self.name)
            with self.readable(path):
                file: Any = f"{self._root}/{path}"  # Arrow opens files of this machine without Python's help
                if type(self._filesystem) is not LocalFileSystem:
                    file = self._filesystem.open(file, cache_type="none")
                handles[path] = pq.ParquetFile(file, metadata=self._footers.get(path), pre_buffer=True)
            self._footers[path] = handles[path].metadata
        return handles[path]

    @contextmanager
    def readable(self, path: str) -> Iterator[None]:
        """Turn what reading a damaged Parquet file raises into one line that names it."""
        try:
            yield
        except (OSError, pa.ArrowException, IndexError) as error:
            raise DatasetError(
                f"{self.name}: {path}: not a readable Parquet file ({one_line(error)}); see `zoo verify`"
            ) from error


def _require_inside(path: str, name: str) -> None:
    """Refuse a name, from a card or an index that anybody may have written, that leads out of the dataset."""
    parts = PurePosixPath(path).parts
    if not parts or ".." in parts or path.startswith("/") or "\\" in path:
        raise DatasetError(f"{name}: found a file named {path!r}, expected a path inside the dataset; do not trust it")


def open_source(source: str | Path, revision: str | None = None) -> Source:
    """Find a dataset; see `zoo.dataset.open_zoo` for the arguments and errors."""
    path = str(source)
    if not path:
        raise DatasetError("dataset: found an empty name, expected a dataset folder or a repository user/name")
    if Path(path).is_dir():
        if revision is not None:
            raise DatasetError(f"revision: found {revision!r}, expected none: {path} is a folder, not a Hub repository")
        if all((Path(path) / part).is_dir() for part in ("plans", "commits")):
            raise DatasetError(f"{path}: found a sweep directory, expected a dataset; make one of it with `zoo build`")
        return Source(fsspec.filesystem("file"), str(Path(path).absolute()), path)
    if path.startswith(HUB_PREFIX) or ("://" not in path and path.count("/") == 1 and not Path(path).exists()):
        return _open_hub(path.removeprefix(HUB_PREFIX), revision)
    if "://" not in path:
        raise DatasetError(
            f"{path}: found no such folder, expected a dataset folder (see `zoo build`) or a repository user/name"
        )
    try:
        filesystem, root = fsspec.core.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise DatasetError(
            f"{path}: fsspec cannot read such an address ({one_line(error)}), expected a dataset folder, "
            f"a repository user/name, or an address whose package is installed"
        ) from error
    return Source(filesystem, root, path)


def _open_hub(repo: str, revision: str | None) -> Source:
    """Pin a revision to its commit, so that all reads see one dataset whoever publishes meanwhile."""
    repo, _, given = repo.partition("@")
    api = HfApi()
    try:
        commit = api.dataset_info(repo, revision=revision or given or None).sha
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise DatasetError(
            f"{repo}: found no dataset of this name and revision ({revision or given or 'main'}) on {api.endpoint}, "
            f"and no folder; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        raise DatasetError(
            f"{repo}: found no folder, and {api.endpoint} could not be asked ({one_line(error)})"
        ) from error
    filesystem = HfFileSystem(endpoint=api.endpoint, skip_instance_cache=True)
    return Source(filesystem, f"datasets/{repo}@{quote(str(commit), safe='')}", repo)
