"""The schedule against torch's LinearLR and CosineAnnealingLR, and against its formula."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from generators.schedules import learning_rate


def torch_rates(peak: float, epochs: int, warmup: int, minimum: float) -> list[float]:
    """Rates of all epochs as torch gives them, the cosine stepped only after the warm-up."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    linear = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1) if warmup else None
    cosine = CosineAnnealingLR(optimizer, T_max=epochs - warmup, eta_min=minimum) if epochs > warmup else None
    rates = []
    for epoch in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler = linear if epoch < warmup else cosine
        scheduler.step()
    return rates


@pytest.mark.parametrize(("epochs", "warmup"), [(50, 10), (100, 10), (11, 10), (10, 10), (6, 1), (5, 0), (1, 1)])
@pytest.mark.parametrize("peak", [7e-2, 3e-4])
def test_equals_torch(epochs: int, warmup: int, peak: float):
    ours = [learning_rate(peak, epoch, epochs, warmup, 1e-5) for epoch in range(epochs)]
    assert ours == pytest.approx(torch_rates(peak, epochs, warmup, 1e-5), rel=1e-9)


@given(peak=st.floats(1e-4, 1), epochs=st.integers(1, 60), data=st.data(), minimum=st.floats(0, 1e-4))
def test_equals_torch_for_any_lengths(peak: float, epochs: int, data: st.DataObject, minimum: float):
    warmup = data.draw(st.integers(0, epochs))
    ours = [learning_rate(peak, epoch, epochs, warmup, minimum) for epoch in range(epochs)]
    assert ours == pytest.approx(torch_rates(peak, epochs, warmup, minimum), rel=1e-6)


def test_golden_rates_of_the_zoo():
    rates = [learning_rate(1e-2, epoch, 50, 10, 1e-5) for epoch in range(50)]
    assert rates[0] == 1e-3
    assert rates[8] == pytest.approx(9e-3)
    assert rates[9] == rates[10] == 1e-2  # the last warm-up epoch and the first cosine epoch
    assert rates[30] == pytest.approx((1e-2 + 1e-5) / 2)  # half of the cosine
    assert rates[49] == pytest.approx(1e-5 + (1e-2 - 1e-5) * (1 + math.cos(math.pi * 39 / 40)) / 2)
    assert rates[49] > 1e-5  # the minimum itself would be the rate of epoch 50


def test_equal_warmup_and_epochs_mean_no_cosine():
    assert [learning_rate(0.3, epoch, 3, 3, 1e-5) for epoch in range(3)] == pytest.approx([0.1, 0.2, 0.3])
