import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from loopback_dataset import contents, seal, write_dataset
from loopback_hub import READ_TOKEN, WRITE_TOKEN, Fault, LoopbackHub

from zoo.errors import DatasetError, HubError
from zoo.hub import publish, verify_repository
from zoo.hub_folder import SECRETS, read_folder
from zoo.hub_plan import PLACEHOLDER, data_files, plan_steps
from zoo.hub_session import ATTEMPTS, RemoteFile, Revision

REPO = "user/small-transformer-zoo"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    """A Hub that this process's client talks to; every address asked for must be one it knows."""
    with LoopbackHub(tmp_path / "home") as hub:
        hub.connect(monkeypatch)
        yield hub
    assert hub.unknown == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_dataset(tmp_path / "dataset")
    return tmp_path / "dataset"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that publishing, or the client within it, would have waited."""
    seconds: list[float] = []
    monkeypatch.setattr("zoo.hub_session.sleep", seconds.append)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=seconds.append))
    return seconds


def run(hub: LoopbackHub, program: str, *arguments: str) -> dict:
    """What a Python program prints as JSON in a process of its own, whose libraries know only this Hub."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **hub.environment()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def commits(hub: LoopbackHub) -> int:
    """Commits beside the one with which the Hub begins a repository."""
    return len(hub.repository(REPO).commits) - 1


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
        first = publish(folder, REPO)
        hub.counters.reset()
        again = publish(folder, REPO)
        assert commits(hub) == 1
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
        assert commits(hub) == 2
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
        assert commits(hub) == 1

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
        assert commits(hub) == 0

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
        assert commits(hub) == 1
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


class TestInterruption:
    def test_cut_upload_resumes_with_what_is_missing(self, hub: LoopbackHub, folder: Path, waits: list[float]) -> None:
        """A connection that breaks in the middle of a file, for as long as the client keeps trying."""
        publish(folder, REPO)
        before = hub.files(REPO)
        write_dataset(folder, rows=60, shards=3, version=1)
        lost = read_folder(folder).files[next(name for name in contents(folder) if name.startswith("mnist/"))]
        hub.faults.append(Fault("PUT", f"/lfs/{lost.sha256}", cut_request=100, times=None))
        with pytest.raises(HubError, match=r"uploading: .* run the same command again later, it resumes"):
            publish(folder, REPO)
        assert hub.files(REPO) == before
        hub.faults.clear()
        hub.counters.reset()
        large = {
            file.sha256: file.size for file in read_folder(folder).files.values() if file.path.suffix == ".parquet"
        }
        missing = large.keys() - hub.store.objects.keys()
        assert lost.sha256 in missing
        assert missing < large.keys()
        publish(folder, REPO)
        assert {exchange.path for exchange in hub.counters.exchanges("PUT")} == {f"/lfs/{sha}" for sha in missing}
        assert hub.counters.received("PUT") == sum(large[sha] for sha in missing)
        assert hub.files(REPO) == contents(folder)
        assert commits(hub) == 2

    @pytest.mark.parametrize("moment", [("PUT", "/lfs/*"), ("POST", "*/preupload/*"), ("POST", "*/validate-yaml")])
    def test_ctrl_c_leaves_main_as_it_was(self, hub: LoopbackHub, folder: Path, moment: tuple[str, str]) -> None:
        publish(folder, REPO)
        before = hub.files(REPO)
        write_dataset(folder, version=1)
        hub.faults.append(Fault(*moment, before=lambda: os.kill(os.getpid(), signal.SIGINT), delay=0.01))
        with pytest.raises(KeyboardInterrupt):
            publish(folder, REPO)
        assert hub.files(REPO) == before
        publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)

    def test_lost_answer_does_not_commit_twice(self, hub: LoopbackHub, folder: Path, waits: list[float]) -> None:
        """The commit was made, only its answer was lost: the client does not know, and asks again."""
        hub.faults.append(Fault("POST", "*/commit/*", cut_response=0))
        report = publish(folder, REPO, tag="v1")
        assert commits(hub) == 1
        assert hub.repository(REPO).tags == {"v1": report.commit}
        assert waits == [1.0]


