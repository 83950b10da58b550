"""Word vectors of 32 dimensions for the words of a corpus: pre-trained ones reduced by PCA, or Word2Vec trained on the
corpus itself.

Pre-trained vectors are streamed from their file once (see `generators.tasks.vector_files`). PCA needs only their count,
sum and second moments, and of the vectors themselves only those of the corpus's words are kept. So memory grows with
the corpus, not with the file: for 3 million vectors of 300 dimensions and the 190,000 words of AG News, about 0.4 GB at
the peak. A KeyedVectors file costs about 0.6 GB more, because gensim holds its 3 million words.

Dimensions: W word of the corpus, N vector of a chunk, E dimension of the pre-trained vectors, D = 32.
"""

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from generators.architecture import WIDTH
from generators.errors import InputError
from generators.tasks.vector_files import file_digests, open_vectors

ALGORITHMS = ("skip-gram", "cbow")
SIGNIFICANT_BITS = 16


@dataclass(frozen=True)
class WordVectors:
    """Word vectors of a corpus.

    words: the words that have a vector, in the order in which they were asked for.
    matrix: float32 [W, 32], a row a word.
    origin: where they come from and how they were made (JSON-ready, for provenance).
    """

    words: tuple[str, ...]
    matrix: np.ndarray
    origin: dict[str, Any]


def pretrained_vectors(name_or_file: str, words: Sequence[str], width: int = WIDTH) -> WordVectors:
    """Return pre-trained vectors of `words`, reduced to `width` dimensions by PCA fitted on all vectors of the file.

    Args:
        name_or_file: a model of gensim.downloader such as "word2vec-google-news-300", or a file in word2vec's binary or
            text form (gzipped or not), or saved by gensim's KeyedVectors.save. The last is a pickle: take it only from
            someone you trust.
        words: the words to keep, each once; those that the file lacks are left out.

    Raises:
        InputError: the model cannot be downloaded, the file cannot be read, has fewer than `width` dimensions, or knows
            none of the words.
    """
    path = _locate(name_or_file)
    wanted = {word.encode(): position for position, word in enumerate(words)}
    kept: dict[int, np.ndarray] = {}
    with open_vectors(path) as source:
        if source.width < width:
            raise InputError(
                f"{path}: found vectors of {source.width} dimensions, expected at least {width}; "
                "set data.vectors to another model or to corpus"
            )
        moments = Moments(source.width)
        with tqdm(total=source.count, desc=f"reading {path.name}", unit=" vectors", unit_scale=True) as progress:
            for chunk_words, vectors in source.chunks:
                moments.add(vectors)
                for row, word in enumerate(chunk_words):
                    if word in wanted:
                        kept.setdefault(wanted[word], vectors[row].copy())
                progress.update(len(chunk_words))
    if not kept:
        raise InputError(f"{path}: found none of the corpus's {len(words)} words, expected vectors of English words")
    if not moments.finite:
        raise InputError(f"{path}: found NaN or infinity in its vectors, expected numbers; get the file anew")
    mean, axes, explained = moments.principal_axes(width)
    order = sorted(kept)
    matrix = np.empty((len(order), width), np.float32)
    for row, position in enumerate(order):
        matrix[row] = _round((kept.pop(position) - mean) @ axes)
    origin = {
        "kind": "pretrained",
        "model": path.name if Path(name_or_file).expanduser().is_file() else name_or_file,
        "files_sha256": file_digests(path),
        "form": source.form,
        "vectors": source.count,
        "dimensions_before_pca": source.width,
        "dimensions": width,
        "explained_variance": round(float(explained.sum()), 6),
        "explained_variance_by_axis": explained.round(6).tolist(),
    }
    return WordVectors(tuple(words[position] for position in order), matrix, origin)


