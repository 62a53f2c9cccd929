from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_platform.comm.tree import Node, Tree

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None, max_examples=60)

MAX_LEAVES = 64


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, list[range]]:
    """Leaves, and contiguous blocks that cover them once; blocks may be empty."""
    num_leaves = draw(st.integers(1, MAX_LEAVES))
    cuts = draw(st.lists(st.integers(0, num_leaves), max_size=8).map(sorted))
    ends = [*cuts, num_leaves]
    return num_leaves, [range(begin, end) for begin, end in zip([0, *cuts], ends, strict=True)]


def random_leaves(num_leaves: int, seed: int) -> np.ndarray:
    """Values of such different sizes that every association rounds differently."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(num_leaves) * 10.0 ** random.integers(-3, 4, num_leaves)).astype(np.float32)


def sum_at(leaves: np.ndarray, node: Node) -> np.float32:
    """The reference: the sum at a node is that of its left child plus that of its right child, if it has one."""
    if node.level == 0:
        return np.float32(leaves[node.index])
    left, right = Node(node.level - 1, 2 * node.index), Node(node.level - 1, 2 * node.index + 1)
    if right.index << right.level >= len(leaves):
        return sum_at(leaves, left)
    return sum_at(leaves, left) + sum_at(leaves, right)


def leaves_of(node: Node, num_leaves: int) -> range:
    return range(node.index << node.level, min((node.index + 1) << node.level, num_leaves))


def root_of(num_leaves: int) -> Node:
    return Node((num_leaves - 1).bit_length(), 0)


def roots_of(leaves: np.ndarray, block: range) -> list[np.float32]:
    """What one worker does: it adds up its block as ``merges`` says."""
    roots: list[np.float32] = []
    for leaf, num_merges in zip(block, Tree(len(leaves)).merges(block), strict=True):
        total = leaves[leaf]
        for _ in range(num_merges):
            total = roots.pop() + total
        roots.append(total)
    return roots


def sum_in_blocks(leaves: np.ndarray, blocks: Sequence[range]) -> np.float32:
    """What a job does: the workers' roots are added up."""
    tree = Tree(len(leaves))
    sums = [root for block in blocks for root in roots_of(leaves, block)]
    for into, other in tree.additions([node for block in blocks for node in tree.subtrees(block)]):
        sums[into] += sums[other]
    return sums[0]


@unhurried
@given(splits(), st.integers(0, 2**32))
def test_a_sum_has_the_same_bits_however_the_leaves_are_dealt_out(split: tuple[int, list[range]], seed: int) -> None:
    num_leaves, blocks = split
    leaves = random_leaves(num_leaves, seed)
    assert sum_in_blocks(leaves, blocks).tobytes() == sum_at(leaves, root_of(num_leaves)).tobytes()


def test_the_bits_do_depend_on_the_order() -> None:
    leaves = random_leaves(MAX_LEAVES, seed=0)
    one_by_one = np.float32(0)
    for leaf in leaves:
        one_by_one += leaf
    assert one_by_one != sum_at(leaves, root_of(MAX_LEAVES))


@unhurried
@given(splits(), st.integers(0, 2**32))
def test_the_sum_of_a_block_is_made_of_the_sums_at_its_subtrees(split: tuple[int, list[range]], seed: int) -> None:
    num_leaves, blocks = split
    leaves, tree = random_leaves(num_leaves, seed), Tree(num_leaves)
    for block in blocks:
        assert roots_of(leaves, block) == [sum_at(leaves, node) for node in tree.subtrees(block)]


@unhurried
@given(splits())
def test_a_block_is_the_fewest_whole_subtrees_from_left_to_right(split: tuple[int, list[range]]) -> None:
    num_leaves, blocks = split
    for block in blocks:
        nodes = Tree(num_leaves).subtrees(block)
        assert [leaf for node in nodes for leaf in leaves_of(node, num_leaves)] == list(block)
        for node in nodes:
            if len(leaves_of(node, num_leaves)) < num_leaves:
                above = leaves_of(node.parent, num_leaves)
                assert not set(above) <= set(block), "the parent would do for both children"


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8, 16])
def test_workers_that_divide_a_power_of_two_send_one_sum_each(num_workers: int) -> None:
    size = 16 // num_workers
    for rank in range(num_workers):
        assert len(Tree(16).subtrees(range(rank * size, (rank + 1) * size))) == 1


def test_the_order_of_five_leaves() -> None:
    assert Tree(5).merges(range(5)) == (0, 1, 0, 2, 1)
    assert Tree(5).subtrees(range(1, 5)) == (Node(0, 1), Node(1, 1), Node(2, 1))
    assert Tree(5).additions([Node(0, leaf) for leaf in range(5)]) == ((0, 1), (2, 3), (0, 2), (0, 4))


@unhurried
@given(st.integers(2, MAX_LEAVES), st.data())
def test_nodes_that_leave_a_gap_have_no_sum(num_leaves: int, data: st.DataObject) -> None:
    gap = data.draw(st.integers(0, num_leaves - 1))
    nodes = [Node(0, leaf) for leaf in range(num_leaves) if leaf != gap]
    with pytest.raises(ValueError, match=f"do not cover {num_leaves} leaves"):
        Tree(num_leaves).additions(nodes)
