"""Every random number of a training run, as a function of names and counters.

Nothing here has a state. A stream is named by its parts (what it is for, the seed, the task, the epoch ...), the parts
are hashed to a 64-bit key, and number i of the stream is a hash of (key, i). So the numbers that a run sees do not
depend on its neighbours in a population, on workers, threads, devices or engines, and a run can start again at any
epoch. The formulas are part of a run's identity: whoever changes one raises STREAM_VERSION.
"""

import hashlib
import json

import numpy as np
import torch
from torch import Tensor

STREAM_VERSION = 1

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

DROPOUT_LEVELS = 1 << 16
"""Dropout compares 16-bit numbers, so a rate is rounded to the nearest 1/65536."""


def stream_key(*parts: str | int) -> int:
    """Return the 64-bit key of the stream that `parts` name, for example ("crops", seed, task, epoch)."""
    name = json.dumps([STREAM_VERSION, *parts], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def random_bits(key: int, count: int) -> np.ndarray:
    """Return numbers 0 to count - 1 of a stream as uint64 [count] (the SplitMix64 generator, started at `key`)."""
    with np.errstate(over="ignore"):
        z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX_1
        z = (z ^ (z >> np.uint64(27))) * _MIX_2
        return z ^ (z >> np.uint64(31))


def uniform(key: int, count: int) -> np.ndarray:
    """Return float64 [count], uniform on the open interval (0, 1), 52 bits each (a 53rd would round up to 1)."""
    return ((random_bits(key, count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def permutation(key: int, count: int) -> np.ndarray:
    """Return a random order of 0 to count - 1 as int64 [count]."""
    return np.argsort(random_bits(key, count), kind="stable")


def integers(key: int, count: int, bound: int) -> np.ndarray:
    """Return int64 [count], each in 0 to bound - 1; the bias is below bound / 2**32."""
    return ((random_bits(key, count) >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32)).astype(np.int64)


def dropout_numbers(
    key: int, samples: int, sites: int, tokens: int, width: int, max_tokens: int, device: torch.device
) -> Tensor:
    """Return the 16-bit numbers behind one step's dropout, int32 [sites, samples, tokens, width].

    Number [s, b, t, j] is the low half (j < width / 2) or the high half of a 32-bit hash of the key and the counter
    ((b * sites + s) * max_tokens + t) * width / 2 + (j mod width / 2). `max_tokens` is the longest sequence that the
    task allows, so that the numbers of a token do not depend on how far a batch was padded.
    """
    half = width // 2
    sample = torch.arange(samples, device=device, dtype=torch.int32)
    site = torch.arange(sites, device=device, dtype=torch.int32)
    token = torch.arange(tokens, device=device, dtype=torch.int32)
    channel = torch.arange(half, device=device, dtype=torch.int32)
    row = (sample[None, :, None] * sites + site[:, None, None]) * max_tokens + token
    h = row[..., None] * half + channel + _int32(key & 0xFFFFFFFF)
    h ^= _shift_right(h, 16)
    h *= _int32(0x7FEB352D)
    h ^= _int32(key >> 32)
    h ^= _shift_right(h, 15)
    h *= _int32(0x846CA68B)
    h ^= _shift_right(h, 16)
    return torch.cat([h & 0xFFFF, _shift_right(h, 16)], dim=-1)


def dropout_threshold(rate: float) -> int:
    """Return t such that a unit is dropped where its 16-bit number is below t; the kept ones are scaled by
    65536 / (65536 - t). A rate below 1 never drops everything: t is at most 65535."""
    return min(round(rate * DROPOUT_LEVELS), DROPOUT_LEVELS - 1)


def _int32(bits: int) -> int:
    """Read 32 bits as a signed integer, since torch multiplies and shifts only signed ones on every device."""
    return bits - (1 << 32) if bits >= 1 << 31 else bits


def _shift_right(h: Tensor, bits: int) -> Tensor:
    """Shift int32 as if unsigned."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)
