"""The loopback Hub itself: what the real clients read through it, what it counts, and that its faults strike."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import IncompleteRead, RemoteDisconnected
from pathlib import Path

import pytest
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, HfFileSystem, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from loopback_dataset import REPO, contents, write_dataset
from loopback_hub import READ_TOKEN, WRITE_TOKEN, Exchange, Fault, LoopbackHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with LoopbackHub(tmp_path / "home", page_size=3) as hub:
        hub.connect(monkeypatch)
        yield hub


def fetch(hub: LoopbackHub, path: str, **headers: str) -> bytes:
    request = urllib.request.Request(f"{hub.url}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


class TestClient:
    def test_upload_commit_and_read_back(self, hub: LoopbackHub, tmp_path: Path) -> None:
        write_dataset(tmp_path / "dataset")
        api = HfApi()
        api.create_repo(REPO, repo_type="dataset", private=True)
        api.upload_folder(repo_id=REPO, repo_type="dataset", folder_path=tmp_path / "dataset")
        assert hub.files(REPO) == contents(tmp_path / "dataset")
        assert hub.repository(REPO).private
        tree = {entry.path: entry for entry in api.list_repo_tree(REPO, repo_type="dataset", recursive=True)}
        assert set(tree) - {"ag_news", "assets", "index", "mnist", "plans"} == {".gitattributes", *hub.files(REPO)}
        assert tree["ag_news/embedding.safetensors"].lfs.size == len(hub.files(REPO)["ag_news/embedding.safetensors"])
        # git's own id of these bytes, as `git hash-object` prints it.
        assert tree["ag_news/vocabulary.txt"].blob_id == "cb2af90770f61209f123b27815e6f1f0021512aa"
        local = hf_hub_download(REPO, "provenance.json", repo_type="dataset")
        assert Path(local).read_bytes() == b'{"version": 0}'
        assert Path(local).is_relative_to(hub.home)
        assert hub.unknown == []

    def test_commits_tags_and_revisions(self, hub: LoopbackHub) -> None:
        api = HfApi()
        first = hub.put(REPO, {"a/one.txt": b"1", "a/two.txt": b"2", "b.txt": b"3"})
        api.create_tag(REPO, tag="v1", repo_type="dataset")
        second = api.create_commit(
            REPO,
            [CommitOperationDelete("a/"), CommitOperationAdd("c.txt", b"4")],
            commit_message="less",
            repo_type="dataset",
            parent_commit=first,
        )
        assert hub.files(REPO) == {"b.txt": b"3", "c.txt": b"4"}
        assert hub.repository(REPO).head.title == "less"
        assert set(hub.files(REPO, "v1")) == {"a/one.txt", "a/two.txt", "b.txt"}
        assert api.dataset_info(REPO, revision="v1").sha == first
        assert api.dataset_info(REPO).sha == second.oid
        assert [tag.target_commit for tag in api.list_repo_refs(REPO, repo_type="dataset").tags] == [first]
        with pytest.raises(HfHubHTTPError) as error:
            api.create_commit(
                REPO, [CommitOperationDelete("b.txt")], commit_message="late", repo_type="dataset", parent_commit=first
            )
        assert error.value.response.status_code == 412
        with pytest.raises(HfHubHTTPError) as error:
            api.create_tag(REPO, tag="v1", repo_type="dataset")
        assert error.value.response.status_code == 409
        with pytest.raises(RevisionNotFoundError):
            api.dataset_info(REPO, revision="v2")
        assert hub.files(REPO) == {"b.txt": b"3", "c.txt": b"4"}

    def test_file_system_reads_ranges(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"letters.bin": bytes(range(100))})
        with HfFileSystem(endpoint=hub.url, skip_instance_cache=True).open(
            f"datasets/{REPO}/letters.bin", cache_type="none"
        ) as file:
            file.seek(90)
            assert file.read(5) == bytes(range(90, 95))
        assert hub.counters.sent(file="letters.bin") == 5

    def test_tokens_decide(self, hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.put(REPO, {"b.txt": b"3"}, private=True)
        hub.connect(monkeypatch, READ_TOKEN)
        assert HfApi().dataset_info(REPO).private
        with pytest.raises(HfHubHTTPError) as error:
            HfApi().create_tag(REPO, tag="v1", repo_type="dataset")
        assert error.value.response.status_code == 403
        with pytest.raises(RepositoryNotFoundError):
            HfApi(token=False).dataset_info(REPO)
        with pytest.raises(HfHubHTTPError) as error:
            HfApi(token="hf_unknown").dataset_info(REPO)
        assert error.value.response.status_code == 401


LOAD = """
import json, sys
from datasets import load_dataset

repo, good = sys.argv[1], dict(filters=[("test_accuracy", ">=", 0.975)])
wanted = dict(split="train", columns=["run_id", "weight", "test_accuracy"])
streamed = list(load_dataset(repo, "mnist", streaming=True, **wanted, **good))
loaded = load_dataset(repo, "mnist", **wanted, **good)
index = load_dataset(repo, "index", split="index", streaming=True)
runs = [row["run_id"] for row in streamed], loaded["run_id"][:]
print(json.dumps([*runs, len(streamed[0]["weight"]), len(list(index))]))
"""


def test_load_dataset_streaming_and_not_with_columns_and_filters(hub: LoopbackHub, tmp_path: Path) -> None:
    """datasets#7867: filters must not fail against sizes in the card."""
    write_dataset(tmp_path / "dataset", rows=81, shards=3)
    hub.upload(REPO, tmp_path / "dataset")
    best = ["v0-0", "v0-1", "v0-2"]
    assert hub.run(LOAD, REPO) == [best, best, 64, 82]
    assert hub.unknown == []


