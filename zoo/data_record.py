"""What a sweep keeps of its data: where it comes from, its digest, and the frozen word embedding where there is one.

data/record.json            task, digest, sizes, origin and the digests of the other two files
data/embedding.safetensors  word_vectors [V, 32]; row 0 is padding and unknown words (AG News)
data/vocabulary.txt         one word a line: line n is the word of row n (the first line is the word of row 1)
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from generators.architecture import WIDTH
from generators.tasks.data import TaskData
from zoo.errors import StoreError
from zoo.storage import Storage

Embedding = tuple[Tensor, tuple[str, ...]]

RECORD = "data/record.json"
EMBEDDING = "data/embedding.safetensors"
VOCABULARY = "data/vocabulary.txt"


def published_names(task: str, data_digest: str) -> tuple[str, str]:
    """Return the names that a dataset gives the embedding and the vocabulary of rows with this data digest."""
    return f"{task}/embedding-{data_digest}.safetensors", f"{task}/vocabulary-{data_digest}.txt"


def write_data_record(storage: Storage, data: TaskData) -> None:
    """Keep the record of a sweep's data, unless it is there already."""
    if storage.exists(RECORD):
        return
    contents: dict[str, bytes] = {}
    if data.word_vectors is not None:
        # The embedding comes last: a process may be killed in between, and where the embedding is, both are there.
        contents[VOCABULARY] = "".join(f"{word}\n" for word in data.vocabulary).encode()
        contents[EMBEDDING] = save({"word_vectors": data.word_vectors.cpu().contiguous()})
    record = {
        "task": data.task,
        "data_digest": data.digest(),
        "train_samples": len(data.train),
        "test_samples": len(data.test),
        "max_tokens": data.max_tokens,
        "origin": data.origin,
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()},
    }
    for name, content in contents.items():
        storage.put_if_absent(name, content)
    storage.put_if_absent(RECORD, json.dumps(record, indent=1, sort_keys=True).encode())


def read_data_record(storage: Storage) -> dict[str, Any] | None:
    """Return the record of a sweep's data; None for imported runs, which have none.

    Raises:
        StoreError: it is damaged.
    """
    try:
        record = json.loads(storage.read(RECORD))
        texts = (record["task"], record["data_digest"], *record["sha256"].values())
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("found a task, data_digest or sha256 that is no text")
        return record
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(
            f"{storage.root}/{RECORD}: not a readable record ({error!r}); run `zoo generate` again after moving it away"
        ) from error


def read_embedding_files(storage: Storage) -> dict[str, bytes]:
    """Return the embedding and the vocabulary of a text sweep as files, under the names that a dataset gives them.

    Raises:
        StoreError: the record of the data or one of them is missing or not what was written.
    """
    record = read_data_record(storage)
    if record is None:
        raise StoreError(f"{storage.root}/{RECORD}: missing, expected the record of the data; run `zoo generate` again")
    files = {}
    for name, published in zip(
        (EMBEDDING, VOCABULARY), published_names(record["task"], record["data_digest"]), strict=True
    ):
        try:
            files[published] = storage.read(name)
        except FileNotFoundError as error:
            raise StoreError(
                f"{storage.root}/{name}: missing, expected what {RECORD} lists; restore it from a copy"
            ) from error
        if (found := hashlib.sha256(files[published]).hexdigest()) != record["sha256"].get(name):
            raise StoreError(
                f"{storage.root}/{name}: found SHA-256 {found}, expected {record['sha256'].get(name)} as in {RECORD}; "
                f"restore it from a copy"
            )
    return files


def load_data(source: Any, storage: Storage, data_dir: Path | None) -> TaskData:
    """Load a task's data for a sweep directory, with the embedding that it keeps, if it keeps one."""
    if storage.exists(EMBEDDING):
        return source.load(data_dir, embedding=read_embedding(storage))
    return source.load(data_dir)


def read_embedding(storage: Storage) -> Embedding:
    """Return the word vectors, float32 [V, 32], and the vocabulary that a sweep keeps."""
    # A call that was killed early has left them without a record; the plan's data digest will tell about them.
    recorded = storage.exists(RECORD)
    files = read_embedding_files(storage).values() if recorded else (storage.read(EMBEDDING), storage.read(VOCABULARY))
    try:
        return parse_embedding(*files)
    except ValueError as error:
        raise StoreError(f"{storage.root}/{EMBEDDING}: {error}; `zoo verify` says what else is damaged") from error


def parse_embedding(vectors: bytes, vocabulary: bytes) -> Embedding:
    """Return word vectors, float32 [V, 32], and the V - 1 words of rows 1 and up.

    Raises:
        ValueError: they are not that, or do not belong together.
    """
    try:
        table, words = load(vectors)["word_vectors"], tuple(vocabulary.decode().split("\n")[:-1])
    except (SafetensorError, KeyError, UnicodeDecodeError) as error:
        raise ValueError(f"not a readable embedding and vocabulary ({error!r})") from error
    if table.dtype != torch.float32 or table.shape != (len(words) + 1, WIDTH):
        raise ValueError(
            f"found word_vectors of {table.dtype} {list(table.shape)}, "
            f"expected torch.float32 [{len(words) + 1}, {WIDTH}] for the {len(words)} words beside them"
        )
    return table, words