class TestConcurrentPublisher:
    def test_commit_of_somebody_else_is_built_upon(self, hub: LoopbackHub, folder: Path) -> None:
        publish(folder, REPO)
        write_dataset(folder, version=1)
        other = {"mnist/train-00000-of-00001-0badcafe.parquet": b"of another publisher"}
        hub.faults.append(Fault("POST", "*/commit/*", before=lambda: hub.put(REPO, other)))
        hub.counters.reset()
        report = publish(folder, REPO)
        assert [exchange.status for exchange in hub.counters.exchanges("POST", "*/commit/*")] == [412, 200]
        assert hub.files(REPO) == contents(folder)
        assert report.commits == [hub.repository(REPO).head.oid]

    def test_endless_conflicts_end_in_an_error(self, hub: LoopbackHub, folder: Path) -> None:
        publish(folder, REPO)
        write_dataset(folder, version=1)
        numbers = iter(range(100))
        intrude = lambda: hub.put(REPO, {"provenance.json": str(next(numbers)).encode()})  # noqa: E731
        hub.faults.append(Fault("POST", "*/commit/*", before=intrude, times=None))
        hub.counters.reset()
        with pytest.raises(HubError, match="somebody else committed during each of 5 attempts"):
            publish(folder, REPO)
        assert hub.counters.requests("POST", "*/commit/*") == 5

    def test_two_publishers_at_once_end_with_one_of_the_two(self, hub: LoopbackHub, tmp_path: Path) -> None:
        versions = [tmp_path / "one", tmp_path / "two"]
        for version, folder in enumerate(versions):
            write_dataset(folder, version=version)
        publish(versions[0], REPO)
        write_dataset(versions[0], version=2)
        threads = [threading.Thread(target=publish, args=(folder, REPO)) for folder in versions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert hub.files(REPO) in [contents(folder) for folder in versions]
        assert commits(hub) == 3

    def test_repository_that_appears_meanwhile_is_used(self, hub: LoopbackHub, folder: Path) -> None:
        """409 from the creation: somebody was faster."""
        hub.faults.append(Fault("POST", "/api/repos/create", before=lambda: hub.store.create(REPO, private=False)))
        publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)


