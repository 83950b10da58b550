import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from dataset_tools import ROWS_A_GROUP, CountingFiles, ids
from loopback_hub import LoopbackHub

from zoo.dataset import Checkpoints, Zoo, open_zoo
from zoo.errors import DatasetError

pytest_plugins = ["dataset_fixtures", "loopback_fixtures"]

REPO = "user/small-transformer-zoo"


def shard_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("mnist/*.parquet"))


def best(zoo: Zoo, share: float) -> Checkpoints:
    """The best of all checkpoints."""
    whole = zoo.checkpoints()
    return whole.take(np.arange(int(len(whole) * share)))


def needed(folder: Path, chosen: Checkpoints) -> int:
    """Bytes of the row groups and columns that hold a selection."""
    total = 0
    places = set(zip(chosen.metadata["file"].to_pylist(), chosen.metadata["row_group"].to_pylist(), strict=True))
    for file, group in places:
        row_group = pq.read_metadata(folder / file).row_group(group)
        columns = map(row_group.column, range(row_group.num_columns))
        wanted = chosen.tensors().keys()
        total += sum(c.total_compressed_size for c in columns if c.path_in_schema.split(".list")[0] in wanted)
    return total


def footers(folder: Path) -> int:
    return sum(pq.read_metadata(path).serialized_size + 8 for path in folder.glob("mnist/*.parquet"))


class TestBytes:
    """What is read, in bytes: local files that count, and the loopback Hub that counts what it sends."""

    def test_the_best_two_percent(self, grouped: Path, counted: Callable[[Path], tuple[Zoo, CountingFiles]]) -> None:
        zoo, files = counted(grouped)
        chosen = best(zoo, 0.02)
        assert len(chosen.tensors()["classifier.fc1.bias"]) == 25
        read = sum(count for name, count in files.read.items() if not name.startswith("index"))
        assert read < 0.10 * shard_bytes(grouped)
        assert read <= 1.05 * needed(grouped, chosen) + 2 * footers(grouped)  # the ids of the rows come along

    def test_one_component_reads_only_its_columns(
        self, grouped: Path, counted: Callable[[Path], tuple[Zoo, CountingFiles]]
    ) -> None:
        zoo, files = counted(grouped)
        chosen = zoo.checkpoints(components=["embedding"])
        chosen.tensors()
        read = sum(count for name, count in files.read.items() if not name.startswith("index"))
        assert read < 0.10 * shard_bytes(grouped)

    def test_metadata_questions_read_no_shard(
        self, grouped: Path, counted: Callable[[Path], tuple[Zoo, CountingFiles]]
    ) -> None:
        zoo, files = counted(grouped)
        assert len(zoo.checkpoints(filters=[("test_accuracy", ">", 0.5)])) > 0
        assert zoo.index.num_rows == 1280
        assert all(name.startswith("index") or name == "README.md" for name in files.read)
        assert sum(files.read.values()) < 1_000_000

    def test_a_stream_that_stops_has_read_no_further(
        self, grouped: Path, counted: Callable[[Path], tuple[Zoo, CountingFiles]]
    ) -> None:
        zoo, files = counted(grouped)
        chosen = zoo.checkpoints(split="train")
        metadata, _ = next(chosen.stream())
        assert len(metadata) == ROWS_A_GROUP
        read = sum(count for name, count in files.read.items() if not name.startswith("index"))
        assert read <= needed(grouped, chosen.take(np.arange(ROWS_A_GROUP))) + 2 * footers(grouped)


