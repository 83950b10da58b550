"""Every form of a file of word vectors is read as gensim reads it, in chunks of any size, and damage is told."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
from gensim.models import KeyedVectors, Word2Vec

from generators.errors import InputError
from generators.tasks import vector_files
from generators.tasks.vector_files import file_digests, open_vectors

WORDS = ["plain", "Über", "日本", "New_York", "3.5", "##.#%"]
VECTORS = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
VECTORS[0, 0] = 1e-30
VECTORS[1, :4] = np.frombuffer(b"\n 1\n 2 \n 33 3 \n\n", "<f4")  # bytes that look like separators
WIDTH = VECTORS.shape[1]


def write(path: Path, form: str) -> Path:
    keyed = KeyedVectors(WIDTH)
    keyed.add_vectors(WORDS, VECTORS)
    if form.startswith("KeyedVectors"):
        keyed.save(str(path), sep_limit=0 if form.endswith("apart") else 1 << 30)
    else:
        keyed.save_word2vec_format(str(path), binary="binary" in form)
    if form.endswith("gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


def read(path: Path) -> tuple[list[str], np.ndarray]:
    with open_vectors(path) as source:
        chunks = list(source.chunks)
        assert (source.count, source.width) == (6, WIDTH)
    return [word.decode() for words, _ in chunks for word in words], np.concatenate([vectors for _, vectors in chunks])


@pytest.mark.parametrize("chunk_bytes", [7, 4 * WIDTH, 1000, 1 << 20])
@pytest.mark.parametrize("form", ["binary", "binary gz", "text", "text gz", "KeyedVectors", "KeyedVectors apart"])
def test_words_and_vectors_come_back_exactly(tmp_path, monkeypatch, form, chunk_bytes):
    monkeypatch.setattr(vector_files, "CHUNK_BYTES", chunk_bytes)
    path = write(tmp_path / "vectors", form)
    words, vectors = read(path)
    assert words == WORDS
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, VECTORS)
    with open_vectors(path) as source:
        assert source.form == form.split()[0]


def test_line_breaks_between_binary_vectors_are_no_part_of_a_word(tmp_path):
    """The original C tool writes one behind every vector."""
    path = tmp_path / "vectors.bin"
    entries = (word.encode() + b" " + vector.tobytes() for word, vector in zip(WORDS, VECTORS, strict=True))
    path.write_bytes(f"6 {WIDTH}\n".encode() + b"\n".join(entries) + b"\n")
    words, vectors = read(path)
    assert words == WORDS
    assert np.array_equal(vectors, VECTORS)


def test_a_word_cut_within_a_character_does_not_stop_the_rest(tmp_path):
    path = write(tmp_path / "vectors.bin", "binary")
    path.write_bytes(path.read_bytes().replace("日本".encode(), "日本".encode()[:-1]))
    with open_vectors(path) as source:
        words = [word for chunk, _ in source.chunks for word in chunk]
    assert words[2] == "日本".encode()[:-1]
    assert words[5] == b"##.#%"


@pytest.mark.parametrize("form", ["binary", "text"])
def test_a_file_that_breaks_off_is_told_with_counts(tmp_path, form):
    path = write(tmp_path / "vectors", form)
    content = path.read_bytes()
    path.write_bytes(content[: content.index("日本".encode())])
    with pytest.raises(InputError, match=r"vectors: found 2 vectors, expected 6"):
        read(path)


def test_a_gzip_stream_that_breaks_off_is_told(tmp_path):
    path = write(tmp_path / "vectors", "binary gz")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match=r"vectors: the gzip stream is damaged"):
        read(path)


@pytest.mark.parametrize("numbers", ["1", "1 2", "x " * WIDTH, "0 " * (WIDTH + 1)])
def test_a_text_line_without_the_right_numbers_is_told_with_its_number(tmp_path, numbers):
    path = write(tmp_path / "vectors.txt", "text")
    lines = path.read_text().splitlines()
    lines[3] = f"word {numbers}"
    path.write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"vectors.txt: line 4: found .*expected a word and {WIDTH} numbers"):
        read(path)


@pytest.mark.parametrize("content", [b"", b"the 0.1 0.2\n", b"0 300\n", b"six 40\n", b"6\n", b"-6 40\n"])
def test_a_file_without_the_two_numbers_is_refused(tmp_path, content):
    path = tmp_path / "vectors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"vectors: found .* as the first line, expected the count of vectors"):
        read(path)


def test_a_whole_model_is_no_keyed_vectors(tmp_path):
    path = tmp_path / "vectors.model"
    Word2Vec([["a", "b"], ["b", "a"]], vector_size=4, min_count=1, epochs=1).save(str(path))
    with pytest.raises(InputError, match=r"found a pickled Word2Vec, expected KeyedVectors; save the model's `wv`"):
        read(path)


def test_a_missing_array_beside_keyed_vectors_is_told(tmp_path):
    path = write(tmp_path / "vectors.kv", "KeyedVectors apart")
    (tmp_path / "vectors.kv.vectors.npy").unlink()
    with pytest.raises(InputError, match=r"vectors.kv: cannot be loaded as gensim's KeyedVectors"):
        read(path)


def test_a_torn_array_beside_keyed_vectors_is_told(tmp_path):
    path = write(tmp_path / "vectors.kv", "KeyedVectors apart")
    array = tmp_path / "vectors.kv.vectors.npy"
    array.write_bytes(array.read_bytes()[:-8])
    with pytest.raises(InputError, match=r"vectors.kv: cannot be loaded as gensim's KeyedVectors .*; save it anew"):
        read(path)


def test_digests_cover_the_arrays_beside_keyed_vectors(tmp_path):
    path = write(tmp_path / "vectors.kv", "KeyedVectors apart")
    array = tmp_path / "vectors.kv.vectors.npy"
    digests = file_digests(path)
    assert set(digests) == {"vectors.kv", "vectors.kv.vectors.npy"}
    assert digests["vectors.kv.vectors.npy"] == hashlib.sha256(array.read_bytes()).hexdigest()
