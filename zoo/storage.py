"""Where a sweep directory lives: what the store needs of a file system, local or remote.

Names are relative, with slashes ("commits/0a1b.json"). The contract that everything above builds on: a name holds a
whole content or nothing; `put_if_absent` lets exactly one of many win; what was written is there after a power cut.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from zoo.errors import DatasetError, StoreError

S3_PREFIX = "s3://"
URL_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
TEMPORARY_PREFIX = ".tmp-"
"""Files of this prefix are unfinished; readers ignore them and anyone may remove old ones."""


@dataclass(frozen=True)
class Entry:
    """What a listing tells of one name: size in bytes and time of the last change in Unix seconds (by its server)."""

    size: int
    changed: float


class Storage(Protocol):
    @property
    def root(self) -> Path | str:
        """How messages call it: a folder or a URL."""
        ...

    def read(self, name: str) -> bytes:
        """Return a content; FileNotFoundError where there is none."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a content, whole and durable."""
        ...

    def put_if_absent(self, name: str, content: bytes) -> bool:
        """Create a content unless the name exists; return whether this call created it.

        After a lost answer it may return False although it did; who has to know compares the content.
        """
        ...

    def write_hint(self, name: str, content: bytes) -> None:
        """Create or replace a small content whose loss in a power cut harms nobody, at less cost."""
        ...

    def settle(self, folder: str) -> None:
        """Make sure that a folder is still there after a power cut, whoever has made it and those above it."""
        ...

    def exists(self, name: str) -> bool: ...

    def children(self, folder: str) -> list[str]:
        """Return the sorted names of files and folders right below `folder`, without their path; [] if it is not
        there. Unfinished temporary files are left out."""
        ...

    def walk(self, folder: str) -> dict[str, Entry]:
        """Return all files below `folder` at any depth, by full name, unfinished ones included."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file; nothing happens where it is not there."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with all that is in it; nothing happens where it is not there."""
        ...

    def local_folder(self, folder: str) -> Path:
        """Return a local folder with the files right below `folder`, fetched if need be."""
        ...

    def free_bytes(self) -> int | None:
        """Return how much room is left, in bytes; None where that is not known."""
        ...


def open_storage(root: Path | str) -> Storage:
    """Return the storage that a folder or an `s3://bucket/prefix` names.

    Raises:
        StoreError: a URL of another kind.
    """
    if str(root).startswith(S3_PREFIX):
        from zoo.objects import ObjectStorage  # s3fs is optional

        return ObjectStorage(str(root))
    # A Path has lost one of the two slashes; what it names is a folder.
    if isinstance(root, str) and (scheme := URL_SCHEME.match(root)):
        raise StoreError(f"{root}: found the scheme {scheme[0]}, expected a folder or {S3_PREFIX}bucket/prefix")
    from zoo.files import LocalStorage

    return LocalStorage(Path(root))


def local_path(path: Path | str, option: str) -> Path:
    """Return the path of what can only be written on this machine's file systems; `option` names it in the error.

    Raises:
        DatasetError: a URL, of which a path would make a folder here.
    """
    if isinstance(path, str) and (scheme := URL_SCHEME.match(path)):
        raise DatasetError(f"{option} {path}: found the scheme {scheme[0]}, expected a folder of this machine")
    return Path(path)
