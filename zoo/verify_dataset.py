"""Checks a dataset folder: is it whole, is everything in it what card, index, plans and checksums say?"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from datasets import Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard

from generators.architecture import CLASSES
from zoo.builder import PROVENANCE, read_checksums
from zoo.card import content_version
from zoo.data_record import parse_embedding, published_names
from zoo.dataset import INDEX
from zoo.errors import ZooError, one_line
from zoo.hub_folder import CARD, CHECKSUMS
from zoo.plan import Plan
from zoo.schema import checkpoint_schema, index_fault, index_schema
from zoo.shards import plan_digest
from zoo.threads import available_cores
from zoo.verify_shard import check_shard, first_problems

GENERATED = "generated"
CLIENT_NAMES = (".git", ".gitattributes", ".cache")
"""What git and the Hub's client put into a folder that they downloaded; no part of the dataset."""


def verify_dataset(folder: Path | str) -> list[str]:
    """Return what is wrong with a dataset folder, a line a problem; [] for a sound one.

    Every byte is read. Checked are: digests, missing and foreign files; the card's files, versions and features; the
    plans' digests and ids; the index against plans and shards; and every shard (see zoo.verify_shard).

    Raises:
        DatasetError: `folder` is no dataset.
    """
    folder = Path(folder)
    digests = read_checksums(folder)
    problems = _check_files(folder, digests)
    broken = {problem.partition(":")[0] for problem in problems}
    if CARD in broken or PROVENANCE in broken:
        return problems
    try:
        card = _Card.read(folder)
        plans, found = _read_plans(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        return [*problems, f"{CARD} or {PROVENANCE}: cannot be read ({one_line(error)})"]
    problems += found + _check_card(card, digests)
    named = {path: (task, split) for task, files in card.files.items() for split, path in files}
    whole = {path: place for path, place in named.items() if path not in broken and (folder / path).is_file()}
    indexes = [path for path, (task, _) in whole.items() if task == INDEX]
    shards = {path: place for path, place in whole.items() if place[0] in CLASSES}
    if not indexes:
        return [*problems, f"{CARD}: found no readable index, so rows were not checked"]
    try:
        index = pa.concat_tables(pq.read_table(folder / path) for path in indexes)
    except (pa.ArrowException, OSError) as error:
        return [*problems, f"{indexes[0]}: cannot be read ({one_line(error)})"]
    if not index.schema.equals(index_schema()):
        return [*problems, f"{indexes[0]}: its columns are not those of an index"]
    if fault := index_fault(index):
        return [*problems, f"{INDEX}: {fault}"]
    problems += _check_index(index, plans, set(named))
    for plan in plans:
        if plan.has_embedding:
            problems += _check_embedding(folder, plan)
    with ThreadPoolExecutor(available_cores()) as pool:
        checks = [pool.submit(check_shard, folder, path, *place, index) for path, place in sorted(shards.items())]
        for check in checks:
            problems += check.result()
    return problems


def _check_files(folder: Path, digests: dict[str, str]) -> list[str]:
    """Compare the files with SHA256SUMS."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    found = {path.as_posix() for path in paths if path.parts[0] not in CLIENT_NAMES} - {CHECKSUMS}
    # The Hub's cache links to its files, and their digests tell; but a link may lead nowhere, and a pipe has no end.
    irregular = {name for name in found if not (folder / name).is_file()}
    problems = [f"{name}: listed in {CHECKSUMS} but missing" for name in sorted(digests.keys() - found)]
    problems += [f"{name}: not listed in {CHECKSUMS}" for name in sorted(found - digests.keys())]
    problems += [
        f"{name}: a broken link or special file, expected a regular file" for name in sorted(irregular & digests.keys())
    ]

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = sorted(digests.keys() & (found - irregular))
    with ThreadPoolExecutor(available_cores()) as pool:
        actual = dict(zip(names, pool.map(digest, names), strict=True))
    return problems + [
        f"{name}: its SHA-256 is {actual[name]}, {CHECKSUMS} says {digests[name]}"
        for name in names
        if actual[name] != digests[name]
    ]


@dataclass(frozen=True)
class _Card:
    """What the card says of the files: config -> [(split, path)], config -> version, config -> features."""

    files: dict[str, list[tuple[str, str]]]
    versions: dict[str, str]
    features: dict[str, Features]

    @classmethod
    def read(cls, folder: Path) -> "_Card":
        data = DatasetCard.load(folder / CARD).data
        configs = {config["config_name"]: config for config in data.to_dict()["configs"]}
        files = {
            name: [(split["split"], path) for split in config["data_files"] for path in split["path"]]
            for name, config in configs.items()
        }
        for path in (path for pairs in files.values() for _, path in pairs):
            if not isinstance(path, str):
                raise TypeError(f"data_files: found the path {path!r}, expected text")
        infos = DatasetInfosDict.from_dataset_card_data(data)
        versions = {name: config["version"] for name, config in configs.items()}
        return cls(files, versions, {name: info.features for name, info in infos.items()})


def _check_card(card: _Card, digests: dict[str, str]) -> list[str]:
    """Compare the card with the files that there are and with the columns that they must have."""
    parquet = {name for name in digests if name.endswith(".parquet")}
    named = {path for files in card.files.values() for _, path in files}
    problems = [f"{CARD}: names {name}, which is missing" for name in sorted(named - parquet)]
    problems += [f"{CARD}: does not name {name}" for name in sorted(parquet - named)]
    for task, files in card.files.items():
        if task != INDEX and task not in CLASSES:
            problems.append(f"{CARD}: found config {task}, expected one of {INDEX}, {', '.join(CLASSES)}")
            continue
        schema = index_schema() if task == INDEX else checkpoint_schema(task)
        if card.features.get(task) != Features.from_arrow_schema(schema):
            problems.append(f"{CARD}: the features of config {task} are not the columns of its files")
        if card.versions[task] != content_version(path for _, path in files):
            problems.append(f"{CARD}: the version of config {task} does not follow from its files")
    return problems


def _read_plans(folder: Path) -> tuple[list[Plan], list[str]]:
    """Return the plans that provenance names, and what is wrong with them."""
    plans, problems = [], []
    for name, digest in json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["plans"].items():
        try:
            if not (folder / name).is_file():
                problems.append(f"{PROVENANCE}: names {name}, which is no file of the dataset")
                continue
            plan = Plan.from_json((folder / name).read_text(encoding="utf-8"), name)
        except (ZooError, OSError, UnicodeDecodeError) as error:
            problems.append(one_line(error))
            continue
        plans.append(plan)
        if plan_digest(plan) != digest:
            problems.append(f"{name}: its digest is {plan_digest(plan)}, {PROVENANCE} says {digest}")
    return plans, problems


def _check_embedding(folder: Path, plan: Plan) -> Iterator[str]:
    """Check that a plan's models find their word vectors. (Their bytes are checked with those of all files.)"""
    vectors, vocabulary = published_names(plan.task, plan.data_digest)
    try:
        table, _ = parse_embedding((folder / vectors).read_bytes(), (folder / vocabulary).read_bytes())
        if not table.isfinite().all():
            yield f"{vectors}: found word vectors that are not finite"
    except (OSError, ValueError) as error:
        yield f"{vectors}: {one_line(error)}; models of {plan.task} need it: build or fetch the dataset again"


def _check_index(index: pa.Table, plans: Sequence[Plan], named: set[str]) -> list[str]:
    """Compare the index with the plans: of a run all labels, each once, or none; of a finished one all checkpoints."""
    planned: dict[str, list[set[str]]] = defaultdict(list)
    for plan in plans:
        for run in plan.runs:
            planned[run.run_id].append(set(plan.labels))
    found: dict[str, list[str]] = defaultdict(list)
    for row in index.select(["run_id", "epoch_label"]).to_pylist():
        found[row["run_id"]].append(row["epoch_label"])
    texts = []
    for run_id, labels in sorted(found.items()):
        wanted = planned[run_id]
        if not wanted:
            texts.append(f"run {run_id} is in no plan")
        # Of several sweeps that planned a run, some may not have finished it.
        elif sorted(labels) != sorted(set().union(*(each for each in wanted if each <= set(labels)))):
            expected = " or ".join(", ".join(sorted(each)) for each in wanted)
            texts.append(f"run {run_id} has rows for {', '.join(sorted(labels))}, expected {expected}")
    problems = first_problems(INDEX, texts)
    lost = index.filter(
        pc.field("file").is_null() & (pc.field("status") == "finished") & (pc.field("origin") == GENERATED)
    )
    problems += first_problems(
        INDEX, [f"{name}: its run has finished, but it is in no file" for name in lost["checkpoint_id"].to_pylist()]
    )
    unknown = set(index["file"].unique().drop_null().to_pylist()) - named
    return problems + [f"{INDEX}: names {name}, which the card does not" for name in sorted(unknown)]
