"""Checks of a published dataset: does a revision hold what its SHA256SUMS, its card and its index say?"""

import fnmatch
import hashlib
from collections.abc import Iterable

import pyarrow.parquet as pq
from huggingface_hub import HfFileSystem
from tqdm import tqdm

from zoo.errors import DatasetError, HubError
from zoo.hub_folder import CARD, CHECKSUMS, parse_checksums
from zoo.hub_plan import data_files
from zoo.hub_session import Revision, Session

_BLOCK = 2**20


def verify_repository(repo: str, revision: str | None = None, deep: bool = False) -> list[str]:
    """What is wrong with a published dataset, one line a problem; an empty list for a sound one.

    The tree's digests are compared with SHA256SUMS, the files that card and index name with the tree. Weights are not
    downloaded, as the Hub lists their SHA-256; with `deep` every file is, and hashed as it streams past (nothing is
    kept on disk). `repo` may carry the revision: user/name@revision. Raises HubError where there is nothing to check.
    """
    repo, _, pinned = repo.partition("@")
    session = Session(repo)
    found = session.revision(revision or pinned or None)
    if found is None:
        raise HubError(f"{repo}: found no such dataset or revision ({revision or pinned or 'main'}); check the name")
    if CHECKSUMS not in found.files:
        return [f"{CHECKSUMS}: missing; this repository was not published with `zoo publish`"]
    files = session.files()

    def read(name: str) -> bytes:
        return session.call(f"reading {name}", lambda: files.read_bytes(session.address(found, name)))

    try:
        digests = parse_checksums(read(CHECKSUMS).decode(errors="replace"), f"{repo}/{CHECKSUMS}")
    except DatasetError as error:
        return [str(error)]
    listed = found.files.keys() & digests.keys()
    problems = [f"{name}: listed in {CHECKSUMS} but missing" for name in sorted(digests.keys() - listed)]
    problems += [f"{name}: not listed in {CHECKSUMS}" for name in sorted(found.files.keys() - listed - {CHECKSUMS})]
    download = [name for name in sorted(listed) if deep or found.files[name].sha256 is None]
    actual = {name: found.files[name].sha256 for name in listed}
    with tqdm(total=sum(found.files[name].size for name in download), unit="B", unit_scale=True, desc=repo) as bar:
        for name in download:
            actual[name] = _streamed_digest(session, files, found, name)
            bar.update(found.files[name].size)
    problems += [
        f"{name}: its SHA-256 is {actual[name]}, {CHECKSUMS} says {digests[name]}"
        for name in sorted(listed)
        if actual[name] != digests[name]
    ]
    if CARD in listed:
        named = data_files(read(CARD).decode(errors="replace"))
        problems += [f"{CARD}: its configs do not name their files"] if named is None else []
        problems += _missing(named or (), found, f"named by the card ({CARD})")
    for name in sorted(listed):
        if fnmatch.fnmatch(name, "index/*.parquet"):
            problems += _missing(_shards_of(session, files, found, name), found, f"named by {name}")
    return problems


def _missing(names: Iterable[str], revision: Revision, where: str) -> list[str]:
    return [
        f"{name}: {where} but missing" for name in sorted(set(names)) if not fnmatch.filter(revision.files.keys(), name)
    ]


def _shards_of(session: Session, files: HfFileSystem, revision: Revision, index: str) -> list[str]:
    """The shards that an index file refers to; only that column is read. It is null for runs without weights."""

    def read() -> list[str]:
        with files.open(session.address(revision, index), cache_type="none") as source:
            return pq.read_table(source, columns=["file"])["file"].drop_null().unique().to_pylist()

    return session.call(f"reading {index}", read)


def _streamed_digest(session: Session, files: HfFileSystem, revision: Revision, name: str) -> str:
    """SHA-256 (hex) of a remote file, block by block."""

    def read() -> str:
        digest = hashlib.sha256()
        with files.open(session.address(revision, name), block_size=0) as source:
            while block := source.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    return session.call(f"reading {name}", read)
