"""The seal of a population as a record: its files, with sizes and digests, and the outcome of each run."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from zoo.errors import StoreError

COMMIT_FORMAT = 1


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
    engine, device, versions, seconds: for provenance; the device is "cpu" or "cuda", None of imported runs.
    """

    population: str
    attempt: str
    files: dict[str, FileRecord]
    runs: dict[str, RunRecord]
    engine: str
    device: str | None
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> str:
        """Return JSON that carries its own digest, so that a flipped bit anywhere is noticed."""
        content = {"format": COMMIT_FORMAT, **asdict(self)}
        return json.dumps({**content, "sha256": _digest_of(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Commit":
        try:
            content = json.loads(text)
            if content["format"] != COMMIT_FORMAT:
                raise StoreError(
                    f"{where}: format: found {content['format']}, expected {COMMIT_FORMAT}; "
                    f"use the version that made the sweep"
                )
            if content.pop("sha256") != _digest_of(content):
                raise StoreError(f"{where}: not the content that was written (SHA-256 differs); see `zoo repair`")
            del content["format"]
            content["files"] = {name: FileRecord(**record) for name, record in content["files"].items()}
            content["runs"] = {run_id: RunRecord(**record) for run_id, record in content["runs"].items()}
            return cls(**content)
        except StoreError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{where}: not a readable commit ({error!r}); see `zoo repair`") from error


def engine_label(engine: str, device: str | None) -> str:
    """Return what decides how results are rounded, for people: "torch", "torch on cuda"."""
    return engine if device in (None, "cpu") else f"{engine} on {device}"


def _digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
