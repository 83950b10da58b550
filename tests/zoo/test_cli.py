"""What the command line itself decides: which options it takes, and what it does with them before the library does."""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset_tools import contents
from large_sweep import write_large_sweep
from scripted_worker import run
from sweep_tools import tiny

from zoo import commands
from zoo.builder import build
from zoo.cli import main, parser
from zoo.cluster import InProcess
from zoo.config import load_config
from zoo.errors import ConfigError, NFNError, PlanError
from zoo.nfn.benchmark import BenchmarkResult
from zoo.signs import FIRST_EPOCH_SECONDS, Sign
from zoo.splits import SPLITS, split_of
from zoo.store import Store
from zoo.sweep import generate


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sealed populations, not to be changed."""
    return write_large_sweep(tmp_path_factory.mktemp("large") / "sweep", 17, epochs=1, labels=("0", "best")).root


@pytest.fixture(scope="module")
def dataset(sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build([sweep], tmp_path_factory.mktemp("built") / "zoo", progress=False).folder


def all_options(part: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in part._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from all_options(command)
        elif action.option_strings:
            yield action


def test_every_option_has_a_help_unless_it_lists_its_choices() -> None:
    bare = {"/".join(action.option_strings) for action in all_options(parser()) if not (action.help or action.choices)}
    assert bare == set()


def test_help_and_completion_wait_for_no_torch() -> None:
    program = "import sys, zoo.cli; zoo.cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


class TestBuild:
    def test_splits_without_a_run_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store = write_large_sweep(tmp_path / "sweep", 2, epochs=1, labels=("0",))
        splits = {split_of(run.run_id) for plan in store.plans() for run in plan.runs}
        assert main(["build", str(store.root), "--out", str(tmp_path / "zoo"), "--quiet"]) == 0
        empty = " or ".join(split for split in SPLITS if split not in splits)
        told = f"mnist: no run fell into {empty}, so that is no split of it; a larger sweep has all"
        assert told in capsys.readouterr().out.splitlines()

    def test_workers_write_what_threads_write(
        self, sweep: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submitted = []
        submit = InProcess.submit
        monkeypatch.setattr(InProcess, "submit", lambda *call: (submitted.append(call), submit(*call))[1])
        assert main(["build", str(sweep), "--out", str(tmp_path / "zoo"), "--quiet", "--workers", "0"]) == 0
        assert contents(tmp_path / "zoo") == contents(dataset)
        assert len(submitted) == len(list(dataset.glob("mnist/*.parquet")))

    def test_it_finds_the_cluster_at_an_address(
        self, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["build", str(sweep), "--out", str(tmp_path / "zoo"), "--address", "127.0.0.1:9"]) == 2
        assert "--address 127.0.0.1:9: no Ray cluster answers" in capsys.readouterr().err
        assert not (tmp_path / "zoo").exists()


class TestURLs:
    @pytest.mark.parametrize("command", ["build SWEEP", "select DATASET"])
    def test_folders_of_this_machine_are_no_urls(
        self,
        sweep: Path,
        dataset: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        command: str,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        places = {"SWEEP": str(sweep), "DATASET": str(dataset)}
        arguments = [places.get(word, word) for word in command.split()]
        assert main([*arguments, "--out", "s3://bucket/zoo"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == ("zoo: error: --out s3://bucket/zoo: found the scheme s3://, expected a folder of this machine")
        assert list(tmp_path.iterdir()) == []

    def test_a_release_can_go_to_one(self) -> None:
        options = parser().parse_args(["import-release", "a.zip", "--task", "mnist", "--out", "s3://bucket/sweep"])
        assert options.out == "s3://bucket/sweep"


@pytest.mark.parametrize("path", ["user/zoo", "hf://datasets/user/zoo"])
def test_who_verifies_a_repository_as_a_path_is_told_how(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["verify", path]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"zoo: error: {path}: found ")
    assert line.endswith("use `zoo verify --repo USER/NAME`")


@pytest.mark.parametrize(
    "option",
    [
        "plan mnist --rate",
        "evaluate zoo --limit",
        *(f"bench mnist {name}" for name in ("--runs", "--seconds", "--cores", "--gpus", "--gpu-rate")),
    ],
)
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "many"])
def test_numbers_that_cannot_be_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*option.split(), value])
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {option.split()[-1]}: found '{value}', expected a " in last


class TestWatch:
    """`zoo status --watch` of a sweep of which one population is in quarantine."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        store = write_large_sweep(tmp_path / "sweep", 17, epochs=1, labels=("0",))
        (first, _) = store.sealed()
        store.unseal(first)
        store.quarantine(first, "error: poison")
        return store

    def sleeps(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """Do not wait, but for a third look fail."""
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(commands.time, "sleep", sleep)
        return waits

    def test_it_ends_where_only_quarantine_is_left(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        waits = self.sleeps(monkeypatch)
        assert main(["status", str(store.root), "--watch", "--json"]) == 0
        assert waits == []
        status = json.loads(capsys.readouterr().out)
        assert (status["populations_sealed"], len(status["quarantined"]), status["done"]) == (1, 1, False)

    @pytest.mark.parametrize(("age", "looks"), [(0.0, 3), (FIRST_EPOCH_SECONDS + 1, 0)])
    def test_it_goes_on_while_the_population_is_tried_again(
        self, store: Store, monkeypatch: pytest.MonkeyPatch, age: float, looks: int
    ) -> None:
        waits = self.sleeps(monkeypatch)
        (quarantined,) = store.quarantined()
        now = commands.time.time() - age
        store.write_sign(quarantined, "a1", Sign(0, now, 0, now, "node-7", 1))
        main(["status", str(store.root), "--watch"])
        assert len(waits) == looks

    def test_it_goes_on_while_something_is_to_be_done(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        waits = self.sleeps(monkeypatch)
        store.unseal(next(iter(store.sealed())))
        main(["status", str(store.root), "--watch"])
        assert len(waits) == 3


class TestNFN:
    def test_a_benchmark_in_which_a_training_failed_is_no_success(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for failed, code in (({}, 0), ({"mlp": "no such library"}, 1)):
            result = BenchmarkResult({"plots": []}, [], failed)
            (tmp_path / "benchmark.md").write_text("")
            monkeypatch.setattr("zoo.nfn.benchmark.benchmark", lambda *args, result=result, **options: result)
            words = ["nfn", "benchmark", "zoo", "--task", "mnist", "--epoch-label", "best", "--out", str(tmp_path)]
            assert main(words) == code

    @pytest.mark.parametrize("command", ["train", "benchmark"])
    def test_results_go_to_a_folder_of_this_machine(
        self, command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = ["nfn", command, "none", "--task", "mnist", "--epoch-label", "best", "--out", "s3://bucket/out"]
        assert main(arguments) == 2
        assert "--out s3://bucket/out: found the scheme s3://, expected a folder" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("given", "workers"),
        [
            ([], 0),
            (["--workers", "3"], 3),
            (["--address", "auto"], None),
            (["--address", "auto", "--workers", "2"], 2),
        ],
    )
    def test_an_address_without_workers_means_the_whole_cluster(
        self, given: list[str], workers: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        seen = {}

        def instead(dataset: str, **options: object) -> None:
            seen.update(options)
            raise NFNError("enough")

        monkeypatch.setattr("zoo.nfn.benchmark.benchmark", instead)
        arguments = ["nfn", "benchmark", "none", "--task", "mnist", "--epoch-label", "best", "--out", str(tmp_path)]
        assert main([*arguments, *given]) == 2
        assert seen["workers"] == workers
        assert seen["address"] == ("auto" if "--address" in given else None)


class TestSignals:
    def test_sigterm_lets_a_command_clean_up_and_ends_with_143(
        self, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        written = []

        def terminate(*call: object, **options: object) -> None:
            written.extend(tmp_path.rglob("*"))
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr("zoo.selection.save", terminate)
        before = signal.getsignal(signal.SIGTERM)
        assert main(["select", str(dataset), "--out", str(tmp_path / "chosen")]) == 143
        assert capsys.readouterr().err.endswith("zoo: terminated\n")
        assert written
        assert list(tmp_path.iterdir()) == []
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_user_error_after_reading_an_index_ends_with_2(self, dataset: Path, tmp_path: Path) -> None:
        # A thread of Arrow that still held bytes of Python aborted every second such process.
        command = ["select", str(dataset), "--filter", "test_acc>0.5", "--out", str(tmp_path / "none")]
        codes = [
            subprocess.run([sys.executable, "-m", "zoo.cli", *command], capture_output=True, check=False).returncode
            for _ in range(5)
        ]
        assert codes == [2] * 5


def test_a_finished_sweep_starts_nothing(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits_dir: Path
) -> None:
    run(tiny(), tmp_path / "s", digits_dir)
    monkeypatch.setattr("zoo.sweep.connect", lambda *options: pytest.fail("a cluster was started"))
    summary = generate(tiny(), tmp_path / "s", digits_dir, progress=False)
    assert (summary.sealed, summary.trained) == (2, 0)
    with pytest.raises(PlanError, match="planned otherwise"):
        generate(tiny(epochs=5), tmp_path / "s", digits_dir, progress=False)


def test_fewer_epochs_have_a_shorter_warm_up(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    grid = "{optimizer: [adam], learning_rate: [1e-3], init_std: [0.1], l2: [0], dropout: [0], train_fraction: [1.0]}"
    text = f"task: mnist\nepochs: 20\nsave_epochs: [best]\ngrid: [{grid}]\n"
    (tmp_path / "sweep.yaml").write_text(text)
    assert load_config(tmp_path / "sweep.yaml").warmup_epochs == 10
    assert load_config(tmp_path / "sweep.yaml", ["epochs=3"]).warmup_epochs == 3
    (tmp_path / "sweep.yaml").write_text(text + "warmup_epochs: 10\n")
    with pytest.raises(ConfigError, match=r"warmup_epochs: found 10, expected 0 to epochs \(3\)"):
        load_config(tmp_path / "sweep.yaml", ["epochs=3"])