class TestRefusals:
    @pytest.mark.parametrize(
        ("headers", "expected"),
        [
            ({"Retry-After": "7"}, [7.0, 7.0]),
            ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, [0.0, 0.0]),
            ({"RateLimit": '"api";r=0;t=55'}, [55.0, 55.0]),
            ({}, [1.0, 2.0]),
        ],
    )
    def test_429_is_waited_out_as_long_as_the_hub_says(
        self, hub: LoopbackHub, folder: Path, waits: list[float], headers: dict[str, str], expected: list[float]
    ) -> None:
        hub.faults.append(Fault("POST", "*/commit/*", status=429, headers=headers, times=2))
        publish(folder, REPO)
        assert waits == expected
        assert hub.files(REPO) == contents(folder)

    def test_429_for_hours_is_told_instead_of_waited_for(
        self, hub: LoopbackHub, folder: Path, waits: list[float]
    ) -> None:
        hub.faults.append(Fault("POST", "*/commit/*", status=429, headers={"Retry-After": "7200"}))
        with pytest.raises(HubError, match="asks to wait 7200 s"):
            publish(folder, REPO)
        assert waits == []

    @pytest.mark.parametrize("status", [500, 503])
    @pytest.mark.parametrize(
        "path", [f"/api/datasets/{REPO}", "/api/repos/create", "/lfs/*", "*/preupload/*", "*/tag/*", "*/tree/*"]
    )
    def test_passing_server_error_does_no_harm(
        self, hub: LoopbackHub, folder: Path, waits: list[float], path: str, status: int
    ) -> None:
        hub.faults.append(Fault(path=path, status=status))
        report = publish(folder, REPO, tag="v1")
        assert hub.files(REPO) == contents(folder)
        assert hub.repository(REPO).tags == {"v1": report.commit}
        assert waits == [1.0]

    def test_lasting_server_error_ends_after_a_bounded_number_of_tries(
        self, hub: LoopbackHub, folder: Path, waits: list[float]
    ) -> None:
        hub.faults.append(Fault("POST", "*/commit/*", status=502, times=None))
        with pytest.raises(HubError, match="committing: the Hub kept answering 502; run the same command again later"):
            publish(folder, REPO)
        assert hub.counters.requests("POST", "*/commit/*") == ATTEMPTS
        assert waits == [1.0, 2.0, 4.0, 8.0, 16.0]
        assert commits(hub) == 0

    def test_unreachable_hub_is_an_error_that_names_it(
        self, hub: LoopbackHub, folder: Path, waits: list[float]
    ) -> None:
        hub.faults.append(Fault(cut_response=0, times=None))
        with pytest.raises(HubError, match=rf"reading main: {hub.url} could not be reached"):
            publish(folder, REPO)
        assert len(waits) == ATTEMPTS - 1

    @pytest.mark.parametrize(
        ("status", "expected"),
        [(401, "does not accept the token .*HF_TOKEN.*hf auth login"), (403, "lacks a permission .*may write")],
    )
    @pytest.mark.parametrize("path", ["/api/repos/create", "*/preupload/*", "*/commit/*", "*/lfs/*", "*/tag/*"])
    def test_401_and_403_are_errors_at_once(
        self, hub: LoopbackHub, folder: Path, waits: list[float], path: str, status: int, expected: str
    ) -> None:
        hub.faults.append(Fault(path=path, status=status, times=None))
        with pytest.raises(HubError, match=expected) as error:
            publish(folder, REPO, tag="v1")
        assert waits == []
        assert "\n" not in str(error.value)
        assert "second try" in str(error.value)

    def test_read_only_token_is_refused(self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.connect(monkeypatch, READ_TOKEN)
        with pytest.raises(HubError, match=r"creating the repository: the token lacks a permission \(403\)"):
            publish(folder, REPO)

    def test_broken_card_is_refused_by_name(self, hub: LoopbackHub, folder: Path) -> None:
        (folder / "README.md").write_text("---\nlicense: [mit\n---\n")
        seal(folder)
        with pytest.raises(HubError, match=r"committing: the Hub refused it \(400\): Invalid metadata in README\.md"):
            publish(folder, REPO)
        assert commits(hub) == 0

    def test_hub_without_xet_is_an_error_with_the_variable_to_set(
        self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """huggingface_hub#4507: uploads fail without a hint against a Hub that has no Xet."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
        with pytest.raises(HubError, match=rf"{hub.url} has no Xet storage; set HF_HUB_DISABLE_XET=1"):
            publish(folder, REPO)
        assert commits(hub) == 0

    def test_commit_that_differs_from_the_folder_is_noticed(self, hub: LoopbackHub, folder: Path) -> None:
        """A Hub that ignores a file, as one with a .gitignore does."""
        preupload = hub.api.preupload

        def ignoring(question: object, **names: str) -> object:
            answer = json.loads(preupload(question, **names).body)
            ignored = [file | {"shouldIgnore": file["path"] == "provenance.json"} for file in answer["files"]]
            return SimpleNamespace(status=200, headers={}, body=json.dumps({"files": ignored}).encode())

        routes = hub.api.routes
        routes[:] = [(verb, path, ignoring if serve == preupload else serve) for verb, path, serve in routes]
        with pytest.raises(HubError, match=r"differs from the folder in 1 file\(s\) \(provenance\.json\)"):
            publish(folder, REPO, tag="v1")
        assert hub.repository(REPO).tags == {}


class TestTokens:
    def test_token_of_the_hubs_own_file_serves(
        self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.connect(monkeypatch, token=None)
        hub.home.mkdir()
        (hub.home / "token").write_text(WRITE_TOKEN)
        publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)

    def test_no_token_is_an_error_before_any_request(
        self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.connect(monkeypatch, token=None)
        with pytest.raises(HubError, match="set HF_TOKEN or run `hf auth login`"):
            publish(folder, REPO)
        assert hub.counters.requests() == 0

    def test_token_is_never_printed(
        self, hub: LoopbackHub, folder: Path, waits: list[float], capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Not even where the Hub's own words repeat it."""
        hub.faults.append(Fault("POST", "*/commit/*", status=503, message=f"busy with {WRITE_TOKEN}"))
        hub.faults.append(Fault("POST", "*/commit/*", status=422, message=f"what is {WRITE_TOKEN}?"))
        with pytest.raises(HubError, match=r"refused it \(422\).*what is \*\*\*\?") as error:
            publish(folder, REPO)
        printed = capfd.readouterr()
        assert WRITE_TOKEN not in printed.out + printed.err + str(error.value)
        assert error.value.__suppress_context__
        assert all(WRITE_TOKEN.encode() not in content for content in contents(folder).values())

    @pytest.mark.parametrize(
        ("kind", "secret"),
        [
            ("a Hugging Face token", "hf_" + "aB3" * 11 + "x"),
            ("a GitHub token", "ghp_" + "a1B2" * 9),
            ("a GitHub token", "github_pat_" + "11ABCDEFG0" * 3),
            ("an AWS key id", "AKIA" + "IOSFODNN7EXAMPLE"),
            ("a Google key", "AIza" + "Sy_-1" * 7),
            ("an API key", "sk-" + "proj-4567" * 3),
            ("a Slack token", "xoxb-" + "123456789012"),
            ("a private key", "-----BEGIN OPENSSH " + "PRIVATE KEY-----"),
            ("a password in a URL", "https://me:hunter2" + "@example.org/data"),
        ],
    )
    @pytest.mark.parametrize("name", ["README.md", "provenance.json", "plans/000.json"])
    def test_secret_in_a_text_is_refused_before_any_request(
        self, hub: LoopbackHub, folder: Path, name: str, kind: str, secret: str
    ) -> None:
        (folder / name).write_text(f'{{\n"key": "{secret}"}}\n')
        seal(folder)
        with pytest.raises(DatasetError, match=rf"{name}, line 2: found what looks like {kind}") as error:
            publish(folder, REPO)
        assert secret not in str(error.value)
        assert hub.counters.requests() == 0

    def test_token_in_use_is_found_whatever_it_looks_like(
        self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "plain.words")
        (folder / "provenance.json").write_text('{"environment": "plain.words"}')
        seal(folder)
        with pytest.raises(DatasetError, match=r"provenance\.json, line 1: .* the Hub token in use"):
            publish(folder, REPO)

    def test_ordinary_text_is_no_secret(self) -> None:
        text = (
            b"hf_hub_download, sk-learn, a task-specific scheme https://github.com:443/x, mail@example.org, "
            + b"0" * 64
        )
        assert [kind for kind, pattern in SECRETS.items() if pattern.search(text)] == []


class TestFolder:
    def test_folder_without_checksums_names_the_command_that_makes_them(self, hub: LoopbackHub, folder: Path) -> None:
        (folder / "SHA256SUMS").unlink()
        with pytest.raises(DatasetError, match=r"found no SHA256SUMS, .*zoo build"):
            publish(folder, REPO)
        assert hub.counters.requests() == 0

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("0" * 63 + "  plans/000.json", "expected '<sha256>  <relative path>'"),
            ("0" * 64 + " *plans/000.json", "expected '<sha256>  <relative path>'"),
            ("0" * 64 + "  ../elsewhere", "is hidden"),
            ("0" * 64 + "  plans/../../elsewhere", "is hidden"),
            ("0" * 64 + "  /etc/passwd", "no plain path inside"),
            ("0" * 64 + "  ./README.md", "no plain path inside"),
            ("0" * 64 + "  .git/config", "is hidden"),
            ("0" * 64 + "  plans/.000.json", "is hidden"),
            ("0" * 64 + "  SHA256SUMS", "no plain path inside"),
            ("0" * 64 + "  README.md", "listed twice"),
            ("0" * 64 + "  plans/001.json", "listed in SHA256SUMS but missing"),
            ("0" * 64 + "  plans", "listed in SHA256SUMS but missing"),
        ],
    )
    def test_odd_line_is_refused(self, folder: Path, line: str, expected: str) -> None:
        with (folder / "SHA256SUMS").open("a") as sums:
            sums.write(line + "\n")
        with pytest.raises(DatasetError, match=expected):
            read_folder(folder)

    @pytest.mark.parametrize("name", ["provenance.json", "plans", "SHA256SUMS"])
    def test_links_are_refused(self, folder: Path, tmp_path: Path, name: str) -> None:
        (folder / name).rename(tmp_path / "elsewhere")
        (folder / name).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(DatasetError, match="SHA256SUMS" if name == "SHA256SUMS" else "found a link"):
            read_folder(folder)

    def test_dataset_without_card_is_refused(self, folder: Path) -> None:
        (folder / "README.md").unlink()
        seal(folder)
        with pytest.raises(DatasetError, match=r"found no README\.md in it"):
            read_folder(folder)


