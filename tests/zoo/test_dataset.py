import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from dataset_tools import CountingFiles, Stored, ids
from datasets import load_dataset

from generators.architecture import SmallTransformer, tensor_table
from zoo.dataset import Zoo, open_zoo
from zoo.errors import DatasetError
from zoo.reading import Source

pytest_plugins = ["dataset_fixtures"]

TENSORS = [spec.name for spec in tensor_table("mnist")]


def equal_to_stored(tensors: dict[str, torch.Tensor], names: list[str], stored: Stored) -> bool:
    return all(
        values[row].numpy().tobytes() == stored[checkpoint_id][name].tobytes()
        for name, values in tensors.items()
        for row, checkpoint_id in enumerate(names)
    )


class TestLoadDataset:
    """What somebody has who has never heard of this toolkit."""

    def test_as_written_in_the_folder_above(
        self, dataset: Path, stored: Stored, monkeypatch: pytest.MonkeyPatch, hf_cache: Path
    ) -> None:
        monkeypatch.chdir(dataset.parent)
        found = load_dataset("small-transformer-zoo")
        assert set(found) == {"train", "validation", "test"}
        assert sum(found.num_rows.values()) == len(stored)

    def test_rows_are_the_stored_checkpoints_bit_for_bit(self, dataset: Path, stored: Stored, hf_cache: Path) -> None:
        seen = 0
        for split in load_dataset(str(dataset), "mnist").with_format("torch").values():
            columns = split[:]
            names = columns["checkpoint_id"]
            assert equal_to_stored({name: columns[name] for name in TENSORS}, names, stored)
            seen += len(names)
        assert seen == len(stored)

    def test_shapes_one_by_one_in_batches_and_streaming(self, dataset: Path, hf_cache: Path) -> None:
        whole = load_dataset(str(dataset), split="train").with_format("torch")
        stream = load_dataset(str(dataset), split="train", streaming=True).with_format("torch")
        batch = next(iter(stream.batch(3)))
        for spec in tensor_table("mnist"):
            assert whole[0][spec.name].shape == spec.shape
            assert whole[:2][spec.name].shape == (2, *spec.shape)
            assert torch.equal(next(iter(stream))[spec.name], whole[0][spec.name])
            assert torch.equal(torch.as_tensor(batch[spec.name]), whole[:3][spec.name])

    @pytest.mark.parametrize("streaming", [False, True])
    def test_filters_and_columns_datasets_7867(
        self, dataset: Path, frame: pd.DataFrame, hf_cache: Path, streaming: bool
    ) -> None:
        """Filters do not fail against sizes that the card declares, as it declares none."""
        threshold = float(frame["test_accuracy"].median())
        found = load_dataset(
            str(dataset),
            "mnist",
            split="train",
            streaming=streaming,
            columns=["checkpoint_id", "classifier.fc2.bias"],
            filters=[("test_accuracy", ">=", threshold), ("learning_rate", "==", 0.001)],
        )
        rows = list(found)
        chosen = frame[(frame.split == "train") & (frame.test_accuracy >= threshold) & (frame.learning_rate == 0.001)]
        assert len(rows) > 0 and sorted(row["checkpoint_id"] for row in rows) == sorted(chosen.checkpoint_id)
        assert rows[0].keys() == {"checkpoint_id", "classifier.fc2.bias"}

    def test_index(self, dataset: Path, frame: pd.DataFrame, hf_cache: Path) -> None:
        index = load_dataset(str(dataset), "index", split="train").to_pandas()
        pd.testing.assert_frame_equal(index, frame)

    def test_unfinished_files_are_never_loaded_daft_3576(self, dataset: Path, tmp_path: Path, hf_cache: Path) -> None:
        """Half a shard of a writer that died, and a whole one that no card names, load as nothing."""
        out = tmp_path / "zoo"
        out.mkdir()
        for path in dataset.rglob("*"):
            if path.is_file():
                (out / path.relative_to(dataset)).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, out / path.relative_to(dataset))
        shard = next(out.glob("mnist/train-*"))
        (out / "mnist" / f".tmp-{'0' * 32}").write_bytes(shard.read_bytes()[:5000])
        (out / "mnist" / "train-00001-of-00002-00000000.parquet").write_bytes(shard.read_bytes())
        expected = load_dataset(str(dataset), "mnist").num_rows
        assert load_dataset(str(out), "mnist").num_rows == expected