class TestHub:
    def test_a_selection_fetches_its_row_groups_and_no_more(self, grouped: Path, hub: LoopbackHub) -> None:
        hub.upload(REPO, grouped)
        zoo = open_zoo(REPO)
        hub.counters.reset()
        chosen = best(zoo, 0.02)
        assert hub.counters.sent() < 1_000_000  # metadata alone
        assert hub.counters.sent(file="mnist/*") == 0
        found = chosen.tensors()
        sent = hub.counters.sent(file="mnist/*")
        assert sent < 0.10 * shard_bytes(grouped)
        local = best(open_zoo(grouped), 0.02)
        assert sent <= 1.05 * needed(grouped, local) + 2 * footers(grouped)  # the ids of the rows come along
        assert ids(chosen) == ids(local)
        assert all(torch.equal(found[name], values) for name, values in local.tensors().items())

    def test_streams_and_components_read_no_further(self, grouped: Path, hub: LoopbackHub) -> None:
        hub.upload(REPO, grouped)
        chosen = open_zoo(REPO).checkpoints(split="train", components=["classifier"])
        hub.counters.reset()
        next(chosen.stream(seed=0, groups=1))
        assert hub.counters.sent(file="mnist/*") < 0.02 * shard_bytes(grouped) + 2 * footers(grouped)

    def test_a_revision_is_pinned_when_it_is_opened(self, dataset: Path, two_tasks: Path, hub: LoopbackHub) -> None:
        first = hub.upload(REPO, dataset)
        zoo = open_zoo(REPO)
        stale = tuple(name for name in hub.files(REPO) if name.startswith(("mnist/", "index/")))
        hub.put(
            REPO,
            {
                path.relative_to(two_tasks).as_posix(): path.read_bytes()
                for path in two_tasks.rglob("*")
                if path.is_file()
            },
            delete=stale,
        )
        for opened in (zoo, open_zoo(REPO, revision=first), open_zoo(f"hf://datasets/{REPO}@{first}")):
            assert opened.tasks == ["mnist"]
            assert len(opened.checkpoints().tensors()["classifier.fc1.bias"]) == len(opened.checkpoints())
        assert open_zoo(REPO).tasks == ["ag_news", "mnist"]
        vectors, _ = open_zoo(REPO).embedding("ag_news")
        assert torch.equal(vectors, open_zoo(two_tasks).embedding("ag_news")[0])

    def test_what_is_not_there(self, dataset: Path, hub: LoopbackHub) -> None:
        with pytest.raises(DatasetError, match="found no dataset of this name and revision"):
            open_zoo("user/other")
        hub.upload(REPO, dataset)
        with pytest.raises(DatasetError, match=r"revision \(v9\)"):
            open_zoo(REPO, revision="v9")

    @pytest.mark.parametrize("address", ["foo://bucket/zoo", "gs://bucket/zoo"])
    def test_an_address_that_nobody_can_read(self, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "gcsfs", None)  # as if it were not installed
        with pytest.raises(DatasetError, match=rf"^{address}: fsspec cannot read such an address \(.+\), expected a"):
            open_zoo(address)

    def test_nobody_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(DatasetError, match=r"found no folder, and http://127\.0\.0\.1:9 could not be asked"):
            open_zoo(REPO)


def test_datasets_reads_the_hub_by_row_groups(grouped: Path, hub: LoopbackHub) -> None:
    """load_dataset from the Hub, streaming with filters and columns and not, in a process that knows only this Hub."""
    hub.upload(REPO, grouped)
    threshold = float(open_zoo(grouped).checkpoints(split="train").metadata["test_accuracy"][17].as_py())
    hub.counters.reset()
    program = f"""
import json
from datasets import load_dataset
rows = load_dataset({REPO!r}, "mnist", split="train", streaming=True,
                    columns=["checkpoint_id", "test_accuracy", "classifier.fc2.weight"],
                    filters=[("test_accuracy", ">=", {threshold!r})])
streamed = [row["checkpoint_id"] for row in rows]
index = load_dataset({REPO!r}, "index", split="train")
print(json.dumps([streamed, len(index)]))
"""
    streamed, rows = hub.run(program)
    assert sorted(streamed) == sorted(ids(open_zoo(grouped).checkpoints(split="train"))[: len(streamed)])
    assert len(streamed) == 18 and rows == 1280
    assert hub.counters.sent(file="mnist/*") < 0.10 * shard_bytes(grouped)
