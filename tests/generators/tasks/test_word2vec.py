"""PCA of pre-trained vectors against numpy's SVD, and Word2Vec of a corpus, alike in every process."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gensim import downloader
from gensim.models import KeyedVectors

from generators.errors import InputError
from generators.tasks.word2vec import Moments, corpus_vectors, pretrained_vectors

WORDS = [f"word{i}" for i in range(300)]
TEXTS = [f"the cat{i % 3} sat on the mat{i % 5} again{i}".split() for i in range(40)]
TEXT_WORDS = ["mat1", "again7", "the", "unseen", "cat2"]


def anisotropic(count: int = 300, width: int = 48) -> np.ndarray:
    """Vectors with a mean far from zero and a variance that falls from axis to axis, in a rotated frame."""
    rng = np.random.default_rng(5)
    rotation = np.linalg.qr(rng.standard_normal((width, width)))[0]
    scaled = rng.standard_normal((count, width)) * np.geomspace(2, 0.05, width)
    return (scaled @ rotation + 3).astype(np.float32)


def reduced_by_svd(vectors: np.ndarray, width: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """PCA by another way: singular values of the centred matrix. Returns the scores and each axis's variance share."""
    exact = vectors.astype(np.float64)
    centred = exact - exact.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:width]
    signs = np.sign([axis[np.abs(axis).argmax()] for axis in axes])
    return centred @ (axes * signs[:, None]).T, (singular**2 / (singular**2).sum())[:width]


def save(path: Path, vectors: np.ndarray, words: list[str] = WORDS) -> Path:
    keyed = KeyedVectors(vectors.shape[1])
    keyed.add_vectors(words, vectors)
    keyed.save_word2vec_format(str(path), binary=True)
    return path


def test_principal_axes_in_uneven_chunks_equal_svd():
    vectors = anisotropic()
    moments = Moments(vectors.shape[1])
    for chunk in np.split(vectors, [1, 8, 200]):
        moments.add(chunk)
    mean, axes, explained = moments.principal_axes(32)
    expected, expected_explained = reduced_by_svd(vectors)
    np.testing.assert_allclose((vectors - mean) @ axes, expected, atol=1e-9)
    np.testing.assert_allclose(explained, expected_explained, rtol=1e-9)


def test_pca_is_fitted_on_all_vectors_and_only_asked_words_are_kept_in_order(tmp_path):
    vectors = anisotropic()
    asked = ["word7", "absent", "word299", "word0"]
    result = pretrained_vectors(str(save(tmp_path / "v.bin", vectors)), asked)
    expected, shares = reduced_by_svd(vectors)
    assert result.words == ("word7", "word299", "word0")
    assert result.matrix.dtype == np.float32
    np.testing.assert_allclose(result.matrix, expected[[7, 299, 0]], rtol=2**-15)
    assert result.origin["explained_variance"] == pytest.approx(shares.sum(), abs=1e-6)
    assert result.origin["dimensions_before_pca"] == 48
    assert result.origin["vectors"] == 300
    assert result.origin["model"] == "v.bin"


def test_vectors_have_16_significant_bits(tmp_path):
    result = pretrained_vectors(str(save(tmp_path / "v.bin", anisotropic())), WORDS)
    mantissa, _ = np.frexp(result.matrix)
    assert np.array_equal(mantissa * 2**16, np.round(mantissa * 2**16))


def test_a_word_given_twice_keeps_its_first_vector(tmp_path):
    vectors = anisotropic()
    path = save(tmp_path / "v.bin", vectors)
    path.write_bytes(path.read_bytes().replace(b"word9 ", b"word7 "))
    result = pretrained_vectors(str(path), ["word7"])
    np.testing.assert_allclose(result.matrix[0], reduced_by_svd(vectors)[0][7], rtol=2**-15)


