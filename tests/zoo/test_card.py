import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Features
from datasets.info import DatasetInfosDict
from huggingface_hub import DatasetCard
from large_sweep import write_large_sweep
from matplotlib.image import imread

from zoo.builder import build
from zoo.card import content_version, size_category
from zoo.plots import curve_matrix
from zoo.schema import CURVES, INDEX_COLUMNS, SCALARS

pytest_plugins = ["dataset_fixtures"]


@pytest.fixture
def card(dataset: Path) -> DatasetCard:
    return DatasetCard.load(dataset / "README.md")


def configs(folder: Path) -> dict[str, dict[str, Any]]:
    data = DatasetCard.load(folder / "README.md").data.to_dict()
    return {config["config_name"]: config for config in data["configs"]}


def shard_rows(folder: Path, task: str, columns: list[str]) -> pd.DataFrame:
    paths = [path for split in configs(folder)[task]["data_files"] for path in split["path"]]
    return pa.concat_tables(pq.read_table(folder / path, columns=columns) for path in paths).to_pandas()


class TestMetadata:
    def test_fields_that_the_hub_knows(self, card: DatasetCard) -> None:
        data = card.data
        assert (data.license, data.pretty_name) == ("mit", "Small Transformer Zoo")
        assert data.task_categories == ["other"]
        assert {"model-zoo", "weight-space-learning", "mnist", "arxiv:2410.04209"} <= set(data.tags)
        assert data.size_categories == ["n<1K"]

    def test_configs_name_every_file_once_and_one_is_the_default(self, two_tasks: Path) -> None:
        found = configs(two_tasks)
        assert list(found) == ["ag_news", "mnist", "index"]
        assert [name for name, config in found.items() if config.get("default")] == ["ag_news"]
        paths = [path for config in found.values() for split in config["data_files"] for path in split["path"]]
        on_disk = {path.relative_to(two_tasks).as_posix() for path in two_tasks.rglob("*.parquet")}
        assert len(paths) == len(set(paths)) and set(paths) == on_disk
        for task in ("ag_news", "mnist"):
            for split in found[task]["data_files"]:
                assert all(path.startswith(f"{task}/{split['split']}-") for path in split["path"])

    @pytest.mark.parametrize("fixture", ["dataset", "two_tasks"])
    def test_card_and_shards_agree_datasets_8608(self, fixture: str, request: pytest.FixtureRequest) -> None:
        """The features in the card are the columns of the files that it names, all of them, in their order; and no
        sizes of splits are declared, which filters would contradict (datasets#7867)."""
        folder = request.getfixturevalue(fixture)
        infos = DatasetInfosDict.from_dataset_card_data(DatasetCard.load(folder / "README.md").data)
        found = configs(folder)
        assert infos.keys() == found.keys()
        for name, config in found.items():
            assert infos[name].splits is None
            for split in config["data_files"]:
                for path in split["path"]:
                    schema = pq.read_schema(folder / path)
                    assert infos[name].features == Features.from_arrow_schema(schema)
                    assert list(infos[name].features) == schema.names

    def test_versions_follow_from_names(self) -> None:
        assert content_version(["a", "b"]) == content_version(["a", "b"]) == "1.0.2115565367"
        assert len({content_version(names) for names in (["a"], ["b"], ["a", "b"], ["b", "a"], ["ab"])}) == 5

    @pytest.mark.parametrize(
        ("rows", "category"),
        [(999, "n<1K"), (1_000, "1K<n<10K"), (62_756, "10K<n<100K"), (126_552, "100K<n<1M"), (1_000_000, "1M<n<10M")],
    )
    def test_size_category(self, rows: int, category: str) -> None:
        assert size_category(rows) == category


