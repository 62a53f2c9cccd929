from __future__ import annotations

import errno
import json
import re

import pytest
import torch

from raytrain_platform.checkpoint.snapshot import Snapshot, flatten
from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.errors import CheckpointError
from tests.contracts.checkpoint_places import count_operations, same, snapshot
from tests.contracts.failing_storage import Crash, failing


def test_what_was_saved_is_loaded(place):
    store = CheckpointStore(place.url)
    store.save(snapshot(40), {"job": "digits", "num_shards": 8})
    loaded = store.load_newest()
    assert same(loaded.snapshot, snapshot(40))
    assert loaded.extra == {"job": "digits", "num_shards": 8}
    assert loaded.skipped == ()
    state = loaded.snapshot.state()
    assert state["weights"] is state["tied"]
    assert store.list_steps() == (40,)
    assert place.names(40) == {"state.safetensors", "manifest.json"}


def test_the_newest_step_is_loaded_in_whatever_order_they_were_saved(place):
    store = CheckpointStore(place.url)
    for step in (9, 100_000_000, 40, 80):
        store.save(snapshot(step))
    assert store.list_steps() == (9, 40, 80, 100_000_000)
    assert same(store.load_newest().snapshot, snapshot(100_000_000))


def test_nothing_saved_is_nothing_to_load(place):
    store = CheckpointStore(place.url)
    assert store.load_newest().snapshot is None
    assert store.list_steps() == ()
    with pytest.raises(CheckpointError, match=r"no committed checkpoint under .*job; start fresh with --no-resume"):
        store.require_newest()


def test_a_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    CheckpointStore("~/runs/digits").save(snapshot(1))
    assert (tmp_path / "runs/digits/step-00000001/manifest.json").exists()


@pytest.mark.parametrize("url", ["nowhere://bucket/job"])
def test_an_unknown_kind_of_storage_is_named(url):
    with pytest.raises(CheckpointError, match="cannot open storage 'nowhere://bucket/job': Protocol not known"):
        CheckpointStore(url)


def test_files_of_others_are_no_checkpoints(place):
    store = CheckpointStore(place.url)
    store.save(snapshot(40))
    for name in ("step-00000099.bak/manifest.json", "step-7/manifest.json", "notes.txt", "mlflow/step-00000041/x"):
        path = place.path(40, "").rsplit("/", 2)[0] + "/" + name
        place.files.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        place.files.pipe_file(path, b"{}")
    assert store.list_steps() == (40,)
    assert store.list_unfinished() == ()


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_any_altered_byte_is_noticed(place, name):
    store = CheckpointStore(place.url)
    store.save(snapshot(40))
    store.save(snapshot(80))
    original = place.files.cat_file(place.path(80, name))
    for position in range(0, len(original), place.stride_bytes):

        def flip(content, position=position):
            content[position] ^= 1 << (position % 8)
            return content

        place.rewrite(80, name, flip)
        loaded = store.load_newest()
        assert same(loaded.snapshot, snapshot(40)), f"byte {position}"
        [reason] = loaded.skipped
        assert reason.startswith("step-80: ")
        assert not store.is_valid(80)
        place.files.pipe_file(place.path(80, name), original)
    assert same(store.load_newest().snapshot, snapshot(80))
    assert store.is_valid(80)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("state.safetensors", lambda content: content[:-1], r"state\.safetensors has \d+ bytes, \d+ were written"),
        ("state.safetensors", lambda content: content + b"\0", r"state\.safetensors has \d+ bytes, \d+ were written"),
        ("state.safetensors", lambda content: b"", r"state\.safetensors has 0 bytes"),
        ("manifest.json", lambda content: content[:-1], "no JSON"),
        ("manifest.json", lambda content: b"", "no JSON"),
        ("manifest.json", lambda content: b"\xff\xfe\0garbage", "no JSON"),
        ("manifest.json", lambda content: b"[1, 2]", "differs from what was written"),
        ("manifest.json", lambda content: b"{}", "differs from what was written"),
    ],
)
def test_a_damaged_file_is_passed_over_with_its_reason(place, name, change, reason):
    store = CheckpointStore(place.url)
    store.save(snapshot(40))
    store.save(snapshot(80))
    place.rewrite(80, name, change)
    loaded = store.load_newest()
    assert same(loaded.snapshot, snapshot(40))
    [skipped] = loaded.skipped
    assert re.search(reason, skipped)


def test_a_missing_state_is_passed_over_with_its_reason(place):
    store = CheckpointStore(place.url)
    store.save(snapshot(40))
    store.save(snapshot(80))
    place.files.rm_file(place.path(80, "state.safetensors"))
    assert store.load_newest().skipped == ("step-80: state.safetensors is missing",)