@pytest.mark.parametrize(
    ("vectors", "words", "message"),
    [
        (np.ones((5, 31), np.float32), WORDS[:5], "found vectors of 31 dimensions, expected at least 32"),
        (np.full((5, 40), np.nan, np.float32), WORDS[:5], "found NaN or infinity"),
        (np.ones((5, 40), np.float32), list("abcde"), "found none of the corpus's 300 words"),
    ],
)
def test_unusable_vectors_are_refused(tmp_path, vectors, words, message):
    with pytest.raises(InputError, match=message):
        pretrained_vectors(str(save(tmp_path / "v.bin", vectors, words)), WORDS)


def test_a_missing_file_is_not_taken_for_a_model_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr(downloader, "load", lambda *_, **__: pytest.fail("tried to download"))
    with pytest.raises(InputError, match=r"data.vectors: found no file .*v\.bin"):
        pretrained_vectors(str(tmp_path / "v.bin"), WORDS)


def test_without_a_network_one_line_names_the_ways_out(tmp_path, monkeypatch, capsys, caplog):
    def refuse(*_, **__):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(downloader, "BASE_DIR", str(tmp_path))
    monkeypatch.setattr(downloader, "urlopen", refuse)
    with caplog.at_level(logging.DEBUG), pytest.raises(InputError) as caught:
        pretrained_vectors("word2vec-google-news-300", WORDS)
    message = str(caught.value)
    assert message.startswith("data.vectors: could not get word2vec-google-news-300 through gensim.downloader")
    assert "data.vectors to a file of word vectors or to corpus" in message
    assert "\n" not in message
    assert capsys.readouterr().out == ""
    assert not caplog.records


def test_a_model_on_this_machine_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(downloader, "BASE_DIR", str(tmp_path))
    monkeypatch.setattr(downloader, "load", lambda *_, **__: pytest.fail("tried to download"))
    (tmp_path / "some-model").mkdir()
    save(tmp_path / "some-model" / "some-model.gz", anisotropic())
    result = pretrained_vectors("some-model", WORDS)
    assert len(result.words) == 300
    assert result.origin["model"] == "some-model"


def test_a_download_ends_in_the_file_that_gensim_names(tmp_path, monkeypatch, capsys):
    path = save(tmp_path / "v.bin", anisotropic())

    def load(name: str, return_path: bool) -> str:
        print("progress of gensim")
        return str(path)

    monkeypatch.setattr(downloader, "BASE_DIR", str(tmp_path))
    monkeypatch.setattr(downloader, "load", load)
    assert pretrained_vectors("some-model", WORDS).origin["model"] == "some-model"
    assert capsys.readouterr().out == ""


def test_corpus_vectors_keep_words_that_are_frequent_enough():
    result = corpus_vectors(TEXTS, TEXT_WORDS, min_count=2, epochs=2)
    assert result.words == ("mat1", "the", "cat2")
    assert result.matrix.shape == (3, 32)
    assert result.origin["words"] == 11
    assert corpus_vectors(TEXTS, TEXT_WORDS, min_count=1, epochs=2).words == ("mat1", "again7", "the", "cat2")


def test_seed_and_algorithm_decide_the_corpus_vectors():
    first, again, other_seed, cbow = (
        corpus_vectors(TEXTS, TEXT_WORDS, epochs=2, **settings).matrix
        for settings in ({"seed": 3}, {"seed": 3}, {"seed": 4}, {"seed": 3, "algorithm": "cbow"})
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other_seed)
    assert not np.array_equal(first, cbow)


def test_corpus_vectors_are_the_same_in_another_process():
    script = (
        "from generators.tasks.word2vec import corpus_vectors\n"
        f"matrix = corpus_vectors({TEXTS!r}, {TEXT_WORDS!r}, epochs=3).matrix\n"
        "print(matrix.tobytes().hex())"
    )
    here = corpus_vectors(TEXTS, TEXT_WORDS, epochs=3).matrix.tobytes().hex()
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == here


def test_texts_of_rare_words_only_are_refused():
    with pytest.raises(InputError, match=r"data.vector_min_count: found no word that occurs 41 times in the 40"):
        corpus_vectors([text[1:4] for text in TEXTS], TEXT_WORDS, min_count=41)
