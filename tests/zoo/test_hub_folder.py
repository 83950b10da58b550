from pathlib import Path

import pytest
from loopback_dataset import REPO, seal
from loopback_hub import LoopbackHub

from zoo.errors import DatasetError
from zoo.hub import publish
from zoo.hub_folder import SECRETS, read_folder

pytest_plugins = ["loopback_fixtures"]


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


class TestSecrets:
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
