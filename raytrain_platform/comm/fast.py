"""Sums by the backend's own all-reduce: as fast as it gets, with other bits at other numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raytrain_platform.comm.exact import ExactReducer, Layout
from raytrain_platform.comm.group import Group, Pending
from raytrain_platform.comm.tree import Tree


class FastReducer(ExactReducer):
    """Adds up one tensor of each rank. Short vectors are still summed in tree order, one leaf for each rank."""

    def __init__(self, group: Group) -> None:
        """Prepare for one generation."""
        super().__init__(group, Layout(Tree(group.size), tuple(range(rank, rank + 1) for rank in range(group.size))))
        self._pending: list[Pending] = []

    def start(self, roots: Sequence[torch.Tensor], num_elements: int) -> None:
        """See ``ExactReducer``; there is just one root."""
        if self._group.size > 1:
            self._pending.append(self._group.all_reduce(roots[0][:num_elements]))

    def finish(self) -> None:
        """See ``ExactReducer``."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
