"""Predictors: the paper's sizes, what each reads, what no group element changes."""

import numpy as np
import pytest
import torch
from conftest import make_data
from scipy import stats
from torch import Tensor
from weight_tools import ILLEGAL

from generators.architecture import flatten, tensor_table, unflatten
from zoo.errors import NFNError
from zoo.nfn.data import Splits, component_columns, split
from zoo.nfn.predictors import NetworkPredictor, make_predictor, predictor_class, predictor_names
from zoo.nfn.predictors.mlp_augmented import move_randomly
from zoo.nfn.predictors.statnn import statistics
from zoo.nfn.weight_space import WeightSpace, apply_group, encoder_tensors, encoder_weights, sample_group

FORESTS = ("xgboost", "lightgbm", "random-forest")
SUBSETS = [("encoder",), ("embedding", "classifier"), ("encoder", "classifier")]


def moved(weights: Tensor, move) -> Tensor:
    """Apply a function of EncoderWeights to the encoder of flat MNIST weights."""
    tensors = unflatten("mnist", weights)
    return flatten("mnist", tensors | encoder_tensors(move(encoder_weights(tensors))))


@pytest.mark.parametrize(
    ("name", "mnist", "ag_news"),
    [
        ("transformer-nfn", 1_812_181, 1_804_741),
        ("mlp", 933_251, 896_051),
        ("mlp-augmented", 933_251, 896_051),
        ("statnn", 203_393, 168_449),
    ],
)
def test_parameters_are_those_of_the_paper(name: str, mnist: int, ag_news: int):
    assert make_predictor(name, "mnist").parameters_trained == mnist
    assert make_predictor(name, "ag_news").parameters_trained == ag_news


def test_the_registry_holds_all_names():
    expected = ["transformer-nfn", "mlp", "mlp-augmented", "statnn", *FORESTS, "hyperparameters"]
    assert sorted(predictor_names()) == sorted(expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nfn"}, "predictor: found 'nfn', expected one of .*transformer-nfn"),
        ({"task": "cifar"}, "task: found 'cifar', expected one of mnist, ag_news"),
        (
            {"task": "ag_news", "components": ["embedding"]},
            "components: found 'embedding', expected some of encoder, cl",
        ),
        ({"components": []}, "components: found none"),
        ({"width": 3}, "options of transformer-nfn: found 'width', expected some of: channels, layers"),
        ({"channels": 0}, "channels: found 0, expected 1 or more"),
    ],
)
def test_wrong_requests_are_refused(arguments: dict, message: str):
    with pytest.raises(NFNError, match=message):
        make_predictor(**({"name": "transformer-nfn", "task": "mnist"} | arguments))


@pytest.mark.parametrize("layers", [1, 2])
def test_transformer_nfn_is_invariant(readable: Splits, layers: int):
    torch.manual_seed(0)
    network = make_predictor("transformer-nfn", "mnist", channels=3, layers=layers).double()
    network.fit_inputs(readable.train.weights.double())
    weights = readable.test.weights.double()
    space = WeightSpace()
    element = sample_group(space, (space.blocks, len(weights)), torch.Generator().manual_seed(1), dtype=torch.float64)
    other = moved(weights, lambda w: apply_group(element, w))
    before = network(weights)
    assert before.std() > 1e-3
    torch.testing.assert_close(network(other), before, rtol=1e-8, atol=1e-8)
    for illegal in ILLEGAL:
        assert (network(moved(weights, lambda w: illegal(w, 2))) - before).abs().max() > 1e-5, illegal.__name__  # noqa: B023


def test_moved_checkpoints_have_the_same_scales(readable: Splits):
    networks = [make_predictor("transformer-nfn", "mnist", channels=2).double() for _ in range(2)]
    weights = readable.train.weights.double()
    space = WeightSpace()
    element = sample_group(space, (space.blocks, len(weights)), torch.Generator().manual_seed(1), dtype=torch.float64)
    networks[0].fit_inputs(weights)
    networks[1].fit_inputs(moved(weights, lambda w: apply_group(element, w)))
    torch.testing.assert_close(networks[1].scale, networks[0].scale, rtol=1e-10, atol=0)


def test_scaled_weights_have_a_common_size(readable: Splits):
    network = make_predictor("mlp", "mnist")
    inputs = network.inputs(readable.train)
    network.fit_inputs(inputs)
    tensors = unflatten("mnist", inputs * network.scale)
    size = lambda x: x.flatten(1).square().mean(1).sqrt().median().item()  # noqa: E731
    for spec in tensor_table("mnist"):
        if "attention" not in spec.name:
            assert size(tensors[spec.name]) == pytest.approx(1, rel=1e-5), spec.name
    weights = encoder_weights(tensors)
    assert size(weights.q[0] @ weights.k[0].mT) == pytest.approx(1 / 32, rel=1e-4)
    assert size(weights.v[1] @ weights.o[1]) == pytest.approx(1 / 32, rel=1e-4)


def test_untrained_biases_need_no_scale():
    data = make_data("ag_news", 10)
    data.weights[:, component_columns("ag_news")["classifier"]] = 0
    network = make_predictor("mlp", "ag_news", ["classifier"])
    network.fit_inputs(network.inputs(data))
    assert (network.scale == 1).all()


