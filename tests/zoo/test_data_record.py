"""The record of a sweep's data, and the embedding that a sweep goes on with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from generators.tasks.data import TaskData
from zoo.bench import random_data
from zoo.data_record import load_data, read_data_record, read_embedding, write_data_record
from zoo.files import LocalStorage

WORDS = tuple(f"word{number}" for number in range(1, 1000))


class Source:
    """Texts with an embedding: trained anew, unless there is one to go on with."""

    def __init__(self) -> None:
        self.data = replace(random_data("ag_news"), vocabulary=WORDS)
        self.trained = 0

    def load(self, data_dir: Path | None, embedding: tuple[Any, tuple[str, ...]] | None = None) -> TaskData:
        if embedding is None:
            self.trained += 1
            return self.data
        return replace(self.data, word_vectors=embedding[0], vocabulary=embedding[1])


@pytest.mark.parametrize(("puts", "trained"), [(0, 1), (1, 1), (2, 0), (3, 0)])
def test_an_end_between_any_two_puts_leaves_a_sweep_that_goes_on(
    puts: int, trained: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, storage, left = Source(), LocalStorage(tmp_path), iter(range(puts))

    def put_or_die(self: LocalStorage, name: str, content: bytes) -> bool:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return put(self, name, content)

    put = LocalStorage.put_if_absent
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "put_if_absent", put_or_die)
        if puts < 3:
            with pytest.raises(KeyboardInterrupt):
                write_data_record(storage, source.data)
        else:
            write_data_record(storage, source.data)
    data = load_data(source, storage, None)
    assert (source.trained, data.vocabulary) == (trained, WORDS)
    write_data_record(storage, data)
    vectors, words = read_embedding(storage)
    assert torch.equal(vectors, source.data.word_vectors)
    assert words == WORDS
    assert read_data_record(storage)["data_digest"] == source.data.digest()
