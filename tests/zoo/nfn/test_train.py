"""Training: the recipe, the choice of the epoch, repeatability, resuming, what is kept, and what is refused."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHORT, STATNN, make_data
from safetensors.torch import save
from tqdm import tqdm

from generators.streams import permutation, stream_key
from zoo.errors import NFNError, ZooError
from zoo.nfn import fit as fit_module
from zoo.nfn.data import Splits, WeightData, load_checkpoints, split
from zoo.nfn.fit import FitState, Recipe, fit_network, kendall_tau, seeded
from zoo.nfn.predictors import NetworkPredictor, make_predictor
from zoo.nfn.record import TrainingResult
from zoo.nfn.saved import CONFIG, STATE, TENSORS, load_predictor
from zoo.nfn.train import Setting, load_splits, train, train_on

CPU = torch.device("cpu")


def fresh(name: str = "statnn", seed: int = 0) -> NetworkPredictor:
    with seeded(torch.device("cpu"), "test", seed):
        return make_predictor(name, "mnist")


def run(splits: Splits, **changes) -> TrainingResult:
    return train_on(splits, replace(STATNN, **changes), "cpu", progress=False)


class TestFit:
    def test_equals_a_plain_loop(self, readable: Splits) -> None:
        """Against Adam, LinearLR and CosineAnnealingLR of torch in a loop of its own."""
        recipe = Recipe(epochs=5, warmup_epochs=2, batch_size=16, learning_rate=1e-3, min_learning_rate=1e-5)
        network = fresh()
        state = fit_network(network, readable, recipe, 7, CPU, progress=False)
        plain = fresh()
        inputs, accuracy = plain.inputs(readable.train), readable.train.accuracy.float()
        optimizer = torch.optim.Adam(plain.parameters(), lr=1e-3)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 2, total_iters=1)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3, eta_min=1e-5)
        optimizer.param_groups[0]["lr"] = 5e-4
        for epoch in range(5):
            losses = []
            for rows in torch.from_numpy(permutation(stream_key("nfn-batches", 7, epoch), len(inputs))).split(16):
                predicted = torch.sigmoid(plain(inputs[rows]))
                loss = -(accuracy[rows] * predicted.log() + (1 - accuracy[rows]) * (1 - predicted).log()).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert state.history[epoch]["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
            (warmup if epoch < 1 else cosine).step() if epoch != 1 else None
        assert [record["epoch"] for record in state.history] == [1, 2, 3, 4, 5]

    def test_the_best_epoch_on_validation_is_kept(self, readable: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
        taus = iter([0.1, 0.7, 0.7, 0.3])
        monkeypatch.setattr(fit_module, "kendall_tau", lambda *_: next(taus))
        after: list[dict[str, torch.Tensor]] = []
        network = fresh()

        def remember(state: FitState) -> None:
            after.append({name: tensor.clone() for name, tensor in state.network.items()})

        state = fit_network(network, readable, SHORT, 0, CPU, at_epoch=remember, progress=False)
        assert state.best_epoch == 2
        assert all(torch.equal(tensor, after[1][name]) for name, tensor in network.state_dict().items())
        assert not torch.equal(after[3]["head.weight"], after[1]["head.weight"])

    def test_the_last_state_is_the_last_epochs(self, readable: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also after the best epoch's parameters came back into the network, and every state stays as it was."""
        taus = iter([0.7, 0.1, 0.1, 0.1])
        monkeypatch.setattr(fit_module, "kendall_tau", lambda *_: next(taus))
        seen: list[FitState] = []
        then: list[torch.Tensor] = []

        def remember(state: FitState) -> None:
            seen.append(state)
            then.append(state.network["head.weight"].clone())

        state = fit_network(fresh(), readable, SHORT, 0, CPU, at_epoch=remember, progress=False)
        assert state.best_epoch == 1
        assert torch.equal(state.network["head.weight"], then[-1])
        assert not torch.equal(state.network["head.weight"], state.best["head.weight"])
        assert all(torch.equal(past.network["head.weight"], weight) for past, weight in zip(seen, then, strict=True))

    def test_an_error_closes_the_bar(self, readable: Splits, monkeypatch: pytest.MonkeyPatch) -> None:
        bars: list[tqdm] = []

        class Remembered(tqdm):
            def __init__(self, *arguments, **options) -> None:
                super().__init__(*arguments, **options, file=io.StringIO())
                bars.append(self)

        def interrupted(state: FitState) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(fit_module, "tqdm", Remembered)
        with pytest.raises(KeyboardInterrupt):
            fit_network(fresh(), readable, SHORT, 0, CPU, at_epoch=interrupted)
        assert [bar.pos for bar in bars] == [0] and bars[0] not in tqdm._instances

    def test_a_prediction_that_is_not_finite_is_one_line(self, readable: Splits) -> None:
        """Kendall's tau would be undefined, and is not 0."""
        weights = readable.validation.weights.clone()
        weights[[4, 9]] = 3e38
        broken = replace(readable, validation=WeightData("mnist", weights, readable.validation.metadata))
        name = readable.validation.names[4]
        with pytest.raises(NFNError, match=rf"{name}: found the prediction nan \(2 such of 18\), expected a finite"):
            run(broken)

    def test_learns_what_can_be_read(self, readable: Splits) -> None:
        """The size of the weights, which LayerNorms would hide without the biases of the layers before them."""
        for name, components in (("statnn", None), ("transformer-nfn", ("encoder",))):
            result = run(readable, predictor=name, components=components, recipe=Recipe(epochs=12, warmup_epochs=2))
            assert result.test_tau > 0.7, name
            assert result.history[-1]["loss"] < result.history[0]["loss"]

    def test_leaves_torchs_generator_alone(self, readable: Splits) -> None:
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        run(readable, predictor="mlp-augmented", recipe=Recipe(epochs=1, warmup_epochs=0))
        assert torch.equal(torch.rand(1), expected)

    def test_a_loss_that_is_not_finite_is_one_line(self, readable: Splits) -> None:
        weights = readable.train.weights.clone()
        weights[int(permutation(stream_key("nfn-batches", 3, 0), len(weights))[20])] = 3e38
        broken = replace(readable, train=WeightData("mnist", weights, readable.train.metadata))
        with pytest.raises(
            NFNError, match=r"loss: found (nan|inf) in epoch 1, step 2, at learning rate 0.001; .*lower"
        ):
            run(broken)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"epochs": 0}, "epochs: found 0, expected 1 or more"),
            ({"epochs": 5}, "warmup_epochs: found 10, expected 0 to 5"),
            ({"batch_size": 0}, "batch_size: found 0"),
            ({"learning_rate": float("nan")}, "learning_rate: found nan, expected a number above 0"),
            ({"min_learning_rate": 1.0}, "min_learning_rate: found 1.0, expected 0 to learning_rate"),
        ],
    )
    def test_a_recipe_out_of_range_is_refused(self, changes: dict, message: str) -> None:
        with pytest.raises(NFNError, match=message):
            Recipe(**changes)


