from pathlib import Path

import pytest
from loopback_dataset import REPO, contents, write_dataset
from loopback_hub import Fault, LoopbackHub

from zoo.errors import DatasetError, HubError
from zoo.hub import publish, verify_repository

pytest_plugins = ["loopback_fixtures"]


class TestPublish:
    def test_new_repository_holds_exactly_what_the_checksums_list(self, hub: LoopbackHub, folder: Path) -> None:
        (folder / ".cache").mkdir()
        (folder / ".cache" / "secret").write_text("hidden")
        (folder / "notes.txt").write_text("a note that nobody listed")
        report = publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)
        assert report.commits == [report.commit] == [hub.repository(REPO).head.oid]
        assert report.created
        assert report.unlisted == [".cache/secret", "notes.txt"]
        assert report.added == sorted(contents(folder))
        assert report.added_bytes == sum(map(len, contents(folder).values()))
        assert report.url == f"{hub.url}/datasets/{REPO}"
        assert not hub.repository(REPO).private

    def test_same_content_makes_no_commit_and_uploads_nothing(self, hub: LoopbackHub, folder: Path) -> None:
        first = publish(str(folder), REPO)
        hub.counters.reset()
        again = publish(folder, REPO)
        assert hub.commits(REPO) == 1
        assert hub.counters.requests("PUT") == hub.counters.requests("POST") == 0
        assert (again.commit, again.commits, again.added, again.created) == (first.commit, [], [], False)

    def test_smaller_dataset_replaces_a_larger_one_in_one_commit(self, hub: LoopbackHub, folder: Path) -> None:
        write_dataset(folder, shards=4)
        publish(folder, REPO)
        old = set(hub.files(REPO))
        write_dataset(folder, rows=20, shards=1, version=1)
        hub.counters.reset()
        report = publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)
        assert hub.commits(REPO) == 2
        assert report.deleted == sorted(old - set(contents(folder)))
        # One shard and the index are new; picture, embedding and vocabulary are there already.
        shards = [name for name in contents(folder) if name.endswith(".parquet")]
        assert hub.counters.received("PUT") == sum((folder / name).stat().st_size for name in shards)
        assert "ag_news/embedding.safetensors" not in report.added

    def test_dry_run_writes_nothing(self, hub: LoopbackHub, folder: Path) -> None:
        report = publish(folder, REPO, dry_run=True, tag="v1.0.0")
        assert REPO not in hub.store.repositories
        assert (report.created, report.commit, report.added) == (True, None, sorted(contents(folder)))
        publish(folder, REPO)
        write_dataset(folder, shards=1)
        hub.counters.reset()
        report = publish(folder, REPO, dry_run=True, tag="v1.0.0")
        assert len(report.deleted) == 3
        assert hub.counters.requests() == hub.counters.requests("GET")
        assert hub.commits(REPO) == 1

    def test_verification_comes_before_any_request(self, hub: LoopbackHub, folder: Path) -> None:
        with pytest.raises(DatasetError, match=r"found 2 problem\(s\): shard 1 is torn; shard 2 is missing"):
            publish(folder, REPO, verify=lambda _: ["shard 1 is torn", "shard 2 is missing"])
        assert hub.counters.requests() == 0
        assert publish(folder, REPO, verify=lambda _: []).created

    def test_file_that_changed_after_the_build_is_not_committed(self, hub: LoopbackHub, folder: Path) -> None:
        shard = next((folder / "mnist").iterdir())
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
        with pytest.raises(DatasetError, match=rf"{shard.name}: differs from its digest in SHA256SUMS; .*zoo build"):
            publish(folder, REPO)
        assert hub.commits(REPO) == 0

    def test_files_of_somebody_else_are_not_deleted(self, hub: LoopbackHub, folder: Path) -> None:
        hub.put(REPO, {"README.md": b"# mine", "thesis.pdf": b"years of work"})
        with pytest.raises(HubError, match=r"1 file\(s\) that `zoo publish` did not put there \(thesis\.pdf"):
            publish(folder, REPO)
        assert hub.files(REPO) == {"README.md": b"# mine", "thesis.pdf": b"years of work"}

    def test_repository_that_the_web_page_made_is_used(self, hub: LoopbackHub, folder: Path) -> None:
        hub.put(REPO, {"README.md": b"---\nlicense: mit\n---\n", "LICENSE": b"MIT"})
        publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)

    def test_slow_hub_is_waited_for(self, hub: LoopbackHub, folder: Path) -> None:
        hub.faults.append(Fault(delay=0.02, times=None))
        publish(folder, REPO, tag="v1.0.0")
        assert verify_repository(f"{REPO}@v1.0.0") == []

    @pytest.mark.parametrize("repo", ["zoo", "user/zoo/mnist", "https://huggingface.co/user/zoo", "user/zo o", "-a/b"])
    def test_repository_needs_owner_and_name(self, hub: LoopbackHub, folder: Path, repo: str) -> None:
        with pytest.raises(HubError, match="expected user/name"):
            publish(folder, repo)
        assert hub.counters.requests() == 0


