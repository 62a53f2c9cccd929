from __future__ import annotations

import errno
import os

import pytest

from raytrain_platform.checkpoint.snapshot import digest
from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.errors import CheckpointError
from tests.contracts.checkpoint_places import count_operations, same, snapshot
from tests.contracts.failing_storage import Crash, failing


@pytest.fixture
def without_waiting_for_the_disk(monkeypatch):
    """A crash of the process loses nothing that the system has; only a power cut does, and none is played here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.mark.usefixtures("without_waiting_for_the_disk")
def test_a_crash_at_any_byte_of_a_save_leaves_the_previous_checkpoint(place):
    store, doomed = CheckpointStore(place.url), CheckpointStore(place.failing_url)
    store.save(snapshot(40))
    outcomes = set()
    for at in range(1, count_operations(lambda: doomed.save(snapshot(80)), place.stride_bytes) + 1):
        place.files.rm(place.path(80, ""), recursive=True)
        with failing(at, piece_bytes=place.stride_bytes), pytest.raises(Crash):
            doomed.save(snapshot(80))
        committed = store.list_steps()[-1]
        assert same(store.load_newest().snapshot, snapshot(committed)), f"crash at operation {at}"
        outcomes.add(committed)
        # The run goes on and comes to the same step again: the leftovers are in nobody's way.
        store.save(snapshot(80, fill=-1))
        assert same(store.load_newest().snapshot, snapshot(80, fill=-1)), f"crash at operation {at}"
        assert len(place.names(80)) == 2, f"crash at operation {at}"
    assert outcomes == {40, 80}


@pytest.mark.usefixtures("without_waiting_for_the_disk")
def test_a_crash_while_a_step_is_saved_again_leaves_one_of_the_two_whole(place):
    store, doomed = CheckpointStore(place.url), CheckpointStore(place.failing_url)
    old, new = snapshot(80, fill=1), snapshot(80, fill=2)
    store.save(old)
    outcomes = set()
    for at in range(1, count_operations(lambda: doomed.save(new)) + 1):
        store.save(old)
        with failing(at), pytest.raises(Crash):
            doomed.save(new)
        found = store.load_newest().snapshot
        assert same(found, old) or same(found, new), f"crash at operation {at}"
        outcomes.add(digest(found.tensors))
    assert outcomes == {digest(old.tensors), digest(new.tensors)}


@pytest.mark.usefixtures("without_waiting_for_the_disk")
@pytest.mark.parametrize(("step", "other"), [(40, 80), (80, 40)])
def test_a_crash_while_deleting_leaves_the_others(place, step, other):
    store, doomed = CheckpointStore(place.url), CheckpointStore(place.failing_url)
    store.save(snapshot(other))
    store.save(snapshot(step))
    for at in range(1, count_operations(lambda: doomed.delete(step)) + 1):
        store.save(snapshot(step))
        with failing(at), pytest.raises(Crash):
            doomed.delete(step)
        newest = max(other, step) if step in store.list_steps() else other
        loaded = store.load_newest()
        assert same(loaded.snapshot, snapshot(newest)), f"crash at operation {at}"
        assert loaded.skipped in ((), (f"step-{step}: unfinished",))
        store.delete(step)
        assert (store.list_steps(), store.list_unfinished()) == ((other,), ())


@pytest.mark.usefixtures("without_waiting_for_the_disk")
def test_a_full_disk_at_any_moment_harms_nothing_and_leaves_no_waste(place):
    store, refusing = CheckpointStore(place.url), CheckpointStore(place.failing_url)
    store.save(snapshot(40))
    outcomes = set()
    for at in range(1, count_operations(lambda: refusing.save(snapshot(80))) + 1):
        place.files.rm(place.path(80, ""), recursive=True)
        with failing(at, OSError(errno.ENOSPC, "No space left on device"), is_lasting=False):
            try:
                refusing.save(snapshot(80))
            except CheckpointError as refused:
                assert f"cannot save step-80 under {place.failing_url}: No space left on device" in str(refused)
        committed = store.list_steps()[-1]
        assert same(store.load_newest().snapshot, snapshot(committed)), f"error at operation {at}"
        assert len(place.names(80)) == (2 if committed == 80 else 0), f"error at operation {at}"
        store.save(snapshot(80))
        assert same(store.load_newest().snapshot, snapshot(80)), f"error at operation {at}"
        outcomes.add(committed)
    assert outcomes == {40, 80}
