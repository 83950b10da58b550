"""Files of pre-trained word vectors, streamed in chunks: word2vec's binary and text forms (gzipped or not), and
gensim's KeyedVectors.

word2vec's forms start with a line of two numbers, the count of vectors and their dimensions; then for each vector the
word, a space, and little-endian float32 numbers (binary) or decimal numbers and a line break (text). Words stay bytes,
as some published files cut them in the middle of a character.

Dimensions: N vector of a chunk, E dimension of a vector.
"""

import gzip
import hashlib
import io
import pickle
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from generators.errors import InputError

CHUNK_BYTES = 8 << 20
"""Bytes of vectors in one chunk: large enough for fast arithmetic, small beside everything else in memory."""
FIRST_LINE_BYTES = 1 << 16
GZIP_MAGIC = b"\x1f\x8b"
PICKLE_MAGIC = b"\x80"
Stream = gzip.GzipFile | io.BufferedReader
Chunk = tuple[list[bytes], np.ndarray]


@dataclass(frozen=True)
class VectorFile:
    """An open file of word vectors.

    form: "binary", "text" or "KeyedVectors".
    count: number of vectors.
    width: dimensions of a vector.
    chunks: yields words (UTF-8) and their vectors, float32 [N, E], once. Raises InputError where the file breaks off or
        holds something else.
    """

    form: str
    count: int
    width: int
    chunks: Iterator[Chunk]


@contextmanager
def open_vectors(path: Path) -> Iterator[VectorFile]:
    """Open a file of word vectors; its form is seen from its content. Raises InputError if it has none of the forms."""
    with path.open("rb") as file:
        magic = file.read(2)
    if magic.startswith(PICKLE_MAGIC):
        yield _keyed_vectors(path)
        return
    with gzip.open(path) if magic == GZIP_MAGIC else path.open("rb") as stream:
        try:
            count, width = _read_header(stream, path)
            start = stream.tell()
            first_line = stream.readline(FIRST_LINE_BYTES)
            stream.seek(start)
            form, read = ("text", _read_text) if _is_text(first_line, width) else ("binary", _read_binary)
            yield VectorFile(form, count, width, read(stream, path, count, width))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise InputError(f"{path}: the gzip stream is damaged ({error}); get the file anew") from error


def file_digests(path: Path) -> dict[str, str]:
    """Return name and SHA-256 of a file of word vectors and of the arrays that gensim keeps beside a large one."""
    digests = {}
    for part in (path, *sorted(path.parent.glob(f"{path.name}.*.npy"))):
        with part.open("rb") as file:
            digests[part.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _keyed_vectors(path: Path) -> VectorFile:
    from gensim.models import KeyedVectors

    try:
        loaded = KeyedVectors.load(str(path), mmap="r")
    except (pickle.UnpicklingError, OSError, EOFError, AttributeError, ImportError, ValueError) as error:
        raise InputError(f"{path}: cannot be loaded as gensim's KeyedVectors ({error}); save it anew") from error
    if not isinstance(loaded, KeyedVectors):
        raise InputError(
            f"{path}: found a pickled {type(loaded).__name__}, expected KeyedVectors; save the model's `wv` on its own"
        )

    def chunks() -> Iterator[Chunk]:
        step = _vectors_per_chunk(loaded.vector_size)
        for start in range(0, len(loaded), step):
            words = [word.encode() for word in loaded.index_to_key[start : start + step]]
            yield words, np.asarray(loaded.vectors[start : start + step], np.float32)

    return VectorFile("KeyedVectors", len(loaded), loaded.vector_size, chunks())


def _read_header(stream: Stream, path: Path) -> tuple[int, int]:
    header = stream.readline(FIRST_LINE_BYTES)
    fields = header.split()
    if len(fields) != 2 or not all(field.isdigit() and int(field) for field in fields):
        raise InputError(
            f"{path}: found {header[:40]!r} as the first line, expected the count of vectors and their dimensions "
            "(word2vec's binary or text form), or a file of gensim's KeyedVectors.save"
        )
    return int(fields[0]), int(fields[1])


def _is_text(first_line: bytes, width: int) -> bool:
    try:
        return len([float(field) for field in first_line.split()[1:]]) == width
    except ValueError:
        return False


def _read_binary(stream: Stream, path: Path, count: int, width: int) -> Iterator[Chunk]:
    size = 4 * width
    data = b""
    left = count
    while left:
        block = stream.read(CHUNK_BYTES)
        if not block:
            raise InputError(f"{path}: found {count - left} vectors, expected {count}; get the file anew")
        data += block
        words: list[bytes] = []
        vectors: list[bytes] = []
        position = 0
        while len(words) < left:
            space = data.find(b" ", position)
            end = space + 1 + size
            if space < 0 or end > len(data):
                break
            words.append(data[position:space].lstrip(b"\n"))
            vectors.append(data[space + 1 : end])
            position = end
        data = data[position:]
        left -= len(words)
        yield words, np.frombuffer(b"".join(vectors), "<f4").reshape(-1, width)


def _read_text(stream: Stream, path: Path, count: int, width: int) -> Iterator[Chunk]:
    step = _vectors_per_chunk(width)
    for done in range(0, count, step):
        words: list[bytes] = []
        vectors = np.empty((min(step, count - done), width), np.float32)
        for row, line in enumerate(islice(stream, len(vectors))):
            word, _, rest = line.partition(b" ")
            numbers = rest.split()
            try:
                if len(numbers) != width:
                    raise ValueError(len(numbers))
                vectors[row] = [float(number) for number in numbers]
            except ValueError as error:
                raise InputError(
                    f"{path}: line {done + row + 2}: found {line[:40]!r}..., expected a word and {width} numbers"
                ) from error
            words.append(word)
        if len(words) < len(vectors):
            raise InputError(f"{path}: found {done + len(words)} vectors, expected {count}; get the file anew")
        yield words, vectors


def _vectors_per_chunk(width: int) -> int:
    return max(1, CHUNK_BYTES // (4 * width))