class TestManyFiles:
    """Above 100 additions: several commits, and every revision of main is a consistent dataset."""

    def test_steps_hide_new_shards_from_every_revision_but_the_last(self, hub: LoopbackHub, folder: Path) -> None:
        write_dataset(folder, rows=230, shards=230)
        report = publish(folder, REPO)
        assert len(report.commits) == 4
        write_dataset(folder, rows=120, shards=120, version=1)
        published = publish(folder, REPO)
        assert len(published.commits) == 3
        revisions = [hub.files(REPO, commit) for commit in report.commits + published.commits]
        assert [len([name for name in files if name.startswith("mnist/")]) for files in revisions] == [
            *(97, 197, 230, 230),
            *(330, 350, 120),
        ]
        for files in revisions[:3]:
            assert files["README.md"] == PLACEHOLDER.encode()
            assert not any(name.startswith("index/") or name == "SHA256SUMS" for name in files)
        for commit in (report.commits[-1], published.commits[-1]):
            assert verify_repository(REPO, commit) == []
        for files in revisions[3:6]:
            assert {name: files[name] for name in revisions[3]} == revisions[3]
        assert hub.files(REPO) == contents(folder)

    def test_interruption_between_steps_is_resumed(self, hub: LoopbackHub, folder: Path) -> None:
        write_dataset(folder, rows=130, shards=130)
        hub.faults.append(Fault("POST", "*/commit/*", status=403, skip=1))
        with pytest.raises(HubError, match="403"):
            publish(folder, REPO)
        assert commits(hub) == 1
        hub.counters.reset()
        publish(folder, REPO)
        assert hub.counters.requests("PUT") == 0
        assert hub.files(REPO) == contents(folder)

    def test_conflict_between_steps_is_planned_anew(self, hub: LoopbackHub, folder: Path) -> None:
        write_dataset(folder, rows=130, shards=130)
        hub.faults.append(Fault("POST", "*/commit/*", skip=1, before=lambda: hub.put(REPO, {"LICENSE": b"MIT"})))
        publish(folder, REPO)
        assert hub.files(REPO) == contents(folder)

    @pytest.mark.parametrize(
        ("card", "steps"),
        [
            ("---\nconfigs:\n- config_name: mnist\n  data_files: mnist/old.parquet\n---\n", 3),
            ("---\nconfigs:\n- config_name: mnist\n  data_files: mnist/*\n---\n", 2),
            ("---\nconfigs:\n- config_name: mnist\n  data_files: '**'\n---\n", 1),
            ("---\nconfigs:\n- config_name: mnist\n  data_dir: mnist\n---\n", 1),
            ("---\nlicense: mit\n---\n", 1),
            ("no metadata at all", 1),
            ("---\nconfigs: [mit\n---\n", 1),
        ],
    )
    def test_names_that_the_earlier_card_uses_wait_for_the_last_commit(
        self, folder: Path, card: str, steps: int
    ) -> None:
        write_dataset(folder, rows=130, shards=130)
        old = {name: RemoteFile(name, 1, "0" * 64, "") for name in ("README.md", "SHA256SUMS", "mnist/old.parquet")}
        plan = plan_steps(REPO, read_folder(folder), Revision("c0ffee0", False, old), card)
        assert len(plan) == steps
        assert plan[-1].delete == ["mnist/old.parquet"]
        assert any(name.startswith("mnist/") for name in plan[0].add) == (steps != 2)
        assert sum(len(step.add) for step in plan) == len(contents(folder))
        assert {"README.md", "SHA256SUMS"} <= plan[-1].add.keys()

    def test_data_files_of_all_forms_are_read(self) -> None:
        configs = """
- {config_name: a, data_files: one}
- {config_name: b, data_files: [two, three]}
- {config_name: c, data_files: {train: four, test: [five]}}
- {config_name: d, data_files: [{split: train, path: six}, {split: test, path: [seven]}]}
"""
        names = {"one", "two", "three", "four", "five", "six", "seven"}
        assert data_files(f"---\nconfigs:{configs}---\n") == names
        assert data_files(f"---\nconfigs:{configs}- {{config_name: e}}\n---\n") is None


