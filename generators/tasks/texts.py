"""From texts to what a transformer reads: tokens, then rows of its embedding."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def tokenize(text: str) -> list[str]:
    """Split at white space; case is kept."""
    return text.split()


def encode(texts: Sequence[Sequence[str]], vocabulary: Sequence[str], max_tokens: int) -> tuple[Tensor, Tensor]:
    """Look tokens up: ids int32 [N, max_tokens], padded with 0, and lengths int64 [N].

    Words that are not in the vocabulary, whose words are rows 1 and up, are 0 too. Tokens behind `max_tokens` are cut
    off; a text without tokens counts as one unknown word.
    """
    row_of = {word: row for row, word in enumerate(vocabulary, start=1)}
    ids = np.zeros((len(texts), max_tokens), np.int32)
    lengths = np.ones(len(texts), np.int64)
    for row, text in enumerate(texts):
        found = [row_of.get(word, 0) for word in text[:max_tokens]]
        ids[row, : len(found)] = found
        lengths[row] = max(1, len(found))
    return torch.from_numpy(ids), torch.from_numpy(lengths)
