"""What of a dataset folder goes to the Hub: the files that SHA256SUMS lists and SHA256SUMS itself, nothing else, and
none of them with a secret inside."""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from zoo.errors import DatasetError

CHECKSUMS = "SHA256SUMS"
CARD = "README.md"
PROVENANCE = "provenance.json"

SECRETS: dict[str, re.Pattern[bytes]] = {
    "a Hugging Face token": re.compile(rb"\b(?:hf_|api_org_)[A-Za-z0-9]{20,}"),
    "a GitHub token": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,})"),
    "an AWS key id": re.compile(rb"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    "a Google key": re.compile(rb"\bAIza[A-Za-z0-9_-]{35}"),
    "an API key": re.compile(rb"\bsk-[A-Za-z0-9_-]{20,}"),
    "a Slack token": re.compile(rb"\bxox[abeoprs]-[A-Za-z0-9-]{10,}"),
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a password in a URL": re.compile(rb"\b[a-z][a-z0-9+]*://[^\s/:@\"']+:[^\s/@\"']+@"),
}
"""What no published text may hold, by what it is called in the error."""

BINARY_SUFFIXES = frozenset({".parquet", ".safetensors", ".png", ".webp", ".jpg"})
"""Files that are not scanned for secrets: they hold arrays and pictures, not text."""

_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


@dataclass(frozen=True)
class LocalFile:
    """A file to publish: its name in the repository, where it lies, and its recorded digest (hex)."""

    name: str
    path: Path
    sha256: str
    size: int
    """Bytes."""

    @cached_property
    def git_oid(self) -> str:
        """The id under which git, and so the Hub, knows this content where it is not kept as a large file."""
        return git_oid(self.path.read_bytes())


@dataclass(frozen=True)
class Folder:
    """A dataset folder as it is published."""

    path: Path
    files: dict[str, LocalFile]
    """By name; SHA256SUMS is one of them."""
    unlisted: list[str]
    """Names in the folder that SHA256SUMS does not list, which stay here."""


def git_oid(content: bytes) -> str:
    """SHA-1 of a git blob, in hex."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def parse_checksums(text: str, source: str) -> dict[str, str]:
    """Names and SHA-256 digests (hex) out of lines as `sha256sum` writes them; raises DatasetError at any other line.

    Names that leave the folder, hidden ones and duplicates are refused: nobody publishes or trusts them.
    """
    digests: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DatasetError(
                f"{source}, line {number}: found {line[:80]!r}, expected '<sha256>  <relative path>'; run `zoo build`"
            )
        digest, name = match.groups()
        parts = PurePosixPath(name).parts
        if name != str(PurePosixPath(name)) or name.startswith(("/", "\\")) or name == CHECKSUMS:
            raise DatasetError(f"{source}, line {number}: {name!r} is no plain path inside the folder; run `zoo build`")
        if any(part.startswith(".") for part in parts):
            raise DatasetError(f"{source}, line {number}: {name!r} is hidden, and hidden files are never published")
        if name in digests:
            raise DatasetError(f"{source}, line {number}: {name!r} is listed twice; run `zoo build`")
        digests[name] = digest
    return digests


def read_folder(path: Path) -> Folder:
    """The folder's publishable files, by its SHA256SUMS; contents are not read here beyond that file.

    Raises DatasetError where there is no SHA256SUMS, or where it lists something missing, a link or a hidden file.
    """
    checksums = path / CHECKSUMS
    if not checksums.is_file() or checksums.is_symlink():
        raise DatasetError(f"{path}: found no {CHECKSUMS}, expected a dataset folder; make one with `zoo build`")
    content = checksums.read_bytes()
    digests = parse_checksums(content.decode(errors="replace"), str(checksums))
    if CARD not in digests:
        raise DatasetError(f"{checksums}: found no {CARD} in it, expected the dataset's card; run `zoo build`")
    digests[CHECKSUMS] = hashlib.sha256(content).hexdigest()
    files = {name: _local_file(path, name, digest) for name, digest in sorted(digests.items())}
    present = (found.relative_to(path).as_posix() for found in path.rglob("*") if not found.is_dir())
    return Folder(path, files, sorted(set(present) - set(files)))


def _local_file(folder: Path, name: str, digest: str) -> LocalFile:
    path = folder / name
    steps = [
        folder.joinpath(*PurePosixPath(name).parts[:depth]) for depth in range(1, len(PurePosixPath(name).parts) + 1)
    ]
    if link := next((step for step in steps if step.is_symlink()), None):
        raise DatasetError(f"{link}: found a link, expected a file of the dataset itself; links are never published")
    if not path.is_file():
        raise DatasetError(f"{path}: listed in {CHECKSUMS} but missing; run `zoo build`")
    return LocalFile(name, path, digest, path.stat().st_size)


def refuse_secrets(files: Iterable[LocalFile], token: str | None) -> None:
    """Raises DatasetError at the first text file that holds something like a token, or the token in use itself.

    The message names file, line and kind, never the secret.
    """
    patterns = dict(SECRETS)
    if token:
        patterns["the Hub token in use"] = re.compile(re.escape(token.encode()))
    for file in files:
        if file.path.suffix in BINARY_SUFFIXES:
            continue
        content = file.path.read_bytes()
        for kind, pattern in patterns.items():
            if match := pattern.search(content):
                line = content.count(b"\n", 0, match.start()) + 1
                raise DatasetError(
                    f"{file.path}, line {line}: found what looks like {kind}, expected no secret in a published file; "
                    "remove it, revoke it if it is real, and run `zoo build`"
                )


def redact(text: str, token: str | None) -> str:
    """The text on one line, with the token in use and everything that looks like a secret blotted out."""
    if token:
        text = text.replace(token, "***")
    content = text.encode()
    for pattern in SECRETS.values():
        content = pattern.sub(b"***", content)
    return " ".join(content.decode().split())
