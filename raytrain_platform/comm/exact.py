"""Sums over the leaves of the tree that have the same bits at every number of workers.

Each rank holds the sums of the few subtrees ("roots") that make up its block of leaves. For large tensors the element
ranges are dealt out as in a reduce-scatter: every rank sends each owner its roots' part of the owner's range, the owner
adds the parts in tree order, and an all-gather returns the result. With one root for each rank that moves
``2 (N - 1) / N`` of the tensor, as a ring all-reduce does (Thakur et al., 2005, section 4.4). Large tensors go in
chunks: while one chunk is exchanged, the one before it is added and gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from raytrain_platform.comm.group import Group, Pending
from raytrain_platform.comm.tree import Tree

CHUNK_BYTES = 8 * 2**20
"""One chunk is exchanged while the one before is added and gathered; see ``make bench NAME=exact_reduce``."""

MAX_WORLD_SIZE = 4096
"""Room left at the end of every bucket, so that it divides evenly among the owners."""


@dataclass(frozen=True)
class Layout:
    """Who holds which part of the tree in one generation."""

    tree: Tree
    blocks: tuple[range, ...]
    """The leaves of each rank, contiguous and in rank order."""

    @property
    def num_roots(self) -> tuple[int, ...]:
        """How many subtrees each rank's block consists of."""
        return tuple(len(self.tree.subtrees(block)) for block in self.blocks)

    def additions(self) -> tuple[tuple[int, int], ...]:
        """The additions over all ranks' roots, in rank order; see ``Tree.additions``."""
        return self.tree.additions([node for block in self.blocks for node in self.tree.subtrees(block)])


class ExactReducer:
    """Adds up roots over a group in tree order. All ranks make the same calls in the same order."""

    def __init__(self, group: Group, layout: Layout, chunk_bytes: int = CHUNK_BYTES) -> None:
        """Prepare for one generation.

        Args:
            group: Its process group.
            layout: Who holds what; ``layout.blocks[group.rank]`` is this rank's.
            chunk_bytes: Size of the pieces in which a large tensor is exchanged.
        """
        self._group = group
        self._num_roots = layout.num_roots
        self._additions = layout.additions()
        self._chunk_bytes = chunk_bytes
        self._exchanged: _Chunk | None = None
        self._gathered: deque[_Chunk] = deque()
        self._spare: list[torch.Tensor] = []

    def start(self, roots: Sequence[torch.Tensor], num_elements: int) -> None:
        """Begin to sum a tensor over all leaves.

        Args:
            roots: This rank's roots: flat, contiguous, with room for ``group.size`` elements after ``num_elements``.
                The result is written into ``roots[0]``, complete after ``finish``.
            num_elements: Elements of the tensor.

        Raises:
            GroupBrokenError: A member is gone; the contents of ``roots`` are undefined.
        """
        if self._group.size == 1:
            self._add(roots)
            return
        step = max(self._chunk_bytes // roots[0].element_size(), self._group.size)
        for begin in range(0, num_elements, step):
            size = min(step, num_elements - begin)
            self._exchange(roots, begin, -(-size // self._group.size))

    def finish(self) -> None:
        """Wait until every sum begun is complete.

        Raises:
            GroupBrokenError: A member is gone.
        """
        self._gather_exchanged()
        while self._gathered:
            self._retire(self._gathered.popleft())

    def sum_small(self, roots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum a short vector over all leaves in one round, in which everybody sees everybody's roots.

        Args:
            roots: This rank's roots, each of shape (K,).

        Returns:
            The sum, of shape (K,).

        Raises:
            GroupBrokenError: A member is gone.
        """
        if self._group.size == 1:
            return self._add([root.clone() for root in roots])
        most = max(self._num_roots)
        given = roots[0].new_zeros(most, roots[0].numel())
        torch.stack(list(roots), out=given[: len(roots)])
        gathered = given.new_empty(self._group.size, most, roots[0].numel())
        self._group.all_gather(gathered.view(-1), given.view(-1)).wait()
        return self._add([gathered[rank, k] for rank, count in enumerate(self._num_roots) for k in range(count)])

    def _exchange(self, roots: Sequence[torch.Tensor], begin: int, share: int) -> None:
        """Send every owner its ``share`` elements of one chunk, then add up the chunk before and gather it."""
        size, own = self._group.size, len(roots)
        result = roots[0][begin : begin + size * share]
        given = result
        if own > 1:
            spans = [root[begin : begin + size * share].view(size, share) for root in roots]
            given = torch.stack(spans, dim=1).view(-1)
        scratch = self._scratch(sum(self._num_roots) * share, result.dtype)
        pending = self._group.all_to_all(
            scratch[: sum(self._num_roots) * share], given, [n * share for n in self._num_roots], [own * share] * size
        )
        # The order of calls must be the same on every rank: always one exchange, then one gather.
        self._gather_exchanged()
        self._exchanged = _Chunk(pending, result, scratch, share)

    def _gather_exchanged(self) -> None:
        if self._exchanged is None:
            return
        chunk, self._exchanged = self._exchanged, None
        chunk.pending.wait()
        total = self._add(chunk.scratch[: sum(self._num_roots) * chunk.share].view(-1, chunk.share).unbind())
        # An all-gather by its result; on gloo the exchange takes two thirds of the time of its all-gather.
        copies, shares = total.repeat(self._group.size), [chunk.share] * self._group.size
        pending = self._group.all_to_all(chunk.result, copies, shares, shares)
        self._gathered.append(replace(chunk, pending=pending))
        while len(self._gathered) > 1:
            self._retire(self._gathered.popleft())

    def _retire(self, chunk: _Chunk) -> None:
        chunk.pending.wait()
        self._spare.append(chunk.scratch)

    def _scratch(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory to receive into, used again and again: fresh memory costs a page fault for every page."""
        for k, spare in enumerate(self._spare):
            if spare.dtype == dtype and spare.numel() >= num_elements:
                return self._spare.pop(k)
        return torch.empty(num_elements, dtype=dtype)

    def _add(self, sums: Sequence[torch.Tensor]) -> torch.Tensor:
        for into, other in self._additions:
            sums[into].add_(sums[other])
        return sums[0]


@dataclass(frozen=True)
class _Chunk:
    """A piece of a tensor on its way."""

    pending: Pending
    result: torch.Tensor
    """Where the sum goes."""

    scratch: torch.Tensor
    """Holds every rank's roots of this rank's share, then their sum."""

    share: int
