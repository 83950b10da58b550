"""What C++ would read out of bounds, and end the process over, is refused before."""

from dataclasses import replace

import pytest
import torch

from generators.architecture import parameter_count
from generators.engines.base import Batch
from generators.engines.fused_engine import FusedEngine
from generators.errors import InputError
from generators.tasks.data import TaskData


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": 100}, "indices: found 0 to 100, expected 0 to 99"),
        ({"indices": -1}, "indices: found -1 to 99, expected 0 to 99"),
        ({"crops": 5}, "crops: found 2 to 5, expected 0 to 4"),
        ({"crops": -1}, "crops: found -1 to 2, expected 0 to 4"),
    ],
)
def test_a_batch_of_other_samples_or_windows(digits: TaskData, change: dict[str, int], message: str) -> None:
    data = replace(digits, train=digits.train.head(100))
    batch = Batch(torch.arange(100), torch.full((100, 2), 2), dropout=0.0, dropout_key=1)
    engine, weights = FusedEngine(data), torch.zeros(1, parameter_count("mnist"))
    assert engine.train_step(weights, batch).loss.isfinite().all()
    [(name, value)] = change.items()
    tensor = getattr(batch, name).clone()
    tensor.view(-1)[3] = value
    with pytest.raises(InputError, match=message):
        engine.train_step(weights, replace(batch, **{name: tensor}))


def test_texts_without_word_vectors(texts: TaskData) -> None:
    with pytest.raises(InputError, match="word_vectors: found none, expected them for texts"):
        FusedEngine(replace(texts, word_vectors=None))
