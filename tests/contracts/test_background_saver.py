from __future__ import annotations

import errno
import logging
import threading
import time
import uuid

import fsspec
import pytest
import torch

from raytrain_platform.checkpoint.background import BackgroundSaver, HostBuffers
from raytrain_platform.checkpoint.snapshot import Snapshot, flatten
from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.errors import CheckpointError
from tests.contracts.failing_storage import failing

PATIENCE_S = 30.0


class GatedStore(CheckpointStore):
    """A storage as slow as the test wants: every save waits until it is let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.saved: list[int] = []

    def save(self, snapshot, extra_manifest=None):
        self.began.release()
        assert self.gate.acquire(timeout=PATIENCE_S)
        super().save(snapshot, extra_manifest)
        self.saved.append(snapshot.step)


@pytest.fixture
def root():
    path = f"/{uuid.uuid4().hex}"
    yield path
    files = fsspec.filesystem("memory")
    if files.exists(path):
        files.rm(path, recursive=True)


@pytest.fixture
def store(root):
    return CheckpointStore(f"memory://{root}")


@pytest.fixture
def closing():
    """Savers that are closed whatever happens, so that no thread outlives its test."""
    savers = []
    yield lambda saver: savers.append(saver) or saver
    for saver in savers:
        assert saver.close(PATIENCE_S)


def snapshot(step):
    return Snapshot(step, *flatten({"weights": torch.full((4,), float(step))}))


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def settled(saver, step):
    """Wait until the save of a step is over, however it went."""
    until(lambda: saver.last_saved_step == step or f"step-{step} " in str(saver.last_error))


def test_what_is_submitted_is_saved_and_the_newest_are_kept(store, closing):
    saver = closing(BackgroundSaver(store, keep=2, extra_manifest={"job": "digits"}))
    for step in (10, 20, 30, 40):
        saver.submit(snapshot(step))
        until(lambda step=step: saver.last_saved_step == step)
    assert saver.close(PATIENCE_S)
    assert store.list_steps() == (30, 40)
    assert saver.last_error is None
    assert store.load_newest().extra == {"job": "digits"}


def test_the_newer_snapshot_replaces_the_one_that_waits(root, closing):
    store = GatedStore(f"memory://{root}")
    saver = closing(BackgroundSaver(store, keep=9))
    saver.submit(snapshot(10))
    assert store.began.acquire(timeout=PATIENCE_S)
    # The storage is stuck at step 10: submit has to return all the same.
    for step in (20, 30, 40):
        saver.submit(snapshot(step))
    store.gate.release(9)
    assert saver.close(PATIENCE_S)
    assert store.saved == [10, 40]
    assert saver.last_saved_step == 40


def test_closing_finishes_what_waits(store):
    saver = BackgroundSaver(store, keep=1)
    saver.submit(snapshot(10))
    assert saver.close(PATIENCE_S)
    assert store.list_steps() == (10,)
    assert saver.close(PATIENCE_S)
    with pytest.raises(CheckpointError, match=r"cannot save step-20: the saver was closed"):
        saver.submit(snapshot(20))


def test_closing_gives_up_on_a_storage_that_is_stuck(root):
    store = GatedStore(f"memory://{root}")
    saver = BackgroundSaver(store, keep=1)
    saver.submit(snapshot(10))
    assert not saver.close(timeout_s=0.05)
    store.gate.release()
    assert saver.close(PATIENCE_S)
    assert saver.last_saved_step == 10


def test_a_full_disk_is_seen_and_told_once_and_saving_resumes(root, closing, caplog):
    caplog.set_level(logging.INFO, logger="raytrain_platform.checkpoint")
    store = CheckpointStore(f"failing-memory://{root}")
    saver = closing(BackgroundSaver(store, keep=1))
    saver.submit(snapshot(10))
    settled(saver, 10)
    with failing(1, OSError(errno.ENOSPC, "No space left on device")):
        for step in (20, 30):
            saver.submit(snapshot(step))
            settled(saver, step)
        assert "cannot save step-30" in str(saver.last_error)
        assert "No space left on device" in str(saver.last_error)
        assert saver.last_saved_step == 10
    assert store.load_newest().snapshot.step == 10
    saver.submit(snapshot(40))
    settled(saver, 40)
    assert saver.close(PATIENCE_S)
    assert saver.last_error is None
    assert store.list_steps() == (40,)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_failure_nobody_thought_of_does_not_end_saving(store, closing, monkeypatch):
    saver = closing(BackgroundSaver(store, keep=1))
    with monkeypatch.context() as broken:
        broken.setattr(store, "list_steps", lambda: 1 / 0)
        saver.submit(snapshot(10))
        until(lambda: isinstance(saver.last_error, ZeroDivisionError))
    saver.submit(snapshot(20))
    settled(saver, 20)
    assert saver.close(PATIENCE_S)
    assert saver.last_error is None
    assert store.list_steps() == (20,)


def damage(root, step):
    fsspec.filesystem("memory").pipe_file(f"{root}/step-{step:08d}/state.safetensors", b"damaged")


def test_a_damaged_checkpoint_never_pushes_out_a_valid_one(root, store, closing):
    for step in (20, 40, 80):
        store.save(snapshot(step))
    damage(root, 80)
    # The job fell back to step 40 and now comes to 60: with step-80 counted, 60 would be surplus.
    saver = closing(BackgroundSaver(store, keep=1))
    saver.submit(snapshot(60))
    settled(saver, 60)
    assert saver.close(PATIENCE_S)
    assert store.list_steps() == (60, 80)
    assert store.load_newest().snapshot.step == 60


def test_leftovers_of_crashes_are_cleaned_up(root, store, closing):
    fsspec.filesystem("memory").pipe_file(f"{root}/step-00000030/state.safetensors", b"half of a sta")
    store.save(snapshot(40))
    damage(root, 40)
    saver = closing(BackgroundSaver(store, keep=2))
    saver.submit(snapshot(50))
    settled(saver, 50)
    assert saver.close(PATIENCE_S)
    assert (store.list_steps(), store.list_unfinished()) == ((50,), ())


def test_training_on_never_reaches_what_is_being_saved(root, closing):
    """Every checkpoint is of one step as a whole, though the weights change while it is written."""
    store = GatedStore(f"memory://{root}")
    saver = closing(BackgroundSaver(store, keep=100))
    weights = {f"layer{index}": torch.zeros(64) for index in range(8)}
    addresses = set()
    for step in range(1, 61):
        for tensor in weights.values():
            tensor.fill_(step)
        tensors, meta = flatten(weights)
        copies = saver.host_copy(tensors)
        addresses.add(copies["layer0"].data_ptr())
        saver.submit(Snapshot(step, copies, meta))
        if step % 3 == 0:
            num_saved = len(store.saved)
            store.gate.release()
            until(lambda num_saved=num_saved: len(store.saved) > num_saved)
    store.gate.release(100)
    assert saver.close(PATIENCE_S)
    assert len(store.saved) >= 20
    for step in reversed(store.saved):
        loaded = store.load_newest().snapshot
        assert loaded.step == step
        assert {value for tensor in loaded.tensors.values() for value in tensor.tolist()} == {float(step)}
        store.delete(step)
    assert len(addresses) <= 3, "at most three copies of the state: written, waiting, being filled"


def test_tensors_of_someone_else_are_never_overwritten(store, closing):
    saver = closing(BackgroundSaver(store, keep=1))
    own = snapshot(10)
    saver.submit(own)
    settled(saver, 10)
    saver.host_copy({"weights": torch.zeros(4)})
    assert own.tensors["weights"].tolist() == [10.0] * 4


def test_buffers_are_used_again_only_once_given_back():
    buffers = HostBuffers()
    first = buffers.copy({"a": torch.ones(3)})
    second = buffers.copy({"a": torch.zeros(3)})
    assert first["a"].tolist() == [1.0] * 3
    address = first["a"].data_ptr()
    buffers.give_back(first)
    buffers.give_back(first)
    third, fourth = buffers.copy({"a": torch.full((3,), 3.0)}), buffers.copy({"a": torch.full((3,), 4.0)})
    assert third["a"].data_ptr() == address
    assert len({copy["a"].data_ptr() for copy in (second, third, fourth)}) == 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3).T,
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(3),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "bf16-scalar", "empty", "other-type", "conjugate", "parameter"],
)
def test_a_copy_is_contiguous_and_equal_whatever_the_buffer_held_before(tensor):
    buffers = HostBuffers()
    buffers.give_back(buffers.copy({"a": torch.full((3,), 7.0)}))
    copy = buffers.copy({"a": tensor})["a"]
    assert copy.is_contiguous() and not copy.requires_grad
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy, tensor)