class TestCheckpoints:
    def test_all_weights(self, zoo: Zoo, stored: Stored) -> None:
        chosen = zoo.checkpoints()
        assert len(chosen) == len(stored)
        assert ids(chosen) != sorted(ids(chosen))
        assert equal_to_stored(chosen.tensors(), ids(chosen), stored)

    def test_metadata_is_sorted_by_accuracy(self, zoo: Zoo) -> None:
        accuracy = zoo.checkpoints().metadata["test_accuracy"].to_numpy()
        assert np.all(np.diff(accuracy) <= 0)

    def test_any_order_and_repetition(self, zoo: Zoo, stored: Stored) -> None:
        chosen = zoo.checkpoints().take([7, 3, 3, 90, 0])
        assert ids(chosen) == [ids(zoo.checkpoints())[row] for row in (7, 3, 3, 90, 0)]
        assert equal_to_stored(chosen.tensors(), ids(chosen), stored)

    def test_row_groups_of_another_size(self, grouped: Path) -> None:
        chosen = open_zoo(grouped).checkpoints(filters=[("epoch_label", "==", "2")])
        stack = chosen.tensors()["classifier.fc1.bias"]
        paths = sorted(grouped.glob("mnist/*.parquet"))
        expected = {}
        for path in paths:
            for row in pq.read_table(path, columns=["checkpoint_id", "classifier.fc1.bias"]).to_pylist():
                expected[row["checkpoint_id"]] = row["classifier.fc1.bias"]
        assert [row.tolist() for row in stack] == [expected[name] for name in ids(chosen)]

    @pytest.mark.parametrize("component", ["embedding", "encoder", "classifier"])
    def test_components(self, zoo: Zoo, stored: Stored, component: str) -> None:
        chosen = zoo.checkpoints(split="test", components=[component])
        tensors = chosen.tensors()
        assert list(tensors) == [name for name in TENSORS if name.startswith(f"{component}.")]
        assert equal_to_stored(tensors, ids(chosen), stored)

    def test_nothing_chosen(self, zoo: Zoo) -> None:
        chosen = zoo.checkpoints(filters=[("test_accuracy", ">", 1)])
        assert len(chosen) == 0 and chosen.models() == [] and list(chosen.pieces()) == list(chosen.stream()) == []
        assert chosen.tensors()["classifier.fc2.weight"].shape == (0, 10, 32)

    def test_pieces_are_the_whole_in_order(self, zoo: Zoo) -> None:
        whole = zoo.checkpoints(split="train")
        pieces = list(whole.pieces(rows=7))
        assert [len(piece) for piece in pieces[:-1]] == [7] * (len(pieces) - 1)
        assert [name for piece in pieces for name in ids(piece)] == ids(whole)
        joined = torch.cat([piece.tensors()["classifier.fc1.weight"] for piece in pieces])
        assert torch.equal(joined, whole.tensors()["classifier.fc1.weight"])

    def test_models_compute_what_their_weights_say(self, zoo: Zoo, stored: Stored) -> None:
        chosen = zoo.checkpoints(split="validation").take([1])
        (model,) = chosen.models()
        expected = SmallTransformer("mnist")
        weights = {name: torch.from_numpy(values.copy()) for name, values in stored[ids(chosen)[0]].items()}
        expected.load_state_dict(weights, strict=False)
        images = torch.randn(2, 1, 28, 28)
        assert not model.training
        assert torch.equal(model(images), expected.eval()(images))

    def test_models_draw_nothing_from_the_callers_random_numbers(self, zoo: Zoo) -> None:
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        zoo.checkpoints().take([0, 1]).models()
        assert torch.equal(torch.rand(3), expected)

    def test_text_models_use_the_datasets_embedding(self, two_tasks: Path) -> None:
        zoo = open_zoo(two_tasks)
        vectors, words = zoo.embedding("ag_news")
        assert vectors.shape == (len(words) + 1, 32) and "word7" in words
        assert not vectors[0].any()
        model = zoo.checkpoints("ag_news", split="train").take([0]).models()[0]
        assert model(torch.tensor([[1, 2, 0]]), torch.tensor([2])).shape == (1, 4)
        with pytest.raises(DatasetError, match=r"found no mnist/embedding-\w+\.safetensors"):
            zoo.embedding("mnist")

    def test_torch_dataset(self, zoo: Zoo) -> None:
        chosen = zoo.checkpoints(split="test")
        loader = torch.utils.data.DataLoader(chosen.dataset(), batch_size=len(chosen))
        ((tensors, target),) = list(loader)
        assert target.dtype == torch.float32
        assert torch.equal(target, torch.tensor(chosen.metadata["test_accuracy"].to_pylist()))
        assert torch.equal(tensors["classifier.fc1.bias"], chosen.tensors()["classifier.fc1.bias"])
        with pytest.raises(DatasetError, match="target: found 'accuracy', expected one of run_id"):
            chosen.dataset("accuracy")
        by_epoch = torch.utils.data.DataLoader(chosen.dataset("epoch"), batch_size=2)
        assert next(iter(by_epoch))[1].dtype == torch.int64

    def test_nulls_of_a_floating_target_are_nan(self, zoo: Zoo) -> None:
        chosen = zoo.checkpoints(filters="epoch_label==0")
        assert chosen.dataset("train_accuracy")[0][1].isnan()

    def test_models_of_some_components_are_refused(self, zoo: Zoo) -> None:
        with pytest.raises(DatasetError, match=r"found encoder; models\(\) needs all components"):
            zoo.checkpoints(components=["encoder"]).models()

    def test_shown_in_a_line_without_reading_anything(self, dataset: Path, stored: Stored) -> None:
        zoo = open_zoo(dataset)
        assert repr(zoo) == f"<Zoo {dataset}: mnist>"
        assert "index" not in zoo.__dict__
        assert repr(zoo.checkpoints()) == f"<{len(stored)} checkpoints of mnist>"
        assert repr(zoo) == f"<Zoo {dataset}: mnist ({len(stored)} checkpoints)>"


