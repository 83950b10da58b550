import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dataset_tools import contents
from datasets import load_dataset
from large_sweep import write_large_sweep
from safetensors.torch import load_file

from zoo import files
from zoo.builder import PROVENANCE, build, read_checksums
from zoo.dataset import open_zoo
from zoo.errors import DatasetError, StoreError
from zoo.plan import Plan
from zoo.repair import repair_sweep
from zoo.shards import plan_digest
from zoo.status import sweep_status
from zoo.store import Store
from zoo.verify_dataset import verify_dataset

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture(scope="module")
def old_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old") / "sweep"
    write_large_sweep(folder, 24, epochs=2, labels=("0", "best"))
    return folder


@pytest.fixture(scope="module")
def new_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of `old_sweep` with other weights and other accuracies."""
    folder = tmp_path_factory.mktemp("new") / "sweep"
    write_large_sweep(folder, 24, epochs=2, labels=("0", "best"), seed=1)
    return folder


@pytest.fixture(scope="module")
def old_dataset(old_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build([old_sweep], tmp_path_factory.mktemp("old-dataset") / "zoo", progress=False).folder


@pytest.fixture(scope="module")
def new_dataset(new_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build([new_sweep], tmp_path_factory.mktemp("new-dataset") / "zoo", progress=False).folder


class TestFolder:
    def test_what_it_holds(self, dataset: Path) -> None:
        kinds = {str(path.relative_to(dataset).parent) for path in dataset.rglob("*") if path.is_file()}
        assert kinds == {".", "mnist", "index", "assets", "plans"}
        assert {path.name for path in dataset.iterdir() if path.is_file()} == {"README.md", PROVENANCE, "SHA256SUMS"}

    def test_checksums_are_those_of_sha256sum(self, dataset: Path) -> None:
        done = subprocess.run(
            ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=dataset, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert read_checksums(dataset).keys() == contents(dataset).keys() - {"SHA256SUMS"}

    def test_plans_and_provenance_travel_with_it_dwsnets_6_neural_graphs_2(self, dataset: Path, sweep: Path) -> None:
        """DWSNets#6, neural-graphs#2: settings are missing or conflict."""
        provenance = json.loads((dataset / PROVENANCE).read_text())
        ((name, digest),) = provenance["plans"].items()
        plan = Plan.from_json((dataset / name).read_text(), name)
        assert plan_digest(plan) == digest
        assert plan == Store(sweep).require_plans()[0]
        record = provenance["data"]["mnist"]
        assert record["data_digest"] == plan.data_digest
        assert (record["train_samples"], record["test_samples"]) == (320, 100)
        assert provenance["versions"]["torch"] == [importlib.metadata.version("torch")]

    def test_report(self, sweep: Path, tmp_path: Path) -> None:
        shutil.copytree(sweep, tmp_path / "sweep")
        store = Store(tmp_path / "sweep")
        first = store.require_plans()[0].populations[0]
        store.unseal(first.id)
        report = build([store.root], tmp_path / "out", progress=False)
        assert report.unfinished_populations == 1
        assert report.diverged_runs == 2
        assert sum(report.checkpoints["mnist"].values()) == (24 - len(first.runs)) * 4 + 2
        written = [report.folder / name for name in read_checksums(report.folder)]
        assert report.bytes == sum(path.stat().st_size for path in written)

    def test_one_sweep_needs_no_list(self, old_sweep: Path, old_dataset: Path, tmp_path: Path) -> None:
        for number, folder in enumerate((old_sweep, str(old_sweep))):
            assert contents(build(folder, tmp_path / str(number), progress=False).folder) == contents(old_dataset)

    def test_an_embedding_is_copied_once_and_whole(self, two_tasks: Path, text_sweep: Path) -> None:
        assert (next(two_tasks.glob("ag_news/embedding-*.safetensors"))).read_bytes() == (
            text_sweep / "data" / "embedding.safetensors"
        ).read_bytes()
        words = (next(two_tasks.glob("ag_news/vocabulary-*.txt"))).read_text().splitlines()
        vectors = load_file(next(two_tasks.glob("ag_news/embedding-*.safetensors")))["word_vectors"]
        assert vectors.shape == (len(words) + 1, 32)


