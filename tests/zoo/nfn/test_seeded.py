"""Training seeds the generators of the CPU and of its own device, and no other."""

from contextlib import nullcontext

import pytest
import torch

from generators.streams import stream_key
from zoo.nfn.fit import seeded


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What is done to the generators of GPUs, in place of doing it."""
    done: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: done.append(("all", seed)))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: done.append(("current", seed)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: done.append(("device", device)) or nullcontext())
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: done.append(("forked", devices)) or nullcontext())
    return done


def test_on_a_cpu_no_gpu_is_seeded(seeds: list[tuple[str, object]]) -> None:
    with seeded(torch.device("cpu"), "a", 1):
        drawn = torch.rand(2)
    assert seeds == [("forked", [])]
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(stream_key("a", 1))))


def test_on_a_gpu_that_one_is_seeded_and_put_back(seeds: list[tuple[str, object]]) -> None:
    gpu = torch.device("cuda", 1)
    with seeded(gpu, "a", 1):
        pass
    assert seeds == [("forked", [gpu]), ("device", gpu), ("current", stream_key("a", 1))]


def test_the_callers_numbers_go_on() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with seeded(torch.device("cpu"), "a", 1):
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)