def test_tau_counts_ties_and_constants_rank_nothing():
    # 5 pairs agree, 0 disagree, 1 is tied in the prediction: 5 / sqrt(5 * 6).
    assert kendall_tau(np.array([1, 1, 2, 3]), np.array([1, 2, 3, 4])) == pytest.approx(5 / np.sqrt(30))
    assert kendall_tau(np.array([3, 2, 1]), np.array([0.1, 0.2, 0.3])) == -1
    assert kendall_tau(np.ones(4), np.arange(4)) == 0.0


def result_of(predicted: list[float]) -> TrainingResult:
    """A result with one test checkpoint a prediction."""
    rows = [
        {"checkpoint_id": str(row), "accuracy": row / 100, "predicted": value} for row, value in enumerate(predicted)
    ]
    return TrainingResult(1, {"train": 9, "validation": 9, "test": len(rows)}, 0.0, 0.0, 1, 0.0, [], rows)


class TestDoubts:
    def test_enough_different_predictions_raise_none(self) -> None:
        assert result_of([row / 30 for row in range(30)]).doubts() == []

    def test_one_value_for_all_and_few_checkpoints_are_told(self) -> None:
        (constant,) = result_of([0.5] * 30).doubts()
        assert constant.startswith("predicts one value for all")
        assert result_of([0.5, *[0.4] * 28]).doubts() == ["29 test checkpoints: Kendall's tau is noisy"]


