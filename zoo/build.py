"""Sweeps -> a dataset folder, which is at once a local dataset and the content of a Hub repository.

    README.md                 the card, whose metadata load_dataset reads
    mnist/*.parquet ...       weights, a folder a task
    index/*.parquet           scalars of every run and label
    assets/*.png              plots
    plans/*.json              the plans of all sweeps, so that a run can be trained again
    ag_news/embedding.safetensors, ag_news/vocabulary.txt
    provenance.json           versions, digests, where the data comes from
    SHA256SUMS                digests of all other files, for `sha256sum -c`

A build into an existing dataset first adds files under names that the old card does not use, then replaces the card,
then removes what is stale: at any moment the folder is a whole dataset, the old one or the new one.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zoo.card as card
from zoo import files
from zoo.data_record import EMBEDDING, VOCABULARY, read_data_record
from zoo.errors import DatasetError
from zoo.shards import SHARD_BYTES, Tables, dumps, plan_digest, write_shards
from zoo.store import Store

CHECKSUMS = "SHA256SUMS"
PROVENANCE = "provenance.json"
PROVENANCE_FORMAT = 1


@dataclass(frozen=True)
class BuildReport:
    """What a build wrote: the folder, checkpoints by task and split, runs that are missing, bytes of all files."""

    folder: Path
    checkpoints: dict[str, dict[str, int]]
    diverged_runs: int
    unfinished_populations: int
    bytes: int


def build(
    sweep_dirs: Sequence[Path | str],
    out: Path | str,
    executor: Executor | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> BuildReport:
    """Write the dataset of one or more sweeps to the folder `out`.

    Args:
        sweep_dirs: sweep directories; sealed populations count, others are left out and reported.
        executor: runs the writing of shards; None for threads of this process.
        shard_bytes: target size of a Parquet file's weights.

    Raises:
        DatasetError: `out` holds something else than a dataset, or the sweeps do not fit together (see write_shards).
    """
    out = Path(out)
    old = _existing_files(out)
    stores = [Store(folder) for folder in sweep_dirs]
    tables = write_shards(stores, out, executor, shard_bytes, progress)
    written = [shard.path for shard in tables.shards] + [tables.index_path]
    written += _copy_embeddings(stores, out)
    for number, plan in enumerate(tables.plans):
        written.append(_write(out, f"plans/{number:03d}.json", plan.to_json()))
    provenance = _provenance(stores, tables)
    written.append(_write(out, PROVENANCE, dumps(provenance)))
    for name, content in card.plots(tables).items():
        digest = hashlib.sha256(content).hexdigest()[:8]
        written.append(_write(out, f"assets/{name}-{digest}.png", content))
    assets = [path for path in written if path.startswith("assets/")]
    written.append(_write(out, "README.md", card.text(tables, provenance, assets)))
    _write(out, CHECKSUMS, checksums(out, written))
    for stale in sorted(old - set(written) - {CHECKSUMS}):
        (out / stale).unlink(missing_ok=True)
    unfinished = sum(len(store.todo()) for store in stores)
    return _report(out, tables, written, unfinished)


def checksums(folder: Path, names: Sequence[str]) -> str:
    """Return the lines of SHA256SUMS, sorted by name."""
    lines = []
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    return "".join(lines)


def read_checksums(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of a dataset folder's files.

    Raises:
        DatasetError: there is no readable SHA256SUMS.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        raise DatasetError(f"{folder}: found no {CHECKSUMS}, expected a dataset folder; make one with `zoo build`")
    entries = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise DatasetError(
                f"{path}:{number}: found {line[:80]!r}, expected a digest, two spaces and a name; build again"
            )
        entries[name] = digest
    return entries


def _existing_files(out: Path) -> set[str]:
    """Return the names of the files of the dataset that `out` holds; refuse a folder that holds anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return set()
    if not (out / CHECKSUMS).is_file() and not _unfinished_build(out):
        raise DatasetError(
            f"--out {out}: found files that are no dataset (no {CHECKSUMS}), expected a new or empty folder"
        )
    listed = set(read_checksums(out)) if (out / CHECKSUMS).is_file() else set()
    leftovers = {
        path.relative_to(out).as_posix() for folder in _PARQUET_FOLDERS for path in (out / folder).glob("*.parquet")
    }
    return listed | leftovers


_PARQUET_FOLDERS = ("mnist", "ag_news", "index")


def _unfinished_build(out: Path) -> bool:
    """Whether all that lies in `out` is what a first build, cut short, leaves there."""
    known = {*_PARQUET_FOLDERS, "plans", "assets", PROVENANCE, "README.md"}
    return all(path.name in known or path.name.startswith(files.TEMPORARY_PREFIX) for path in out.iterdir())


def _write(out: Path, name: str, content: str | bytes) -> str:
    files.write(out / name, content.encode() if isinstance(content, str) else content)
    return name


def _copy_embeddings(stores: Sequence[Store], out: Path) -> list[str]:
    """Copy each task's frozen embedding once; the data digest has shown that all sweeps of a task have the same."""
    copied: list[str] = []
    for store in stores:
        record = read_data_record(store.storage)
        if record is None or not store.storage.exists(EMBEDDING):
            continue
        for source in (EMBEDDING, VOCABULARY):
            name = f"{record['task']}/{Path(source).name}"
            if name not in copied:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(store.storage.read(source))
                copied.append(name)
    return copied


def _provenance(stores: Sequence[Store], tables: Tables) -> dict[str, Any]:
    """Return what a reader needs to know to trust the rows, and to make them again."""
    versions: dict[str, set[str]] = {}
    engines: set[str] = set()
    for store in stores:
        for commit in store.commits():
            engines.add(commit.engine)
            for name, version in commit.versions.items():
                versions.setdefault(name, set()).add(version)
    data = [record for store in stores if (record := read_data_record(store.storage)) is not None]
    return {
        "format": PROVENANCE_FORMAT,
        "data": {record["task"]: record for record in data},
        "engines": sorted(engines),
        "plans": {f"plans/{number:03d}.json": plan_digest(plan) for number, plan in enumerate(tables.plans)},
        "versions": {name: sorted(found) for name, found in sorted(versions.items())},
    }


def _report(out: Path, tables: Tables, written: list[str], unfinished: int) -> BuildReport:
    checkpoints: dict[str, dict[str, int]] = {}
    for shard in tables.shards:
        by_split = checkpoints.setdefault(shard.task, {})
        by_split[shard.split] = by_split.get(shard.split, 0) + shard.rows
    index = tables.index.select(["run_id", "status"]).to_pylist()
    diverged = {row["run_id"] for row in index if row["status"] == "diverged"}
    size = sum((out / name).stat().st_size for name in written)
    return BuildReport(out, checkpoints, len(diverged), unfinished, size)
