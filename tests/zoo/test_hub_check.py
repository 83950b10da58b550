import hashlib
from pathlib import Path

import pytest
from loopback_dataset import REPO, contents, seal
from loopback_hub import Fault, LoopbackHub

from zoo.errors import HubError
from zoo.hub import publish, verify_repository

pytest_plugins = ["loopback_fixtures"]


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
