"""Random streams: golden numbers, their definition in plain Python, and cheap statistics of their quality."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from generators import streams
from generators.streams import dropout_numbers, dropout_threshold, integers, permutation, random_bits, uniform

CPU = torch.device("cpu")
keys = st.integers(0, 2**64 - 1)


def key(*parts: str | int) -> int:
    return streams.stream_key("test", *parts)


def test_golden_keys():
    assert streams.STREAM_VERSION == 1
    assert streams.stream_key("order", 3, "mnist", 0) == 16483277750917688748
    assert streams.stream_key("dropout", 3, "mnist", 49, 467) == 17057091115413852581


def test_keys_differ_by_every_part_and_its_type():
    names = [("a", 1, 2), ("a", 12), ("a", 1, 3), ("b", 1, 2), ("a", "1", 2), ("a,1", 2), ("a", 2, 1), ("a",), ("a", 1)]
    assert len({streams.stream_key(*name) for name in names}) == len(names)


def test_bits_are_splitmix64():
    # The first numbers that the published generator gives from the seed 1234567.
    assert random_bits(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(start=keys)
def test_bits_follow_their_definition(start: int):
    expected, state = [], start
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        expected.append(z ^ (z >> 31))
    assert random_bits(start, 4).tolist() == expected


def test_golden_numbers():
    assert uniform(1, 3).tolist() == [0.5665615751722809, 0.7457817572627011, 0.9710027535867963]
    assert permutation(1, 12).tolist() == [8, 10, 4, 3, 7, 0, 11, 1, 5, 9, 6, 2]
    assert integers(1, 12, 5).tolist() == [2, 3, 4, 2, 2, 3, 4, 2, 1, 3, 2, 3]
    numbers = dropout_numbers(2**63 + 1, samples=2, sites=5, tokens=3, width=32, max_tokens=49, device=CPU)
    assert numbers[0, 0, 0, :4].tolist() == [47543, 23066, 38730, 13660]
    assert numbers[4, 1, 2, -4:].tolist() == [63030, 5053, 13162, 20867]


@given(start=keys, count=st.integers(0, 300))
def test_permutation_has_every_number_once(start: int, count: int):
    order = permutation(start, count)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


@given(start=keys, bound=st.integers(1, 2**20))
def test_integers_stay_below_their_bound(start: int, bound: int):
    numbers = integers(start, 50, bound)
    assert numbers.dtype == np.int64
    assert numbers.min() >= 0 and numbers.max() < bound


@pytest.mark.parametrize(("bits", "low", "high"), [(2**64 - 1, 0.9999999999999997, 1.0), (0, 0.0, 2.0**-52)])
def test_extreme_bits_stay_inside_the_open_interval(monkeypatch, bits: int, low: float, high: float):
    monkeypatch.setattr(streams, "random_bits", lambda key, count: np.full(count, bits, np.uint64))
    assert low < uniform(0, 1)[0] < high
    assert integers(0, 1, 5)[0] == (4 if bits else 0)


def test_a_longer_stream_begins_like_a_shorter_one():
    assert np.array_equal(random_bits(5, 1000)[:10], random_bits(5, 10))


def test_uniform_numbers_pass_kolmogorov_smirnov():
    pooled = np.concatenate([uniform(key("ks", i), 2_000) for i in range(20)])
    assert stats.kstest(pooled, "uniform").pvalue > 1e-3


def test_every_bit_is_balanced_and_streams_of_neighbouring_epochs_are_uncorrelated():
    streams_by_epoch = np.stack([random_bits(key("bits", epoch), 10_000) for epoch in range(8)])
    for bit in range(64):
        ones = int(((streams_by_epoch >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 40_000) < 5 * math.sqrt(80_000) / 2, bit
    between = np.corrcoef(np.stack([uniform(key("bits", epoch), 10_000) for epoch in range(8)])) - np.eye(8)
    assert np.abs(between).max() < 5 / math.sqrt(10_000)


def test_all_orders_of_four_are_equally_likely():
    orders = [tuple(permutation(key("orders", i), 4)) for i in range(4_800)]
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-3


def test_permutation_leaves_nothing_near_its_place():
    order = permutation(key("long"), 60_000)
    assert abs(np.corrcoef(order, np.arange(60_000))[0, 1]) < 5 / math.sqrt(60_000)
    # A permutation has one fixed point on average, Poisson distributed.
    assert (order == np.arange(60_000)).sum() < 10


def test_crop_offsets_are_uniform_in_pairs():
    rows, columns = integers(key("crops"), 50_000, 5).reshape(-1, 2).T
    assert stats.chisquare(np.bincount(5 * rows + columns, minlength=25)).pvalue > 1e-3


def scalar_dropout_number(key: int, b: int, s: int, t: int, j: int, sites: int, width: int, max_tokens: int) -> int:
    """One number by the definition, in Python's own integers."""
    half, mask = width // 2, 0xFFFFFFFF
    counter = ((b * sites + s) * max_tokens + t) * half + j % half
    h = (counter + key) & mask
    h ^= h >> 16
    h = h * 0x7FEB352D & mask
    h ^= key >> 32
    h ^= h >> 15
    h = h * 0x846CA68B & mask
    h ^= h >> 16
    return h & 0xFFFF if j < half else h >> 16