def corpus_vectors(
    texts: Sequence[Sequence[str]],
    words: Sequence[str],
    *,
    epochs: int = 20,
    min_count: int = 2,
    window: int = 5,
    algorithm: str = "skip-gram",
    seed: int = 3,
    width: int = WIDTH,
) -> WordVectors:
    """Train gensim's Word2Vec on `texts` and return the vectors of those of `words` that it learned.

    One thread and a fixed seed: the same texts give the same bits in every process of a machine. Another kind of
    processor may round differently.

    Args:
        texts: tokens of each text.
        words: the words to keep, each once.
        epochs: passes over the texts. Few are not enough: on 8,000 texts a linear classifier of mean vectors reaches
            0.76 test accuracy after 5 and 0.835 after 20.
        min_count: words that occur less often are unknown.
        window: the farthest distance, in tokens, of a word that is predicted.
        algorithm: "skip-gram" or "cbow".

    Raises:
        InputError: no word occurs `min_count` times.
    """
    from gensim.models import Word2Vec
    from gensim.models.callbacks import CallbackAny2Vec

    class ShowProgress(CallbackAny2Vec):
        def on_epoch_end(self, model: Any) -> None:
            progress.update()

    model = Word2Vec(
        vector_size=width,
        window=window,
        min_count=min_count,
        sg=int(algorithm == "skip-gram"),
        epochs=epochs,
        seed=seed,
        workers=1,
    )
    model.build_vocab(texts)
    known = model.wv.key_to_index
    if not known:
        raise InputError(
            f"data.vector_min_count: found no word that occurs {min_count} times in the {len(texts)} training texts, "
            "expected some; set it to 1 or load more texts"
        )
    with tqdm(total=epochs, desc="training word vectors", unit=" epochs") as progress:
        model.train(texts, total_examples=model.corpus_count, epochs=epochs, callbacks=[ShowProgress()])
    kept = tuple(word for word in words if word in known)
    matrix = model.wv.vectors[[known[word] for word in kept]]
    origin = {
        "kind": "corpus",
        "algorithm": algorithm,
        "texts": len(texts),
        "words": len(known),
        "dimensions": width,
        "epochs": epochs,
        "min_count": min_count,
        "window": window,
        "negative": model.negative,
        "sample": model.sample,
        "learning_rate": [model.alpha, model.min_alpha],
        "seed": seed,
    }
    return WordVectors(kept, matrix, origin)


class Moments:
    """Count, sum and second moments of vectors that arrive in chunks, in float64."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.total = np.zeros(width)
        self.products = np.zeros((width, width))

    def add(self, vectors: np.ndarray) -> None:
        """Take in a chunk [N, E]."""
        exact = vectors.astype(np.float64)
        self.count += len(exact)
        self.total += exact.sum(axis=0)
        self.products += exact.T @ exact

    @property
    def finite(self) -> bool:
        """Whether all numbers taken in were; one that was not shows in the sums."""
        return bool(np.isfinite(self.total).all() and np.isfinite(self.products).all())

    def principal_axes(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the mean [E], the first `width` principal axes [E, width], and the share of variance of each [width].

        An axis's sign is free; here its entry of largest magnitude is positive.
        """
        mean = self.total / self.count
        variances, axes = np.linalg.eigh(self.products / self.count - np.outer(mean, mean))
        variances, axes = variances[::-1][:width], axes[:, ::-1][:, :width]
        largest = np.abs(axes).argmax(axis=0)
        axes = axes * np.sign(axes[largest, np.arange(width)])
        total_variance = np.trace(self.products) / self.count - mean @ mean
        return mean, axes, variances / total_variance


def _round(numbers: np.ndarray) -> np.ndarray:
    """Keep 16 significant bits: the last bits of float64 sums depend on the number of threads and on the processor, and
    the data's digest, which names every run, should not."""
    mantissa, exponent = np.frexp(numbers)
    return np.ldexp(np.round(mantissa * 2**SIGNIFICANT_BITS), exponent - SIGNIFICANT_BITS)


def _locate(name_or_file: str) -> Path:
    """Return the file of word vectors, downloading a model of gensim.downloader that is not on this machine yet."""
    path = Path(name_or_file).expanduser()
    if path.is_file():
        return path
    if not re.fullmatch(r"[\w-]+", name_or_file):
        raise InputError(
            f"data.vectors: found no file {name_or_file}, expected a file of word vectors, "
            "a model of gensim.downloader such as word2vec-google-news-300, or corpus"
        )
    from gensim import downloader

    local = Path(downloader.BASE_DIR) / name_or_file / f"{name_or_file}.gz"
    if local.is_file():
        return local
    try:
        with _quiet(downloader.logger), contextlib.redirect_stdout(sys.stderr):
            return Path(downloader.load(name_or_file, return_path=True))
    except Exception as error:  # gensim raises bare Exceptions too
        raise InputError(
            f"data.vectors: could not get {name_or_file} through gensim.downloader "
            f"({' '.join(str(error).split())}); go online, copy it to {local}, "
            "or set data.vectors to a file of word vectors or to corpus"
        ) from error


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence gensim's traceback of a failed connection, which our own message tells in one line."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
