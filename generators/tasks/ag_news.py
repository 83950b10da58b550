"""AG News: four classes of news texts (World, Sports, Business, Sci/Tech), 120,000 for training and 7,600 for test
(Zhang, Zhao, LeCun, NeurIPS 2015).

A text is its description, split at white space, case kept; the files write line breaks as backslashes, which stay as
they are. Texts keep their source's order, so that the first f * N of them are the training fraction f.

Dimensions: N text, T token (padded to `max_tokens`), V row of the embedding.
"""

import csv
import gzip
import hashlib
import importlib.metadata
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from generators.architecture import CLASSES, WIDTH
from generators.errors import InputError
from generators.tasks.data import Split, TaskData
from generators.tasks.texts import encode, tokenize
from generators.tasks.word2vec import ALGORITHMS, WordVectors, corpus_vectors, pretrained_vectors

CORPUS = "corpus"
KINDS = ("auto", "csv", "hub")
TRAIN_TEXTS = 120_000
TEST_TEXTS = 7_600
ORIGINAL_COLUMNS = ("Class Index", "Title", "Description")
COLUMN_SYNONYMS = {"description": ("description", "content"), "label": ("label", "class index")}
Row = tuple[list[str], int]
Embedding = tuple[torch.Tensor, tuple[str, ...]]
"""Word vectors, float32 [V, 32], and the words of rows 1 to V - 1."""


