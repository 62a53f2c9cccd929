from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_platform.elastic.shards import block_of, effective_workers

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None, max_examples=60)

COUNTS = st.integers(1, 200)


def blocks(world_size: int, num_shards: int) -> list[range]:
    return [block_of(rank, world_size, num_shards) for rank in range(world_size)]


@unhurried
@given(COUNTS, COUNTS)
def test_every_shard_is_computed_once_and_in_rank_order(world_size: int, num_shards: int) -> None:
    assert [shard for block in blocks(world_size, num_shards) for shard in block] == list(range(num_shards))


@unhurried
@given(COUNTS, COUNTS)
def test_no_worker_has_two_shards_more_than_another(world_size: int, num_shards: int) -> None:
    sizes = [len(block) for block in blocks(world_size, num_shards)]
    assert max(sizes) - min(sizes) <= 1


@unhurried
@given(COUNTS, COUNTS)
def test_the_largest_block_sets_the_pace(world_size: int, num_shards: int) -> None:
    assert effective_workers(world_size, num_shards) == num_shards / max(map(len, blocks(world_size, num_shards)))


@unhurried
@given(COUNTS, COUNTS)
def test_one_more_worker_never_slows_a_job_and_never_helps_beyond_the_shards(world_size: int, num_shards: int) -> None:
    now, then = effective_workers(world_size, num_shards), effective_workers(world_size + 1, num_shards)
    assert now <= then <= num_shards
    assert now <= world_size
    assert (now == world_size) == (num_shards % world_size == 0)


def test_three_workers_on_eight_shards_work_like_eight_thirds() -> None:
    assert blocks(3, 8) == [range(0, 2), range(2, 5), range(5, 8)]
    assert effective_workers(3, 8) == 8 / 3
