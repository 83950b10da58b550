"""A kept embedding that does not belong to its vocabulary is refused: word ids would lie outside of it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from zoo.data_record import EMBEDDING, parse_embedding, read_embedding
from zoo.dataset import open_zoo
from zoo.errors import DatasetError, StoreError
from zoo.files import LocalStorage

pytest_plugins = ["dataset_fixtures"]


@pytest.mark.parametrize(
    "table", [torch.zeros(3, 32), torch.zeros(5, 32), torch.zeros(4, 31), torch.zeros(4, 32).double()]
)
def test_its_rows_are_one_more_than_the_words(table: torch.Tensor) -> None:
    words = b"one\ntwo\nthree\n"
    vectors, vocabulary = parse_embedding(save({"word_vectors": torch.ones(4, 32)}), words)
    assert vectors.shape == (4, 32) and vocabulary == ("one", "two", "three")
    with pytest.raises(ValueError, match=r"found word_vectors of .*, expected torch.float32 \[4, 32\] for the 3 words"):
        parse_embedding(save({"word_vectors": table}), words)


def test_both_readers_say_so_in_a_line(two_tasks: Path, text_sweep: Path, tmp_path: Path) -> None:
    short = save({"word_vectors": torch.zeros(2, 32)})
    folder, sweep = (Path(shutil.copytree(path, tmp_path / path.name)) for path in (two_tasks, text_sweep))
    (name,) = folder.glob("ag_news/embedding-*.safetensors")
    for path in (name, sweep / EMBEDDING):
        path.write_bytes(short)
    with pytest.raises(DatasetError, match=r"^[^\n]*embedding[^\n]*found word_vectors[^\n]*build the dataset again$"):
        open_zoo(folder).embedding("ag_news")
    with pytest.raises(StoreError, match=r"^[^\n]*embedding[^\n]*found word_vectors[^\n]*damaged$"):
        read_embedding(LocalStorage(sweep))
