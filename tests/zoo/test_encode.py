"""Texts of the caller's own, as the models of a zoo read them."""

import csv
import shutil
from pathlib import Path

import pytest
import torch

from zoo.dataset import Zoo, open_zoo
from zoo.errors import DatasetError

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture(scope="module")
def texts(two_tasks: Path) -> Zoo:
    return open_zoo(two_tasks)


def test_a_models_recorded_accuracy_comes_back_from_the_texts_themselves(texts: Zoo, text_sweep: Path) -> None:
    with (text_sweep.parent / "test.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    ids, lengths = texts.encode([row["Description"] for row in rows])
    labels = torch.tensor([int(row["Class Index"]) - 1 for row in rows])
    assert {len(row["Description"].split()) for row in rows} == {7, 21} and lengths.unique().tolist() == [7, 16]
    chosen = texts.checkpoints("ag_news")
    for model, recorded in zip(chosen.models(), chosen.metadata["test_accuracy"].to_pylist(), strict=True):
        assert (model(ids, lengths).argmax(1) == labels).double().mean().item() == recorded


def test_ids_are_rows_of_the_embedding(texts: Zoo) -> None:
    words = texts.embedding("ag_news")[1]
    ids, lengths = texts.encode([f"  {words[4]}\tWorlds\n{words[0]} ", "", " ".join(words[:17])])
    assert (ids.dtype, lengths.dtype) == (torch.int32, torch.int64)
    assert ids.tolist() == [[5, 0, 1, *[0] * 13], [0] * 16, [*range(1, 17)]]
    assert lengths.tolist() == [3, 1, 16]


def test_models_take_texts_of_the_trainings_length(texts: Zoo) -> None:
    (model,) = texts.checkpoints("ag_news").take([0]).models()
    assert model.embedding.pos_embedding.shape == (16, 32)


def test_what_cannot_be_encoded_is_told(texts: Zoo, two_tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="texts: found a single text, expected a list of them"):
        texts.encode("word1 word2")
    with pytest.raises(DatasetError, match=r"found no mnist/embedding-\w+\.safetensors"):
        texts.encode(["word1"], "mnist")
    torn = Path(shutil.copytree(two_tasks, tmp_path / "torn"))
    (torn / "provenance.json").write_text('{"data": {}, "plans": {}}')
    with pytest.raises(DatasetError, match=r"provenance.json: found no max_tokens of ag_news \(KeyError"):
        open_zoo(torn).encode(["word1"])
