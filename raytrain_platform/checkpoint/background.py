"""Saving while the training goes on: a step pays for one copy within memory, never for storage."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import torch
from pydantic import JsonValue

from raytrain_platform.checkpoint.retention import decide_deletions
from raytrain_platform.checkpoint.snapshot import Snapshot
from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.errors import CheckpointError

logger = logging.getLogger(__name__)


class HostBuffers:
    """Host memory for copies of a state, used again once given back.

    Fresh memory costs several times the copy itself, since the system clears every page first.
    """

    def __init__(self) -> None:
        """Start without memory; it grows with the copies that are out at the same time."""
        self._free: list[dict[str, torch.Tensor]] = []

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous host copies under the same names, all of them complete.

        Args:
            tensors: On any device. From an accelerator the copies go to pinned memory, all at once.
        """
        buffers = self._free.pop() if self._free else {}
        copied = _Lent()
        is_pending = False
        for name, tensor in tensors.items():
            is_remote = tensor.device.type != "cpu"
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_remote)
            copied[name] = buffer.copy_(tensor.detach(), non_blocking=is_remote)
            is_pending = is_pending or is_remote
        if is_pending:
            torch.accelerator.synchronize()
        return copied

    def give_back(self, copied: Mapping[str, torch.Tensor]) -> None:
        """Allow copies to be overwritten; anything but copies made here is left alone."""
        if isinstance(copied, _Lent) and not copied.is_back:
            copied.is_back = True
            self._free.append(dict(copied))


class _Lent(dict[str, torch.Tensor]):
    """Copies that are out: told apart from tensors of someone else, which must never be overwritten."""

    is_back = False


class BackgroundSaver:
    """Saves the newest snapshot it was given, on a thread of its own, and keeps the newest few on storage.

    It keeps at most three host copies of the state: one being written, one waiting and one being filled.
    """

    def __init__(
        self, store: CheckpointStore, keep: int, extra_manifest: Mapping[str, JsonValue] | None = None
    ) -> None:
        """Start the thread.

        Args:
            store: Where to save; nobody else may write there meanwhile.
            keep: Valid checkpoints that stay on storage.
            extra_manifest: More to keep in every manifest.
        """
        self._store = store
        self._keep = keep
        self._extra = dict(extra_manifest or {})
        self._buffers = HostBuffers()
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._is_closed = False
        self._last_error: Exception | None = None
        self._last_saved_step: int | None = None
        self._is_valid: dict[int, bool] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoint-saver", daemon=True)
        self._thread.start()

    @property
    def last_error(self) -> Exception | None:
        """Why the latest save or clean-up failed; None when it went through."""
        return self._last_error

    @property
    def last_saved_step(self) -> int | None:
        """Step of the latest checkpoint committed here."""
        return self._last_saved_step

    def host_copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy tensors to host memory, for a snapshot to submit; all that a step waits for.

        Once submitted the copies belong to the saver, which overwrites them later.
        """
        return self._buffers.copy(tensors)

    def submit(self, snapshot: Snapshot) -> None:
        """Have a snapshot saved; returns at once. It replaces one that still waits.

        Raises:
            CheckpointError: The saver was closed.
        """
        with self._changed:
            if self._is_closed:
                raise CheckpointError(f"cannot save step-{snapshot.step}: the saver was closed; submit before close()")
            replaced, self._waiting = self._waiting, snapshot
            self._changed.notify_all()
        if replaced is not None:
            self._buffers.give_back(replaced.tensors)

    def close(self, timeout_s: float) -> bool:
        """Finish what was submitted and end the thread.

        Args:
            timeout_s: Longest to wait; what is not written by then may stay unfinished.

        Returns:
            Whether all of it was dealt with in time; ``last_error`` says whether it was saved.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                snapshot, self._waiting = self._waiting, None
            if snapshot is None:
                return
            self._save(snapshot)
            self._buffers.give_back(snapshot.tensors)

    def _save(self, snapshot: Snapshot) -> None:
        try:
            self._store.save(snapshot, self._extra)
            self._last_saved_step = snapshot.step
            self._is_valid[snapshot.step] = True
            self._delete_old()
        except Exception as error:
            # A full disk fails at every save: say so once, and again only after it worked in between.
            if self._last_error is None:
                logger.warning("%s; training goes on", error)
            self._last_error = error
            return
        if self._last_error is not None:
            logger.info("step-%d is saved under %s: saving works again", snapshot.step, self._store.url)
        self._last_error = None

    def _delete_old(self) -> None:
        """Delete what retention lets go; what this saver did not write is verified first, once.

        A damaged checkpoint must not count as one of those kept, or a valid one would be deleted for it.
        """
        valid: list[int] = []
        unusable = list(self._store.list_unfinished())
        for step in self._store.list_steps():
            if step not in self._is_valid:
                self._is_valid[step] = self._store.is_valid(step)
            (valid if self._is_valid[step] else unusable).append(step)
        for step in decide_deletions(valid, unusable, self._keep):
            self._store.delete(step)
            self._is_valid.pop(step, None)
