"""Predictors on disk: what comes back, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import DAMAGED_RECORDS, STATNN, make_data

from zoo.errors import NFNError
from zoo.nfn.data import Splits
from zoo.nfn.fit import kendall_tau
from zoo.nfn.saved import CONFIG, TENSORS, load_predictor
from zoo.nfn.train import train_on

TREES = ("xgboost", "lightgbm", "random-forest")


class TestSaved:
    @pytest.mark.parametrize("name", ["transformer-nfn", "hyperparameters", "random-forest"])
    def test_a_saved_predictor_predicts_the_same(self, readable: Splits, tmp_path: Path, name: str) -> None:
        result = train_on(readable, replace(STATNN, predictor=name), "cpu", tmp_path, progress=False)
        saved = load_predictor(tmp_path)
        predicted = saved.predict(readable.test)
        np.testing.assert_allclose(predicted, [row["predicted"] for row in result.predictions], rtol=1e-6)
        assert saved.result["test_tau"] == result.test_tau == kendall_tau(predicted, readable.test.accuracy.numpy())
        assert result.checkpoints == {"train": 84, "validation": 18, "test": 18}

    def test_options_are_kept(self, readable: Splits, tmp_path: Path) -> None:
        options = {"channels": 2, "layers": 2}
        setting = replace(STATNN, predictor="transformer-nfn", options=options, components=("encoder",))
        result = train_on(readable, setting, "cpu", tmp_path, progress=False)
        network = load_predictor(tmp_path).predictor
        assert network.parameters_trained == result.parameters < 1_000_000
        assert network.components == ("encoder",)

    def test_what_is_no_predictor_is_refused(self, readable: Splits, tmp_path: Path) -> None:
        with pytest.raises(NFNError, match=r"found no predictor.json, expected the folder of a trained predictor"):
            load_predictor(tmp_path)
        train_on(readable, STATNN, "cpu", tmp_path, progress=False)
        with pytest.raises(NFNError, match="task: found checkpoints of ag_news, expected mnist"):
            load_predictor(tmp_path).predict(make_data("ag_news", 4))
        record = json.loads((tmp_path / CONFIG).read_text())
        for change in ({"predictor": "mlp"}, {"components": ["encoder"]}, {"options": None}):
            (tmp_path / CONFIG).write_text(json.dumps(record | {"config": record["config"] | change}))
            with pytest.raises(NFNError, match=r"predictor.safetensors: does not fit predictor.json .*; train the pr"):
                load_predictor(tmp_path)
        (tmp_path / CONFIG).write_text(json.dumps(record))
        (tmp_path / TENSORS).unlink()
        with pytest.raises(NFNError, match=r"predictor.safetensors: cannot be read \(No such file or directory\)"):
            load_predictor(tmp_path)

    @pytest.mark.parametrize("name", ["statnn", *TREES])
    @pytest.mark.parametrize("cut", [False, True])
    def test_damaged_tensors_are_refused(self, readable: Splits, tmp_path: Path, name: str, cut: bool) -> None:
        """Before a library of trees sees them: some end the process over a wrong byte."""
        setting = replace(STATNN, predictor=name, components=("classifier",))
        train_on(readable, setting, "cpu", tmp_path, progress=False)
        content = bytearray((tmp_path / TENSORS).read_bytes())
        content[len(content) // 2] ^= 0xFF
        (tmp_path / TENSORS).write_bytes(content[:-8] if cut else content)
        with pytest.raises(NFNError, match=r"predictor.safetensors: damaged: found SHA-256 .*; train the predictor ag"):
            load_predictor(tmp_path)

    @pytest.mark.parametrize(("content", "message"), DAMAGED_RECORDS)
    def test_a_damaged_record_is_refused(self, readable: Splits, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / CONFIG).write_bytes(content)
        for read in (lambda: load_predictor(tmp_path), lambda: train_on(readable, STATNN, "cpu", tmp_path)):
            with pytest.raises(NFNError, match=f"predictor.json: {message}; train the predictor again") as caught:
                read()
            assert "\n" not in str(caught.value)

    def test_a_predictor_of_another_format_is_refused(self, readable: Splits, tmp_path: Path) -> None:
        train_on(readable, STATNN, "cpu", tmp_path, progress=False)
        record = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps(record | {"format": 1}))
        with pytest.raises(NFNError, match=r"predictor.json: format: found 1, expected 2; train the predictor again"):
            load_predictor(tmp_path)
