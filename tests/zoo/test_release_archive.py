"""Archives that lie about what they are: files that are no checkpoints are named, what is unsafe is refused."""

import io
import os
import pickle
import re
import stat
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from release_tools import Release, checkpoint, found, run_import, saved, state_dict, two_runs

from zoo.errors import ReleaseError
from zoo.release import import_release
from zoo.release_archive import ReleaseArchive


@pytest.fixture
def release() -> Release:
    return two_runs()


class Evil:
    """Unpickles to a call of os.mkdir."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (self.path,)


def _changed(changes: dict[str, Any]) -> dict[str, Any]:
    state = state_dict("mnist", 1) | changes
    return {name: value for name, value in state.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no pickle", "cannot be read (BadZipFile"),
        (b"", "cannot be read (BadZipFile"),
        (saved(state_dict("mnist", 1))[:-400], "cannot be read (BadZipFile"),
        (saved([1, 2]), "found a list, expected a state dict"),
        (saved(_changed({"classifier.fc2.bias": torch.zeros(4)})), "found torch.float32 of shape (4,), expected"),
        (saved(_changed({"classifier.fc2.bias": torch.zeros(1).expand(10**9)})), "of shape (1000000000,)"),
        (saved(_changed({"classifier.fc2.bias": torch.zeros(10).double()})), "found torch.float64"),
        (saved(_changed({"classifier.fc2.bias": torch.zeros(10, device="meta")})), "expected a plain tensor"),
        pytest.param(
            saved(_changed({"classifier.fc2.bias": torch.zeros(10).to_sparse()})),
            "expected a plain tensor",
            marks=pytest.mark.filterwarnings("ignore:Validating sparse"),
        ),
        (saved(_changed({"classifier.fc2.bias": 3})), "found a int, expected a plain tensor"),
        (saved(_changed({"classifier.fc2.bias": None})), "classifier.fc2.bias: found no tensor"),
        (saved(_changed({"classifier.fc3.bias": torch.zeros(10)})), "classifier.fc3.bias: found a tensor"),
        (saved(_changed({"embedding.pos_embedding": torch.zeros(49, 32)})), "other values than the sinusoidal"),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_files_that_are_no_checkpoint_are_named_and_the_others_imported(
    release: Release, content: bytes, reason: str, tmp_path: Path
) -> None:
    name = release.add("bad", "50", 0.5, state=content, lr=5e-3)
    report, store = run_import(release, tmp_path)
    assert found(report) == {"unreadable": [name]}
    assert reason in report.findings[0].reason
    assert report.checkpoints == 8
    bad = next(run for run in store.plans()[0].runs if run.learning_rate == 5e-3)
    (commit,) = store.commits()
    assert commit.runs[bad.run_id].labels == []


def test_a_pickle_that_calls_something_is_refused_and_calls_nothing(release: Release, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    name = release.add("bad", "50", 0.5, state=saved({"classifier.fc2.bias": Evil(str(trap))}), lr=5e-3)
    plain = release.add("bad", "75", 0.5, state=pickle.dumps(Evil(str(trap))), lr=5e-3)
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"unreadable": [name, plain]}
    assert not trap.exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_told_and_their_run_is_diverged(release: Release, value: float, tmp_path: Path) -> None:
    state = state_dict("mnist", 9)
    state["encoder.1.fc1.weight"][3, 4] = value
    name = release.add("bad", "100", 0.1, state=state, lr=5e-3)
    release.add("bad", "50", 0.2, lr=5e-3)
    report, store = run_import(release, tmp_path)
    assert found(report) == {"non-finite": [name]}
    assert report.findings[0].reason == "1 of 18506 weights"
    run_id = next(run.run_id for run in store.plans()[0].runs if run.learning_rate == 5e-3)
    (commit,) = store.commits()
    assert (commit.runs[run_id].status, commit.runs[run_id].labels) == ("diverged", ["50"])
    header, _ = checkpoint(store, "epoch-100")
    assert run_id not in header["run_ids"]


# What is hostile is refused, or bounded


@pytest.mark.parametrize(
    "name",
    [
        "../outside.pt",
        "mnist/../../outside.pt",
        "/etc/outside.pt",
        "C:/outside.pt",
        "mnist\\..\\outside.pt",
        "mnist/./a_50_5000.pt",
        "mnist//a_50_5000.pt",
        "mnist/a_50_5000.pt\0.txt",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str, tmp_path: Path) -> None:
    release = Release()
    release.add("a")
    source = release.write_zip(tmp_path / "release.zip")
    with zipfile.ZipFile(source, "a") as archive:
        info = zipfile.ZipInfo("placeholder")
        info.filename = info.orig_filename = name
        archive.writestr(info, b"")
    with pytest.raises(ReleaseError, match="found a name that leads elsewhere"):
        import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    "name", ["readme.txt", "mnist/readme.txt", "mnist/run.pt", "mnist/deep/a_50_5000.pt", "other/a_50_5000.pt"]
)
def test_files_that_no_release_holds_are_refused_by_name(release: Release, name: str, tmp_path: Path) -> None:
    release.files[name] = b""
    with pytest.raises(ReleaseError, match=f"{name}': unknown file, expected MNIST-Transformers/mnist/RUN_EPOCH"):
        run_import(release, tmp_path)


def test_links_in_a_zip_are_refused(release: Release, tmp_path: Path) -> None:
    source = release.write_zip(tmp_path / "release.zip")
    with zipfile.ZipFile(source, "a") as archive:
        info = zipfile.ZipInfo("MNIST-Transformers/mnist/link_50_5000.pt")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(ReleaseError, match=r"link_50_5000\.pt': found a link or special file"):
        import_release(source, "mnist", tmp_path / "sweep", progress=False)


@pytest.mark.parametrize("to_folder", [False, True])
def test_links_in_a_folder_are_refused(release: Release, to_folder: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    secret = outside / "a_50_5000.pt"
    secret.write_bytes(saved(state_dict("mnist", 1)))
    folder = release.write_folder(tmp_path / "folder")
    if to_folder:
        (folder / "ag_news").symlink_to(outside)
    else:
        (folder / "MNIST-Transformers" / "mnist" / secret.name).symlink_to(secret)
    with pytest.raises(ReleaseError, match="found a link or special file"):
        import_release(folder, "mnist", tmp_path / "sweep", progress=False)


def test_encrypted_files_are_refused(release: Release, tmp_path: Path) -> None:
    source = release.write_zip(tmp_path / "release.zip")
    content = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as archive:
        content[archive.start_dir + 8] |= 1  # the flags of the first file in the central directory
    source.write_bytes(content)
    with pytest.raises(ReleaseError, match="found an encrypted file"):
        import_release(source, "mnist", tmp_path / "sweep", progress=False)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version needed", 250, "cannot be read (zip file version 25.0), expected a zip archive or a folder"),
        ("name", 0xFF, "cannot be read ('utf-8' codec can't decode byte 0xff"),
        ("method", 9, "metadata/mnist.csv: cannot be read (That compression method is not supported); get it again"),
        ("method", 99, "metadata/mnist.csv: cannot be read (That compression method is not supported); get it again"),
        ("local name", 0xFF, "metadata/mnist.csv: cannot be read ('utf-8' codec can't decode byte 0xff"),
    ],
)
def test_archives_that_no_zip_reader_takes_are_one_line(
    release: Release, field: str, value: int, message: str, tmp_path: Path
) -> None:
    source = release.write_zip(tmp_path / "release.zip")
    content = bytearray(source.read_bytes())
    utf8 = 8  # in the higher byte of the flags
    with zipfile.ZipFile(source) as archive:
        table = next(info for info in archive.infolist() if info.filename.endswith(".csv"))
        local = table.header_offset
        central = content.index(table.filename.encode(), archive.start_dir) - 46
    if field == "local name":
        content[local + 7] |= utf8
        content[local + 30] = value
    else:
        content[central + 9] |= utf8
        content[central + {"version needed": 6, "method": 10, "name": 46}[field]] = value
    source.write_bytes(content)
    with pytest.raises(ReleaseError, match=re.escape(message)) as caught:
        import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert str(caught.value).startswith(f"{source}: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_unpacks_to_more_than_a_checkpoint_is_not_unpacked(
    release: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = release.add("bomb", "50", 0.5, state=bytes(100_000_000), lr=5e-3)
    source = release.write_zip(tmp_path / "release.zip", zipfile.ZIP_DEFLATED)
    assert source.stat().st_size < 1_500_000
    unpacked = []
    read = ReleaseArchive._read
    monkeypatch.setattr(ReleaseArchive, "_read", lambda self, e: unpacked.append(e.file) or read(self, e))
    report = import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert name not in unpacked
    assert report.findings[0].reason == "found 100000000 bytes, expected at most 139560"


def test_a_size_that_lies_yields_no_more_than_it_says(release: Release, tmp_path: Path) -> None:
    name = release.add("bomb", "50", 0.5, state=bytes(1_000_000), lr=5e-3)
    source = release.write_zip(tmp_path / "release.zip", zipfile.ZIP_DEFLATED)
    content = source.read_bytes()
    source.write_bytes(content.replace((1_000_000).to_bytes(4, "little"), (90_000).to_bytes(4, "little")))
    report = import_release(source, "mnist", tmp_path / "sweep", progress=False)
    assert found(report) == {"unreadable": [name]}
    assert "Bad CRC-32" in report.findings[0].reason


def test_a_checkpoint_that_is_a_zip_bomb_itself_is_not_loaded(release: Release, tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/data/0", bytes(50_000_000))
    name = release.add("bomb", "50", 0.5, state=inner.getvalue(), lr=5e-3)
    report, _ = run_import(release, tmp_path)
    assert found(report) == {"unreadable": [name]}
    assert "bytes inside, expected at most 139560" in report.findings[0].reason


def test_sources_that_are_no_release_say_what_was_expected(release: Release, tmp_path: Path) -> None:
    (tmp_path / "text.zip").write_text("no zip")
    for source, expected in (
        (tmp_path / "absent.zip", "no such file, expected a zip archive or a folder"),
        (tmp_path / "text.zip", "File is not a zip file"),
        (release.write_folder(tmp_path / "folder") / "MNIST-Transformers" / "mnist", "expected one metadata/mnist.csv"),
    ):
        with pytest.raises(ReleaseError, match=expected):
            import_release(source, "mnist", tmp_path / "sweep", progress=False)
    with pytest.raises(ReleaseError, match="found no table of checkpoints, expected one metadata/ag_news"):
        import_release(release.write_zip(tmp_path / "r.zip"), "ag_news", tmp_path / "sweep", progress=False)
    with pytest.raises(ReleaseError, match="task: found 'cifar'"):
        import_release(tmp_path / "r.zip", "cifar", tmp_path / "sweep", progress=False)


def test_a_table_without_a_column_names_it_and_its_likeness(release: Release, tmp_path: Path) -> None:
    for row in release.rows:
        row["learning_rate"] = row.pop("lr")
        row["accuracy"] = row.pop("test_top1_accuracy")
    with pytest.raises(ReleaseError, match="expected lr, test_top1_accuracy or test_accuracy too"):
        run_import(release, tmp_path)


def test_a_release_of_nothing_usable_says_why(tmp_path: Path) -> None:
    release = Release()
    release.add("a", optimizer="adamw")
    with pytest.raises(ReleaseError, match=r"no checkpoint with both a file and a usable row.*found 'adamw'"):
        run_import(release, tmp_path)
