from pathlib import Path

import pytest
from loopback_dataset import REPO, contents, write_dataset
from loopback_hub import Fault, LoopbackHub

from zoo.errors import HubError
from zoo.hub import publish, verify_repository
from zoo.hub_folder import read_folder
from zoo.hub_plan import PLACEHOLDER, data_files, plan_steps
from zoo.hub_session import RemoteFile, Revision

pytest_plugins = ["loopback_fixtures"]


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
        assert hub.commits(REPO) == 1
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
    seen = hub.run(LOAD_EVERY_REVISION, str(folder), REPO)
    assert seen == [True, True, True, [40, "v0-0"], [40, "v0-0"], [40, "v0-0"], [39, "v1-0"]]