@dataclass(frozen=True)
class AGNewsSource:
    """Where AG News and its word vectors come from: the keys under `data:` of an AG News configuration.

    Raises InputError, naming the key, for a value outside its range.
    """

    source: str = "auto"
    """"csv" (files in the data folder), "hub" (a dataset repository), or "auto": csv where a data folder is given."""
    hub_dataset: str = "sh0416/ag_news"
    """Repository that the datasets library loads, with splits train and test."""
    hub_revision: str | None = None
    """Commit, tag or branch of the repository; its newest commit if not given."""
    text_column: str = "description"
    """Column of the text. In CSV files, description is also known as content."""
    label_column: str = "label"
    """Column of the label. In CSV files, label is also known as Class Index."""
    first_label: int = 1
    """Label of the class World: 1 in the original files and in sh0416/ag_news, 0 in some copies."""
    max_tokens: int = 64
    """Tokens behind this many are cut off."""
    train_limit: int | None = None
    """Only the first so many training texts; all if not given."""
    test_limit: int | None = None
    """Only the first so many test texts; all if not given."""
    vectors: str = "word2vec-google-news-300"
    """A model of gensim.downloader or a file of word vectors (word2vec's binary or text form, or gensim's
    KeyedVectors), reduced to 32 dimensions by PCA; or "corpus": Word2Vec trained on the training texts."""
    vector_algorithm: str = "skip-gram"
    """With vectors: corpus, "skip-gram" or "cbow"."""
    vector_epochs: int = 20
    """With vectors: corpus, passes over the training texts."""
    vector_min_count: int = 2
    """With vectors: corpus, rarer words are unknown."""
    vector_window: int = 5
    """With vectors: corpus, the farthest distance of a predicted word, in tokens."""
    vector_seed: int = 3
    """With vectors: corpus, seed of gensim's Word2Vec."""

    def __post_init__(self) -> None:
        self._require("source", self.source in KINDS, f"one of {', '.join(KINDS)}")
        self._require("first_label", self.first_label in (0, 1), "0 or 1")
        for name in ("max_tokens", "vector_epochs", "vector_min_count", "vector_window"):
            self._require(name, getattr(self, name) >= 1, "1 or more")
        for name in ("train_limit", "test_limit"):
            limit = getattr(self, name)
            self._require(name, limit is None or limit >= 1, "1 or more")
        self._require("vectors", bool(self.vectors), "a model of gensim.downloader, a file, or corpus")
        self._require("vector_algorithm", self.vector_algorithm in ALGORITHMS, f"one of {', '.join(ALGORITHMS)}")
        self._require("vector_seed", self.vector_seed >= 0, "0 or more")

    def _require(self, name: str, fulfilled: bool, expected: str) -> None:
        if not fulfilled:
            raise InputError(f"{name}: found {getattr(self, name)!r}, expected {expected}")

    def sizes(self) -> tuple[int, int]:
        """Return how many training and test texts there will be if the source has all, without reading them."""
        return min(TRAIN_TEXTS, self.train_limit or TRAIN_TEXTS), min(TEST_TEXTS, self.test_limit or TEST_TEXTS)

    def settings(self) -> dict[str, Any]:
        """Return the settings for the record; of a file of word vectors the name only."""
        path = Path(self.vectors).expanduser()
        return asdict(self) | {"vectors": path.name if path.is_file() else self.vectors}

    def load(self, data_dir: Path | None, embedding: Embedding | None = None) -> TaskData:
        """Return AG News with token ids int32 [N, T], lengths, and the frozen embedding float32 [V, 32].

        Row 0 of the embedding is zero; it stands for padding and for every word without a vector. Rows 1 to V - 1 are
        the words of the loaded texts that have one, in order of appearance. A text without tokens counts as one unknown
        word.

        Args:
            data_dir: folder with train*.csv[.gz] and test*.csv[.gz]; not needed for the Hub.
            embedding: word vectors and vocabulary that a sweep or a dataset keeps, to be used in place of `vectors`:
                trained ones come out the same on the same kind of machine only.

        Raises:
            InputError: a file, a row, a column or the word vectors cannot be used, or the Hub cannot be reached.
        """
        rows, origin = self._open(data_dir)
        train_texts, train_labels = _take(rows["train"], self.train_limit, "train")
        test_texts, test_labels = _take(rows["test"], self.test_limit, "test")
        vector_origin = {"source": "kept embedding"}
        if embedding is None:
            shortened = (text[: self.max_tokens] for text in chain(train_texts, test_texts))
            vectors = self._word_vectors(train_texts, list(dict.fromkeys(chain.from_iterable(shortened))))
            matrix = np.concatenate([np.zeros((1, WIDTH), np.float32), vectors.matrix])
            embedding, vector_origin = (torch.from_numpy(matrix), vectors.words), vectors.origin
        word_vectors, vocabulary = embedding
        train = _split(train_texts, train_labels, vocabulary, self.max_tokens)
        test = _split(test_texts, test_labels, vocabulary, self.max_tokens)
        origin |= {
            "tokens": f"{self.text_column}, split at white space, case kept",
            "texts": {"train": len(train), "test": len(test)},
            "max_tokens": self.max_tokens,
            "cut_texts": {
                "train": _share_cut(train_texts, self.max_tokens),
                "test": _share_cut(test_texts, self.max_tokens),
            },
            "unknown_tokens": {"train": _share_unknown(train), "test": _share_unknown(test)},
            "vocabulary": len(vocabulary),
            "word_vectors": vector_origin,
            "libraries": {name: importlib.metadata.version(name) for name in ("datasets", "gensim", "numpy")},
        }
        return TaskData("ag_news", train, test, word_vectors, vocabulary, origin)

    def _open(self, data_dir: Path | None) -> tuple[dict[str, Iterator[Row]], dict[str, Any]]:
        if self.source == "hub" or (self.source == "auto" and data_dir is None):
            return _open_hub(self)
        if data_dir is None:
            raise InputError(
                "data.source: csv needs a folder with train*.csv and test*.csv; name it with --data-dir, or use hub"
            )
        return _open_csv(self, data_dir)

    def _word_vectors(self, texts: Sequence[Sequence[str]], words: Sequence[str]) -> WordVectors:
        if self.vectors != CORPUS:
            return pretrained_vectors(self.vectors, words)
        return corpus_vectors(
            texts,
            words,
            epochs=self.vector_epochs,
            min_count=self.vector_min_count,
            window=self.vector_window,
            algorithm=self.vector_algorithm,
            seed=self.vector_seed,
        )


def _take(rows: Iterable[Row], limit: int | None, split: str) -> tuple[list[list[str]], list[int]]:
    """Return the tokens and the labels of the first `limit` rows."""
    taken = list(islice(rows, limit))
    if not taken:
        raise InputError(f"AG News: found no text in the {split} split, expected at least one")
    return [text for text, _ in taken], [label for _, label in taken]


def _split(texts: Sequence[Sequence[str]], labels: Sequence[int], vocabulary: Sequence[str], max_tokens: int) -> Split:
    ids, lengths = encode(texts, vocabulary, max_tokens)
    return Split(ids, torch.tensor(labels), lengths)


def _share_cut(texts: Sequence[Sequence[str]], max_tokens: int) -> float:
    return sum(len(text) > max_tokens for text in texts) / len(texts)


def _share_unknown(split: Split) -> float:
    """Share of tokens that have no vector; ids are 0 there, as they are in the padding."""
    tokens = int(split.lengths.sum())  # type: ignore[union-attr]
    return (tokens - int((split.inputs > 0).sum())) / tokens


