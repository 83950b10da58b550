"""Dataset repositories in memory: blobs, commits, branches and tags, as the loopback Hub serves them."""

import hashlib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import PurePosixPath

LFS_SUFFIXES = frozenset({".parquet", ".arrow", ".safetensors", ".bin", ".pt", ".zip", ".gz", ".png", ".jpg", ".webp"})
"""What a new dataset repository's .gitattributes sends to large file storage (the part that matters here)."""


@dataclass(frozen=True)
class Blob:
    """The content of a file, and whether it is kept as a large file (LFS)."""

    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def pointer(self) -> bytes:
        """What git itself holds for a large file."""
        return f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n".encode()

    @cached_property
    def git_oid(self) -> str:
        """git's own id: of the content, or of the pointer for a large file."""
        content = self.pointer if self.lfs else self.data
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.git_oid


@dataclass(frozen=True)
class Commit:
    """One revision: its id, what it says and every file in it."""

    oid: str
    parent: str | None
    title: str
    files: Mapping[str, Blob]


class Conflict(Exception):
    """The branch has moved on from the parent that a commit names."""


@dataclass
class Repository:
    """A repository with one branch, `main`, whose commits are kept oldest first."""

    repo_id: str
    private: bool
    commits: list[Commit] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def head(self) -> Commit:
        return self.commits[-1]

    def resolve(self, revision: str) -> Commit | None:
        """The commit that a branch, a tag or (the start of) a commit id means."""
        if revision in ("main", "refs/heads/main"):
            return self.head
        oid = self.tags.get(revision.removeprefix("refs/tags/"), revision)
        return next((commit for commit in self.commits if len(oid) >= 7 and commit.oid.startswith(oid)), None)

    def commit(
        self,
        add: Mapping[str, Blob],
        delete: Iterable[str] = (),
        parent: str | None = None,
        title: str = "a commit",
    ) -> Commit:
        """Adds a commit to main; a path of `delete` that ends with / is a folder. Raises Conflict, KeyError."""
        with self.lock:
            before = self.head if self.commits else None
            if parent is not None and (before is None or not before.oid.startswith(parent)):
                raise Conflict
            files = dict(before.files) if before else {}
            for path in delete:
                doomed = [name for name in files if name == path or (path.endswith("/") and name.startswith(path))]
                if not doomed:
                    raise KeyError(path)
                for name in doomed:
                    del files[name]
            files.update(add)
            content = "".join(f"{name} {blob.git_oid}\n" for name, blob in sorted(files.items()))
            seed = f"{self.repo_id} {len(self.commits)} {before and before.oid} {title}\n{content}"
            oid = hashlib.sha1(seed.encode()).hexdigest()
            commit = Commit(oid, before.oid if before else None, title, files)
            self.commits.append(commit)
            return commit


class Store:
    """All repositories, and the large files that were uploaded, by their sha256, committed or not."""

    def __init__(self, lfs_above: int) -> None:
        self.lfs_above = lfs_above
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}

    def create(self, repo_id: str, private: bool) -> Repository:
        """A repository as the Hub makes it: one commit, which holds `.gitattributes`."""
        repository = Repository(repo_id, private)
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in sorted(LFS_SUFFIXES))
        repository.commit({".gitattributes": Blob(attributes.encode(), lfs=False)}, title="initial commit")
        self.repositories[repo_id] = repository
        return repository

    def is_large(self, path: str, size: int) -> bool:
        """Whether a file of this name and size (bytes) goes to large file storage."""
        return size > 0 and (PurePosixPath(path).suffix in LFS_SUFFIXES or size > self.lfs_above)

    def blob(self, path: str, data: bytes) -> Blob:
        """The blob that a file becomes; a large one is kept among the objects too."""
        blob = Blob(data, self.is_large(path, len(data)))
        if blob.lfs:
            self.objects[blob.sha256] = data
        return blob
