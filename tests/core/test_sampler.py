"""Every sample exactly once an epoch, in an order that is a pure function of the seed and the epoch."""

from __future__ import annotations

import itertools
import math
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raytrain_platform.data.sampler import Sampler, derive_seed, num_steps_per_epoch, permute
from raytrain_platform.errors import TaskError

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None)

words = st.integers(0, 2**64 - 1)


def order(num_items: int, key: int) -> list[int]:
    return permute(np.arange(num_items, dtype=np.uint64), num_items, key).tolist()


def chi_square(counts: NDArray[np.int64]) -> float:
    """Standard deviations by which counts that should be equal are too uneven."""
    expected = counts.mean()
    degrees = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@unhurried
@given(num_items=st.integers(1, 600), key=words)
def test_a_permutation_reaches_every_item_once(num_items, key):
    assert sorted(order(num_items, key)) == list(range(num_items))


AROUND_POWERS_OF_TWO = [2**power + offset for power in (4, 8, 10, 12, 15, 16) for offset in (-1, 0, 1)]
SQUARES_AND_PRIMES = [961, 992, 1009, 7919, 65_521, 90_000]


@pytest.mark.parametrize("num_items", [1, 2, 3, *AROUND_POWERS_OF_TWO, *SQUARES_AND_PRIMES])
def test_a_permutation_reaches_every_item_once_at_awkward_sizes(num_items):
    assert sorted(order(num_items, key=num_items)) == list(range(num_items))


@unhurried
@given(num_items=st.integers(2**31, 2**63), key=words)
def test_an_item_of_a_huge_range_stays_in_it_and_distinct(num_items, key):
    items = np.unique(np.linspace(0, num_items - 1, 50).astype(np.uint64).clip(0, num_items - 1))
    permuted = permute(items, num_items, key)
    assert permuted.max() < num_items
    assert len(np.unique(permuted)) == len(items)


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 120),
    batch_size=st.integers(1, 50),
    num_shards=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**6),
)
def test_every_sample_comes_once_an_epoch(num_samples, batch_size, num_shards, seed, epoch):
    sampler = Sampler(num_samples=num_samples, batch_size=batch_size, num_shards=num_shards, seed=seed)
    num_steps = num_steps_per_epoch(num_samples, batch_size)
    steps = range(epoch * num_steps, (epoch + 1) * num_steps)
    assert {sampler.epoch_of(step) for step in steps} == {epoch}
    seen = [index for step in steps for shard in range(num_shards) for index in sampler.indices(step, shard).tolist()]
    assert sorted(seen) == list(range(num_samples))


@unhurried
@given(num_samples=st.integers(1, 200), batch_size=st.integers(1, 50), num_shards=st.integers(1, 60), data=st.data())
def test_a_batch_is_dealt_out_evenly_and_in_order(num_samples, batch_size, num_shards, data):
    sampler = Sampler(num_samples=num_samples, batch_size=batch_size, num_shards=num_shards, seed=0)
    whole = Sampler(num_samples=num_samples, batch_size=batch_size, num_shards=1, seed=0)
    step = data.draw(st.integers(0, 3 * num_steps_per_epoch(num_samples, batch_size)))
    slices = [sampler.indices(step, shard).tolist() for shard in range(num_shards)]
    assert [len(part) for part in slices] == [len(sampler.positions(step, shard)) for shard in range(num_shards)]
    assert max(map(len, slices)) - min(map(len, slices)) <= 1
    assert list(itertools.chain(*slices)) == whole.indices(step, 0).tolist()


def test_only_the_last_step_of_an_epoch_is_smaller():
    sampler = Sampler(num_samples=10, batch_size=4, num_shards=1, seed=0)
    assert [sampler.indices(step, 0).size for step in range(6)] == [4, 4, 2, 4, 4, 2]