@pytest.mark.parametrize(
    "names", [["state.safetensors"], ["manifest.json"], ["state.safetensors", "manifest.json"]], ids="+".join
)
def test_files_of_two_steps_are_never_mixed(place, names):
    store = CheckpointStore(place.url)
    store.save(snapshot(40))
    store.save(snapshot(80))
    for name in names:
        place.files.pipe_file(place.path(80, name), place.files.cat_file(place.path(40, name)))
    loaded = store.load_newest()
    assert same(loaded.snapshot, snapshot(40))
    assert len(loaded.skipped) == 1


def test_another_schema_is_refused_with_the_versions_that_wrote_it(place, monkeypatch):
    store = CheckpointStore(place.url)
    with monkeypatch.context() as newer:
        newer.setattr("raytrain_platform.checkpoint.manifest.SCHEMA", 2)
        store.save(snapshot(80))
    with pytest.raises(CheckpointError, match=r"has schema 2, this version reads 1; it was written with .*'torch'"):
        store.load_newest()


def test_all_that_was_passed_over_is_told_newest_first(place):
    store = CheckpointStore(place.failing_url)
    for step in (20, 60, 100):
        store.save(snapshot(step))
    for step in (10, 80, 120):
        with failing(40), pytest.raises(Crash):
            store.save(snapshot(step))
    place.rewrite(60, "manifest.json", lambda content: b"")
    place.rewrite(100, "state.safetensors", lambda content: b"")
    loaded = store.load_newest()
    assert same(loaded.snapshot, snapshot(20))
    assert [reason.split(":")[0] for reason in loaded.skipped] == ["step-120", "step-100", "step-80", "step-60"]
    assert store.list_unfinished() == (10, 80, 120)


def test_no_usable_checkpoint_is_an_error_and_not_a_silent_start_from_nothing(place):
    store = CheckpointStore(place.failing_url)
    store.save(snapshot(40))
    with failing(40), pytest.raises(Crash):
        store.save(snapshot(80))
    place.rewrite(40, "state.safetensors", lambda content: b"")
    with pytest.raises(
        CheckpointError,
        match=r"no usable checkpoint under .*/job \(step-40: state\.safetensors has 0 bytes, \d+ were written\) "
        r"\(1 unfinished: step-80\); .* start fresh with --no-resume",
    ):
        store.load_newest()


def test_unfinished_ones_alone_are_told_but_nothing_to_load(place):
    store = CheckpointStore(place.failing_url)
    for step in (40, 80):
        with failing(40), pytest.raises(Crash):
            store.save(snapshot(step))
    loaded = store.load_newest()
    assert loaded.snapshot is None
    assert loaded.skipped == ("step-80: unfinished", "step-40: unfinished")
    with pytest.raises(
        CheckpointError,
        match=r"no committed checkpoint under .*/job \(2 unfinished: step-40, step-80\); start fresh with --no-resume",
    ):
        store.require_newest()


def test_unreachable_storage_is_not_taken_for_an_empty_one(place):
    store = CheckpointStore(place.failing_url)
    store.save(snapshot(40))
    for at in range(1, count_operations(store.load_newest) + 1):
        error = OSError(errno.EHOSTUNREACH, "No route to host")
        with failing(at, error), pytest.raises(CheckpointError, match="No route to host"):
            store.load_newest()


def test_deleting_what_is_not_there_is_no_error(place):
    store = CheckpointStore(place.url)
    store.delete(40)
    store.save(snapshot(40))
    store.delete(40)
    store.delete(40)
    assert store.list_steps() == store.list_unfinished() == ()


@pytest.mark.parametrize("extra", [{"loss": float("nan")}, {"task": object()}, {"ids": {1}}])
def test_a_manifest_that_is_no_json_is_refused_and_nothing_is_left(place, extra):
    store = CheckpointStore(place.url)
    with pytest.raises(CheckpointError, match="cannot save step-40"):
        store.save(snapshot(40), extra)
    assert place.names(40) == set()


def test_the_manifest_says_what_it_is_a_checkpoint_of(place):
    CheckpointStore(place.url).save(snapshot(40), {10: (1, 2), 9: None})
    manifest = json.loads(place.files.cat_file(place.path(40, "manifest.json")))
    assert (manifest["schema"], manifest["step"]) == (1, 40)
    assert manifest["libraries"]["torch"] == torch.__version__
    assert manifest["files"]["state.safetensors"]["num_bytes"] == place.files.size(place.path(40, "state.safetensors"))
    assert CheckpointStore(place.url).load_newest().extra == {"10": [1, 2], "9": None}


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "runs").write_text("a file where a folder is wanted")
    store = CheckpointStore(f"{tmp_path}/runs/digits")
    with pytest.raises(CheckpointError, match=r"cannot save step-40 under .*/runs/digits: Not a directory"):
        store.save(snapshot(40))


def test_a_state_larger_than_one_write_is_written_whole(place, monkeypatch):
    monkeypatch.setattr("raytrain_platform.checkpoint.store._WRITE_BYTES", 7)
    large = Snapshot(1, *flatten({"weights": torch.arange(1000.0), "empty": torch.empty(0, 3)}))
    store = CheckpointStore(place.url)
    store.save(large)
    assert same(store.load_newest().snapshot, large)
