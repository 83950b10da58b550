import json
import os
import signal
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from loopback_dataset import REPO, contents, seal, write_dataset
from loopback_hub import READ_TOKEN, WRITE_TOKEN, Fault, LoopbackHub

from zoo.errors import HubError
from zoo.hub import publish
from zoo.hub_folder import read_folder
from zoo.hub_session import ATTEMPTS, Session

pytest_plugins = ["loopback_fixtures"]


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
        assert hub.commits(REPO) == 2

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
        assert hub.commits(REPO) == 1
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
        assert hub.commits(REPO) == 3

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
            ({"Retry-After": "1.5"}, [1.5, 1.5]),
            ({"Retry-After": "Wed, 21 Oct 2015 07:28:00"}, [0.0, 0.0]),
            ({"Retry-After": "soon"}, [1.0, 2.0]),
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
        assert hub.commits(REPO) == 0

    def test_unreachable_hub_is_an_error_that_names_it(
        self, hub: LoopbackHub, folder: Path, waits: list[float]
    ) -> None:
        hub.faults.append(Fault(cut_response=0, times=None))
        with pytest.raises(HubError, match=rf"reading main: {hub.url} could not be reached"):
            publish(folder, REPO)
        assert len(waits) == ATTEMPTS - 1

    @pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://hub.invalid"])
    def test_a_hub_that_is_not_there_is_told_soon(self, waits: list[float], address: str) -> None:
        session = Session(REPO)
        session.api = huggingface_hub.HfApi(endpoint=address)
        with pytest.raises(HubError, match=rf"reading main: {address} could not be reached; nothing was sent") as error:
            session.revision()
        assert "resumes" not in str(error.value)
        assert waits == [1.0]

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
        assert hub.commits(REPO) == 0

    def test_hub_without_xet_is_an_error_with_the_variable_to_set(
        self, hub: LoopbackHub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """huggingface_hub#4507: uploads fail without a hint against a Hub that has no Xet."""
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
        with pytest.raises(HubError, match=rf"{hub.url} has no Xet storage; set HF_HUB_DISABLE_XET=1"):
            publish(folder, REPO)
        assert hub.commits(REPO) == 0

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
        assert WRITE_TOKEN not in printed.out + printed.err + "".join(traceback.format_exception(error.value))
        assert all(WRITE_TOKEN.encode() not in content for content in contents(folder).values())