def _label(value: Any, first_label: int, where: str) -> int:
    """Return 0 to 3."""
    last = first_label + CLASSES["ag_news"] - 1
    text = str(value).strip()
    if not text.isdecimal() or not first_label <= int(text) <= last:
        raise InputError(
            f"{where}: found label {value!r}, expected {first_label} to {last}, a whole number "
            f"(data.first_label is {first_label})"
        )
    return int(text) - first_label


def _open_csv(source: AGNewsSource, data_dir: Path) -> tuple[dict[str, Iterator[Row]], dict[str, Any]]:
    files = {split: _find_csv(data_dir, split) for split in ("train", "test")}
    origin: dict[str, Any] = {"source": "csv", "files_sha256": {}}
    for file in files.values():
        with file.open("rb") as stream:
            origin["files_sha256"][file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return {split: _csv_rows(file, source) for split, file in files.items()}, origin


def _find_csv(data_dir: Path, split: str) -> Path:
    found = sorted(path for ending in ("csv", "csv.gz") for path in data_dir.glob(f"{split}*.{ending}"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise InputError(f"{data_dir}: found {names}, expected one file {split}*.csv or {split}*.csv.gz")
    return found[0]


def _csv_rows(path: Path, source: AGNewsSource) -> Iterator[Row]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            rows = filter(None, reader)  # without blank lines
            first = next(rows, [])
            headless = bool(first) and first[0].strip().isdecimal()
            columns = ORIGINAL_COLUMNS if headless else tuple(first)
            label_at = _find_column(columns, source.label_column, path)
            text_at = _find_column(columns, source.text_column, path)
            for row in chain([first] if headless else [], rows):
                where = f"{path}: line {reader.line_num}"
                if len(row) != len(columns):
                    raise InputError(
                        f"{where}: found {len(row)} columns, expected {len(columns)} ({', '.join(columns)})"
                    )
                yield tokenize(row[text_at]), _label(row[label_at], source.first_label, where)
        except (csv.Error, UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(
                f"{path}: after line {reader.line_num}: cannot be read as CSV in UTF-8 ({error}); get the file anew"
            ) from error


def _find_column(columns: Sequence[str], name: str, path: Path) -> int:
    """Return the position of a column; upper and lower case are the same."""
    names = [column.strip().casefold() for column in columns]
    for candidate in COLUMN_SYNONYMS.get(name, (name.casefold(),)):
        if candidate in names:
            return names.index(candidate)
    raise InputError(
        f"{path}: found columns {', '.join(columns) or 'none'}, expected one named {name}; "
        "set data.text_column and data.label_column, or take the original files (Class Index, Title, Description)"
    )


def _open_hub(source: AGNewsSource) -> tuple[dict[str, Iterator[Row]], dict[str, Any]]:
    from datasets import load_dataset_builder
    from datasets.exceptions import DatasetsError

    try:
        builder = load_dataset_builder(source.hub_dataset, revision=source.hub_revision)
        builder.download_and_prepare()
        dataset = builder.as_dataset()
    except (OSError, ValueError, DatasetsError) as error:
        raise InputError(
            f"data.hub_dataset: could not load {source.hub_dataset} ({' '.join(str(error).split())}); go online, "
            "or use --data-dir with a folder of train*.csv and test*.csv and data.source: csv"
        ) from error
    for split in ("train", "test"):
        if split not in dataset:
            raise InputError(f"{source.hub_dataset}: found splits {', '.join(dataset)}, expected train and test")
    for key in ("text_column", "label_column"):
        columns = dataset["train"].column_names
        if getattr(source, key) not in columns:
            raise InputError(
                f"data.{key}: found {getattr(source, key)!r}, expected a column of {source.hub_dataset}: "
                f"{', '.join(columns)}"
            )
    # For a repository the builder's hash is the commit that was read.
    origin = {"source": "hub", "dataset": source.hub_dataset, "commit": builder.hash}
    return {split: _hub_rows(dataset[split], split, source) for split in ("train", "test")}, origin


def _hub_rows(split: Any, name: str, source: AGNewsSource) -> Iterator[Row]:
    columns = split.select_columns([source.text_column, source.label_column])
    for number, row in enumerate(columns):
        where = f"{source.hub_dataset}: row {number} of {name}"
        text = row[source.text_column]
        if not isinstance(text, str):
            raise InputError(f"{where}: found {text!r} in column {source.text_column}, expected a text")
        yield tokenize(text), _label(row[source.label_column], source.first_label, where)
