"""A kept embedding that does not belong to its vocabulary is refused: word ids would lie outside of it."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from zoo.builder import build
from zoo.data_record import EMBEDDING, RECORD, VOCABULARY, parse_embedding, read_data_record, read_embedding
from zoo.dataset import open_zoo
from zoo.errors import DatasetError, StoreError
from zoo.files import LocalStorage
from zoo.hub_folder import CHECKSUMS
from zoo.verify_dataset import verify_dataset

pytest_plugins = ["dataset_fixtures"]


@pytest.mark.parametrize(
    "table", [torch.zeros(3, 32), torch.zeros(5, 32), torch.zeros(4, 31), torch.zeros(4, 32).double()]
)
def test_its_rows_are_one_more_than_the_words(table: torch.Tensor) -> None:
    words = b"one\ntwo\nthree\n"
    vectors, vocabulary = parse_embedding(save({"word_vectors": torch.ones(4, 32)}), words)
    assert vectors.shape == (4, 32) and vocabulary == ("one", "two", "three")
    with pytest.raises(ValueError, match=r"found word_vectors of .*, expected torch.float32 \[4, 32\] for the 3 words"):
        parse_embedding(save({"word_vectors": table}), words)


def test_both_readers_say_so_in_a_line(two_tasks: Path, text_sweep: Path, tmp_path: Path) -> None:
    short = save({"word_vectors": torch.zeros(2, 32)})
    folder, sweep = (Path(shutil.copytree(path, tmp_path / path.name)) for path in (two_tasks, text_sweep))
    (name,) = folder.glob("ag_news/embedding-*.safetensors")
    for path in (name, sweep / EMBEDDING):
        path.write_bytes(short)
    (sweep / RECORD).unlink()
    with pytest.raises(DatasetError, match=r"^[^\n]*embedding[^\n]*found word_vectors[^\n]*build the dataset again$"):
        open_zoo(folder).embedding("ag_news")
    with pytest.raises(StoreError, match=r"^[^\n]*embedding[^\n]*found word_vectors[^\n]*damaged$"):
        read_embedding(LocalStorage(sweep))


@pytest.mark.parametrize("name", [EMBEDDING, VOCABULARY, RECORD])
@pytest.mark.parametrize("content", [None, b"null", b"\xff\xfe"])
def test_a_build_takes_over_only_what_was_written(
    name: str, content: bytes | None, text_sweep: Path, tmp_path: Path
) -> None:
    sweep, out = Path(shutil.copytree(text_sweep, tmp_path / "sweep")), tmp_path / "zoo"
    if content is None:
        (sweep / name).unlink()
    else:
        (sweep / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"^[^\n]*sweep/{name}: [^\n]*(missing|found|not a readable record)[^\n]*$"):
        build([sweep], out, progress=False)
    assert not out.exists() or not list(out.iterdir())


@pytest.mark.parametrize("content", ["[]", "{}", "5", "null", '"a"', "[" * 100_000, '{"task": 1}'])
def test_a_record_of_another_shape_is_refused_in_a_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(StoreError, match=r"^[^\n]*record\.json: not a readable record [^\n]*$"):
        read_data_record(LocalStorage(tmp_path))


def test_verify_opens_the_embedding_of_a_dataset(two_tasks: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(two_tasks, tmp_path / "zoo"))
    assert verify_dataset(folder) == []
    (path,) = folder.glob("ag_news/embedding-*.safetensors")
    name, checksums = path.relative_to(folder).as_posix(), (folder / CHECKSUMS).read_text()
    rows = len(parse_embedding(path.read_bytes(), next(folder.glob("ag_news/vocabulary-*")).read_bytes())[1]) + 1
    faults = {
        save({"word_vectors": torch.full((rows, 32), torch.nan)}): "not finite",
        save({"word_vectors": torch.zeros(2, 32)}): "found word_vectors",
        b"junk": "not a readable embedding",
        None: "No such file",
    }
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    for content, reason in faults.items():
        path.unlink()
        lines = checksums.replace(f"{old}  {name}\n", "")
        if content is not None:
            path.write_bytes(content)
            lines += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        (folder / CHECKSUMS).write_text(lines)  # whoever has changed it has changed its checksum too
        (problem,) = verify_dataset(folder)
        assert problem.startswith(name) and reason in problem
        path.write_bytes(b"")
