"""Predictions for checkpoint files and datasets, and what is refused."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import STATNN, make_data
from safetensors.torch import save_file

from generators.architecture import unflatten
from zoo.errors import NFNError, ZooError
from zoo.nfn.data import Splits, WeightData, load_checkpoints
from zoo.nfn.fit import Recipe, kendall_tau
from zoo.nfn.predict import predict, rank
from zoo.nfn.saved import load_predictor
from zoo.nfn.train import Setting, load_splits, train_on


@pytest.fixture(scope="module")
def folder(readable: Splits, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained StatNN on disk."""
    folder = tmp_path_factory.mktemp("predictor")
    train_on(readable, replace(STATNN, recipe=Recipe(epochs=8, warmup_epochs=1)), "cpu", folder, progress=False)
    return folder


class TestPredict:
    def test_files_are_ranked(self, readable: Splits, folder: Path, tmp_path: Path) -> None:
        paths = []
        for row in (0, 1, 2):
            tensors = {
                name: tensor.contiguous() for name, tensor in unflatten("mnist", readable.test.weights[row]).items()
            }
            paths.append(tmp_path / f"{row}.safetensors")
            save_file(tensors | {"embedding.pos_embedding": torch.zeros(49, 32)}, paths[-1])
        ranking = predict(folder, checkpoints=paths, device="cpu")
        expected = load_predictor(folder).predict(readable.test)[:3]
        assert [row.name for row in ranking.predictions] == [str(paths[i]) for i in np.argsort(-expected)]
        assert [row.predicted for row in ranking.predictions] == pytest.approx(sorted(expected, reverse=True), rel=1e-5)
        assert ranking.tau is None and ranking.predictions[0].accuracy is None

    def test_a_dataset_is_ranked(self, folder: Path, small_zoo: Path) -> None:
        ranking = predict(folder, dataset=small_zoo, device="cpu")
        data = load_checkpoints(str(small_zoo), "mnist", "best")
        assert {row.name: row.accuracy for row in ranking.predictions} == dict(
            zip(data.names, data.accuracy.tolist(), strict=True)
        )
        assert [row.predicted for row in ranking.predictions] == sorted(r.predicted for r in ranking.predictions)[::-1]
        predicted, accuracy = ([getattr(row, key) for row in ranking.predictions] for key in ("predicted", "accuracy"))
        assert ranking.tau == pytest.approx(kendall_tau(np.array(predicted), np.array(accuracy)))

    def test_the_test_split_has_a_tau_of_its_own(self, folder: Path, small_zoo: Path, readable: Splits) -> None:
        """The others may have trained the predictor."""
        ranking = predict(folder, dataset=small_zoo, device="cpu")
        test = load_splits(small_zoo, Setting("mnist", "best")).test
        expected = kendall_tau(load_predictor(folder).predict(test), test.accuracy.numpy())
        assert ranking.test_checkpoints == len(test) > 2
        assert ranking.test_tau == pytest.approx(expected)

    def test_equal_accuracies_have_no_tau(self) -> None:
        data = make_data("mnist", 3)
        predicted = np.array([0.1, 0.3, 0.2])
        accuracy = {"test_accuracy": [0.5, 0.5, 0.5]}
        equal = replace(data, metadata=pa.table({"checkpoint_id": data.names} | accuracy))
        assert rank(equal, predicted).tau is None
        assert rank(equal.select(np.array([0])), predicted[:1]).tau is None
        assert rank(data, np.full(3, 0.5)).tau == 0.0
        assert [row.predicted for row in rank(equal, predicted).predictions] == [0.3, 0.2, 0.1]

    def test_a_checkpoint_without_a_prediction_is_named(self, readable: Splits, folder: Path) -> None:
        weights = readable.test.weights.clone()
        weights[2] = 3e38
        broken = WeightData("mnist", weights, readable.test.metadata)
        with pytest.raises(NFNError, match=rf"{broken.names[2]}: found the prediction nan \(1 such of 18\)"):
            load_predictor(folder).predict(broken)

    def test_wrong_checkpoints_are_refused(self, folder: Path, tmp_path: Path, small_zoo: Path) -> None:
        with pytest.raises(NFNError, match="found neither, expected either checkpoint files or a dataset"):
            predict(folder)
        with pytest.raises(NFNError, match="found files and a dataset"):
            predict(folder, checkpoints=["a"], dataset=small_zoo)
        for more in ({"filters": ["l2>0"]}, {"epoch_label": "2"}):
            with pytest.raises(NFNError, match="found files with an epoch label or filters"):
                predict(folder, checkpoints=["a"], **more)
        torn, other = tmp_path / "torn.safetensors", tmp_path / "other.safetensors"
        torn.write_bytes(b"{}")
        save_file({"embedding.conv1.weight": torch.zeros(3)}, other)
        with pytest.raises(NFNError, match=r"torn.safetensors: not a readable safetensors file"):
            predict(folder, checkpoints=[torn])
        with pytest.raises(
            NFNError, match=r"other.safetensors: embedding.conv1.weight: found \(3,\), expected \(32, 1"
        ):
            predict(folder, checkpoints=[other])
        with pytest.raises(ZooError, match=r"epoch_label: found '75', which no row has, expected one of 0, 2, best"):
            predict(folder, dataset=small_zoo, epoch_label="75")

    def test_filters_choose_what_is_ranked(self, folder: Path, small_zoo: Path) -> None:
        conditions = ("init_std>=0.2", "learning_rate<0.01")
        chosen = load_checkpoints(str(small_zoo), "mnist", "best", conditions)
        ranking = predict(folder, dataset=small_zoo, filters=conditions, device="cpu")
        assert sorted(row.name for row in ranking.predictions) == sorted(chosen.names)
