"""A sweep directory on S3-compatible storage: the same protocol, with conditional writes as put-if-absent.

Credentials, region and endpoint come from where boto3 looks for them (AWS_* variables, profiles, roles), on every
machine for itself; nothing of them is kept here. Single requests are whole or absent, so no temporary names are needed.
"""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

from generators.cache import cache_folder
from zoo.errors import StoreError, one_line
from zoo.storage import S3_PREFIX, TEMPORARY_PREFIX, Entry

ATTEMPTS = 8
"""Requests are repeated so often on 500, 503 and lost connections, with growing pauses, before an error is raised."""
CONFLICTS = 5
"""A conditional write is repeated so often where another to the same name is under way (409)."""
READ_SECONDS = 60
"""A request without an answer for so long is repeated."""


class ObjectStorage:
    """A prefix of a bucket, as `s3://bucket/prefix`; see `zoo.storage.Storage`.

    Raises:
        StoreError: s3fs is not installed, or the bucket cannot be reached with the credentials at hand.
    """

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._path = self.root.removeprefix(S3_PREFIX)
        bucket = self._path.partition("/")[0]
        try:
            self._files.call_s3("head_bucket", Bucket=bucket)
        except ImportError as error:
            raise StoreError(f"{url}: needs the package s3fs; pip install 'small-transformer-zoo[s3]'") from error
        except Exception as error:  # botocore's, aiohttp's and s3fs's own kinds have no common base
            raise StoreError(
                f"{url}: cannot reach bucket {bucket!r} ({one_line(error)}); "
                f"check its name, the credentials and AWS_ENDPOINT_URL"
            ) from error

    @property
    def _files(self) -> Any:
        import s3fs

        # s3fs keeps one instance for equal arguments, and after pickling each process makes its own.
        return s3fs.S3FileSystem(
            use_listings_cache=False,
            config_kwargs={
                "retries": {"mode": "standard", "max_attempts": ATTEMPTS},
                "read_timeout": READ_SECONDS,
                "connect_timeout": READ_SECONDS,
            },
        )

    def read(self, name: str) -> bytes:
        return self._call("cat_file", self._key(name))

    def write(self, name: str, content: bytes) -> None:
        self._call("pipe_file", self._key(name), content)

    write_hint = write

    def put_if_absent(self, name: str, content: bytes) -> bool:
        for _ in range(CONFLICTS):
            try:
                self._call("pipe_file", self._key(name), content, mode="create")
            except OSError as error:
                code = _error_code(error)
                if code == "PreconditionFailed":
                    return False
                if code != "ConditionalRequestConflict":
                    raise
                conflict = error
            else:
                return True
        raise conflict

    def settle(self, folder: str) -> None:
        """There are no folders."""

    def exists(self, name: str) -> bool:
        return self._call("exists", self._key(name))

    def children(self, folder: str) -> list[str]:
        key = self._key(folder)
        try:
            paths = self._call("ls", key, detail=False)
        except FileNotFoundError:
            return []
        # Web consoles make a folder as an empty object of its name, which is listed in itself.
        names = (path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != key)
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def walk(self, folder: str) -> dict[str, Entry]:
        found = self._find(folder)
        return {name: Entry(entry["size"], entry["LastModified"].timestamp()) for name, entry in found.items()}

    def remove(self, name: str) -> None:
        bucket, _, key = self._key(name).partition("/")
        self._call("call_s3", "delete_object", Bucket=bucket, Key=key)

    def remove_folder(self, folder: str) -> None:
        for name in self.walk(folder):
            self.remove(name)

    def local_folder(self, folder: str) -> Path:
        """Fetch what is not in the user's cache yet.

        A folder for each URL and state of what lies there, so that nothing old is found after a change. They can be
        deleted at any time.
        """
        found = self._find(folder)
        state = [self.root, folder, *(f"{name} {entry['ETag']}" for name, entry in sorted(found.items()))]
        target = cache_folder() / "objects" / hashlib.sha256("\n".join(state).encode()).hexdigest()[:16]
        target.mkdir(parents=True, exist_ok=True)
        for name, entry in found.items():
            path = target / name.removeprefix(f"{folder}/")
            if not path.is_file() or path.stat().st_size != entry["size"]:
                temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
                temporary.write_bytes(self.read(name))
                temporary.rename(path)
        return target

    def free_bytes(self) -> int | None:
        return None

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")

    def _find(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return all objects below a folder by name, with S3's own fields; without those that stand for folders."""
        found = self._call("find", self._key(folder), detail=True)
        start = len(self._path) + 1
        return {path[start:]: entry for path, entry in found.items() if not entry["Key"].endswith("/")}

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call s3fs; a lost network is an OSError as on disk, so that whoever asked can try again."""
        from aiohttp import ClientError
        from botocore.exceptions import BotoCoreError

        try:
            return getattr(self._files, method)(*arguments, **options)
        except (BotoCoreError, ClientError) as error:
            raise OSError(errno.EIO, one_line(error)) from error


def _error_code(error: OSError) -> str | None:
    """Return S3's own code of an error that s3fs has translated; None for one without an answer of S3."""
    answer = getattr(error.__cause__, "response", None) or {}
    return answer.get("Error", {}).get("Code")
