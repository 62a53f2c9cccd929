"""What a job tells reaches its run once, in order, whatever the store does in between."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_platform.errors import SpecError
from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.buffer import MAX_KEY_LENGTH, PointBuffer, clean_key
from raytrain_platform.tracking.flusher import Flusher, Row, Unwritten
from raytrain_platform.tracking.location import Location, locate, mask_secrets
from raytrain_platform.tracking.records import PHASES, Point, RecoveryRecord, StepRecord, recovery_row, recovery_step
from raytrain_platform.tracking.unwritten import load_unwritten, merge_recoveries, save_unwritten

KEYS = ("train/loss", "perf/step_s", "val/accuracy")

steps_with_keys = st.lists(st.tuples(st.integers(0, 12), st.sets(st.sampled_from(KEYS))), max_size=30)
marks_by_key = st.dictionaries(st.sampled_from(KEYS), st.integers(-1, 12))


def spec_at(storage: Path | str, **fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "a", "task": "m:T", "steps": 1, "storage": str(storage)} | fields)


def record(step: int, *keys: str, value: float = 1.0) -> StepRecord:
    return StepRecord(step, 1000.0 + step, dict.fromkeys(keys, value))


def recovery(generation: int, at_step: int = 0) -> RecoveryRecord:
    phases = {phase: 0.1 * (i + 1) for i, phase in enumerate(PHASES)}
    return RecoveryRecord(generation, "lost", "node 2", at_step, 3, 2, phases, pause_s=1.5, time_s=2000.0 + generation)


def drain(buffer: PointBuffer) -> list[Point]:
    points: list[Point] = []
    while batch := buffer.peek(7):
        points += batch
        buffer.confirm(len(batch))
    return points


class MemorySink:
    """Keeps what it is given; fails and hangs when told to."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.writes: list[int] = []
        self.recoveries: tuple[Row, ...] = ()
        self.ended: list[tuple[str, str]] = []
        self.num_failures_left = 0
        self.gate = threading.Event()
        self.gate.set()

    def write_points(self, points: Sequence[Point]) -> None:
        self.gate.wait()
        self._maybe_fail()
        self.points += points
        self.writes.append(len(points))

    def write_recoveries(self, rows: Sequence[Row]) -> None:
        self._maybe_fail()
        self.recoveries = tuple(rows)

    def end(self, status: str, reason: str) -> None:
        self._maybe_fail()
        self.ended.append((status, reason))

    def _maybe_fail(self) -> None:
        if self.num_failures_left > 0:
            self.num_failures_left -= 1
            raise ConnectionError("no route to https://user:hunter2@tracking.example/api")


@given(steps_with_keys, marks_by_key)
def test_a_point_passes_exactly_if_its_step_is_above_all_that_its_metric_has_seen(
    steps: list[tuple[int, set[str]]], marks: dict[str, int]
) -> None:
    buffer = PointBuffer(marks)
    highest = dict(marks)
    expected = []
    for step, keys in steps:
        buffer.add([record(step, *sorted(keys))])
        for key in sorted(keys):
            if step > highest.get(key, -(10**9)):
                highest[key] = step
                expected.append((key, step))
    assert [(point.key, point.step) for point in drain(buffer)] == expected


@given(steps_with_keys, st.lists(st.integers(0, 5), max_size=20))
def test_nothing_is_lost_or_doubled_when_a_job_is_killed_and_goes_on_from_what_was_written(
    steps: list[tuple[int, set[str]]], kills: list[int]
) -> None:
    """Each life writes some of its points, then dies; the next starts from the highest steps written and replays."""
    written: list[Point] = []
    records = [record(step, *sorted(keys)) for step, keys in steps]
    for num_written in [*kills, 10**9]:
        marks: dict[str, int] = {}
        for point in written:
            marks[point.key] = max(point.step, marks.get(point.key, point.step))
        buffer = PointBuffer(marks)
        buffer.add(records)
        written += buffer.peek(num_written)
    undisturbed = PointBuffer({})
    undisturbed.add(records)
    assert sorted(written) == sorted(drain(undisturbed))


def test_points_stay_queued_until_confirmed() -> None:
    buffer = PointBuffer({})
    buffer.add([record(step, "train/loss") for step in range(5)])
    assert buffer.peek(3) == buffer.peek(3)
    assert len(buffer) == 5
    buffer.confirm(3)
    assert [point.step for point in buffer.peek(10)] == [3, 4]


@given(st.one_of(st.text(max_size=300), st.text("a/. ", max_size=8)))
def test_every_metric_name_becomes_one_that_mlflow_accepts(name: str) -> None:
    key = clean_key(name)
    assert re.fullmatch(r"[\w./: -]+", key)
    assert len(key) <= MAX_KEY_LENGTH
    assert all(part not in ("", ".", "..") for part in key.split("/"))
    assert clean_key(key) == key


def test_a_good_metric_name_is_left_alone() -> None:
    assert clean_key("perf/samples_per_s") == "perf/samples_per_s"


def test_a_value_that_is_no_number_is_left_out_and_holds_up_nothing() -> None:
    buffer = PointBuffer({})
    buffer.add([StepRecord(1, 0.0, {"bad": "high", "good": 2.0})])  # type: ignore[dict-item]
    assert [point.key for point in drain(buffer)] == ["good"]
    assert buffer.rejected == {"bad"}


