"""Data-parallel gradients: buckets that go on their way while the backward pass still runs.

This is what ``DistributedDataParallel`` does, with three differences that elasticity needs (docs/adr/0003): the
reduction belongs to a generation while the buckets stay for the life of the worker; each shard's gradient is a leaf of
the reduction tree; and no collective runs where only C++ could catch its failure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from raytrain_platform.comm.exact import MAX_WORLD_SIZE
from raytrain_platform.errors import TaskError

BUCKET_BYTES = 8 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is small, so that the exchange starts early."""


class Reducer(Protocol):
    """Sums tensors over all ranks; see ``ExactReducer``."""

    def start(self, roots: Sequence[torch.Tensor], num_elements: int) -> None:
        """Begin to sum the roots of all ranks into ``roots[0]``."""

    def finish(self) -> None:
        """Wait until every sum begun is complete."""

    def sum_small(self, roots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum the short roots of all ranks."""


@dataclass
class _Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[torch.nn.Parameter]
    num_elements: int = 0
    current: torch.Tensor | None = None
    """Receives the gradients of the shard in hand."""

    current_views: list[torch.Tensor] = field(default_factory=list)

    missing: set[int] = field(default_factory=set)
    """Positions of parameters whose gradient the shard in hand has not produced yet."""

    sums: list[torch.Tensor] = field(default_factory=list)
    """Sums of the subtrees complete so far, from left to right."""

    spare: list[torch.Tensor] = field(default_factory=list)
    """Buffers to use again: fresh memory costs a page fault for every page."""

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a flat tensor, in their shapes."""
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = flat[: self.num_elements].split(sizes)
        return [part.view_as(parameter) for part, parameter in zip(parts, self.parameters, strict=True)]


class Gradients:
    """The gradients of a model, from its backward passes to their sum over all shards."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        """Watch the parameters that require a gradient.

        Args:
            parameters: The model's parameters, in their order; the backward pass is expected to reach the last first.
            bucket_bytes: Size of a bucket.
        """
        self._buckets = _fill_buckets([p for p in parameters if p.requires_grad], bucket_bytes)
        self._reducer: Reducer | None = None
        self._merges: Sequence[int] = ()
        self._num_shards = 0
        self._num_sent = 0
        self._sent: list[Future[None]] = []
        # Collectives must start in the same order on every rank: one thread, first in first out.
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="reduce")
        self._places = {
            parameter: (bucket, position)
            for bucket in self._buckets
            for position, parameter in enumerate(bucket.parameters)
        }
        for parameter in self._places:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The watched parameters, in bucket order."""
        return list(self._places)

    def begin_step(self, reducer: Reducer, merges: Sequence[int]) -> None:
        """Begin a step.

        Args:
            reducer: Sums over the ranks of the generation.
            merges: For each shard of this rank, how it is added to those before; see ``Tree.merges``.
        """
        self._reducer, self._merges = reducer, merges
        self._num_shards = self._num_sent = 0
        self._sent.clear()
        for bucket in self._buckets:
            if bucket.sums or bucket.current is not None:
                # An unfinished step. A collective of a broken group may still write into its buffers, whenever a
                # member that was taken for dead wakes up: never use them again.
                bucket.sums, bucket.current, bucket.spare = [], None, []

    def begin_shard(self) -> None:
        """Expect the backward pass of the next shard; during that of the last one, full buckets are sent at once."""
        self._num_shards += 1
        for bucket in self._buckets:
            bucket.missing = set(range(len(bucket.parameters)))

    def end_shard(self) -> list[bool]:
        """Close the shard: parameters that it did not use have a gradient of zero.

        Returns:
            For each watched parameter, in bucket order, whether the shard used it.
        """
        used = []
        for bucket in self._buckets:
            used += [position not in bucket.missing for position in range(len(bucket.parameters))]
            if bucket.missing:
                views = self._current_views(bucket)
                for position in bucket.missing:
                    views[position].zero_()
                bucket.missing = set()
                self._add_leaf(bucket)
        self._send_full_buckets()
        return used

    def sum_small(self, roots: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum short vectors over all ranks, after the buckets.

        Raises:
            GroupBrokenError: A member is gone.
        """
        assert self._reducer is not None
        return self._sender.submit(self._reducer.sum_small, roots).result()

    def finish(self) -> list[torch.Tensor]:
        """Wait for the sums over all shards.

        Returns:
            One flat tensor for each bucket, to be scaled in place and then given to ``assign``.

        Raises:
            GroupBrokenError: A member is gone; ``begin_step`` starts over.
        """
        assert self._reducer is not None
        self._sent.append(self._sender.submit(self._reducer.finish))
        for sent in self._sent:
            sent.result()
        return [bucket.sums[0][: bucket.num_elements] for bucket in self._buckets]

    def assign(self, is_used: Sequence[bool]) -> None:
        """Make the sums the gradients of the parameters; those that no shard used get none, as in plain PyTorch."""
        used = iter(is_used)
        for bucket in self._buckets:
            for parameter, view in zip(bucket.parameters, bucket.views(bucket.sums[0]), strict=True):
                parameter.grad = view if next(used) else None

    def end_step(self) -> None:
        """Take the gradients from the parameters again, and keep the buffers for the next step."""
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
            bucket.spare += bucket.sums
            bucket.sums = []

    def close(self) -> None:
        """End the sending thread, without waiting for it."""
        self._sender.shutdown(wait=False, cancel_futures=True)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        bucket, position = self._places[parameter]  # type: ignore[index]
        if position not in bucket.missing:
            raise TaskError(
                f"a parameter of shape {tuple(parameter.shape)} received its gradient twice in one backward pass; "
                "use activation checkpointing with use_reentrant=False, and call backward only in the platform's hands"
            )
        assert parameter.grad is not None
        self._current_views(bucket)[position].copy_(parameter.grad)
        parameter.grad = None
        bucket.missing.remove(position)
        if not bucket.missing:
            self._add_leaf(bucket)
            self._send_full_buckets()

    def _current_views(self, bucket: _Bucket) -> list[torch.Tensor]:
        if bucket.current is None:
            like, size = bucket.parameters[0], bucket.num_elements + MAX_WORLD_SIZE
            bucket.current = bucket.spare.pop() if bucket.spare else torch.zeros(size, dtype=like.dtype)
            bucket.current_views = bucket.views(bucket.current)
        return bucket.current_views

    def _add_leaf(self, bucket: _Bucket) -> None:
        """Add the shard in hand to the sums, as the tree says."""
        assert bucket.current is not None
        total, bucket.current = bucket.current, None
        for _ in range(self._merges[self._num_shards - 1]):
            bucket.spare.append(total)
            total = bucket.sums.pop().add_(total)
        bucket.sums.append(total)

    def _send_full_buckets(self) -> None:
        if self._num_shards < len(self._merges):
            return
        assert self._reducer is not None
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            bucket = self._buckets[self._num_sent]
            self._sent.append(self._sender.submit(self._reducer.start, bucket.sums, bucket.num_elements))
            self._num_sent += 1


def _fill_buckets(parameters: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[_Bucket]:
    """Deal out the parameters in the order in which the backward pass reaches them."""
    buckets: list[_Bucket] = []
    room: dict[torch.dtype, tuple[_Bucket, int]] = {}
    for parameter in reversed(parameters):
        bucket, left = room.get(parameter.dtype, (None, 0))
        num_bytes = parameter.numel() * parameter.element_size()
        if bucket is None or left < num_bytes:
            bucket = _Bucket([])
            left = bucket_bytes if buckets else min(FIRST_BUCKET_BYTES, bucket_bytes)
            buckets.append(bucket)
        bucket.parameters.append(parameter)
        bucket.num_elements += parameter.numel()
        room[parameter.dtype] = (bucket, left - num_bytes)
    return buckets