class TestFigures:
    def test_counts_equal_those_of_the_shards(self, two_tasks: Path) -> None:
        text = (two_tasks / "README.md").read_text()
        for task, runs in (("mnist", 26), ("ag_news", 4)):
            rows = shard_rows(two_tasks, task, ["epoch_label", "optimizer", "test_accuracy"])
            low, high = rows["test_accuracy"].min(), rows["test_accuracy"].max()
            weights = {"mnist": "18,506", "ag_news": "17,764"}[task]
            line = f"- `{task}`: {len(rows)} checkpoints of {runs} runs, {weights} parameters each, test accuracy "
            assert f"{line}{low:.3f} to {high:.3f}\n" in text
            section = text[text.index(f"`{task}`, checkpoints by epoch label") :]
            table = [line.strip("| ").split(" | ") for line in section.splitlines()[2:8]]
            header, body = table[0], table[2:]
            assert [line[0] for line in body] == ["0", "1", "2", "best"]
            for line in body:
                for optimizer, count in zip(header[1:-1], line[1:-1], strict=True):
                    chosen = (rows["epoch_label"] == line[0]) & (rows["optimizer"] == optimizer)
                    assert int(count) == chosen.sum()
                assert int(line[-1]) == (rows["epoch_label"] == line[0]).sum()
        assert "Runs: diverged 2, finished 24." in text

    def test_what_was_cut_and_what_is_unknown(self, two_tasks: Path) -> None:
        """A quarter of the made-up texts has 21 tokens, more than the 16 that are kept."""
        text = (two_tasks / "README.md").read_text()
        assert "25.00% of the training texts and 25.00% of the test texts have more than 16 tokens and were cut" in text
        assert "0.00% and 0.00% of their tokens have no vector" in text
        assert "96 training and 40 test samples (source: csv)" in text

    def test_licences_of_the_tasks_at_hand(self, dataset: Path, two_tasks: Path) -> None:
        assert "CC BY-SA 3.0" in (dataset / "README.md").read_text()
        assert "AG's corpus" not in (dataset / "README.md").read_text()
        assert "AG's corpus" in (two_tasks / "README.md").read_text()

    def test_every_column_and_tensor_is_explained(self, card: DatasetCard) -> None:
        for column in (*SCALARS, *CURVES, *INDEX_COLUMNS):
            assert f"| `{column.name}`" in card.text and column.meaning in card.text
        assert "| `embedding.conv1.weight` | 32 x 1 x 4 x 4 | embedding |" in card.text

    def test_nothing_is_left_to_fill_in(self, card: DatasetCard) -> None:
        assert not re.search(r"\$\w", card.text)
        for limit in ("chosen by the accuracy", "padding is masked", "start from one draw", "Runs that diverged"):
            assert limit in card.text

    def test_no_machine_is_named(self, two_tasks: Path) -> None:
        for name in ("README.md", "provenance.json", *(f"plans/{p.name}" for p in two_tasks.glob("plans/*"))):
            assert str(Path.home()) not in (two_tasks / name).read_text()
            assert "/tmp" not in (two_tasks / name).read_text()


class TestSnippets:
    def test_they_run_as_they_are(
        self, dataset: Path, card: DatasetCard, monkeypatch: pytest.MonkeyPatch, hf_cache: Path
    ) -> None:
        monkeypatch.chdir(dataset.parent)
        snippets = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
        assert len(snippets) == 4
        spaces: list[dict[str, Any]] = []
        for snippet in snippets:
            spaces.append({})
            exec(compile(snippet, "README.md", "exec"), spaces[-1])
        loading, filtering, asking, toolkit = spaces
        assert loading["zoo"][0]["encoder.0.attention.queries.weight"].shape == (32, 32)
        assert filtering["row"]["classifier.fc2.weight"].shape == (10, 32)
        assert len(asking["index"]) == 26 * 4
        assert 0 < len(toolkit["best"]) == len(toolkit["weights"]["classifier.fc2.bias"]) == len(toolkit["accuracy"])
        assert toolkit["accuracy"].min() >= filtering["row"]["test_accuracy"] > 0
        assert len(toolkit["rmsprop"]) + len(toolkit["others"]) == len(toolkit["encoders"])
        assert set(toolkit["rmsprop"].metadata["optimizer"].to_pylist()) == {"rmsprop"}


class TestPlots:
    def test_the_card_shows_each_once(self, two_tasks: Path) -> None:
        shown = re.findall(r"!\[.+?\]\((.+?)\)", (two_tasks / "README.md").read_text())
        kinds = ("accuracy-by-epoch-label", "accuracy-by-hyperparameter", "learning-curves")
        assert [re.sub(r"-[0-9a-f]{8}\.png$", "", name) for name in shown] == [
            f"assets/{task}-{kind}" for task in ("ag_news", "mnist") for kind in kinds
        ]
        assert {two_tasks / name for name in shown} == set(two_tasks.glob("assets/*"))
        for name in shown:
            pixels = imread(two_tasks / name)[..., :3]
            assert pixels.std() > 0.05 and min(pixels.shape[:2]) > 200

    def test_one_label_and_one_run_are_enough(self, tmp_path: Path) -> None:
        write_large_sweep(tmp_path / "sweep", 1, epochs=1, labels=("best",))
        build([tmp_path / "sweep"], tmp_path / "zoo", progress=False)
        assert len(list((tmp_path / "zoo").glob("assets/*.png"))) == 3

    def test_curves_of_different_length(self) -> None:
        curves = pa.chunked_array([pa.array([[0.1, None, 0.3], None, [0.5]], pa.list_(pa.float64()))])
        expected = np.array([[0.1, np.nan, 0.3], [np.nan] * 3, [0.5, np.nan, np.nan]])
        assert np.array_equal(curve_matrix(curves), expected, equal_nan=True)
