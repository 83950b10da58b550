"""Sweeps -> a dataset folder, which is at once a local dataset and the content of a Hub repository.

    README.md                 the card, whose metadata load_dataset reads
    mnist/*.parquet ...       weights, a folder a task
    index/*.parquet           scalars of every run and label
    assets/*.png              plots
    plans/*.json              the plans of all sweeps, so that a run can be trained again
    ag_news/embedding-*.safetensors, ag_news/vocabulary-*.txt
    provenance.json           versions, digests, where the data comes from
    SHA256SUMS                digests of all other files, for `sha256sum -c`

A build into an existing dataset first adds files under names that the old card does not use (they carry a piece of
their digest, or that of their data), then replaces provenance, card and checksums, then removes what is stale: at any
moment load_dataset and open_zoo find a whole dataset, the old one or the new one. A build that is killed between those
three replacements leaves checksums that do not fit, which verify reports; the next build mends that, and removes what
any killed one has left.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generators.architecture import CLASSES
from zoo import files
from zoo.card import card_text
from zoo.commit import engine_label
from zoo.data_record import read_data_record, read_embedding_files
from zoo.errors import DatasetError
from zoo.hub_folder import CARD, CHECKSUMS, PROVENANCE, parse_checksums
from zoo.plots import make_plots
from zoo.shards import SHARD_BYTES, Tables, dumps, plan_digest, write_shards
from zoo.storage import local_path
from zoo.store import Store

PROVENANCE_FORMAT = 1

_TASKS = "|".join(CLASSES)
_DIGEST = "[0-9a-f]{8}"
INDEX_NAME = re.compile(rf"index/index-{_DIGEST}\.parquet")
NAMED_BY_CONTENT = re.compile(
    rf"(?:{_TASKS})/(?:train|validation|test)-\d{{5}}-of-\d{{5}}-{_DIGEST}\.parquet|{INDEX_NAME.pattern}"
    rf"|(?:{_TASKS})/(?:embedding-[0-9a-f]{{16}}\.safetensors|vocabulary-[0-9a-f]{{16}}\.txt)"
    rf"|assets/[a-z0-9_-]+-{_DIGEST}\.png|plans/\d{{3}}-{_DIGEST}\.json"
    rf"|(?:[a-z_]+/)?{re.escape(files.TEMPORARY_PREFIX)}[0-9a-f]{{32}}"
)
"""Files that nobody but a build makes: a later one may remove them."""


@dataclass(frozen=True)
class BuildReport:
    """What a build wrote.

    checkpoints: task -> split -> rows. diverged_runs: in the index. unfinished_populations: planned, not sealed, and so
    left out. bytes: of all files.
    """

    folder: Path
    checkpoints: dict[str, dict[str, int]]
    diverged_runs: int
    unfinished_populations: int
    bytes: int


def build(
    sweep_dirs: Path | str | Sequence[Path | str],
    out: Path | str,
    executor: Executor | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> BuildReport:
    """Write the dataset of one or more sweeps to the folder `out`.

    Args:
        sweep_dirs: one sweep directory or several; sealed populations count, others are left out and reported.
        executor: runs the writing of shards; None for threads of this process.
        shard_bytes: target size of a Parquet file's weights.

    Raises:
        DatasetError: `out` is no folder, holds something else than a dataset or lies in a sweep, or the sweeps do not
            fit together (see write_shards).
        StoreError: a file of a sweep is not what its commit says.
    """
    out = local_path(out, "--out").absolute()  # an executor's workers may run elsewhere
    stores = [Store(folder) for folder in ([sweep_dirs] if isinstance(sweep_dirs, str | Path) else sweep_dirs)]
    for store in stores:
        store.require_plans()
        if out.resolve().is_relative_to(Path(store.root).resolve()):
            raise DatasetError(f"--out {out}: found a folder inside the sweep {store.root}, expected one outside of it")
    with _only_build_in(out):
        return _build(stores, out, executor, shard_bytes, progress)


def _build(
    stores: list[Store],
    out: Path,
    executor: Executor | None,
    shard_bytes: int,
    progress: bool,
) -> BuildReport:
    old = _existing_files(out)
    embeddings = _read_embeddings(stores)
    tables = write_shards(stores, out, executor, shard_bytes, progress)
    if unseen := [shard.path for shard in tables.shards if not (out / shard.path).is_file()]:
        raise DatasetError(
            f"--out {out}: found no {unseen[0]}, which a worker has written, expected a folder that all nodes share; "
            f"choose one, or build without --address"
        )
    folder = _Folder(out, {file.path: file.sha256 for file in (*tables.shards, tables.index_file)})
    plans = {
        folder.write_named(f"plans/{number:03d}", ".json", plan.to_json().encode()): plan_digest(plan)
        for number, plan in enumerate(tables.plans)
    }
    plots = {
        folder.write_named(f"assets/{plot.name}", ".png", plot.content): plot.caption for plot in make_plots(tables)
    }
    for name, content in embeddings.items():
        folder.write(name, content)
    provenance = _provenance(stores, plans)
    folder.write(PROVENANCE, dumps(provenance).encode())
    folder.write(CARD, card_text(tables, provenance, plots).encode())
    files.write(
        out / CHECKSUMS, "".join(f"{folder.digests[name]}  {name}\n" for name in sorted(folder.digests)).encode()
    )
    _remove(out, old - folder.digests.keys())
    return _report(out, tables, list(folder.digests), sum(len(store.todo()) for store in stores))


@contextmanager
def _only_build_in(out: Path) -> Iterator[None]:
    """Hold the folder for one build: two at once would each remove what the other has written."""
    if out.exists() and not out.is_dir():
        raise DatasetError(f"--out {out}: found a file, expected a new or empty folder, or a dataset of `zoo build`")
    try:
        with files.held(out):
            yield
    except BlockingIOError as error:
        raise DatasetError(f"--out {out}: another build is writing there; wait for it, or use another") from error


class _Folder:
    """The dataset being written: digests of all its files, by name."""

    def __init__(self, out: Path, digests: dict[str, str]) -> None:
        self.out = out
        self.digests = digests

    def write(self, name: str, content: bytes) -> None:
        self.digests[name] = hashlib.sha256(content).hexdigest()
        files.write(self.out / name, content)

    def write_named(self, stem: str, ending: str, content: bytes) -> str:
        """Write under a name that carries a piece of the digest, and return the name."""
        name = f"{stem}-{hashlib.sha256(content).hexdigest()[:8]}{ending}"
        self.write(name, content)
        return name


def read_checksums(folder: Path) -> dict[str, str]:
    """Return name -> SHA-256 of a dataset folder's files.

    Raises:
        DatasetError: there is no readable SHA256SUMS.
    """
    path = folder / CHECKSUMS
    if not path.is_file():
        raise DatasetError(f"{folder}: found no {CHECKSUMS}, expected a dataset folder; make one with `zoo build`")
    return parse_checksums(path.read_text(encoding="utf-8", errors="replace"), str(path))


def _existing_files(out: Path) -> set[str]:
    """Return the names of the files in `out` that builds have made; refuse a folder that is no dataset of a build.

    Only names that a build makes count, whatever else SHA256SUMS lists: other programs write files of that name, too.
    """
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir()}
    made = {name for name in found if NAMED_BY_CONTENT.fullmatch(name)}
    if CHECKSUMS not in found:
        # A first build that was cut short has no checksums yet. It writes provenance before the card.
        made |= found & ({PROVENANCE, CARD} if PROVENANCE in found else set())
        if foreign := sorted(found - made):
            raise DatasetError(
                f"--out {out}: found {foreign[0]}{' and more' if len(foreign) > 1 else ''} and no {CHECKSUMS}, "
                f"expected a new or empty folder, or a dataset of `zoo build`"
            )
        return made
    listed = read_checksums(out).keys()
    if not ({CARD, PROVENANCE} <= listed and any(INDEX_NAME.fullmatch(name) for name in listed)):
        raise DatasetError(
            f"--out {out}: found a {CHECKSUMS} that does not list {CARD}, {PROVENANCE} and an index, "
            f"expected a new or empty folder, or a dataset of `zoo build`"
        )
    return made | (found & listed & {PROVENANCE, CARD})


def _remove(out: Path, names: set[str]) -> None:
    """Remove stale files, and the folders that they leave empty."""
    for name in sorted(names):
        (out / name).unlink(missing_ok=True)
    for folder in {(out / name).parent for name in names} - {out}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _read_embeddings(stores: Sequence[Store]) -> dict[str, bytes]:
    """Return name -> content of the frozen embeddings and vocabularies; sweeps of the same data have the same."""
    found: dict[str, bytes] = {}
    for store in stores:
        if store.plans()[0].has_embedding:
            found |= read_embedding_files(store.storage)
    return found


def _provenance(stores: Sequence[Store], plans: dict[str, str]) -> dict[str, Any]:
    """Return what a reader needs to know to trust the rows, and to make them again."""
    versions: dict[str, set[str]] = {}
    engines: set[str] = set()
    for store in stores:
        for commit in store.commits():
            engines.add(engine_label(commit.engine, commit.device))
            for name, version in commit.versions.items():
                versions.setdefault(name, set()).add(version)
    records = [record for store in stores if (record := read_data_record(store.storage)) is not None]
    records.sort(key=dumps)
    return {
        "format": PROVENANCE_FORMAT,
        "data": {record["task"]: record for record in records},
        "engines": sorted(engines),
        "plans": plans,
        "versions": {name: sorted(found) for name, found in sorted(versions.items())},
    }


def _report(out: Path, tables: Tables, names: list[str], unfinished: int) -> BuildReport:
    checkpoints: dict[str, dict[str, int]] = {}
    for shard in tables.shards:
        by_split = checkpoints.setdefault(shard.task, {})
        by_split[shard.split] = by_split.get(shard.split, 0) + shard.rows
    status = tables.index.select(["run_id", "status"])
    diverged = {row["run_id"] for row in status.to_pylist() if row["status"] == "diverged"}
    return BuildReport(out, checkpoints, len(diverged), unfinished, sum((out / name).stat().st_size for name in names))
