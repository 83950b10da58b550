"""AG News from each form of its files and from a dataset repository; on the real texts, what its vectors are worth."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from gensim.models import KeyedVectors
from sklearn.linear_model import LogisticRegression

from generators.errors import InputError
from generators.tasks.ag_news import AGNewsSource
from generators.tasks.data import Split, TaskData
from generators.tasks.word2vec import corpus_vectors

TRAIN = [
    (3, "Oil", "Oil prices rose, the Bank said"),
    (1, "Talks", 'He said: "no" \\today'),
    (4, "Empty", "  "),
    (2, "Cup", "the cup  the\tCup the"),
]
TEST = [(2, "Match", "the match said nothing"), (1, "Vote", "vote the")]
SMALL = AGNewsSource(vectors="corpus", vector_epochs=1, vector_min_count=1, max_tokens=4)
FORMS = ("original", "original without header", "label,content")


def write_csv(folder: Path, form: str = "label,content", packed: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    for split, rows in (("train_some", TRAIN), ("test", TEST)):
        path = folder / f"{split}.csv{'.gz' if packed else ''}"
        with (gzip.open if packed else open)(path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            if form == "label,content":
                writer.writerows([("label", "content"), *((label, text) for label, _, text in rows)])
            else:
                header = [] if "without" in form else [("Class Index", "Title", "Description")]
                writer.writerows([*header, *rows])
    return folder


def write_repository(
    folder: Path, train: list[tuple], names: tuple[str, ...] = ("label", "title", "description")
) -> str:
    folder.mkdir(exist_ok=True)
    for split, rows in (("train", train), ("test", TEST)):
        lines = (json.dumps(dict(zip(names, row, strict=True))) for row in rows)
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def words_of(data: TaskData, split: Split) -> list[list[str]]:
    """Ids back to words; the empty string stands for row 0."""
    known = ("", *data.vocabulary)
    return [
        [known[i] for i in ids[:length]]
        for ids, length in zip(split.inputs.tolist(), split.lengths.tolist(), strict=True)
    ]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_files_gives_the_same_data(tmp_path, form, packed):
    data = SMALL.load(write_csv(tmp_path / "data", form, packed))
    assert words_of(data, data.train) == [
        ["Oil", "prices", "rose,", "the"],
        ["He", "said:", '"no"', "\\today"],
        [""],
        ["the", "cup", "the", "Cup"],
    ]
    assert words_of(data, data.test) == [["the", "", "said", ""], ["", "the"]]
    assert data.train.labels.tolist() == [2, 0, 3, 1]
    assert data.test.labels.tolist() == [1, 0]
    assert data.train.lengths.tolist() == [4, 4, 1, 4]
    assert data.test.lengths.tolist() == [4, 2]
    assert data.digest() == SMALL.load(write_csv(tmp_path / "reference")).digest()


@pytest.mark.parametrize("form", FORMS)
def test_blank_lines_in_the_files_are_no_texts(tmp_path, form):
    folder = write_csv(tmp_path / "data", form)
    for path in folder.iterdir():
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"\r\n" + b"\n\n".join(lines) + b"\n\n")
    assert SMALL.load(folder).digest() == SMALL.load(write_csv(tmp_path / "reference")).digest()


@pytest.mark.parametrize("label", [None, 2.0, True, "²", -1, "2.0", ""])
def test_labels_that_are_no_whole_numbers_are_told(tmp_path, label):
    second = [(4, "Title", "text")] if label is None else []  # which makes it a column of numbers
    repository = write_repository(tmp_path / "data", [(label, "Title", "text"), *second])
    with pytest.raises(InputError, match=r"row 0 of train: found label .*, expected 1 to 4, a whole number \(data"):
        replace(SMALL, source="hub", hub_dataset=repository).load(None)


def test_the_record_names_a_file_of_vectors_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    keyed = KeyedVectors(32)
    keyed.add_vectors(["the", "said", "cup", "Oil"], np.eye(4, 32, dtype=np.float32))
    keyed.save(str(tmp_path / "vectors.kv"))
    source = replace(SMALL, vectors="~/vectors.kv")
    assert source.settings()["vectors"] == "vectors.kv"
    assert source.load(write_csv(tmp_path / "data")).origin["word_vectors"]["model"] == "vectors.kv"


def test_shapes_types_and_padding(tmp_path):
    data = SMALL.load(write_csv(tmp_path / "data"))
    assert data.task == "ag_news"
    assert data.train.inputs.shape == (4, 4)
    assert data.train.inputs.dtype == torch.int32
    assert data.train.labels.dtype == data.train.lengths.dtype == torch.int64
    assert data.train.inputs[2].tolist() == [0, 0, 0, 0]
    assert data.test.inputs[1, 2:].tolist() == [0, 0]
    assert data.max_tokens == 4


def test_embedding_holds_the_words_of_the_cut_texts_behind_a_row_of_zeros(tmp_path):
    data = SMALL.load(write_csv(tmp_path / "data"))
    # "Bank" and "said" of the first text lie behind the fourth token.
    expected = ("Oil", "prices", "rose,", "the", "He", "said:", '"no"', "\\today", "cup", "Cup")
    texts = [text.split() for _, _, text in TRAIN]
    assert data.vocabulary == (*expected, "said")  # "said" is in the test set too, and in the vectors
    vectors = corpus_vectors(texts, data.vocabulary, epochs=1, min_count=1)
    assert data.word_vectors.shape == (12, 32)
    assert data.word_vectors[0].tolist() == [0.0] * 32
    assert np.array_equal(data.word_vectors[1:].numpy(), vectors.matrix)


def test_origin_tells_what_was_cut_and_what_is_unknown(tmp_path):
    data = SMALL.load(write_csv(tmp_path / "data", "original"))
    origin = json.loads(json.dumps(data.origin))
    assert origin["cut_texts"] == {"train": 0.5, "test": 0.0}
    assert origin["unknown_tokens"] == {"train": 1 / 13, "test": 3 / 6}
    assert origin["texts"] == {"train": 4, "test": 2}
    assert origin["vocabulary"] == 11
    assert set(origin["files_sha256"]) == {"train_some.csv", "test.csv"}
    assert origin["word_vectors"]["kind"] == "corpus"
    assert origin["word_vectors"]["seed"] == 3
    assert str(tmp_path) not in json.dumps(origin)


def test_limits_take_the_first_texts(tmp_path):
    folder = write_csv(tmp_path / "data")
    data = replace(SMALL, train_limit=2, test_limit=1).load(folder)
    assert data.train.labels.tolist() == [2, 0]
    assert data.test.labels.tolist() == [1]
    assert "cup" not in data.vocabulary


def test_titles_can_be_the_text(tmp_path):
    folder = write_csv(tmp_path / "data", "original")
    data = replace(SMALL, text_column="title").load(folder)
    assert data.vocabulary == ("Oil", "Talks", "Empty", "Cup")


def test_pretrained_vectors_cover_words_of_the_test_set(tmp_path):
    lines = [
        f"{word} {' '.join(str((7 * i + j * j) % 11) for j in range(40))}"
        for i, word in enumerate(["the", "vote", "Oil"])
    ]
    path = tmp_path / "vectors.txt"
    path.write_text("\n".join(["3 40", *lines]))
    data = AGNewsSource(vectors=str(path), max_tokens=4).load(write_csv(tmp_path / "data"))
    assert data.vocabulary == ("Oil", "the", "vote")
    assert words_of(data, data.test)[1] == ["vote", "the"]
    assert data.origin["word_vectors"]["model"] == "vectors.txt"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("label,content\n1,a b\n5,c\n", r"train.csv: line 3: found label '5', expected 1 to 4"),
        (
            "label,content\n0,a\n",
            r"line 2: found label '0', expected 1 to 4, a whole number \(data.first_label is 1\)",
        ),
        ("label,content\nWorld,a\n", r"line 2: found label 'World'"),
        ("label,content\n1,a,b\n", r"line 2: found 3 columns, expected 2 \(label, content\)"),
        ('label,content\n1,"a\nb"\n2\n', r"line 4: found 1 columns, expected 2"),
        ("1,title,text\n2,title\n", r"line 2: found 2 columns, expected 3 \(Class Index, Title, Description\)"),
        ("1,text\n", r"line 1: found 2 columns, expected 3"),
        ('label,content\n1,"a\n', r"after line 2: cannot be read as CSV in UTF-8 \(unexpected end of data\)"),
        ("label,text\n1,a\n", r"found columns label, text, expected one named description; set data.text_column"),
        ("content\na\n", r"found columns content, expected one named label"),
        ("", r"found columns none, expected one named label"),
        ("label,content\n", r"found no text in the train split"),
    ],
)
def test_malformed_files_are_told_in_one_line_with_the_place(tmp_path, content, message):
    write_csv(tmp_path)
    (tmp_path / "train_some.csv").unlink()
    (tmp_path / "train.csv").write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        SMALL.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_text_that_is_not_utf8_is_told(tmp_path):
    write_csv(tmp_path)
    (tmp_path / "test.csv").write_bytes("label,content\n1,Grüße\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"test.csv: after line 0: cannot be read as CSV in UTF-8"):
        SMALL.load(tmp_path)


def test_a_gzip_file_that_breaks_off_is_told(tmp_path):
    write_csv(tmp_path, packed=True)
    path = tmp_path / "train_some.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"train_some.csv.gz: after line \d+: cannot be read"):
        SMALL.load(tmp_path)


def test_one_file_a_split_is_expected(tmp_path):
    write_csv(tmp_path)
    write_csv(tmp_path, packed=True)
    with pytest.raises(InputError, match=r"found train_some.csv, train_some.csv.gz, expected one file train\*.csv"):
        SMALL.load(tmp_path)
    with pytest.raises(InputError, match=r"found none, expected one file train\*.csv or train\*.csv.gz"):
        SMALL.load(tmp_path / "elsewhere")


def test_csv_needs_a_folder():
    with pytest.raises(InputError, match=r"data.source: csv needs a folder"):
        AGNewsSource(source="csv").load(None)


def test_a_repository_gives_the_same_data_as_the_files(tmp_path):
    repository = write_repository(tmp_path / "repository", TRAIN)
    data = replace(SMALL, hub_dataset=repository).load(None)
    assert data.digest() == SMALL.load(write_csv(tmp_path / "data")).digest()
    assert data.origin["source"] == "hub"
    first_commit = data.origin["commit"]
    write_repository(tmp_path / "repository", TRAIN[:3])
    changed = replace(SMALL, hub_dataset=repository).load(None)
    assert len(changed.train) == 3
    assert changed.origin["commit"] != first_commit


def test_columns_and_label_coding_of_a_repository_are_configurable(tmp_path):
    rows = [(label - 1, title, text) for label, title, text in TRAIN]
    repository = write_repository(tmp_path / "repository", rows, ("topic", "title", "body"))
    (tmp_path / "repository" / "test.jsonl").write_text('{"topic": 0, "title": "", "body": "the"}')
    settings = {"source": "hub", "hub_dataset": repository, "text_column": "body", "label_column": "topic"}
    with pytest.raises(InputError, match=r"row 3 of train|row 1 of train: found label 0, expected 1 to 4"):
        replace(SMALL, **settings).load(None)
    data = replace(SMALL, **settings, first_label=0).load(write_csv(tmp_path / "data"))
    assert data.train.labels.tolist() == [2, 0, 3, 1]
    assert data.vocabulary[0] == "Oil"


def test_a_column_that_a_repository_lacks_is_told(tmp_path):
    repository = write_repository(tmp_path / "repository", TRAIN)
    with pytest.raises(
        InputError, match=r"data.text_column: found 'text', expected a column of .*: label, title, desc"
    ):
        replace(SMALL, hub_dataset=repository, text_column="text").load(None)


def test_a_row_without_text_is_told(tmp_path):
    repository = write_repository(tmp_path / "repository", [*TRAIN, (1, "No text", None)])
    with pytest.raises(InputError, match=r"row 4 of train: found None in column description, expected a text"):
        replace(SMALL, hub_dataset=repository).load(None)


def test_an_unreachable_repository_is_told_in_one_line(monkeypatch):
    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\n(offline)")

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(InputError) as caught:
        AGNewsSource().load(None)
    assert "could not load sh0416/ag_news (Couldn't reach the Hub (offline)); go online" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "files"),
        ("first_label", 2),
        ("max_tokens", 0),
        ("train_limit", 0),
        ("vectors", ""),
        ("vector_algorithm", "sg"),
        ("vector_epochs", 0),
        ("vector_seed", -1),
    ],
)
def test_settings_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(InputError, match=rf"^{key}: found {value!r}, expected"):
        AGNewsSource(**{key: value})


def test_sizes_are_those_of_the_corpus_up_to_the_limits():
    assert AGNewsSource().sizes() == (120_000, 7_600)
    assert AGNewsSource(train_limit=8_000, test_limit=9_000).sizes() == (8_000, 7_600)


@pytest.fixture(scope="module")
def real(test_data) -> TaskData:
    return AGNewsSource(vectors="corpus").load(test_data / "ag_news")


def test_real_texts_are_read_whole_and_in_order(real):
    assert (len(real.train), len(real.test)) == (8000, 7600)
    assert real.train.labels.bincount().tolist() == [2000] * 4
    assert real.test.labels.bincount().tolist() == [1900] * 4
    assert real.train.labels[:2].tolist() == [0, 2]
    assert words_of(real, real.train)[1][:5] == ["The", "taste", "for", "oil", "is"]
    assert real.train.lengths[:2].tolist() == [22, 24]
    assert real.origin["cut_texts"] == {"train": 72 / 8000, "test": 63 / 7600}
    assert int(real.train.lengths.max()) == real.train.inputs.shape[1] == 64


def test_mean_word_vectors_of_real_texts_classify(real):
    """A linear classifier of mean vectors reaches 0.835; with vectors trained for 5 epochs only, 0.76."""

    def features(split: Split) -> np.ndarray:
        return (real.word_vectors[split.inputs.long()].sum(dim=1) / split.lengths[:, None]).numpy()

    train, test = features(real.train), features(real.test)
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    classifier = LogisticRegression(C=10, max_iter=1000)
    classifier.fit((train - mean) / deviation, real.train.labels.numpy())
    assert classifier.score((test - mean) / deviation, real.test.labels.numpy()) > 0.825