@pytest.mark.parametrize("name", ["transformer-nfn", "mlp", "mlp-augmented", "statnn"])
@pytest.mark.parametrize("components", SUBSETS)
def test_a_network_reads_its_components_alone(name: str, components: tuple[str, ...]):
    torch.manual_seed(0)
    data = make_data("mnist", 4)
    network: NetworkPredictor = make_predictor(name, "mnist", components).eval()
    before = network(network.inputs(data))
    for component, columns in component_columns("mnist").items():
        changed = make_data("mnist", 4)
        changed.weights[:, columns] *= 1.5
        difference = (network(network.inputs(changed)) - before).abs().max()
        assert (difference > 1e-5) == (component in components), component


def test_statistics_are_numpys():
    rows = torch.randn(3, 101, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    array = rows.numpy()
    expected = np.stack([array.mean(1), array.var(1), *np.quantile(array, [0, 0.25, 0.5, 0.75, 1], axis=1)], axis=1)
    np.testing.assert_allclose(statistics(rows).numpy(), expected, rtol=1e-12)


def test_statistics_of_more_entries_than_torch_takes_at_once():
    rows = torch.arange(2049.0).expand(9000, 2049)
    assert statistics(rows).unique(dim=0).tolist() == [
        [1024, pytest.approx((2049**2 - 1) / 12), 0, 512, 1024, 1536, 2048]
    ]


def test_augmentation_moves_each_encoder_within_its_orbit():
    data = make_data("mnist", 3)
    columns = component_columns("mnist")["encoder"]
    torch.manual_seed(0)
    first, second = (data.weights.clone() for _ in range(2))
    first[:, columns] = move_randomly("mnist", data.weights[:, columns])
    second[:, columns] = move_randomly("mnist", data.weights[:, columns])
    assert (first - second).abs().max() > 0.1
    network = make_predictor("transformer-nfn", "mnist").eval()
    torch.testing.assert_close(
        network(network.inputs(data)), network(network.inputs(make_copy(data, first))), rtol=1e-3, atol=1e-3
    )


def make_copy(data, weights: Tensor):
    return type(data)(data.task, weights, data.metadata)


def test_augmentation_ends_with_training():
    torch.manual_seed(0)
    data = make_data("mnist", 3)
    network = make_predictor("mlp-augmented", "mnist")
    inputs = network.inputs(data)
    assert not torch.equal(network(inputs), network(inputs))
    network.eval()
    assert torch.equal(network(inputs), network(inputs))


def test_hyperparameters_are_standardised_and_the_weights_unread():
    data = make_data("mnist", 20)
    network = make_predictor("hyperparameters", "mnist")
    inputs = network.inputs(data)
    assert inputs.shape == (20, 9)
    assert inputs[0].tolist() == pytest.approx([0, 0, 1, 0, -3, np.log10(0.2), -12, 0, 1])
    network.fit_inputs(inputs)
    standard = (inputs - network.mean) / network.scale
    assert standard[:, 1].abs().max() == 0  # no run has momentum
    assert standard[:, 6].std(correction=0).item() == pytest.approx(1)
    with pytest.raises(NFNError, match="optimizer: found no such column"):
        network.inputs(type(data)(data.task, data.weights, data.metadata.select(["checkpoint_id"])))


@pytest.mark.parametrize("name", FORESTS)
def test_forests_rank_and_come_back_from_tensors(name: str):
    splits = split(make_data("ag_news", 400), resplit_seed=1)
    components = ["classifier"]
    forest = make_predictor(name, "ag_news", components)
    inputs = forest.inputs(splits.test).abs().numpy()
    forest.fit(forest.inputs(splits.train).abs().numpy(), splits.train.accuracy.numpy(), seed=0)
    predicted = forest.predict(inputs)
    assert stats.kendalltau(predicted, splits.test.accuracy.numpy()).statistic > 0.5
    again = make_predictor(name, "ag_news", components)
    again.load_state(forest.state())
    np.testing.assert_allclose(again.predict(inputs), predicted, rtol=1e-6)
    assert again.parameters_trained == forest.parameters_trained > 100


def test_a_random_forest_of_arrays_is_that_of_scikit_learn():
    from sklearn.ensemble import RandomForestRegressor

    generator = np.random.default_rng(0)
    inputs, accuracy = generator.normal(size=(300, 8)).astype(np.float32), generator.uniform(size=300)
    forest = make_predictor("random-forest", "mnist")
    forest.fit(inputs, accuracy, seed=3)
    original = RandomForestRegressor(
        100, max_depth=10, min_samples_leaf=50, max_leaf_nodes=256, max_features="sqrt", random_state=3
    )
    np.testing.assert_allclose(forest.predict(inputs), original.fit(inputs, accuracy).predict(inputs), rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in predictor_names() if not predictor_class(name).has_chance])
def test_a_predictor_without_chance_ignores_the_seed(name: str) -> None:
    pytest.importorskip(name)
    data = make_data("mnist", 160)
    first, second = (make_predictor(name, "mnist") for _ in range(2))
    for forest, seed in ((first, 0), (second, 1)):
        forest.fit(forest.inputs(data)[:, :500].numpy(), data.accuracy.numpy(), seed)
    inputs = first.inputs(data)[:, :500].numpy()
    assert np.array_equal(first.predict(inputs), second.predict(inputs))
    assert len(np.unique(first.predict(inputs))) > 1
