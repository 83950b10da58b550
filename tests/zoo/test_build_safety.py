"""What a build must not lose: the old dataset while a new one is made, and shards that workers write elsewhere."""

import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from crash_points import at_steps
from dataset_tools import contents, grid_block, train

from zoo import builder
from zoo.builder import build
from zoo.dataset import open_zoo
from zoo.errors import DatasetError

pytest_plugins = ["dataset_fixtures"]


class Killed(BaseException):
    """Ends a build where it stands."""


@pytest.fixture(scope="module")
def other_texts(text_sweep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep on the same texts with other word vectors."""
    data = {"source": "csv", "vectors": "corpus", "vector_epochs": 2, "vector_min_count": 1, "max_tokens": 16}
    block = grid_block(optimizer=["adam"], learning_rate=[1e-3], init_std=[0.2])
    out = tmp_path_factory.mktemp("other") / "sweep"
    return train(out, [block], text_sweep.parent, task="ag_news", data=data, batch_size=16)


def state_of(folder: Path) -> tuple[Any, ...]:
    """Return what a reader gets: rows, weights and the word vectors that belong to them."""
    zoo = open_zoo(folder)
    chosen = zoo.checkpoints("ag_news")
    weights = {name: tensor.numpy().tobytes() for name, tensor in chosen.tensors().items()}
    vectors, words = zoo.embedding("ag_news")
    return chosen.metadata["checkpoint_id"].to_pylist(), weights, vectors.numpy().tobytes(), words


def test_a_reader_finds_the_old_dataset_or_the_new_one_whenever_a_build_is_killed(
    text_sweep: Path, other_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "make_plots", lambda tables: [])  # for speed
    old, new = tmp_path / "old", tmp_path / "new"
    build([text_sweep], old, progress=False)
    build([other_texts], new, progress=False)
    allowed = [state_of(old), state_of(new)]
    assert allowed[0][2] != allowed[1][2]
    seen = []
    for step in range(1_000):
        out = tmp_path / f"out{step}"
        shutil.copytree(old, out)

        def strike(number: int, kind: str, path: Path, argument: Any, step: int = step) -> None:
            if number == step:
                raise Killed

        try:
            with at_steps(out, strike):
                build([other_texts], out, progress=False)
        except Killed:
            seen.append(allowed.index(state_of(out)))
            build([other_texts], out, progress=False)
            assert contents(out) == contents(new)
        else:
            break
        shutil.rmtree(out)
    assert seen == sorted(seen) and set(seen) == {0, 1}


def go(folder: Path) -> None:
    os.chdir(folder)


def test_workers_in_another_directory_write_to_the_folder_that_the_caller_means(
    sweep: Path, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=go, initargs=(tmp_path / "there",)) as workers:
        build([sweep], "zoo", workers, progress=False)
    assert contents(tmp_path / "here" / "zoo") == contents(dataset)
    assert list((tmp_path / "there").iterdir()) == []


class Elsewhere(Executor):
    """Workers on a machine that has a folder of its own under the same name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(self, function: Callable, /, job: Any, out: Path) -> Future:
        future: Future = Future()
        future.set_result(function(job, self.folder))
        return future


def test_shards_on_a_disk_that_is_not_shared_cost_nothing(sweep: Path, text_sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "zoo"
    build([text_sweep], out, progress=False)
    before = contents(out)
    with pytest.raises(DatasetError, match=rf"--out {re.escape(str(out))}: found no mnist/train-.*expected a folder"):
        build([sweep], out, Elsewhere(tmp_path / "elsewhere"), progress=False)
    assert before.items() <= contents(out).items()


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        (3, ["a", "b", "c"], r"found word_vectors of torch.float32 \[3, 32\], expected torch.float32 \[4, 32\]"),
        (4, ["a", "b"], r"expected torch.float32 \[3, 32\] for the 2 words"),
        (0, [], "expected torch.float32"),
    ],
)
def test_an_embedding_that_does_not_fit_its_words_is_refused(
    text_sweep: Path, tmp_path: Path, rows: int, words: list[str], message: str
) -> None:
    """Ids beyond the last row would be read out of bounds."""
    from safetensors.torch import save_file

    out = tmp_path / "zoo"
    build([text_sweep], out, progress=False)
    save_file({"word_vectors": torch.zeros(rows, 32)}, next(out.glob("ag_news/embedding-*")))
    next(out.glob("ag_news/vocabulary-*")).write_text("".join(f"{word}\n" for word in words))
    with pytest.raises(DatasetError, match=message):
        open_zoo(out).embedding("ag_news")
