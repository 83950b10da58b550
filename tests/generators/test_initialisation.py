"""Initial weights: the distribution against scipy, who shares a draw with whom, and golden numbers."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from generators.architecture import tensor_table, unflatten
from generators.initialisation import CUT, initial_weights, truncated_normal
from generators.streams import stream_key, uniform

GOLDEN = [
    [-0.114965156, 0.0881147534, -0.0724644735],
    [0.407878488, 0.0332894847, -0.0897722319],
    [0.271948069, -0.0389110446, -0.242848232],
    [-0.274962276, 0.111377485, -0.169562146],
]


def uniforms(count: int) -> torch.Tensor:
    return torch.from_numpy(uniform(stream_key("test of initialisation"), count))


@pytest.mark.parametrize("std", [0.1, 0.5, 2.0, 30.0])
def test_distribution_is_scipys_truncated_normal(std: float):
    drawn = truncated_normal(uniforms(20_000), std).numpy()
    expected = stats.truncnorm(-CUT / std, CUT / std, scale=std)
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-3
    assert np.abs(drawn).max() <= CUT
    assert drawn.std() == pytest.approx(expected.std(), rel=0.02)


@pytest.mark.parametrize("std", [0.1, 0.5, 2.0])
def test_quantiles_are_scipys(std: float):
    levels = np.array([1e-9, 1e-6, 0.01, 0.3, 0.5, 0.9, 1 - 1e-6])
    expected = stats.truncnorm(-CUT / std, CUT / std, scale=std).ppf(levels)
    assert truncated_normal(torch.from_numpy(levels), std).numpy() == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_extreme_numbers_stay_within_the_cut():
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    for std in (1e-3, 0.1, 1.0, 1e6):
        low, high = truncated_normal(ends, std).tolist()
        assert -CUT <= low < 0 < high <= CUT
        assert high < 9 * std  # an infinite quantile would show as the cut


@pytest.mark.parametrize("task", ["mnist", "ag_news"])
def test_biases_are_zero_and_weights_have_the_standard_deviation(make_run, task: str):
    tensors = unflatten(task, initial_weights(make_run(task=task, init_std=0.15)))
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.float32
        if name.endswith("bias"):
            assert not tensor.any(), name
        else:
            # Five standard errors of a standard deviation.
            assert tensor.std().item() == pytest.approx(0.15, rel=5 / math.sqrt(2 * tensor.numel())), name
            assert abs(tensor.mean().item()) < 5 * 0.15 / math.sqrt(tensor.numel()), name


def test_shared_runs_differ_in_scale_only(make_run):
    small = initial_weights(make_run(initialisation="shared", init_std=0.1, optimizer="sgd", dropout=0.2))
    large = initial_weights(make_run(initialisation="shared", init_std=0.3, learning_rate=0.01))
    assert torch.equal(small != 0, large != 0)
    torch.testing.assert_close(3 * small, large, rtol=1e-6, atol=1e-6)
    other_seed = initial_weights(make_run(initialisation="shared", init_std=0.1, seed=4))
    assert abs(correlation(small, other_seed)) < 0.05


def test_per_run_draws_are_independent(make_run):
    first, second = initial_weights(make_run(l2=1e-8)), initial_weights(make_run(l2=1e-7))
    assert abs(correlation(first, second)) < 0.05


def test_tensors_of_one_run_are_independent(make_run):
    for initialisation in ("shared", "per_run"):
        tensors = unflatten("mnist", initial_weights(make_run(initialisation=initialisation)))
        squares = [t.flatten() for t in tensors.values() if t.shape == (32, 32)]
        assert len(squares) == 9
        matrix = torch.corrcoef(torch.stack(squares)) - torch.eye(9)
        assert matrix.abs().max() < 5 / 32


def test_golden_weights(make_run):
    per_run = unflatten("mnist", initial_weights(make_run()))
    shared = unflatten("mnist", initial_weights(make_run(initialisation="shared")))
    assert len(per_run) == len(tensor_table("mnist"))
    found = [
        per_run["embedding.conv1.weight"].flatten()[:3],
        per_run["classifier.fc2.weight"].flatten()[-3:],
        shared["embedding.conv1.weight"].flatten()[:3],
        shared["encoder.1.attention.keys.weight"].flatten()[:3],
    ]
    torch.testing.assert_close(torch.stack(found), torch.tensor(GOLDEN), rtol=1e-6, atol=0)


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()
