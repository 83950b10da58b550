"""Which commits lead from a revision of a repository to the content of a folder; nothing here talks to the Hub."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from zoo.errors import HubError
from zoo.hub_folder import CARD, CHECKSUMS, Folder, LocalFile
from zoo.hub_session import RemoteFile, Revision

FILES_PER_COMMIT = 100
"""Above this many additions they are committed in several steps, all but the last of which change nothing visible."""
DECISIVE = (CARD, CHECKSUMS, "index/*")
"""Files that say which files count; they change in the last commit, together with the deletions."""
TOLERATED = frozenset({CARD, "LICENSE"})
"""What may lie in a repository that no dataset was published to yet: the Hub's web page can make these."""

UNFINISHED = "publishing-has-not-finished"
PLACEHOLDER = f"""---
viewer: false
configs:
- config_name: default
  data_files: {UNFINISHED}
---
This dataset is being published in several commits. The last one replaces this page.
"""
"""The card of a new repository until its last commit. Without one, readers would take the first shards for all."""


@dataclass(frozen=True)
class Step:
    """One commit: contents by name, and names to delete."""

    title: str
    add: dict[str, Path | bytes]
    delete: list[str] = field(default_factory=list)


def plan_steps(repo: str, content: Folder, main: Revision, card: str) -> list[Step]:
    """The commits, in order, that lead from main to the folder; `card` is main's README.md, empty where it has none.

    Raises HubError where main holds files that no publication put there: they are not ours to delete.
    """
    foreign = sorted(main.files.keys() - TOLERATED)
    if foreign and CHECKSUMS not in main.files and UNFINISHED not in card:
        raise HubError(
            f"{repo}: found {len(foreign)} file(s) that `zoo publish` did not put there ({foreign[0]}, ...) and no "
            f"{CHECKSUMS}, expected a dataset of ours or none; publish to another repository, or empty this one first"
        )
    changed = [file for file in content.files.values() if not alike(file, main.files.get(file.name))]
    stale = sorted(main.files.keys() - content.files.keys())
    early = _invisible(changed, main, card) if len(changed) > FILES_PER_COMMIT else []
    steps = [
        Step(
            "Add files of the next version", {file.name: file.path for file in early[start : start + FILES_PER_COMMIT]}
        )
        for start in range(0, len(early), FILES_PER_COMMIT)
    ]
    if steps and not main.files:
        steps[0].add[CARD] = PLACEHOLDER.encode()
    ahead = {file.name for file in early}
    version = content.files[CHECKSUMS].sha256[:8]
    rest: dict[str, Path | bytes] = {file.name: file.path for file in changed if file.name not in ahead}
    return [*steps, Step(f"Publish version {version} of the dataset", rest, stale)]


def _invisible(changed: Sequence[LocalFile], main: Revision, card: str) -> list[LocalFile]:
    """The files that may join main ahead of the others, because nothing on main refers to their names.

    Where the card leaves it to readers to find files by themselves there are none: then all goes in one commit.
    """
    named = data_files(card) if main.files else set()
    if named is None:
        return []
    visible = (*named, *DECISIVE)
    return [
        file
        for file in changed
        if file.name not in main.files and not any(fnmatch.fnmatch(file.name, pattern) for pattern in visible)
    ]


def differences(local: dict[str, LocalFile], remote: Revision) -> list[str]:
    """Names of files that a folder and a revision do not have alike: other content, missing here or missing there."""
    either = local.keys() | remote.files.keys()
    return sorted(name for name in either if not alike(local.get(name), remote.files.get(name)))


def alike(local: LocalFile | None, remote: RemoteFile | None) -> bool:
    """Whether both exist with the same content, by size and digest."""
    if local is None or remote is None or local.size != remote.size:
        return False
    if remote.sha256 is not None:
        return local.sha256 == remote.sha256
    return local.git_oid == remote.git_oid


def data_files(card: str) -> set[str] | None:
    """The paths and patterns that a card's configs name; None where a config, or the lack of any, leaves it to the
    reader to find its files by their names."""
    header = re.match(r"---\r?\n(.*?)\r?\n---(?:\r?\n|$)", card, re.DOTALL)
    try:
        metadata = yaml.safe_load(header[1]) if header else None
    except yaml.YAMLError:
        return None
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    if not configs or any("data_files" not in config or "data_dir" in config for config in configs):
        return None
    return {path for config in configs for path in _paths(config["data_files"])}


def _paths(declared: object) -> Iterable[str]:
    """All paths in a `data_files` entry: one, a list, a table by split, or a list of `split` and `path`."""
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, dict):
        for value in [declared["path"]] if "path" in declared else declared.values():
            yield from _paths(value)
    elif isinstance(declared, list):
        for value in declared:
            yield from _paths(value)