class TestCounters:
    def test_bytes_are_counted_by_file_and_path(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"mnist/a.bin": bytes(1000), "mnist/b.bin": bytes(500)})
        where = f"/datasets/{REPO}/resolve/main/mnist"
        fetch(hub, f"{where}/a.bin", Range="bytes=0-9")
        fetch(hub, f"{where}/a.bin", Range="bytes=-20")
        fetch(hub, f"{where}/b.bin")
        assert hub.counters.sent_by_file() == {"mnist/a.bin": 30, "mnist/b.bin": 500}
        assert hub.counters.sent(file="mnist/*") == 530
        assert hub.counters.sent(file="*/a.bin") == 30
        assert hub.counters.exchanges(file="*/b.bin") == [
            Exchange("GET", f"{where}/b.bin", "mnist/b.bin", status=200, received=0, sent=500)
        ]
        assert [exchange.status for exchange in hub.counters.exchanges()] == [206, 206, 200]
        hub.counters.reset()
        assert hub.counters.requests() == 0

    def test_head_sends_no_bytes_but_says_how_many(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"mnist/a.bin": bytes(1000)})
        request = urllib.request.Request(f"{hub.url}/datasets/{REPO}/resolve/main/mnist/a.bin", method="HEAD")
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["X-Linked-Size"] == answer.headers["Content-Length"] == "1000"
            assert answer.headers["X-Repo-Commit"] == hub.repository(REPO).head.oid
        assert hub.counters.sent() == 0
        assert hub.counters.requests("HEAD") == 1

    def test_unserved_addresses_are_remembered(self, hub: LoopbackHub) -> None:
        with pytest.raises(urllib.error.HTTPError):
            fetch(hub, "/api/spaces?search=zoo")
        assert hub.unknown == ["GET /api/spaces?search=zoo"]


class TestFaults:
    @pytest.mark.parametrize("status", [401, 403, 409, 412, 429, 500])
    def test_status_strikes_as_often_as_asked(self, hub: LoopbackHub, status: int) -> None:
        hub.put(REPO, {"a.txt": b"1"})
        path = f"/datasets/{REPO}/resolve/main/a.txt"
        hub.faults.append(Fault("GET", "*/a.txt", status=status, headers={"Retry-After": "3"}, skip=1, times=2))
        assert fetch(hub, path) == b"1"
        for _ in range(2):
            with pytest.raises(urllib.error.HTTPError) as error:
                fetch(hub, path)
            assert (error.value.code, error.value.headers["Retry-After"]) == (status, "3")
        assert fetch(hub, path) == b"1"

    def test_other_requests_pass(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"a.txt": b"1"})
        hub.faults.append(Fault("PUT", status=500, times=None))
        hub.faults.append(Fault(path="/api/*", status=500, times=None))
        assert fetch(hub, f"/datasets/{REPO}/resolve/main/a.txt") == b"1"

    def test_cut_answers(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"a.bin": bytes(1000)})
        path = f"/datasets/{REPO}/resolve/main/a.bin"
        hub.faults += [Fault(cut_response=0), Fault(cut_response=10)]
        with pytest.raises((RemoteDisconnected, ConnectionError)):
            fetch(hub, path)
        with pytest.raises(IncompleteRead):
            fetch(hub, path)
        assert hub.counters.sent() == 10
        assert len(fetch(hub, path)) == 1000

    def test_cut_upload_is_not_kept(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {})
        hub.faults.append(Fault("POST", "*/commit/*", cut_request=20))
        addition = CommitOperationAdd("a.txt", b"1")
        with pytest.raises(Exception, match=r"disconnected|reset|closed"):
            HfApi().create_commit(REPO, [addition], commit_message="cut", repo_type="dataset")
        assert hub.files(REPO) == {}
        assert hub.counters.exchanges("POST", "*/commit/*")[0].received == 20

    def test_before_runs_ahead_of_the_answer(self, hub: LoopbackHub) -> None:
        hub.put(REPO, {"a.txt": b"1"})
        hub.faults.append(Fault(before=lambda: hub.put(REPO, {"a.txt": b"2"}), delay=0.01))
        assert fetch(hub, f"/datasets/{REPO}/resolve/main/a.txt") == b"2"

    def test_wrong_content_is_refused(self, hub: LoopbackHub) -> None:
        request = urllib.request.Request(f"{hub.url}/lfs/{'0' * 64}", data=b"not that", method="PUT")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=10)
        assert hub.store.objects == {}


def test_environment_is_complete(tmp_path: Path) -> None:
    with LoopbackHub(tmp_path) as hub:
        environment = hub.environment()
        assert environment["HF_ENDPOINT"] == hub.url
        assert environment["HF_HUB_DISABLE_XET"] == "1"
        assert environment["HF_HOME"] == str(tmp_path)
        assert environment["HF_TOKEN"] == WRITE_TOKEN
        assert "HF_TOKEN" not in hub.environment(token=None)
        assert hub.url.startswith("http://127.0.0.1:")
