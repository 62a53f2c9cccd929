"""Groups of threads in one process: for a job on its own, and for whole jobs simulated in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count

import torch

from raytrain_platform.comm.group import Pending
from raytrain_platform.errors import GroupBrokenError


class LocalHub:
    """Where the members of one group meet."""

    def __init__(self, size: int) -> None:
        """Make room for ``size`` members."""
        self.size = size
        self._changed = threading.Condition()
        self._given: dict[int, dict[int, list[torch.Tensor]]] = {}
        self._num_taken: dict[int, int] = {}
        self._broken: str | None = None

    def break_up(self, reason: str) -> None:
        """Do to all members what the death of one does to the others: every wait raises, now and from now on."""
        with self._changed:
            self._broken = reason
            self._changed.notify_all()

    def give(self, call: int, rank: int, parts: list[torch.Tensor]) -> None:
        """Hand over what a rank contributes to a call, one part for each rank."""
        with self._changed:
            self._given.setdefault(call, {})[rank] = parts
            self._changed.notify_all()

    def take(self, call: int, rank: int, is_abandoned: Callable[[], str | None]) -> list[torch.Tensor]:
        """Wait for what all ranks contribute for this rank, in rank order."""
        with self._changed:
            while len(self._given[call]) < self.size:
                reason = self._broken or is_abandoned()
                if reason is not None:
                    raise GroupBrokenError(reason)
                self._changed.wait(0.02)
            parts = [self._given[call][source][rank] for source in range(self.size)]
            self._num_taken[call] = self._num_taken.get(call, 0) + 1
            if self._num_taken[call] == self.size:
                del self._given[call], self._num_taken[call]
            return parts


class LocalGroup:
    """One member's side of a group of threads; see ``Group``."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        """Take part as ``rank``."""
        self.rank, self.size = rank, hub.size
        self._hub = hub
        self._calls = count()
        self._abandoned: str | None = None

    def connect(self) -> None:
        """See ``Group``."""

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, out_splits: Sequence[int], splits: Sequence[int]
    ) -> Pending:
        """See ``Group``."""
        return self._start(list(given.clone().split(list(splits))), lambda parts: torch.cat(parts, out=out))

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Pending:
        """See ``Group``."""
        return self._start([given.clone()] * self.size, lambda parts: torch.cat(parts, out=out))

    def all_reduce(self, values: torch.Tensor) -> Pending:
        """See ``Group``."""
        return self._start([values.clone()] * self.size, lambda parts: torch.sum(torch.stack(parts), 0, out=values))

    def abandon(self, reason: str) -> None:
        """See ``Group``."""
        self._abandoned = reason

    def close(self) -> None:
        """See ``Group``: a member that leaves before the others are done breaks the group, as a closed socket does."""
        self._hub.break_up("a member left")

    def _start(self, parts: list[torch.Tensor], finish: Callable[[list[torch.Tensor]], object]) -> Pending:
        call = next(self._calls)
        self._hub.give(call, self.rank, parts)
        return _LocalPending(lambda: finish(self._hub.take(call, self.rank, lambda: self._abandoned)))


class _LocalPending:
    def __init__(self, complete: Callable[[], object]) -> None:
        self._complete = complete

    def wait(self) -> None:
        self._complete()
