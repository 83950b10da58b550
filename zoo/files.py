"""Files that survive a crash: a file is there whole under its name, or not at all.

Written to a private temporary name beside the target, flushed to the disk, then renamed or linked; then the folder is
flushed too. `link` fails where the name exists, also on NFS, which makes it the put-if-absent that seals things.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
"""Files of this prefix are unfinished; readers ignore them and anyone may remove old ones."""


def write(path: Path, content: bytes) -> None:
    """Create `path` with `content`, or replace it, atomically and durably; folders are made as needed."""
    with _temporary(path, content) as temporary:
        temporary.rename(path)
    _flush_folder(path.parent)


def put_if_absent(path: Path, content: bytes) -> bool:
    """Create `path` with `content` unless it exists; return whether this call created it."""
    with _temporary(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    _flush_folder(path.parent)
    return True


@contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
