"""Files that survive a crash: a file is there whole under its name, or not at all.

Written to a private temporary name beside the target, flushed to the disk, then renamed or linked; then the folder is
flushed too. `link` fails where the name exists, also on NFS, which makes it the put-if-absent that seals things.
"""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zoo.storage import TEMPORARY_PREFIX, Entry


def write(path: Path, content: bytes) -> None:
    """Create `path` with `content`, or replace it, atomically and durably; folders are made as needed."""
    with _temporary(path, content) as temporary:
        temporary.rename(path)
    flush_folder(path.parent)


def put_if_absent(path: Path, content: bytes) -> bool:
    """Create `path` with `content` unless it exists; return whether this call created it."""
    with _temporary(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    flush_folder(path.parent)
    return True


class LocalStorage:
    """A folder of a POSIX file system, local or NFS; see `zoo.storage.Storage`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()  # workers start in folders of their own

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        write(self.root / name, content)

    def put_if_absent(self, name: str, content: bytes) -> bool:
        return put_if_absent(self.root / name, content)

    def write_hint(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _temporary_name(path)
        temporary.write_bytes(content)
        temporary.rename(path)

    def settle(self, folder: str) -> None:
        path = self.root / folder
        while path != self.root:
            path = path.parent
            flush_folder(path)

    def exists(self, name: str) -> bool:
        return (self.root / name).exists()

    def children(self, folder: str) -> list[str]:
        try:
            names = [path.name for path in (self.root / folder).iterdir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def walk(self, folder: str) -> dict[str, Entry]:
        entries = {}
        for path in sorted((self.root / folder).rglob("*")):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue  # gone since it was listed
            if not path.is_dir():
                entries[path.relative_to(self.root).as_posix()] = Entry(found.st_size, found.st_mtime)
        return entries

    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        shutil.rmtree(self.root / folder, ignore_errors=True)

    def local_folder(self, folder: str) -> Path:
        return self.root / folder

    def free_bytes(self) -> int | None:
        folder = next(path for path in (self.root, *self.root.parents) if path.is_dir())
        return shutil.disk_usage(folder).free


@contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    make_folder(path.parent)
    temporary = _temporary_name(path)
    try:
        with named_in_errors(path), temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def named_in_errors(path: Path) -> Iterator[None]:
    """Let errors that name no file, such as that of a full disk, name the one that was to be written."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; each is flushed into the one that holds it."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    flush_folder(folder.parent)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a folder if need be, and hold it for this process alone.

    The lock is the system's, on the folder itself: it leaves no file and ends with the process, however that ends.

    Raises:
        BlockingIOError: another process holds it.
    """
    make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def flush_folder(folder: Path) -> None:
    """Bring a folder's list of names to the disk: what was made, renamed or removed in it lasts."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
