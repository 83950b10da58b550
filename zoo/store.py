"""What a sweep directory holds, and the one way to seal a finished population.

    plans/000.json ...                  what has to exist; immutable
    populations/ID/ATTEMPT/             a private folder of one attempt: stacked checkpoints, metrics, a sign of life
    populations/ID/state/               states to resume from, named by epoch and digest; gone after sealing
    commits/ID.json                     the seal: files, sizes, digests and the status of each run; put only if absent
    quarantine/ID.json                  populations that failed, with their error
    removed/                            commits that repair took out

The contract: an attempt writes into its own folder only; it counts from the moment its commit exists, and the first
commit wins; nothing that a commit names is written again. Readers follow commits, so half-written, lost and doubled
attempts cost time, never rows. Work to do = plans minus commits.
"""

import contextlib
import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from zoo.commit import Commit, FileRecord
from zoo.errors import PlanError, StoreError
from zoo.plan import Plan, Population
from zoo.signs import Sign
from zoo.storage import TEMPORARY_PREFIX, open_storage

METRICS_FILE = "metrics.parquet"
FOLDERS = {"plans", "data", "populations", "commits", "quarantine", "removed"}
"""All that lies in a sweep directory."""
SIGN_FILE = "progress.json"
STOP_FILE = "stop"
STATE_FOLDER = "state"
STATE_NAME = re.compile(r"[0-9]{5,}-[0-9a-f]{16}\.safetensors")
ERROR_CHARACTERS = 20_000
"""A quarantined error keeps its last so many characters."""


def checkpoint_file(label: str) -> str:
    return "best.safetensors" if label == "best" else f"epoch-{label}.safetensors"