class TestVerifyRepository:
    @pytest.fixture
    def published(self, hub: LoopbackHub, folder: Path) -> LoopbackHub:
        publish(folder, REPO, tag="v1")
        hub.counters.reset()
        return hub

    def test_sound_dataset_has_no_problems_and_no_weights_are_read(self, published: LoopbackHub) -> None:
        assert verify_repository(REPO) == []
        assert published.counters.sent(file="mnist/*") == published.counters.sent(file="*.safetensors") == 0
        assert published.counters.sent(file="index/*") > 0

    def test_deep_reads_all_of_it(self, published: LoopbackHub, folder: Path) -> None:
        assert verify_repository(REPO, deep=True) == []
        sent = published.counters.sent_by_file()
        assert {name for name, size in sent.items() if size >= (folder / name).stat().st_size} == set(contents(folder))

    def test_changed_large_file_is_found_by_its_listed_digest(self, published: LoopbackHub) -> None:
        name = next(name for name in published.files(REPO) if name.startswith("mnist/"))
        published.put(REPO, {name: b"other weights"})
        actual = hashlib.sha256(b"other weights").hexdigest()
        (problem,) = verify_repository(REPO)
        assert problem.startswith(f"{name}: its SHA-256 is {actual}, SHA256SUMS says ")
        assert verify_repository(f"{REPO}@v1") == verify_repository(REPO, "v1") == []

    def test_changed_small_file_is_found_by_reading_it(self, published: LoopbackHub) -> None:
        published.put(REPO, {"provenance.json": b"{}"})
        assert [problem.split(":")[0] for problem in verify_repository(REPO)] == ["provenance.json"]

    def test_missing_and_unknown_files_are_found(self, published: LoopbackHub) -> None:
        name = next(name for name in published.files(REPO) if name.startswith("mnist/"))
        index = next(name for name in published.files(REPO) if name.startswith("index/"))
        published.put(REPO, {"mnist/train-00000-of-00001-0badcafe.parquet": b"left over"}, delete=(name,))
        assert verify_repository(REPO) == [
            f"{name}: listed in SHA256SUMS but missing",
            "mnist/train-00000-of-00001-0badcafe.parquet: not listed in SHA256SUMS",
            f"{name}: named by the card (README.md) but missing",
            f"{name}: named by {index} but missing",
        ]

    def test_only_deep_finds_storage_that_lost_bits(self, published: LoopbackHub) -> None:
        """The Hub lists the digest it was told; what it stores may still have rotted."""
        name, blob = next(
            (name, blob) for name, blob in published.repository(REPO).head.files.items() if name.startswith("mnist/")
        )
        assert blob.sha256
        object.__setattr__(blob, "data", blob.data[:-1] + b"\0")
        assert verify_repository(REPO) == []
        assert [problem.split(":")[0] for problem in verify_repository(REPO, deep=True)] == [name]

    def test_card_that_leaves_its_files_to_guessing_is_a_problem(self, published: LoopbackHub, folder: Path) -> None:
        (folder / "README.md").write_text("---\nlicense: mit\n---\n")
        seal(folder)
        publish(folder, REPO)
        assert verify_repository(REPO) == ["README.md: its configs do not name their files"]

    def test_other_repositories(self, published: LoopbackHub) -> None:
        published.put("user/other", {"README.md": b"# other"})
        assert verify_repository("user/other") == [
            "SHA256SUMS: missing; this repository was not published with `zoo publish`"
        ]
        published.put("user/broken", {"SHA256SUMS": b"not a digest"})
        assert verify_repository("user/broken")[0].startswith("user/broken/SHA256SUMS, line 1: found 'not a digest'")
        for name in ("user/nothing", f"{REPO}@v9"):
            with pytest.raises(HubError, match="found no such dataset or revision"):
                verify_repository(name)

    def test_reading_survives_passing_faults(self, published: LoopbackHub, waits: list[float]) -> None:
        published.faults.append(Fault("GET", "*/resolve/*/mnist/*", cut_response=10))
        published.faults.append(Fault("GET", "*/resolve/*/SHA256SUMS", status=503))
        assert verify_repository(REPO, deep=True) == []


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
    assert run(hub, LOAD_VERSIONS, str(folder), REPO) == [
        *[[40, "v0-0", columns]] * 2,
        [40, "v0-0", True],
        *[[40, "v1-0", ["epoch", *columns]]] * 2,
        [40, "v1-0", True],
        *[[12, "v2-0", columns]] * 2,
        [12, "v2-0", True],
        "v0-0",
    ]


LOAD_EVERY_REVISION = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests")
import zoo.hub_plan
from datasets import load_dataset
from loopback_dataset import write_dataset
from zoo.hub import publish

zoo.hub_plan.FILES_PER_COMMIT = 4
folder, repo = Path(sys.argv[1]), sys.argv[2]
commits = []
for version, shards in enumerate([7, 6]):
    write_dataset(folder, 40 - version, shards, version)
    commits += publish(folder, repo).commits
seen = []
for commit in commits:
    try:
        loaded = load_dataset(repo, split="train", revision=commit)
        seen.append([len(loaded), loaded[0]["run_id"]])
    except Exception as error:
        seen.append("publishing-has-not-finished" in str(error))
print(json.dumps(seen))
"""


def test_no_revision_ever_loads_a_part_of_a_dataset(hub: LoopbackHub, folder: Path) -> None:
    seen = run(hub, LOAD_EVERY_REVISION, str(folder), REPO)
    assert seen == [True, True, True, [40, "v0-0"], [40, "v0-0"], [40, "v0-0"], [39, "v1-0"]]