class TestVisibility:
    def test_private_repository_is_created_private(self, hub: LoopbackHub, folder: Path) -> None:
        publish(folder, REPO, private=True)
        assert hub.repository(REPO).private
        assert verify_repository(REPO) == []

    @pytest.mark.parametrize("private", [True, False])
    def test_other_visibility_than_asked_for_is_an_error(self, hub: LoopbackHub, folder: Path, private: bool) -> None:
        hub.put(REPO, {}, private=not private)
        hub.counters.reset()
        found, asked = ("public", "private") if private else ("private", "public")
        with pytest.raises(HubError, match=f"found a {found} repository, expected a {asked} one"):
            publish(folder, REPO, private=private)
        assert hub.counters.requests() == hub.counters.requests("GET")


class TestTag:
    def test_tag_marks_the_published_commit(self, hub: LoopbackHub, folder: Path) -> None:
        report = publish(folder, REPO, tag="v1.0.0")
        assert hub.repository(REPO).tags == {"v1.0.0": report.commit}
        assert publish(folder, REPO, tag="v1.0.0").commit == report.commit
        publish(folder, REPO, tag="v1.0.1")
        assert hub.repository(REPO).tags == {"v1.0.0": report.commit, "v1.0.1": report.commit}

    def test_tag_of_another_version_is_refused_before_anything_changes(self, hub: LoopbackHub, folder: Path) -> None:
        first = publish(folder, REPO, tag="v1.0.0")
        write_dataset(folder, version=1)
        with pytest.raises(HubError, match=rf"tag v1\.0\.0 marks another version already \(commit {first.commit}\)"):
            publish(folder, REPO, tag="v1.0.0")
        assert hub.commits(REPO) == 1
        publish(folder, REPO)
        with pytest.raises(HubError, match="marks another version"):
            publish(folder, REPO, tag="v1.0.0")
        assert hub.repository(REPO).tags == {"v1.0.0": first.commit}

    def test_tag_that_somebody_sets_meanwhile_is_seen(self, hub: LoopbackHub, folder: Path) -> None:
        tags = "*/tag/*"
        hub.faults.append(Fault("POST", tags, before=lambda: hub.repository(REPO).tags.update(v1=first)))
        first = hub.put(REPO, {})
        with pytest.raises(HubError, match="tag v1 marks another version"):
            publish(folder, REPO, tag="v1")

    def test_odd_tag_is_refused(self, hub: LoopbackHub, folder: Path) -> None:
        with pytest.raises(HubError, match="expected a name such as"):
            publish(folder, REPO, tag="my tag")
        assert hub.counters.requests() == 0


LOAD_VERSIONS = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
from datasets import load_dataset
from loopback_dataset import write_dataset
from zoo.hub import publish

folder, repo = Path(sys.argv[1]), sys.argv[2]
seen = []
for version, (rows, shards) in enumerate([(40, 2), (40, 2), (12, 1)]):
    write_dataset(folder, rows, shards, version, extra_column=version == 1)
    publish(folder, repo, tag=f"v{version}")
    for streaming in (False, True):
        loaded = load_dataset(repo, split="train", streaming=streaming)
        table = list(loaded)
        seen.append([len(table), table[0]["run_id"], sorted(loaded.features)])
    index = load_dataset(repo, "index", split="index")
    seen.append([len(index), index[0]["run_id"], "file" in index.features])
seen.append(load_dataset(repo, split="train", revision="v0")[0]["run_id"])
print(json.dumps(seen))
"""


def test_every_publication_is_what_the_next_load_dataset_sees(hub: LoopbackHub, folder: Path) -> None:
    """datasets#2956: old rows from the cache; datasets#8608: a card that keeps old features when a column joins."""
    columns = ["run_id", "test_accuracy", "weight"]
    assert hub.run(LOAD_VERSIONS, str(folder), REPO) == [
        *[[40, "v0-0", columns]] * 2,
        [41, "v0-0", True],
        *[[40, "v1-0", ["epoch", *columns]]] * 2,
        [41, "v1-0", True],
        *[[12, "v2-0", columns]] * 2,
        [13, "v2-0", True],
        "v0-0",
    ]