class Store:
    """A sweep directory: a local folder, or `s3://bucket/prefix`."""

    def __init__(self, root: Path | str) -> None:
        self.storage = open_storage(root)

    @property
    def root(self) -> Path | str:
        """The folder or URL, as messages call it."""
        return self.storage.root

    def check(self, option: str = "--sweep-dir") -> None:
        """Try whether the storage keeps the one promise that sealing needs: of two puts of a name, one wins.

        Args:
            option: of the command line, that names the directory.

        Raises:
            StoreError: it does not, nothing can be written there, or what lies there is no sweep.
        """
        foreign = set(self.storage.children("")) - FOLDERS
        if foreign and not self.has_plan():
            found = ", ".join(sorted(foreign)[:3]) + " and more" * (len(foreign) > 3)
            raise StoreError(
                f"{self.root}: found {found}, expected a sweep directory or a new or empty folder; use another {option}"
            )
        name = f"{TEMPORARY_PREFIX}probe-{uuid.uuid4().hex}"
        try:
            answers = [self.storage.put_if_absent(name, content) for content in (b"first", b"second")]
            kept = self.storage.read(name)
            self.storage.remove(name)
        except OSError as error:
            raise StoreError(
                f"{self.root}: cannot be written ({error.strerror or error}), expected a folder with hard links; "
                f"use another {option}"
            ) from error
        if (answers, kept) != ([True, False], b"first"):
            raise StoreError(
                f"{self.root}: a second conditional write replaced the first, expected a storage that refuses it "
                f"(If-None-Match); use another {option}"
            )

    # Plans

    def plans(self) -> list[Plan]:
        """Return the plans in the order in which they were added; [] for a new directory."""
        names = [f"plans/{name}" for name in self.storage.children("plans") if name.endswith(".json")]
        return [
            Plan.from_json(self.storage.read(name).decode(errors="replace"), f"{self.root}/{name}") for name in names
        ]

    def has_plan(self) -> bool:
        """Whether this machine sees the sweep at all."""
        return self.storage.exists(_plan_name(0))

    def require_plans(self) -> list[Plan]:
        """Return the plans of an existing sweep. (A dataset has plans too, under other names.)"""
        if not self.has_plan():
            raise StoreError(f"{self.root}: found no plans/000.json, expected a sweep directory; see `zoo generate`")
        return self.plans()

    def add_plan(self, plan: Plan, number: int) -> None:
        """Add a further plan; an equal one that another driver has just put there is the same plan.

        Args:
            number: how many plans there were when it was decided to add this one, so that of two drivers that decide
                at the same moment only one can be right.

        Raises:
            PlanError: another plan of this number is there.
        """
        name, content = _plan_name(number), plan.to_json().encode()
        if not self.storage.put_if_absent(name, content) and self.storage.read(name) != content:
            raise PlanError(f"{self.root}/{name}: another plan was put there at the same moment; run the command again")

    def populations(self) -> dict[str, Population]:
        """Return all planned populations by id."""
        return {population.id: population for plan in self.plans() for population in plan.populations}

    # Commits

    def is_sealed(self, population: str) -> bool:
        return self.storage.exists(_commit_name(population))

    def sealed(self) -> set[str]:
        """Return the ids of all sealed populations (from names alone)."""
        return {name.removesuffix(".json") for name in self.storage.children("commits") if name.endswith(".json")}

    def commits(self) -> Iterator[Commit]:
        """Read all commits, ordered by population id."""
        return (self.commit(population) for population in sorted(self.sealed()))

    def commit(self, population: str) -> Commit:
        name = _commit_name(population)
        return Commit.from_json(self.storage.read(name).decode(errors="replace"), f"{self.root}/{name}")

    def todo(self) -> list[Population]:
        """Return the planned populations that have no commit, in the plans' order."""
        sealed = self.sealed()
        return [population for id_, population in self.populations().items() if id_ not in sealed]

    def seal(self, commit: Commit) -> bool:
        """Seal a population, unless it is sealed already; return whether this commit is the one that counts."""
        name, content = _commit_name(commit.population), commit.to_json().encode()
        self.storage.settle(_attempt_name(commit.population, commit.attempt))
        # A put whose answer was lost is repeated below us, and then finds its own content.
        won = self.storage.put_if_absent(name, content) or self.storage.read(name) == content
        if not won:
            self.discard(commit.population, commit.attempt)
        self.storage.remove_folder(_attempt_name(commit.population, STATE_FOLDER))
        return won

    def unseal(self, population: str) -> None:
        """Take a commit out of the sweep, into removed/; the same command as before makes the population again."""
        name = _commit_name(population)
        self.storage.write(f"removed/{new_attempt()}-{population}.json", self.storage.read(name))
        self.storage.remove(name)

    # Attempts

    def attempt_folder(self, population: str, attempt: str) -> Path:
        """Return a local folder with the files of a sealed attempt (fetched, where the sweep is remote)."""
        return self.storage.local_folder(_attempt_name(population, attempt))

    def read(self, population: str, attempt: str, name: str) -> bytes:
        """Read one file of an attempt."""
        return self.storage.read(f"{_attempt_name(population, attempt)}/{name}")

    def write(self, population: str, attempt: str, name: str, content: bytes) -> FileRecord:
        """Write one file of an attempt."""
        self.storage.write(f"{_attempt_name(population, attempt)}/{name}", content)
        return FileRecord.of(content)

    def attempts(self, population: str) -> list[str]:
        """Return the names of a population's attempts, oldest first (by the clocks of their drivers)."""
        return [name for name in self.storage.children(f"populations/{population}") if name != STATE_FOLDER]

    def discard(self, population: str, attempt: str) -> None:
        """Remove an attempt that will never be sealed."""
        self.storage.remove_folder(_attempt_name(population, attempt))

    def begun(self) -> list[str]:
        """Return the ids of all populations that have an attempt or a state."""
        return self.storage.children("populations")

    # States to resume from

    def save_state(self, population: str, epoch: int, content: bytes) -> None:
        """Save a state, then drop older ones: there is always a whole one."""
        name = f"{epoch:05d}-{_short_digest(content)}.safetensors"
        self.storage.write(f"{_attempt_name(population, STATE_FOLDER)}/{name}", content)
        for older in self.states(population):
            if older < name:
                self.storage.remove(f"{_attempt_name(population, STATE_FOLDER)}/{older}")

    def load_states(self, population: str) -> Iterator[bytes]:
        """Yield the states whose digest is right, newest first."""
        for name in reversed(self.states(population)):
            try:
                content = self.read(population, STATE_FOLDER, name)
            except FileNotFoundError:
                continue  # another attempt has just saved a newer one
            if state_is_whole(name, content):
                yield content

    def saved_epoch(self, population: str) -> int:
        """Return the epoch of the newest state, from its name; 0 where there is none."""
        return max(map(state_epoch, self.states(population)), default=0)

    def states(self, population: str) -> list[str]:
        """Return the names of a population's states; they start with the epoch. (NFS leaves names of its own there.)"""
        names = self.storage.children(_attempt_name(population, STATE_FOLDER))
        return [name for name in names if STATE_NAME.fullmatch(name)]

    # Signs of life

    def write_sign(self, population: str, attempt: str, sign: Sign) -> None:
        self.storage.write_hint(f"{_attempt_name(population, attempt)}/{SIGN_FILE}", sign.to_bytes())

    def read_sign(self, population: str, attempt: str) -> Sign | None:
        """Return an attempt's last sign of life; None before its first and after its end."""
        try:
            return Sign.from_bytes(self.read(population, attempt, SIGN_FILE))
        except (OSError, ValueError, TypeError):
            # A sign is written without a flush, and may be torn by a power cut. On NFS, one that is just being replaced
            # by another machine can be stale. What matters is noticed where results are written.
            return None

    def clear_sign(self, population: str, attempt: str) -> None:
        """Take the sign of an attempt away that has ended. (One that stays is soon taken for dead.)"""
        with contextlib.suppress(OSError):
            self.storage.remove(f"{_attempt_name(population, attempt)}/{SIGN_FILE}")

    def signs(self, population: str) -> dict[str, Sign]:
        """Return attempt -> last sign of life of all attempts that have one."""
        found = {attempt: self.read_sign(population, attempt) for attempt in self.attempts(population)}
        return {attempt: sign for attempt, sign in found.items() if sign is not None}

    def request_stop(self, population: str, attempt: str) -> None:
        """Ask an attempt to save its state and stop at the end of its epoch. (Who asked waits for a limited time.)"""
        with contextlib.suppress(OSError):
            self.storage.write_hint(f"{_attempt_name(population, attempt)}/{STOP_FILE}", b"")

    def stop_requested(self, population: str, attempt: str) -> bool:
        try:
            return self.storage.exists(f"{_attempt_name(population, attempt)}/{STOP_FILE}")
        except OSError:
            return False  # asked again after the next epoch

    # Quarantine

    def quarantine(self, population: str, error: str) -> None:
        """Set a population aside with its error; a later sweep tries it again."""
        content = json.dumps({"population": population, "error": error[-ERROR_CHARACTERS:]}, indent=1)
        self.storage.write(f"quarantine/{population}.json", content.encode())

    def release(self, population: str) -> None:
        """Take a population out of quarantine."""
        self.storage.remove(f"quarantine/{population}.json")

    def quarantined(self) -> dict[str, str]:
        """Return population id -> error of all populations in quarantine."""
        found = {}
        for population in self.in_quarantine():
            with contextlib.suppress(FileNotFoundError):  # let go since it was listed
                found[population] = self.quarantined_error(population)
        return found

    def in_quarantine(self) -> list[str]:
        """Return the ids of all populations in quarantine (from names alone)."""
        return [name.removesuffix(".json") for name in self.storage.children("quarantine")]

    def quarantined_error(self, population: str) -> str:
        """Return the error for which a population was set aside."""
        name = f"quarantine/{population}.json"
        try:
            return str(json.loads(self.storage.read(name))["error"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(f"{self.root}/{name}: not readable ({error!r}); move it away") from error


def new_attempt() -> str:
    """Return a name for an attempt: sorts by time, never given twice."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"


def state_epoch(name: str) -> int:
    """Return the epoch that a state's name tells."""
    return int(name.partition("-")[0])


def state_is_whole(name: str, content: bytes) -> bool:
    """Whether a state's content has the digest that its name tells."""
    return name.removesuffix(".safetensors").partition("-")[2] == _short_digest(content)


def _plan_name(number: int) -> str:
    return f"plans/{number:03d}.json"


def _commit_name(population: str) -> str:
    return f"commits/{population}.json"


def _attempt_name(population: str, attempt: str) -> str:
    return f"populations/{population}/{attempt}"


def _short_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