def test_each_epoch_and_each_seed_has_its_own_order():
    orders = {
        tuple(Sampler(num_samples=50, batch_size=50, num_shards=1, seed=seed).indices(epoch, 0).tolist())
        for seed in range(20)
        for epoch in range(20)
    }
    assert len(orders) == 20 * 20


@pytest.mark.parametrize("num_items", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_equally_likely(num_items):
    possible = list(itertools.permutations(range(num_items)))
    seen = Counter(tuple(order(num_items, derive_seed(7, number))) for number in range(20 * len(possible) + 400))
    assert abs(chi_square(np.array([seen[one] for one in possible]))) < 4


@pytest.mark.parametrize("num_items", [6, 9, 16, 30])
def test_every_pair_of_first_samples_is_equally_likely(num_items):
    seen = Counter(tuple(order(num_items, derive_seed(3, number))[:2]) for number in range(3000))
    pairs = list(itertools.permutations(range(num_items), 2))
    assert abs(chi_square(np.array([seen[pair] for pair in pairs]))) < 4


@pytest.mark.parametrize("num_samples", [1797, 10**9])
def test_samples_come_from_everywhere_and_neighbours_are_unrelated(num_samples):
    epochs = [
        Sampler(num_samples=num_samples, batch_size=512, num_shards=1, seed=seed).indices(0, 0) for seed in range(100)
    ]
    bins = np.bincount(np.concatenate(epochs) * 64 // num_samples, minlength=64)
    assert abs(chi_square(bins)) < 4
    steps = np.concatenate([np.diff(indices) % num_samples for indices in epochs])
    assert abs(chi_square(np.bincount(steps * 64 // num_samples, minlength=64))) < 4


def test_a_billion_samples_cost_no_time_and_no_memory():
    sampler = Sampler(num_samples=10**9, batch_size=1024, num_shards=8, seed=1)
    sampler.indices(0, 0)
    tracemalloc.start()
    durations_s = []
    for step in (0, 976_561, 10**9, 10**12, 10**15):
        began = time.perf_counter()
        sampler.indices(step, 7)
        durations_s.append(time.perf_counter() - began)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(durations_s) < 5e-3
    assert peak_bytes < 100_000


def test_the_order_never_changes_between_releases_processes_and_machines():
    # A checkpoint holds only the step: with another order, a resumed job would repeat and drop samples.
    small = Sampler(num_samples=10, batch_size=4, num_shards=2, seed=0)
    assert [small.indices(step, shard).tolist() for step in range(3) for shard in range(2)] == [
        [9, 5],
        [3, 0],
        [6, 2],
        [8, 4],
        [7],
        [1],
    ]
    large = Sampler(num_samples=10**9, batch_size=8, num_shards=2, seed=2**63 - 1)
    assert large.indices(10**12, 1).tolist() == [300952540, 684977898, 889264923, 512634721]


def test_a_derived_seed_never_changes():
    # The first output of SplitMix64 seeded with 0, as its authors' code gives it.
    assert derive_seed(0) == 0xE220_A839_7B1D_CDAF
    assert derive_seed(1, 2, 3) == 0xEABC_FA2C_623C_5A59


@unhurried
@given(parts=st.lists(words, min_size=1, max_size=5), other=words, data=st.data())
def test_another_part_gives_another_seed(parts, other, data):
    place = data.draw(st.integers(0, len(parts) - 1))
    changed = [*parts[:place], other, *parts[place + 1 :]]
    assert (derive_seed(*changed) == derive_seed(*parts)) == (changed == parts)
    assert 0 <= derive_seed(*parts) < 2**64


def test_the_order_and_the_number_of_parts_count():
    assert len({derive_seed(1, 2), derive_seed(2, 1), derive_seed(1), derive_seed(1, 0), derive_seed(0, 1)}) == 5


def test_data_without_samples_is_refused():
    with pytest.raises(TaskError, match=r"no samples; check what train_data\(\) returns"):
        Sampler(num_samples=0, batch_size=4, num_shards=2, seed=0)
