"""Sums over a group have the bits of one process's sum, on threads and on real processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain_platform.comm.exact import ExactReducer, Layout
from raytrain_platform.comm.fast import FastReducer
from raytrain_platform.comm.group import Group
from raytrain_platform.comm.local import LocalGroup, LocalHub
from raytrain_platform.comm.tree import Tree
from tests.contracts.members import team

ROOM = 8
"""Elements left free after each tensor, as buckets do; no less than the members of any group here."""


def leaf(seed: int, number: int, num_elements: int) -> torch.Tensor:
    """Values of such different sizes that every association rounds differently."""
    random = torch.Generator().manual_seed(1000 * seed + number)
    sizes = 10.0 ** torch.randint(-3, 4, (num_elements,), generator=random)
    return torch.randn(num_elements, generator=random) * sizes


def tree_sum(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reference, in one process: the leaves are halved at the largest power of two, again and again."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return tree_sum(leaves[:half]) + tree_sum(leaves[half:])


def roots_of(seed: int, num_elements: int, num_leaves: int, block: range) -> list[torch.Tensor]:
    """One member's roots, in tensors with room at their end."""
    roots: list[torch.Tensor] = []
    for number, num_merges in zip(block, Tree(num_leaves).merges(block), strict=True):
        total = torch.cat([leaf(seed, number, num_elements), torch.zeros(ROOM)])
        for _ in range(num_merges):
            total = roots.pop() + total
        roots.append(total)
    return roots


def cut(num_leaves: int, size: int, seed: int) -> tuple[range, ...]:
    """A block for each member, of any length but 0."""
    random = torch.Generator().manual_seed(seed)
    cuts = sorted((torch.randperm(num_leaves - 1, generator=random)[: size - 1] + 1).tolist())
    return tuple(map(range, [0, *cuts], [*cuts, num_leaves]))


def reduce_tensors(group: Group, num_leaves: int, lengths: Sequence[int], chunk_bytes: int, seed: int) -> None:
    """Sum several tensors at once, as the buckets of one step, and a short vector beside them; check every bit."""
    blocks = cut(num_leaves, group.size, seed)
    reducer = ExactReducer(group, Layout(Tree(num_leaves), blocks), chunk_bytes)
    buckets = [roots_of(seed + k, n, num_leaves, blocks[group.rank]) for k, n in enumerate(lengths)]
    for roots, num_elements in zip(buckets, lengths, strict=True):
        reducer.start(roots, num_elements)
    small = roots_of(seed, 5, num_leaves, blocks[group.rank])
    vector = reducer.sum_small(small)
    reducer.finish()
    for k, (roots, num_elements) in enumerate(zip(buckets, lengths, strict=True)):
        expected = tree_sum([leaf(seed + k, number, num_elements) for number in range(num_leaves)])
        assert same_bits(roots[0][:num_elements], expected), f"tensor {k} of {lengths}, {blocks}"
    assert same_bits(vector[:5], tree_sum([leaf(seed, number, 5) for number in range(num_leaves)]))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def on_threads(size: int, run: Callable[[Group], None]) -> None:
    hub = LocalHub(size)
    with ThreadPoolExecutor(size) as threads:
        for done in [threads.submit(run, LocalGroup(hub, rank)) for rank in range(size)]:
            done.result(timeout=60)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    size=st.integers(1, 5),
    more_leaves=st.integers(0, 20),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    chunk_elements=st.integers(1, 40),
    seed=st.integers(0, 10**6),
)
def test_threads_sum_to_the_bits_of_one_process(
    size: int, more_leaves: int, lengths: list[int], chunk_elements: int, seed: int
) -> None:
    on_threads(size, lambda group: reduce_tensors(group, size + more_leaves, lengths, 4 * chunk_elements, seed))


def reduce_many(group: Group, talk: Connection) -> None:
    for seed in range(20):
        random = torch.Generator().manual_seed(seed)

        def any_of(low: int, high: int, random: torch.Generator = random) -> int:
            return int(torch.randint(low, high, (1,), generator=random))

        lengths = [any_of(1, 2000) for _ in range(3)]
        chunk_bytes = 4 * group.size * any_of(10, 200)
        reduce_tensors(group, group.size + any_of(0, 14), lengths, chunk_bytes, 10 * seed)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_sum_to_the_bits_of_one_process(size: int) -> None:
    with team("gloo", size, reduce_many) as members:
        assert members.receive() == [None] * size


def reduce_fast(group: Group, talk: Connection) -> None:
    reducer = FastReducer(group)
    rows = [[leaf(number, rank, 1001) for rank in range(group.size)] for number in range(3)]
    tensors = [torch.cat([row[group.rank], torch.full((ROOM,), 7.0)]) for row in rows]
    for tensor in tensors:
        reducer.start([tensor], 1001)
    vector = reducer.sum_small([rows[0][group.rank]])
    reducer.finish()
    for tensor, row in zip(tensors, rows, strict=True):
        scale = torch.stack(row).abs().sum(0)
        assert bool(((tensor[:1001] - torch.stack(row).sum(0)).abs() <= 1e-6 * scale).all())
        assert tensor[1001:].tolist() == [7.0] * ROOM, "only the elements of the tensor are summed"
    assert same_bits(vector, tree_sum(rows[0]))


@pytest.mark.parametrize(("kind", "size"), [("gloo", 3), ("local", 1), ("local", 3)])
def test_the_fast_reduction_is_close_and_its_short_sums_are_exact(kind: str, size: int) -> None:
    with team(kind, size, reduce_fast) as members:
        assert members.receive() == [None] * size


@pytest.mark.parametrize("num_leaves", [1, 2, 5, 8, 13])
def test_a_layout_counts_the_roots_of_every_block(num_leaves: int) -> None:
    for size in range(1, num_leaves + 1):
        layout = Layout(Tree(num_leaves), cut(num_leaves, size, seed=size))
        assert layout.num_roots == tuple(len(roots_of(0, 1, num_leaves, block)) for block in layout.blocks)
        joined = {0}
        for into, other in layout.additions():
            assert into in joined or into < other, "a sum is added to one on its left"
            joined.add(other)
        assert joined == set(range(sum(layout.num_roots))), "every root is added"


def test_one_member_per_subtree_moves_no_more_than_a_ring() -> None:
    layout = Layout(Tree(8), tuple(range(2 * rank, 2 * rank + 2) for rank in range(4)))
    assert layout.num_roots == (1, 1, 1, 1)


def test_a_worker_alone_adds_up_its_own_roots() -> None:
    on_threads(1, partial(reduce_tensors, num_leaves=7, lengths=[9], chunk_bytes=4, seed=3))