class TestRebuild:
    def test_same_commits_give_the_same_bytes_in_a_new_and_in_an_old_folder(
        self, dataset: Path, sweep: Path, new_sweep: Path, tmp_path: Path
    ) -> None:
        build([new_sweep], tmp_path / "used", shard_bytes=500_000, progress=False)
        for out in ("fresh", "used", "used"):
            build([sweep], tmp_path / out, progress=False)
            assert contents(tmp_path / out) == contents(dataset)

    def test_one_embedding_less_leaves_no_folder(
        self, two_tasks: Path, dataset: Path, sweep: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(two_tasks, tmp_path / "out")
        build([sweep], tmp_path / "out", progress=False)
        assert contents(tmp_path / "out") == contents(dataset)
        assert not (tmp_path / "out" / "ag_news").exists()

    def test_what_a_killed_build_left_is_removed(
        self, old_sweep: Path, old_dataset: Path, new_dataset: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "out"
        shutil.copytree(old_dataset, out)
        for path in new_dataset.glob("mnist/*.parquet"):
            shutil.copy(path, out / "mnist")
        (out / "mnist" / f"{files.TEMPORARY_PREFIX}{'0' * 32}").write_bytes(b"half a file")
        (out / f"{files.TEMPORARY_PREFIX}{'1' * 32}").write_bytes(b"half a card")
        (out / "notes.txt").write_text("mine")
        note = contents(out)["notes.txt"]
        build([old_sweep], out, progress=False)
        assert contents(out) == contents(old_dataset) | {"notes.txt": note}

    def test_every_build_is_seen_by_the_next_load_datasets_2956(
        self, old_sweep: Path, new_sweep: Path, tmp_path: Path, hf_cache: Path
    ) -> None:
        """The cache holds rows of the old build; a new one of the same folder, with equal counts, is never answered
        from there, nor an old one that comes back."""
        out = tmp_path / "zoo"
        seen = []
        for sweep in (old_sweep, new_sweep, old_sweep):
            build([sweep], out, progress=False)
            for config in ("mnist", "index"):
                rows = load_dataset(str(out), config, split="train")
                expected = (
                    open_zoo(out).index if config == "index" else open_zoo(out).checkpoints(split="train").metadata
                )
                assert rows["test_accuracy"][:] == expected["test_accuracy"].to_pylist()
            seen.append(expected["test_accuracy"].to_pylist())
        assert seen[0] == seen[2] != seen[1]


class Killed(BaseException):
    """Ends a build where it stands."""


def killed_after(monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Let the process die before its next write of a whole file, after so many."""
    left = iter(range(writes))
    original = files.write

    def write(path: Path, content: bytes) -> None:
        if next(left, None) is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f"{files.TEMPORARY_PREFIX}{'e' * 32}").write_bytes(content[: len(content) // 2])
            raise Killed
        original(path, content)

    monkeypatch.setattr(files, "write", write)


class TestKill:
    @pytest.mark.parametrize("writes", [0, 2, 4, 5, 6])
    def test_a_rebuild_killed_anywhere_leaves_a_whole_dataset(
        self,
        old_dataset: Path,
        new_sweep: Path,
        new_dataset: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        hf_cache: Path,
        writes: int,
    ) -> None:
        out = tmp_path / "zoo"
        shutil.copytree(old_dataset, out)
        old = open_zoo(out).checkpoints().tensors()["classifier.fc1.bias"]
        with monkeypatch.context() as patched, pytest.raises(Killed):
            killed_after(patched, writes)
            build([new_sweep], out, progress=False)
        found = open_zoo(out).checkpoints().tensors()["classifier.fc1.bias"]
        # Written are a plan, three plots, provenance, the card, checksums.
        assert torch.equal(found, old) == (writes < 6)
        rows = load_dataset(str(out), "mnist", split="train")
        assert (
            rows["checkpoint_id"][:] == open_zoo(out).checkpoints(split="train").metadata["checkpoint_id"].to_pylist()
        )
        build([new_sweep], out, progress=False)
        assert contents(out) == contents(new_dataset)

    @pytest.mark.parametrize("writes", [0, 5, 6])
    def test_a_first_build_killed_anywhere_can_be_repeated(
        self, old_sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
    ) -> None:
        with monkeypatch.context() as patched, pytest.raises(Killed):
            killed_after(patched, writes)
            build([old_sweep], tmp_path / "zoo", progress=False)
        build([old_sweep], tmp_path / "zoo", progress=False)
        assert verify_dataset(tmp_path / "zoo") == []

    def test_sigkill(self, old_dataset: Path, new_sweep: Path, tmp_path: Path) -> None:
        """A real one, while one of several shards is written."""
        out = tmp_path / "zoo"
        shutil.copytree(old_dataset, out)
        before = contents(out)
        program = (
            "import os, signal, sys\n"
            "from zoo import shards\n"
            "from zoo.builder import build\n"
            "gather, calls = shards._gather, []\n"
            "def gather_and_die(*arguments):\n"
            "    calls.append(1)\n"
            "    if len(calls) > 2:\n"
            "        os.kill(os.getpid(), signal.SIGKILL)\n"
            "    return gather(*arguments)\n"
            "shards._gather = gather_and_die\n"
            "build([sys.argv[1]], sys.argv[2], shard_bytes=500_000, progress=False)\n"
        )
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run([sys.executable, "-c", program, str(new_sweep), str(out)], cwd=root, check=False)
        assert done.returncode == -9
        assert before.items() <= contents(out).items()
        assert len(contents(out)) > len(before)
        assert len(load_dataset(str(out), "mnist", split="train", cache_dir=str(tmp_path / "cache"))) > 0
        build([new_sweep], out, progress=False)
        assert verify_dataset(out) == []


def readme_only(out: Path) -> None:
    (out / "README.md").write_text("# My page")


def images(out: Path) -> None:
    (out / "mnist").mkdir()
    (out / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(b"")


def other_parquet(out: Path) -> None:
    (out / "mnist").mkdir()
    (out / "mnist" / "train-00000-of-00001.parquet").write_bytes(b"")


class TestRefusals:
    @pytest.mark.parametrize("fill", [readme_only, images, other_parquet])
    def test_a_folder_of_something_else_stays_as_it_is(
        self, old_sweep: Path, tmp_path: Path, fill: Callable[[Path], None]
    ) -> None:
        fill(tmp_path)
        before = contents(tmp_path)
        with pytest.raises(DatasetError, match=r"--out .*: found .* and no SHA256SUMS, expected a new or empty folder"):
            build([old_sweep], tmp_path, progress=False)
        assert contents(tmp_path) == before

    def test_a_folder_with_checksums_of_something_else_stays_as_it_is(self, old_sweep: Path, tmp_path: Path) -> None:
        names = ["debian.iso", "README.md", "provenance.json"]
        for count in range(1, len(names) + 1):
            for name in names[:count]:
                (tmp_path / name).write_text("mine")
            digest = hashlib.sha256(b"mine").hexdigest()
            (tmp_path / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name in names[:count]))
            before = contents(tmp_path)
            message = (
                r"--out .*: found a SHA256SUMS that does not list README.md, provenance.json and an index, expected"
            )
            with pytest.raises(DatasetError, match=message):
                build([old_sweep], tmp_path, progress=False)
            assert contents(tmp_path) == before

    def test_what_somebody_added_to_a_dataset_and_its_checksums_stays(
        self, new_sweep: Path, old_dataset: Path, new_dataset: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "zoo"
        shutil.copytree(old_dataset, out)
        (out / "notes.txt").write_text("mine")
        note = contents(out)["notes.txt"]
        with (out / "SHA256SUMS").open("a") as file:
            file.write(f"{note}  notes.txt\n")
        build([new_sweep], out, progress=False)
        assert contents(out) == contents(new_dataset) | {"notes.txt": note}

    def test_a_file(self, old_sweep: Path, tmp_path: Path) -> None:
        (tmp_path / "out").write_text("")
        with pytest.raises(DatasetError, match="found a file"):
            build([old_sweep], tmp_path / "out", progress=False)


class TestTwoTasks:
    def test_both_load(self, two_tasks: Path, monkeypatch: pytest.MonkeyPatch, hf_cache: Path) -> None:
        monkeypatch.chdir(two_tasks.parent)
        texts = load_dataset("small-transformer-zoo", "ag_news", split="train").with_format("torch")
        assert set(texts["task"]) == {"ag_news"}
        assert texts[0]["classifier.fc2.weight"].shape == (4, 32)
        default = load_dataset("small-transformer-zoo", split="train")
        assert set(default["task"]) == {"ag_news"}  # the first task
        images = load_dataset("small-transformer-zoo", "mnist", split="train")
        assert set(images["task"]) == {"mnist"}

    def test_sound(self, two_tasks: Path) -> None:
        assert verify_dataset(two_tasks) == []


def test_a_dataset_is_no_sweep_and_grows_in_none(tmp_path: Path) -> None:
    sweep, dataset = tmp_path / "sweep", tmp_path / "zoo"
    write_large_sweep(sweep, 1, epochs=1, labels=("0", "best"))
    before = sorted(sweep.rglob("*"))
    for inside in (sweep, sweep / "populations" / "zoo"):
        with pytest.raises(DatasetError, match=r"--out .*: found a folder inside the sweep .*, expected one outside"):
            build([sweep], inside, progress=False)
    assert sorted(sweep.rglob("*")) == before
    build([sweep], dataset, progress=False)
    no_sweep = r"found no plans/000\.json, expected a sweep directory"
    with pytest.raises(StoreError, match=no_sweep):
        sweep_status(dataset)
    with pytest.raises(StoreError, match=no_sweep):
        build([dataset], tmp_path / "again", progress=False)
    assert not (tmp_path / "again").exists()
    before = sorted(dataset.rglob("*"))
    with pytest.raises(StoreError, match=no_sweep):
        repair_sweep(dataset, apply=True, orphans=True)
    assert sorted(dataset.rglob("*")) == before


def test_small_zoos_declare_no_empty_splits(tmp_path: Path, hf_cache: Path) -> None:
    write_large_sweep(tmp_path / "sweep", 1, epochs=1, labels=("0", "best"))
    report = build([tmp_path / "sweep"], tmp_path / "zoo", progress=False)
    (split,) = report.checkpoints["mnist"]
    assert report.checkpoints["mnist"] == {split: 2}
    assert load_dataset(str(tmp_path / "zoo"), "mnist").num_rows == {split: 2}
    assert verify_dataset(tmp_path / "zoo") == []