class TestRepeat:
    def test_a_seed_repeats_and_another_differs(self, readable: Splits) -> None:
        setting = {"predictor": "mlp-augmented", "recipe": Recipe(epochs=2, warmup_epochs=1)}
        first, again, other = (run(readable, seed=seed, **setting) for seed in (1, 1, 2))
        assert again.predictions == first.predictions and again.history == first.history
        assert other.predictions != first.predictions

    @pytest.mark.parametrize("name", ["transformer-nfn", "mlp-augmented"])
    def test_an_interrupted_training_ends_like_an_undisturbed_one(
        self, readable: Splits, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        setting = replace(STATNN, predictor=name)
        undisturbed = train_on(readable, setting, "cpu", progress=False)
        tau, calls = fit_module.kendall_tau, []

        def interrupted(*arguments) -> float:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return tau(*arguments)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fit_module, "kendall_tau", interrupted)
            train_on(readable, setting, "cpu", tmp_path, progress=False)
        assert [path.name for path in tmp_path.iterdir()] == [STATE]
        resumed = train_on(readable, setting, "cpu", tmp_path, progress=False)
        assert replace(resumed, seconds=0) == replace(undisturbed, seconds=0)
        assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, TENSORS]

    def test_a_finished_training_is_not_done_again(self, readable: Splits, tmp_path: Path) -> None:
        first = train_on(readable, STATNN, "cpu", tmp_path, progress=False)
        assert train_on(readable, STATNN, "cpu", tmp_path, progress=False) == first

    def test_a_folder_of_another_training_is_refused(self, readable: Splits, tmp_path: Path) -> None:
        train_on(readable, STATNN, "cpu", tmp_path, progress=False)
        with pytest.raises(NFNError, match=r"predictor.json: seed: found 3, expected 4; choose another folder"):
            train_on(readable, replace(STATNN, seed=4), "cpu", tmp_path, progress=False)
        with pytest.raises(NFNError, match=r"predictor.json: data: found"):
            train_on(split(make_data("mnist", 120, seed=9), 0), STATNN, "cpu", tmp_path, progress=False)

    @pytest.mark.parametrize(
        "content",
        [b"torn", save({}), *(save({"adam.x": torch.zeros(1)}, {"fit": fit}) for fit in ("[]", "{}"))],
    )
    def test_a_damaged_state_is_refused(self, content: bytes, readable: Splits, tmp_path: Path) -> None:
        (tmp_path / STATE).write_bytes(content)
        with pytest.raises(NFNError, match=r"state.safetensors: damaged .*remove it to start again"):
            train_on(readable, STATNN, "cpu", tmp_path, progress=False)