@given(key=keys, samples=st.integers(1, 3), tokens=st.integers(1, 4), padding=st.integers(0, 600))
def test_dropout_numbers_equal_their_definition(key: int, samples: int, tokens: int, padding: int):
    longest = tokens + padding
    numbers = dropout_numbers(key, samples, 5, tokens, 8, longest, CPU)
    assert numbers.shape == (5, samples, tokens, 8) and numbers.dtype == torch.int32
    expected = [
        [[[scalar_dropout_number(key, b, s, t, j, 5, 8, longest) for j in range(8)] for t in range(tokens)]
         for b in range(samples)]
        for s in range(5)
    ]  # fmt: skip
    assert numbers.tolist() == expected


def test_dropout_numbers_do_not_depend_on_padding_or_batch_size():
    whole = dropout_numbers(key("drop"), 8, 5, 20, 32, 64, CPU)
    assert torch.equal(whole[:, :3, :7], dropout_numbers(key("drop"), 3, 5, 7, 32, 64, CPU))


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.15, 0.2, 0.5])
def test_share_of_dropped_units_is_the_rate(rate: float):
    numbers = dropout_numbers(key("share", 1), 128, 5, 49, 32, 49, CPU)
    dropped = (numbers < dropout_threshold(rate)).double()
    tolerance = 5 * math.sqrt(rate * (1 - rate))
    assert dropped.mean().item() == pytest.approx(rate, abs=tolerance / math.sqrt(numbers.numel()) + 2**-17)
    for dimension in range(4):  # no site, sample, token or channel is favoured
        others = [d for d in range(4) if d != dimension]
        shares = dropped.mean(dim=others)
        count = numbers.numel() / numbers.shape[dimension]
        assert (shares - rate).abs().max().item() < tolerance / math.sqrt(count) + 2**-17


def test_dropout_numbers_are_uniform_and_independent_from_step_to_step():
    steps = torch.stack([dropout_numbers(key("step", i), 32, 5, 49, 32, 49, CPU).flatten() for i in range(4)])
    assert steps.min() >= 0 and steps.max() < 65536
    counts = torch.bincount(steps.flatten() >> 8, minlength=256).numpy()
    assert stats.chisquare(counts).pvalue > 1e-3
    limit = 5 / math.sqrt(steps.shape[1])
    assert (torch.corrcoef(steps.double()) - torch.eye(4)).abs().max() < limit
    # The two halves of one hash serve two channels; neighbours in a row come from neighbouring counters.
    rows = steps[0].view(-1, 32).double()
    assert abs(torch.corrcoef(torch.stack([rows[:, :16].flatten(), rows[:, 16:].flatten()]))[0, 1]) < 2 * limit
    assert abs(torch.corrcoef(torch.stack([rows[:, :15].flatten(), rows[:, 1:16].flatten()]))[0, 1]) < 2 * limit


@pytest.mark.parametrize(("rate", "threshold"), [(0.0, 0), (0.05, 3277), (0.1, 6554), (0.5, 32768), (0.9999999, 65535)])
def test_thresholds(rate: float, threshold: int):
    assert dropout_threshold(rate) == threshold
