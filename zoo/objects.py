"""A sweep directory on S3-compatible storage: the same protocol, with conditional writes as put-if-absent.

Credentials, region and endpoint come from where boto3 looks for them (AWS_* variables, profiles, roles), on every
machine for itself; nothing of them is kept here. Single requests are whole or absent, so no temporary names are needed.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from zoo.errors import StoreError
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
                f"{url}: cannot reach bucket {bucket!r} ({' '.join(str(error).split())}); "
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
        return self._files.cat_file(self._key(name))

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(self._key(name), content)

    write_hint = write

    def put_if_absent(self, name: str, content: bytes) -> bool:
        for _ in range(CONFLICTS):
            try:
                self._files.pipe_file(self._key(name), content, mode="create")
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
        return self._files.exists(self._key(name))

    def children(self, folder: str) -> list[str]:
        try:
            paths = self._files.ls(self._key(folder), detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return sorted(name for name in names if not name.startswith(TEMPORARY_PREFIX))

    def walk(self, folder: str) -> dict[str, Entry]:
        found = self._files.find(self._key(folder), detail=True)
        start = len(self._path) + 1
        return {path[start:]: Entry(entry["size"], entry["LastModified"].timestamp()) for path, entry in found.items()}

    def remove(self, name: str) -> None:
        bucket, _, key = self._key(name).partition("/")
        self._files.call_s3("delete_object", Bucket=bucket, Key=key)

    def remove_folder(self, folder: str) -> None:
        for name in self.walk(folder):
            self.remove(name)

    def local_folder(self, folder: str) -> Path:
        """Fetch what is not in the user's cache yet; for folders whose files never change."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "small-transformer-zoo" / "objects"
        target = cache / hashlib.sha256(self.root.encode()).hexdigest()[:16] / folder
        target.mkdir(parents=True, exist_ok=True)
        for name, entry in self.walk(folder).items():
            path = target / name.removeprefix(f"{folder}/")
            if not path.is_file() or path.stat().st_size != entry.size:
                temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
                temporary.write_bytes(self.read(name))
                temporary.rename(path)
        return target

    def free_bytes(self) -> int | None:
        return None

    def _key(self, name: str) -> str:
        return f"{self._path}/{name}".rstrip("/")


def _error_code(error: OSError) -> str | None:
    """Return S3's own code of an error that s3fs has translated."""
    return getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
