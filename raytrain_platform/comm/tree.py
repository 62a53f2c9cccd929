"""The order in which a sum is taken: one fixed binary tree, whoever holds the leaves.

Floating-point addition is not associative, so a sum has the same bits at every number of workers only if its
association is fixed. Leaves ``0 .. num_leaves - 1`` hang under a binary tree whose node ``(level, index)`` covers
leaves ``index * 2**level`` up to ``(index + 1) * 2**level``, cut off at ``num_leaves``. A contiguous block of leaves is
a few whole subtrees; their sums, added in tree order, give the sum over all leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Node:
    """One node of the tree; a leaf has level 0."""

    level: int
    index: int

    @property
    def parent(self) -> Node:
        """The node above."""
        return Node(self.level + 1, self.index // 2)

    def is_left_sibling_of(self, other: Node) -> bool:
        """Whether the two are the left and the right child of one node."""
        return self.level == other.level and self.index % 2 == 0 and other.index == self.index + 1


@dataclass(frozen=True)
class Tree:
    """The tree over ``num_leaves`` leaves."""

    num_leaves: int

    def subtrees(self, block: range) -> tuple[Node, ...]:
        """The fewest nodes that cover just the leaves of a contiguous block, from left to right."""
        nodes: list[Node] = []
        for leaf in block:
            nodes, _ = self._push(nodes, Node(0, leaf))
        return tuple(nodes)

    def merges(self, block: range) -> tuple[int, ...]:
        """For each leaf of a contiguous block: how many of the sums to its left are added to it, the last first."""
        nodes: list[Node] = []
        counts = []
        for leaf in block:
            nodes, num_merges = self._push(nodes, Node(0, leaf))
            counts.append(num_merges)
        return tuple(counts)

    def additions(self, nodes: Sequence[Node]) -> tuple[tuple[int, int], ...]:
        """The additions that turn the sums of ``nodes``, which cover all leaves, into the sum over all leaves.

        Returns:
            Pairs ``(into, other)`` of positions in ``nodes``, to be carried out in order as
            ``sums[into] += sums[other]``; the result ends up in ``sums[0]``.
        """
        pending: list[tuple[Node, int]] = []
        order: list[tuple[int, int]] = []
        for position, pushed in enumerate(nodes):
            node = self._promoted(pushed)
            while pending and pending[-1][0].is_left_sibling_of(node):
                left, into = pending.pop()
                order.append((into, position))
                node, position = self._promoted(left.parent), into
            pending.append((node, position))
        if [node for node, _ in pending] != [self._root]:
            raise ValueError(f"the nodes {list(nodes)} do not cover {self.num_leaves} leaves")
        return tuple(order)

    def _push(self, nodes: list[Node], node: Node) -> tuple[list[Node], int]:
        num_merges = 0
        node = self._promoted(node)
        while nodes and nodes[-1].is_left_sibling_of(node):
            node = self._promoted(nodes.pop().parent)
            num_merges += 1
        return [*nodes, node], num_merges

    def _promoted(self, node: Node) -> Node:
        """The highest node with the same leaves: a left child without a sibling is its parent."""
        while node.index % 2 == 0 and node != self._root and (node.index + 1) << node.level >= self.num_leaves:
            node = node.parent
        return node

    @property
    def _root(self) -> Node:
        return Node((self.num_leaves - 1).bit_length(), 0)
