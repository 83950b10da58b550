"""What a sweep directory holds, and the one way to seal a finished population.

    plans/000.json ...                  what has to exist; immutable
    populations/ID/ATTEMPT/             a private folder of one attempt: stacked checkpoints, metrics, a sign of life
    populations/ID/state/               states to resume from, named by epoch and digest; gone after sealing
    commits/ID.json                     the seal: files, sizes, digests and the status of each run; put only if absent
    quarantine/ID.json                  populations that failed, with their error

The contract: an attempt writes into its own folder only; it counts from the moment its commit exists, and the first
commit wins; nothing that a commit names is written again. Readers follow commits, so half-written, lost and doubled
attempts cost time, never rows. Work to do = plans minus commits.
"""

import hashlib
import json
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zoo import files
from zoo.errors import PlanError, StoreError
from zoo.plan import Plan, Population

COMMIT_FORMAT = 1
METRICS_FILE = "metrics.parquet"


def checkpoint_file(label: str) -> str:
    return "best.safetensors" if label == "best" else f"epoch-{label}.safetensors"


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> "FileRecord":
        return cls(len(content), hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class RunRecord:
    """Outcome of one run: status "finished" or "diverged" (then with the epoch), and the labels of its checkpoints."""

    status: str
    diverged_epoch: int | None
    labels: list[str]


@dataclass(frozen=True)
class Commit:
    """The seal of a population.

    attempt: the folder below populations/ID/ that holds the files.
    files: name -> size and digest.
    runs: run_id -> outcome, in the population's order.
    engine, versions, seconds: for provenance.
    """

    population: str
    attempt: str
    files: dict[str, FileRecord]
    runs: dict[str, RunRecord]
    engine: str
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> str:
        return json.dumps({"format": COMMIT_FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Commit":
        try:
            content = json.loads(text)
            found = content.pop("format")
            if found != COMMIT_FORMAT:
                raise StoreError(
                    f"{where}: format: found {found}, expected {COMMIT_FORMAT}; use the version that made the sweep"
                )
            content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
            content["runs"] = {run_id: RunRecord(**record) for run_id, record in content["runs"].items()}
            return cls(**content)
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{where}: not a readable commit ({error!r}); move it away and generate again") from error


class Store:
    """A sweep directory."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    # Plans

    def plans(self) -> list[Plan]:
        """Return the plans in the order in which they were added; [] for a new directory."""
        folder = self.root / "plans"
        return [Plan.from_json(path.read_text(), str(path)) for path in sorted(folder.glob("[0-9]*.json"))]

    def require_plans(self) -> list[Plan]:
        """Return the plans of an existing sweep."""
        plans = self.plans()
        if not plans:
            raise StoreError(f"{self.root}: found no plans/000.json, expected a sweep directory; see `zoo generate`")
        return plans

    def add_plan(self, plan: Plan) -> None:
        """Add a further plan; an equal one that another driver has just put there is the same plan."""
        number = len(self.plans())
        path = self.root / "plans" / f"{number:03d}.json"
        if not files.put_if_absent(path, plan.to_json().encode()) and path.read_text() != plan.to_json():
            raise PlanError(f"{path}: another plan was put there at the same moment; run the command again")

    def populations(self) -> dict[str, Population]:
        """Return all planned populations by id."""
        return {population.id: population for plan in self.plans() for population in plan.populations}

    # Commits

    def commit_path(self, population: str) -> Path:
        return self.root / "commits" / f"{population}.json"

    def is_sealed(self, population: str) -> bool:
        return self.commit_path(population).is_file()

    def sealed(self) -> set[str]:
        """Return the ids of all sealed populations (from names alone)."""
        return {path.stem for path in (self.root / "commits").glob("*.json") if not path.name.startswith(".")}

    def commits(self) -> Iterator[Commit]:
        """Read all commits, ordered by population id."""
        return (self.commit(population) for population in sorted(self.sealed()))

    def commit(self, population: str) -> Commit:
        path = self.commit_path(population)
        return Commit.from_json(path.read_text(), str(path))

    def todo(self) -> list[Population]:
        """Return the planned populations that have no commit, in the plans' order."""
        sealed = self.sealed()
        return [population for id_, population in self.populations().items() if id_ not in sealed]

    # Attempts

    def attempt_folder(self, population: str, attempt: str) -> Path:
        return self.root / "populations" / population / attempt

    def write(self, population: str, attempt: str, name: str, content: bytes) -> FileRecord:
        """Write one file of an attempt."""
        files.write(self.attempt_folder(population, attempt) / name, content)
        return FileRecord.of(content)

    def seal(self, commit: Commit) -> bool:
        """Seal a population, unless it is sealed already; return whether this commit is the one that counts."""
        won = files.put_if_absent(self.commit_path(commit.population), commit.to_json().encode())
        if not won:
            shutil.rmtree(self.attempt_folder(commit.population, commit.attempt), ignore_errors=True)
        shutil.rmtree(self._state_folder(commit.population), ignore_errors=True)
        return won

    # States to resume from

    def _state_folder(self, population: str) -> Path:
        return self.root / "populations" / population / "state"

    def save_state(self, population: str, epoch: int, content: bytes) -> None:
        """Save a state, then drop older ones: there is always a whole one."""
        folder = self._state_folder(population)
        path = folder / f"{epoch:05d}-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
        files.write(path, content)
        for older in self._states(population):
            if older.name < path.name:
                older.unlink(missing_ok=True)

    def load_states(self, population: str) -> Iterator[bytes]:
        """Yield the states whose digest is right, newest first."""
        for path in reversed(self._states(population)):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                continue  # another attempt has just saved a newer one
            if path.stem.partition("-")[2] == hashlib.sha256(content).hexdigest()[:16]:
                yield content

    def _states(self, population: str) -> list[Path]:
        return sorted(self._state_folder(population).glob("[0-9]*.safetensors"))

    # Signs of life

    def write_progress(self, population: str, attempt: str, epoch: int) -> None:
        """Leave a sign of life: the epoch reached and the time."""
        content = json.dumps({"epoch": epoch, "time": time.time()})
        path = self.attempt_folder(population, attempt) / "progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{files.TEMPORARY_PREFIX}progress-{uuid.uuid4().hex}")
        temporary.write_text(content)  # no flush: a lost sign of life harms nobody
        temporary.rename(path)

    def read_progress(self, population: str, attempt: str) -> dict[str, Any] | None:
        """Return {"epoch", "time"} of an attempt, or None before its first epoch."""
        try:
            return json.loads((self.attempt_folder(population, attempt) / "progress.json").read_text())
        except FileNotFoundError:
            return None

    def attempts(self, population: str) -> list[str]:
        """Return the names of a population's attempts, oldest first."""
        folder = self.root / "populations" / population
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name != "state")

    def request_stop(self, population: str, attempt: str) -> None:
        """Ask an attempt to save its state and stop at the end of its epoch."""
        folder = self.attempt_folder(population, attempt)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stop").touch()

    def stop_requested(self, population: str, attempt: str) -> bool:
        return (self.attempt_folder(population, attempt) / "stop").exists()

    # Quarantine

    def quarantine(self, population: str, error: str) -> None:
        """Set a population aside with its error; a later sweep tries it again."""
        content = json.dumps({"population": population, "error": error}, indent=1)
        files.write(self.root / "quarantine" / f"{population}.json", content.encode())

    def release(self, population: str) -> None:
        """Take a population out of quarantine."""
        (self.root / "quarantine" / f"{population}.json").unlink(missing_ok=True)

    def quarantined(self) -> dict[str, str]:
        """Return population id -> error of all populations in quarantine."""
        entries = (json.loads(path.read_text()) for path in sorted((self.root / "quarantine").glob("*.json")))
        return {entry["population"]: entry["error"] for entry in entries}


def new_attempt() -> str:
    """Return a name for an attempt: sorts by time, never given twice."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
