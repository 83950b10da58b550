"""Mends a sweep directory so that the command that made it redoes exactly what is damaged. Says first, does on request.

A damaged population loses its commit, which moves to removed/; its files stay. Left-overs of dead attempts are removed
only where that is asked for.
"""

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from zoo.storage import TEMPORARY_PREFIX, Entry
from zoo.store import STATE_FOLDER, Store
from zoo.verify_sweep import Problem, command_of, find_problems

ORPHAN_SECONDS = 3600.0
"""What has changed within this time may belong to somebody at work, and is no left-over."""


@dataclass(frozen=True)
class Orphan:
    """Files that no commit and no living attempt needs: their folder (or single file), number and bytes."""

    name: str
    files: int
    size: int

    def __str__(self) -> str:
        return f"{self.name}: {self.files} files, {self.size} bytes"


@dataclass(frozen=True)
class Repair:
    """What `repair_sweep` found, and whether it has acted on it.

    damaged: population id -> its problems; the commits to move to removed/.
    states: damaged states, to be deleted.
    orphans: left-overs, deleted only on request.
    beyond: problems that no repair can mend: plans, foreign files, data.
    command: of the command line, that makes damaged populations again.
    """

    sweep: str
    damaged: dict[str, list[str]]
    states: list[str]
    orphans: list[Orphan]
    beyond: list[str]
    applied: bool
    orphans_removed: bool
    command: str

    def text(self) -> str:
        """Return what was done, or would be, a line each."""
        moves, deletes = ("moved", "deleted") if self.applied else ("to move", "to delete")
        lines = []
        for population, problems in self.damaged.items():
            lines += problems
            lines.append(f"{moves}: commits/{population}.json to removed/; `{self.command}` makes the population again")
        lines += [f"{deletes}: {name} (damaged state)" for name in self.states]
        kept = "deleted" if self.orphans_removed else "left over (--orphans --apply deletes it)"
        lines += [f"{kept}: {orphan}" for orphan in self.orphans]
        lines += [f"cannot be repaired: {problem}" for problem in self.beyond]
        if not lines:
            lines = [f"{self.sweep}: nothing to repair"]
        elif not self.applied and (self.damaged or self.states):
            lines.append("nothing was changed; --apply does it")
        return "\n".join(lines)


def repair_sweep(
    path: Path | str, apply: bool = False, orphans: bool = False, orphan_seconds: float = ORPHAN_SECONDS
) -> Repair:
    """Find what is damaged in a sweep directory, and mend it with `apply`.

    Args:
        apply: move the commits of damaged populations to removed/ and delete damaged states.
        orphans: with `apply`, delete left-overs too. They are always listed.
        orphan_seconds: what has changed within this time is no left-over.

    Raises:
        StoreError: it is no sweep directory.
    """
    store = Store(path)
    if not store.has_plan():
        store.require_plans()  # in a folder that is no sweep, nothing is ours to delete
    problems = find_problems(store)
    damaged: dict[str, list[str]] = defaultdict(list)
    states, beyond = [], []
    for problem in problems:
        if problem.population is not None:
            damaged[problem.population].append(str(problem))
        elif _is_state(problem):
            states.append(problem.name)
        elif problem.name != "commits":  # an unfinished sweep is not damaged
            beyond.append(str(problem))
    # Without a plan, anything looks left over.
    known = not any(problem.name.startswith("plans") for problem in problems)
    found = find_orphans(store, set(damaged), orphan_seconds) if known else []
    command = command_of(store.plans()[0]) if damaged else ""  # damage is only found where plans can be read
    if apply:
        for population in damaged:
            store.unseal(population)
        for name in states:
            store.storage.remove(name)
        if orphans:
            for orphan in found:
                store.storage.remove_folder(orphan.name)
                store.storage.remove(orphan.name)
    return Repair(str(store.root), dict(damaged), states, found, beyond, apply, apply and orphans, command)


def find_orphans(store: Store, damaged: set[str], orphan_seconds: float = ORPHAN_SECONDS) -> list[Orphan]:
    """Return attempts that were never sealed and show no life, states of sealed populations, and unfinished files.

    Nothing of a `damaged` population is called left over: its files may be all that is left of it.
    """
    found: list[Orphan] = []
    sealed = store.sealed()
    for id_ in sorted(set(store.begun()) - damaged):
        try:
            kept = {store.commit(id_).attempt} if id_ in sealed else {STATE_FOLDER}
        except OSError:
            continue  # its commit, which cannot be read, may name any of the attempts
        for name in store.storage.children(f"populations/{id_}"):
            sign = None if name == STATE_FOLDER else store.read_sign(id_, name)
            if name not in kept and not (sign and sign.is_alive()):
                folder = f"populations/{id_}/{name}"
                found += _orphan(folder, store.storage.walk(folder), orphan_seconds)
    listed = tuple(f"{orphan.name}/" for orphan in found)
    for name, entry in store.storage.walk("").items():
        if name.rpartition("/")[2].startswith(TEMPORARY_PREFIX) and not name.startswith(listed):
            found += _orphan(name, {name: entry}, orphan_seconds)
    return found


def _orphan(name: str, entries: dict[str, Entry], orphan_seconds: float) -> list[Orphan]:
    newest = max((entry.changed for entry in entries.values()), default=0.0)
    if time.time() - newest < orphan_seconds:
        return []
    return [Orphan(name, len(entries), sum(entry.size for entry in entries.values()))]


def _is_state(problem: Problem) -> bool:
    return f"/{STATE_FOLDER}/" in problem.name