def test_a_failing_store_delays_but_loses_and_doubles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    sink = MemorySink()
    sink.num_failures_left = 3
    flusher = Flusher(sink, PointBuffer({}), interval_s=0.01)
    for step in range(2500):
        flusher.put([record(step, "train/loss")])
    flusher.put_recovery(recovery_row(recovery(2, 2499)), recovery_step(recovery(2, 2499)))
    left = flusher.close("FINISHED", "done", timeout_s=20)
    assert left.is_ended and not left.points and not left.recoveries
    assert [point.step for point in sink.points if point.key == "train/loss"] == list(range(2500))
    assert max(sink.writes) <= 1000
    assert sink.recoveries == (recovery_row(recovery(2, 2499)),)
    assert {f"recovery/{phase}" for phase in PHASES} < {point.key for point in sink.points}
    assert sink.ended == [("FINISHED", "done")]
    warnings = [entry for entry in caplog.records if entry.levelno == logging.WARNING]
    assert len(warnings) == 1, "an outage is told once, not at every try"
    assert "hunter2" not in warnings[0].getMessage()


def test_telling_never_waits_for_a_store_that_hangs() -> None:
    sink = MemorySink()
    sink.gate.clear()
    flusher = Flusher(sink, PointBuffer({}), interval_s=0.01)
    flusher.put([record(0, "train/loss")])
    time.sleep(0.1)
    thousand = [record(step, *KEYS) for step in range(1, 1001)]
    fastest_s = math.inf
    for _ in range(20):
        start_s = time.perf_counter()
        flusher.put(thousand)
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    assert fastest_s < 0.005
    assert not flusher.flush(timeout_s=0.05)
    sink.gate.set()
    assert flusher.flush(timeout_s=20)
    assert len(sink.points) == 1 + 1000 * len(KEYS)
    flusher.close("FINISHED", "", timeout_s=20)


def test_closing_does_not_wait_for_ever_and_hands_back_what_is_left() -> None:
    sink = MemorySink()
    sink.num_failures_left = 10**9
    flusher = Flusher(sink, PointBuffer({}), interval_s=0.01)
    flusher.put([record(step, "train/loss") for step in range(10)])
    flusher.put_recovery(recovery_row(recovery(1)), record(10, "recovery/pause_s"))
    start_s = time.monotonic()
    left = flusher.close("FINISHED", "", timeout_s=0.3)
    assert time.monotonic() - start_s < 2.0
    assert [point.step for point in left.points] == list(range(11))
    assert left.recoveries == (recovery_row(recovery(1)),)
    assert not left.is_ended
    assert left.error == "ConnectionError: no route to https://***@tracking.example/api"
    sink.num_failures_left = 0
    time.sleep(0.1)
    assert not sink.points and not sink.ended, "what was handed back is not written as well"


def test_a_write_that_hangs_is_left_behind_and_the_rest_is_handed_back() -> None:
    sink = MemorySink()
    sink.gate.clear()
    flusher = Flusher(sink, PointBuffer({}), interval_s=0.01)
    flusher.put([record(step, "train/loss") for step in range(5000)])
    left = flusher.close("FINISHED", "", timeout_s=0.3)
    assert [point.step for point in left.points] == list(range(5000))
    sink.gate.set()
    time.sleep(0.2)
    assert sink.writes == [1000], "only the write that hung may still arrive"
    assert not sink.ended


@given(st.lists(st.builds(Point, st.sampled_from(KEYS), st.floats(), st.integers(0, 99), st.integers(0, 10**13))))
def test_what_could_not_be_written_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory, points: list[Point]
) -> None:
    path = tmp_path_factory.mktemp("left") / "deeper" / "run.jsonl"
    save_unwritten(path, Unwritten(tuple(points), (recovery_row(recovery(1)),), is_ended=False, error=""))
    found, rows = load_unwritten(path)
    assert repr(found) == repr(points)
    assert rows == [recovery_row(recovery(1))]


def test_nothing_left_reads_as_nothing(tmp_path: Path) -> None:
    assert load_unwritten(tmp_path / "none.jsonl") == ([], [])


def test_tables_of_recoveries_merge_without_doubles() -> None:
    rows = [recovery_row(recovery(generation)) for generation in range(4)]
    assert merge_recoveries(rows[:3], rows[2:]) == rows


def test_a_run_is_kept_under_the_storage_unless_told_otherwise(tmp_path: Path) -> None:
    place = locate(spec_at(tmp_path), {})
    assert place == Location(f"sqlite:///{tmp_path}/mlflow.db", (tmp_path / "mlartifacts").as_uri())
    env = {"MLFLOW_TRACKING_URI": "http://server:5000"}
    assert locate(spec_at("s3://bucket/x"), env) == Location("http://server:5000", None)
    given = spec_at("s3://bucket/x", tracking={"uri": "postgresql+psycopg2://u:p@db/m"})
    assert locate(given, env) == Location("postgresql+psycopg2://u:p@db/m", "s3://bucket/x/mlartifacts")
    with pytest.raises(SpecError, match=r"(?s)tracking\.uri: is required when storage is remote .*MLFLOW_TRACKING_URI"):
        locate(spec_at("s3://bucket/x"), {})
    for unusable in ("./mlruns", "file:///tmp/mlruns", "sqlite://", "sqlite:///:memory:"):
        with pytest.raises(SpecError, match="sqlite:////absolute/path"):
            locate(spec_at(tmp_path, tracking={"uri": unusable}), {})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:p@ss@db:5432/m", "postgresql://***@db:5432/m"),
        ("at https://token@host/x, no", "at https://***@host/x, no"),
        ("mysql://db/m?user=me&password=pw&ssl=1", "mysql://db/m?user=me&password=***&ssl=1"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("mail me@host", "mail me@host"),
    ],
)
def test_credentials_are_masked(text: str, masked: str) -> None:
    assert mask_secrets(text) == masked


def test_importing_the_platform_does_not_import_mlflow() -> None:
    code = (
        "import sys, raytrain_platform\n"
        "from raytrain_platform.tracking import history, records, tracker, ui\n"
        "sys.exit('mlflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