class TestStream:
    @pytest.mark.parametrize("seed", [None, 0])
    def test_every_row_once_with_its_own_weights(self, grouped: Path, seed: int | None) -> None:
        chosen = open_zoo(grouped).checkpoints(split="train", components=["classifier"])
        biases = dict(zip(ids(chosen), chosen.tensors()["classifier.fc1.bias"], strict=True))
        seen = []
        for metadata, tensors in chosen.stream(seed):
            names = metadata["checkpoint_id"].to_pylist()
            seen += names
            for name, bias in zip(names, tensors["classifier.fc1.bias"], strict=True):
                assert torch.equal(bias, biases[name])
        assert sorted(seen) == sorted(ids(chosen))
        assert (seen == ids(chosen)) == (seed is None)

    def test_a_seed_names_an_order_and_mixes_accuracies(self, grouped: Path) -> None:
        chosen = open_zoo(grouped).checkpoints(split="train", components=["classifier"])
        orders = [[m["checkpoint_id"].to_pylist() for m, _ in chosen.stream(seed)] for seed in (1, 1, 2)]
        assert orders[0] == orders[1] != orders[2]
        spread = [np.ptp(metadata["test_accuracy"].to_numpy()) for metadata, _ in chosen.stream(1)]
        sorted_spread = [np.ptp(metadata["test_accuracy"].to_numpy()) for metadata, _ in chosen.stream()]
        assert len(spread) * 8 >= len(sorted_spread) > 8
        assert np.median(spread) > 5 * np.median(sorted_spread)


