"""Which shards each worker computes: contiguous blocks, as equal as they can be."""

from __future__ import annotations


def block_of(rank: int, world_size: int, num_shards: int) -> range:
    """The shards of one worker.

    Blocks are contiguous, cover every shard once and differ in length by at most one, so that a worker's gradient is
    the sum of a few whole subtrees of the reduction tree.

    Args:
        rank: The worker's rank, from 0.
        world_size: Workers of the generation.
        num_shards: Shards of the job.
    """
    return range(rank * num_shards // world_size, (rank + 1) * num_shards // world_size)


def effective_workers(world_size: int, num_shards: int) -> float:
    """How many workers' worth of speed a size gives: the largest block sets the pace.

    A size that does not divide ``num_shards`` leaves some workers waiting: 3 workers on 8 shards work like 8 / 3.
    """
    return num_shards / -(-num_shards // world_size)