class TestZoo:
    def test_a_tau_of_few_checkpoints_is_doubted_on_stderr(
        self, small_zoo: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        result = train(
            small_zoo, task="mnist", epoch_label="best", predictor="statnn", recipe=SHORT, device="cpu", progress=False
        )
        count = result.checkpoints["test"]
        assert f"statnn: {count} test checkpoints: Kendall's tau is noisy\n" in capsys.readouterr().err

    def test_trains_on_a_real_zoo(self, small_zoo: Path, tmp_path: Path) -> None:
        result = train(
            small_zoo, task="mnist", epoch_label="best", recipe=SHORT, device="cpu", out=tmp_path, progress=False
        )
        assert sum(result.checkpoints.values()) == 48
        assert result.parameters == 1_812_181
        assert load_predictor(tmp_path).config["epoch_label"] == "best"

    def test_a_dataset_that_was_built_anew_is_read_anew(self, small_zoo: Path, tmp_path: Path) -> None:
        shutil.copytree(small_zoo, tmp_path / "zoo")
        assert len(load_checkpoints(str(tmp_path / "zoo"), "mnist", "best")) == 48
        shutil.rmtree(tmp_path / "zoo")
        with pytest.raises(ZooError, match="found no such folder"):
            load_checkpoints(str(tmp_path / "zoo"), "mnist", "best")

    def test_pinned_splits_stay_and_new_ones_follow_the_seed(self, small_zoo: Path) -> None:
        data = load_checkpoints(str(small_zoo), "mnist", "best")
        pinned = split(data)
        assert set(pinned.test.metadata["split"].to_pylist()) == {"test"}
        first, again, other = (split(data, seed) for seed in (0, 0, 1))
        assert first.test.names == again.test.names != other.test.names
        assert [len(part) for part in (first.train, first.validation, first.test)] == [34, 7, 7]
        assert sorted(first.train.names + first.validation.names + first.test.names) == sorted(data.names)

    def test_the_threshold_comes_first(self, small_zoo: Path) -> None:
        data = load_checkpoints(str(small_zoo), "mnist", "best")
        threshold = float(data.accuracy.median())
        good = data.at_least(threshold)
        assert good.accuracy.min() >= threshold
        assert data.at_least(0.0) is data
        assert len(good) == int((data.accuracy >= threshold).sum()) < 48
        with pytest.raises(
            NFNError, match=r"train part: found 0 checkpoints of 0 different accuracies, expected 2 or more"
        ):
            train(small_zoo, task="mnist", epoch_label="best", threshold=0.99, progress=False)

    def test_filters_choose_what_takes_part(self, small_zoo: Path) -> None:
        conditions = ("init_std>=0.2", "learning_rate<0.01")
        everything = load_checkpoints(str(small_zoo), "mnist", "best")
        chosen = load_checkpoints(str(small_zoo), "mnist", "best", conditions)
        assert chosen.names == [
            row["checkpoint_id"]
            for row in everything.metadata.to_pylist()
            if row["init_std"] >= 0.2 and row["learning_rate"] < 0.01
        ]
        assert 0 < len(chosen) < len(everything)
        splits = load_splits(small_zoo, Setting("mnist", "best", filters=conditions, resplit=True))
        parts = (splits.train, splits.validation, splits.test)
        assert sorted(name for part in parts for name in part.names) == sorted(chosen.names)

    @pytest.mark.parametrize(
        ("condition", "message"),
        [
            ("learning_rate>9", r"no checkpoint of 'best' that fulfils learning_rate>9 in .* labels .* and wider"),
            ("optimiser==adam", "filters: found 'optimiser', .*; did you mean optimizer?"),
        ],
    )
    def test_filters_that_fit_nothing_are_told(self, small_zoo: Path, condition: str, message: str) -> None:
        with pytest.raises(ZooError, match=message):
            train(small_zoo, task="mnist", epoch_label="best", filters=[condition], progress=False)

    def test_weights_that_are_not_finite_are_named(self) -> None:
        data = make_data("mnist", 4)
        data.weights[2, 100] = float("nan")
        with pytest.raises(NFNError, match=r"run0002-best: found a weight that is no finite number \(1 such"):
            data.require_finite()

    def test_the_digest_covers_every_bit_and_no_layout(self) -> None:
        data = make_data("mnist", 4)
        swapped = data.weights.clone()
        swapped[1, [0, 1]] = swapped[1, [1, 0]]  # which no sum shows
        assert replace(data, weights=swapped).digest() != data.digest()
        transposed = data.weights.mT.contiguous().mT
        assert replace(data, weights=transposed).digest() == data.digest()

    def test_an_unknown_predictor_is_refused_before_anything_is_read(self, tmp_path: Path) -> None:
        with pytest.raises(NFNError, match=r"predictor: found 'transformer_nfn', expected one of .*transformer-nfn"):
            train(tmp_path / "nothing", task="mnist", epoch_label="best", predictor="transformer_nfn")

    def test_an_unknown_device_is_refused(self, small_zoo: Path) -> None:
        with pytest.raises(NFNError, match="device: found 'abacus', which torch cannot use here"):
            train(small_zoo, task="mnist", epoch_label="best", device="abacus", progress=False)