class TestHoldOut:
    def test_one_hyperparameter(self, zoo: Zoo) -> None:
        rest, held_out = zoo.checkpoints().hold_out(optimizer="rmsprop")
        assert set(held_out.metadata["optimizer"].to_pylist()) == {"rmsprop"}
        assert set(rest.metadata["optimizer"].to_pylist()) == {"sgd", "sgd_momentum", "adam"}
        assert sorted(ids(rest) + ids(held_out)) == sorted(ids(zoo.checkpoints()))

    def test_several_hold_out_what_has_all_of_them(self, zoo: Zoo) -> None:
        rest, held_out = zoo.checkpoints().hold_out(optimizer="adam", learning_rate=0.001)
        assert len(held_out) == 2 * 4
        assert "adam" in rest.metadata["optimizer"].to_pylist()

    def test_nulls_belong_to_the_rest(self, zoo: Zoo) -> None:
        """At epoch 0 nothing was trained, so train_accuracy is null."""
        whole = zoo.checkpoints()
        value = next(value for value in whole.metadata["train_accuracy"].to_pylist() if value is not None)
        rest, held_out = whole.hold_out(train_accuracy=value)
        assert len(held_out) > 0 and len(rest) + len(held_out) == len(whole)

    def test_splits_are_disjoint_in_runs(self, zoo: Zoo) -> None:
        runs = [
            set(zoo.checkpoints(split=name).metadata["run_id"].to_pylist()) for name in ("train", "validation", "test")
        ]
        assert sum(map(len, runs)) == len(set.union(*runs)) == 26


class TestOpen:
    def test_tasks(self, two_tasks: Path) -> None:
        zoo = open_zoo(two_tasks)
        assert zoo.tasks == ["ag_news", "mnist"]
        with pytest.raises(DatasetError, match="task: not given, expected one of ag_news, mnist"):
            zoo.checkpoints()
        assert set(zoo.checkpoints("mnist").metadata["task"].to_pylist()) == {"mnist"}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"task": "cifar"}, "task: found 'cifar', expected one of mnist"),
            ({"split": "dev"}, "split: found 'dev', expected one of train, validation, test"),
            ({"components": ["head"]}, "components: found 'head', expected one of embedding, encoder, classifier"),
        ],
    )
    def test_unknown_names(self, zoo: Zoo, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(DatasetError, match=message):
            zoo.checkpoints(**arguments)

    def test_what_is_no_dataset(self, dataset: Path, tmp_path: Path) -> None:
        with pytest.raises(DatasetError, match=r"README\.md: not a readable dataset card"):
            open_zoo(tmp_path)
        (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
        with pytest.raises(DatasetError, match="found no index among its configs"):
            open_zoo(tmp_path)
        with pytest.raises(DatasetError, match="found no such folder"):
            open_zoo(tmp_path / "missing")
        for part in ("plans", "commits"):
            (tmp_path / "sweep" / part).mkdir(parents=True)
        with pytest.raises(DatasetError, match=r"found a sweep directory, expected a dataset; .*`zoo build`"):
            open_zoo(tmp_path / "sweep")
        with pytest.raises(DatasetError, match="revision: found 'main', expected none"):
            open_zoo(dataset, revision="main")

    def test_a_missing_shard(self, dataset: Path, tmp_path: Path) -> None:
        files = CountingFiles()
        source = Source(files, str(dataset), "zoo")
        with pytest.raises(DatasetError, match=r"zoo: mnist/none\.parquet: not a readable Parquet file"):
            source.parquet("mnist/none.parquet")
        with pytest.raises(DatasetError, match=r"zoo: README\.md: not a readable Parquet file"):
            source.parquet("README.md")
