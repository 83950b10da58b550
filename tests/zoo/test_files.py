import os
import threading
from pathlib import Path

import pytest

from zoo import files
from zoo.errors import StoreError
from zoo.files import LocalStorage
from zoo.storage import open_storage


def test_of_many_puts_of_one_name_exactly_one_wins_and_its_content_stays(tmp_path: Path) -> None:
    path, winners, barrier = tmp_path / "deep" / "seal.json", [], threading.Barrier(16)

    def put(number: int) -> None:
        barrier.wait()
        if files.put_if_absent(path, b"%d" % number):
            winners.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert path.read_bytes() == b"%d" % winners[0]
    assert [p.name for p in path.parent.iterdir()] == ["seal.json"]


@pytest.mark.parametrize("url", ["file:///tmp/x", "gs://bucket/x", "S3://bucket/x"])
def test_a_url_of_another_kind_is_no_folder(url: str) -> None:
    with pytest.raises(StoreError, match=rf"^{url}: found the scheme \w+://, expected a folder or s3://bucket/prefix"):
        open_storage(url)


def test_a_folder_may_have_a_colon(tmp_path: Path) -> None:
    assert open_storage(f"{tmp_path}/a:b").root == tmp_path / "a:b"


def test_a_write_replaces_whole_contents(tmp_path: Path) -> None:
    path = tmp_path / "state"
    files.write(path, b"long content")
    files.write(path, b"short")
    assert path.read_bytes() == b"short"


def test_content_is_flushed_before_it_gets_its_name_and_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "a" / "b" / "file", []
    fsync, rename, link = os.fsync, os.rename, os.link

    def flushed(descriptor: int) -> None:
        target = Path(f"/proc/self/fd/{descriptor}").readlink()
        steps.append(("flush", "file" if target.name.startswith(files.TEMPORARY_PREFIX) else target.name))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", lambda *names: (steps.append(("rename", path.name)), rename(*names)))
    monkeypatch.setattr(os, "link", lambda *names: (steps.append(("link", path.name)), link(*names)))
    files.write(path, b"content")
    # Each new folder is flushed into the one that holds it: without that, a commit could outlive its files.
    assert steps == [("flush", tmp_path.name), ("flush", "a"), ("flush", "file"), ("rename", "file"), ("flush", "b")]
    steps.clear()
    files.put_if_absent(path.with_name("seal"), b"content")
    assert steps == [("flush", "file"), ("link", "file"), ("flush", "b")]


@pytest.mark.parametrize("operation", [files.write, files.put_if_absent])
def test_a_failing_flush_leaves_nothing_behind(
    operation: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    files.write(tmp_path / "old", b"old")
    monkeypatch.setattr(os, "fsync", fail)
    for name in ("old", "new"):
        with pytest.raises(OSError, match="Input/output error"):
            operation(tmp_path / name, b"content")  # type: ignore[operator]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"old": b"old"}


def test_storage_lists_what_is_finished_and_walks_over_everything(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.write("a/b/one", b"1")
    storage.write_hint("a/two", b"22")
    (tmp_path / "a" / f"{files.TEMPORARY_PREFIX}torn").write_bytes(b"333")
    assert storage.children("a") == ["b", "two"]
    assert storage.children("nothing") == storage.children("a/two") == []
    assert {name: entry.size for name, entry in storage.walk("").items()} == {
        "a/b/one": 1,
        "a/two": 2,
        "a/.tmp-torn": 3,
    }
    storage.remove("a/two")
    storage.remove("a/two")
    storage.remove_folder("a/b")
    storage.remove_folder("a/b")
    assert storage.children("a") == []
    with pytest.raises(FileNotFoundError):
        storage.read("a/two")


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    here = os.statvfs(tmp_path)
    found = LocalStorage(tmp_path / "not" / "yet").free_bytes()
    assert found == pytest.approx(here.f_bavail * here.f_frsize, rel=0.2)


def test_a_relative_root_does_not_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage(Path("sweep"))
    monkeypatch.chdir("/")
    storage.write("name", b"content")
    assert (tmp_path / "sweep" / "name").read_bytes() == b"content"
