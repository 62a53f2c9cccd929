"""Copying the state from the furthest member of a generation to those behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from raytrain_platform.checkpoint.snapshot import Snapshot
from raytrain_platform.comm.group import Group, Pending

_CHUNK_BYTES = 8 * 2**20
_ALIGNMENT = 64  # bytes; tensors that are used where they arrived must be aligned for any element type
_IN_FLIGHT = 2  # chunks on their way while the next is being filled


def copy_state(
    group: Group, source: int, receivers: Sequence[int], snapshot: Snapshot | None, staging: torch.Tensor | None = None
) -> Snapshot | None:
    """Copy a snapshot to the members that are behind. Every member of the group calls this.

    The bytes arrive in memory of their own, so that a copy that breaks off leaves the receiver as it was, and a source
    that is taken for dead and wakes up later cannot write into live state.

    Args:
        group: The generation's process group.
        source: Rank of the member to copy from.
        receivers: Ranks of the members to copy to.
        snapshot: The state to send; only looked at on the source.
        staging: Bytes to receive into, if they are enough: memory that is already mapped saves a receiver much of
            its time.

    Returns:
        The snapshot on a receiver, None elsewhere. Its tensors lie in ``staging``.

    Raises:
        GroupBrokenError: A member is gone.
    """
    is_source, is_receiver = group.rank == source, group.rank in receivers
    parts = _encode(snapshot) if is_source and snapshot is not None else []
    sizes_R = torch.zeros(group.size, dtype=torch.int64)
    group.all_gather(sizes_R, torch.tensor([sum(part.numel() for part in parts)])).wait()
    num_bytes = int(sizes_R[source])
    if is_receiver and (staging is None or staging.numel() < num_bytes):
        staging = torch.empty(num_bytes, dtype=torch.uint8)
    chunks = _chunks(parts, len(receivers))
    nothing = torch.empty(0, dtype=torch.uint8)
    under_way: list[tuple[Pending, torch.Tensor]] = []
    for begin in range(0, num_bytes, _CHUNK_BYTES):
        size = min(_CHUNK_BYTES, num_bytes - begin)
        given = next(chunks) if is_source else nothing
        out = staging[begin : begin + size] if is_receiver and staging is not None else nothing
        splits = [size if is_source and rank in receivers else 0 for rank in range(group.size)]
        out_splits = [size if is_receiver and rank == source else 0 for rank in range(group.size)]
        under_way.append((group.all_to_all(out, given, out_splits, splits), given))
        if len(under_way) > _IN_FLIGHT:
            under_way.pop(0)[0].wait()
    for pending, _ in under_way:
        pending.wait()
    return _decode(staging) if is_receiver and staging is not None else None


def encoded_bytes(snapshot: Snapshot) -> int:
    """How many bytes a snapshot takes on its way."""
    return sum(part.numel() for part in _encode(snapshot))


def _encode(snapshot: Snapshot) -> list[torch.Tensor]:
    """A snapshot as a row of byte tensors: the length of the header, the header, then each tensor, aligned."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in snapshot.tensors.items()}
    described = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    header = json.dumps({"step": snapshot.step, "tensors": described, "meta": snapshot.meta}).encode()
    length = len(header).to_bytes(_ALIGNMENT, "little")
    parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (length, header)]
    parts += [tensor.view(-1).view(torch.uint8) for tensor in tensors.values() if tensor.numel()]
    return list(chain.from_iterable((part, _padding(part)) for part in parts))


def _decode(received_B: torch.Tensor) -> Snapshot:
    length = int.from_bytes(received_B[:_ALIGNMENT].numpy().tobytes(), "little")
    header = json.loads(received_B[_ALIGNMENT : _ALIGNMENT + length].numpy().tobytes())
    begin = _ALIGNMENT + _aligned(length)
    tensors: dict[str, torch.Tensor] = {}
    for name, (dtype_name, shape) in header["tensors"].items():
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        tensors[name] = received_B[begin : begin + num_bytes].view(dtype).view(shape)
        begin += _aligned(num_bytes)
    return Snapshot(step=header["step"], tensors=tensors, meta=header["meta"])


def _chunks(parts: Sequence[torch.Tensor], num_copies: int) -> Iterator[torch.Tensor]:
    """The bytes of all parts in chunks of equal size, each repeated for every receiver."""
    chunk_B = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    filled = 0
    for part in parts:
        begin = 0
        while begin < part.numel():
            size = min(part.numel() - begin, _CHUNK_BYTES - filled)
            chunk_B[filled : filled + size] = part[begin : begin + size]
            begin, filled = begin + size, filled + size
            if filled == _CHUNK_BYTES:
                yield chunk_B.repeat(num_copies) if num_copies > 1 else chunk_B
                chunk_B, filled = torch.empty(_CHUNK_BYTES, dtype=torch.uint8), 0
    if filled:
        yield chunk_B[:filled].repeat(num_copies)


def _padding(part_B: torch.Tensor) -> torch.Tensor:
    return torch.zeros(_aligned(part_B.numel()) - part_B.numel(), dtype=torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
