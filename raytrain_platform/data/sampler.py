"""Which samples make up a step: a pure function of the seed, the step and the shard."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raytrain_platform.errors import TaskError

# Four rounds are enough for a large domain (Luby and Rackoff, 1988); with five samples the order needs twelve.
_NUM_ROUNDS = 12

# The finalizer of SplitMix64, which scatters 64-bit words one to one: for one word, and typed for NumPy, which takes
# as long to convert a plain int as to use it.
# Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
_SHIFTS, _LAST_SHIFT = (30, 27), 31
_FACTORS = (0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB)
_SHIFTS_U64, _LAST_SHIFT_U64 = np.array(_SHIFTS, dtype=np.uint64), np.uint64(_LAST_SHIFT)
_FACTORS_U64 = np.array(_FACTORS, dtype=np.uint64)


def num_steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Return the steps of one pass over the data, the last of which may be smaller."""
    return -(-num_samples // batch_size)


def derive_seed(*parts: int) -> int:
    """Mix numbers into one seed below 2**64; with all but one part fixed, different parts give different seeds.

    Args:
        parts: Numbers that say what the seed is for; each counts modulo 2**64, and their order matters.
    """
    state = 0
    for part in parts:
        state = _mix64(((state + 0x9E37_79B9_7F4A_7C15) ^ part) & 0xFFFF_FFFF_FFFF_FFFF)
    return state


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Deals the samples of each epoch, in a new order, into steps and shards.

    Every sample comes exactly once an epoch. Nothing is stored: asking for any step costs the same, whatever came
    before and however large the data.
    """

    num_samples: int
    """Samples in the data set, at least 1."""

    batch_size: int
    """Samples of one step; the last step of an epoch takes what is left."""

    num_shards: int
    """Slices of every batch, whose sizes differ by at most one; some are empty when the batch is smaller."""

    seed: int
    """Decides the order, another one in every epoch."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise TaskError("the training data has no samples; check what train_data() returns")

    def epoch_of(self, step: int) -> int:
        """Return the epoch a step belongs to, counted from 0."""
        return step // num_steps_per_epoch(self.num_samples, self.batch_size)

    def positions(self, step: int, shard: int) -> range:
        """Return where in the order of its epoch the shard's samples stand; empty for an empty shard."""
        first = step % num_steps_per_epoch(self.num_samples, self.batch_size) * self.batch_size
        size = min(self.batch_size, self.num_samples - first)
        return range(first + shard * size // self.num_shards, first + (shard + 1) * size // self.num_shards)

    def indices(self, step: int, shard: int) -> NDArray[np.int64]:
        """Return the indices of the samples of one shard of one step."""
        positions = self.positions(step, shard)
        order = np.arange(positions.start, positions.stop, dtype=np.uint64)
        return permute(order, self.num_samples, derive_seed(self.seed, self.epoch_of(step))).astype(np.int64)


def permute(items: NDArray[np.uint64], num_items: int, key: int) -> NDArray[np.uint64]:
    """Return where a keyed random permutation of ``range(num_items)`` takes each item, without storing it.

    A generalized Feistel network permutes the slightly larger ``range(a * b)``; what lands at or past ``num_items`` is
    enciphered again until it lands below, as it must: it walks along a cycle that began there.
    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.

    Args:
        items: One-dimensional, each below ``num_items``.
        num_items: Size of the permuted range, from 1 to 2**63.
        key: Chooses the permutation.
    """
    # a * b exceeds num_items by less than a, its square root, so that few items walk, and those rarely twice.
    a = math.isqrt(num_items - 1) + 1
    b = -(-num_items // a)
    round_keys = [derive_seed(key, number) for number in range(_NUM_ROUNDS)]
    permuted = _encipher(items, a, b, round_keys)
    while (outside := permuted >= np.uint64(num_items)).any():
        permuted[outside] = _encipher(permuted[outside], a, b, round_keys)
    return permuted


def _encipher(items: NDArray[np.uint64], a: int, b: int, round_keys: list[int]) -> NDArray[np.uint64]:
    size_a, size_b, keys = np.uint64(a), np.uint64(b), np.array(round_keys, dtype=np.uint64)
    left, right = items % size_a, items // size_a
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix64s(right ^ left_key) % size_a) % size_a
        right = (right + _mix64s(left ^ right_key) % size_b) % size_b
    return left + right * size_a


def _mix64(word: int) -> int:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        word = (word ^ (word >> shift)) * factor & 0xFFFF_FFFF_FFFF_FFFF
    return word ^ (word >> _LAST_SHIFT)


def _mix64s(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in zip(_SHIFTS_U64, _FACTORS_U64, strict=True):
        words = (words ^ (words >> shift)) * factor
    return words ^ (words >> _LAST_SHIFT_U64)
