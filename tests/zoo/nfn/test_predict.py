"""What a ranking says of the checkpoints that may have trained the predictor."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import STATNN

from zoo.cli import main
from zoo.nfn.data import load_checkpoints
from zoo.nfn.fit import kendall_tau
from zoo.nfn.predict import predict
from zoo.nfn.saved import load_predictor
from zoo.nfn.train import load_splits, train_on


@pytest.fixture(scope="module", params=[False, True], ids=["pinned", "resplit"])
def trained(request: pytest.FixtureRequest, small_zoo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StatNN trained on `small_zoo`."""
    setting = replace(STATNN, resplit=request.param)
    folder = tmp_path_factory.mktemp("predictor")
    train_on(load_splits(small_zoo, setting), setting, "cpu", folder, progress=False)
    return folder


def test_rows_say_their_split(trained: Path, small_zoo: Path) -> None:
    metadata = load_checkpoints(str(small_zoo), "mnist", "best").metadata
    expected = dict(zip(metadata["checkpoint_id"].to_pylist(), metadata["split"].to_pylist(), strict=True))
    assert set(expected.values()) == {"train", "validation", "test"}
    assert {row.name: row.split for row in predict(trained, dataset=small_zoo, device="cpu").predictions} == expected


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_filter_chooses_the_split_of_the_tau(trained: Path, small_zoo: Path, split: str) -> None:
    ranking = predict(trained, dataset=small_zoo, filters=[f"split=={split}"], device="cpu")
    data = load_checkpoints(str(small_zoo), "mnist", "best")
    part = data.select(np.flatnonzero(np.array(data.metadata["split"].to_pylist()) == split))
    expected = kendall_tau(load_predictor(trained).predict(part), part.accuracy.numpy())
    assert len(ranking.predictions) == len(part)
    assert (ranking.tau, ranking.test_tau) == (pytest.approx(expected), None)


def test_the_test_splits_tau_comes_first_and_a_resplit_is_told(
    trained: Path, small_zoo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resplit = load_predictor(trained).config["resplit"]
    ranking = predict(trained, dataset=small_zoo, device="cpu")
    assert ranking.resplit is resplit
    assert main(["nfn", "predict", str(trained), "--dataset", str(small_zoo), "--device", "cpu", "--top", "48"]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = ranking.predictions[0]
    assert lines[0] == f"{best.predicted:.4f}  {best.name}  recorded {best.accuracy:.4f}  {best.split}"
    of_test = f"{ranking.test_tau:.3f} of the {ranking.test_checkpoints} in test"
    assert lines[48] == f"Kendall's tau: {of_test}, {ranking.tau:.3f} of all 48, training part included"
    told = ["trained with --resplit: checkpoints of every split, test too, may have trained the predictor"]
    assert lines[49:] == (told if resplit else [])
