"""The thread that carries what a job tells to where it is kept, so that telling never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from raytrain_platform.tracking.buffer import PointBuffer
from raytrain_platform.tracking.location import mask_secrets
from raytrain_platform.tracking.records import Point, StepRecord

logger = logging.getLogger(__name__)

THREAD_NAME = "raytrain-tracking"
MAX_POINTS_PER_WRITE = 1000
LONGEST_BACKOFF_S = 30.0
HURRIED_BACKOFF_S = 0.5

Row = Mapping[str, str | int | float]


class Sink(Protocol):
    """Where points end up. Each call may raise; it is then made again with the same arguments."""

    def write_points(self, points: Sequence[Point]) -> None:
        """Write points; writing one again must change nothing."""

    def write_recoveries(self, rows: Sequence[Row]) -> None:
        """Replace the table of recoveries."""

    def end(self, status: str, reason: str) -> None:
        """Give the run its final status."""


@dataclass(frozen=True)
class Unwritten:
    """What was still waiting when the flusher had to stop."""

    points: tuple[Point, ...]
    """Points that were never confirmed, oldest first."""

    recoveries: tuple[Row, ...]
    """The whole table, if its newest version was not written; else empty."""

    is_ended: bool
    """Whether the run got its final status."""

    error: str
    """The last failure, or an empty string."""


class Flusher:
    """Takes records at once and writes them in order, again and again until each is written.

    One thread writes, so a kill at any moment leaves a prefix of each metric: no holes, and the highest step of a
    metric says all there is to know about what is missing.
    """

    def __init__(
        self, sink: Sink, buffer: PointBuffer, recoveries: Sequence[Row] = (), interval_s: float = 1.0
    ) -> None:
        """Start the thread.

        Args:
            sink: Where to write.
            buffer: Holds the marks of the run, and points left from an earlier try.
            recoveries: The table so far.
            interval_s: Seconds between two writes.
        """
        self._sink = sink
        self._interval_s = interval_s
        self._inbox: list[StepRecord] = []
        self._buffer = buffer
        # Two locks, taken in this order, so that sorting a long inbox into the buffer never holds up put().
        self._buffer_lock = threading.Lock()
        self._lock = threading.Condition()
        self._recoveries = list(recoveries)
        self._num_recoveries_written = 0
        self._num_put = self._num_written = 0
        self._closing: tuple[str, str] | None = None
        self._is_ended = self._is_abandoned = self._is_nudged = False
        self._hurry_until_s = 0.0
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def put(self, records: Sequence[StepRecord]) -> None:
        """Take some steps; they are written within about one interval. After ``close`` they are dropped."""
        with self._lock:
            if self._closing is None:
                self._inbox.extend(records)
                self._num_put += 1

    def put_recovery(self, row: Row, step: StepRecord) -> None:
        """Take one more row of the table of recoveries, and its values as metrics."""
        with self._lock:
            if self._closing is None:
                self._recoveries.append(row)
                self._inbox.append(step)
                self._num_put += 1

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put so far is written.

        Returns:
            Whether it is; after ``timeout_s`` it is not.
        """
        with self._lock:
            target = self._num_put
            self._hurry(timeout_s)
            return self._lock.wait_for(lambda: self._num_written >= target, timeout_s)

    def close(self, status: str, reason: str, timeout_s: float) -> Unwritten:
        """Write what is left, give the run its final status and stop the thread.

        Args:
            status: Final status of the run.
            reason: Why it ended.
            timeout_s: How long to keep trying; a write that hangs is left behind.
        """
        with self._lock:
            self._closing = (status, reason)
            self._hurry(timeout_s)
            self._lock.wait_for(lambda: self._is_ended, timeout_s)
            self._is_abandoned = True
            self._hurry(0.0)
        with self._buffer_lock:
            self._take_inbox()
            is_table_missing = self._num_recoveries_written < len(self._recoveries)
            return Unwritten(
                points=self._buffer.peek(len(self._buffer)),
                recoveries=tuple(self._recoveries) if is_table_missing else (),
                is_ended=self._is_ended,
                error=self._error,
            )

    def _hurry(self, timeout_s: float) -> None:
        self._hurry_until_s = time.monotonic() + timeout_s
        self._is_nudged = True
        self._lock.notify_all()

    def _run(self) -> None:
        num_failures = 0
        while self._wait(num_failures):
            try:
                self._drain()
            except Exception as error:
                num_failures += 1
                self._error = mask_secrets(f"{type(error).__name__}: {error}")
                if num_failures == 1:
                    logger.warning(
                        "cannot write to the tracking store, will try again (training goes on, nothing is dropped): %s",
                        self._error,
                    )
            else:
                if num_failures:
                    logger.info("the tracking store answers again after %d tries", num_failures)
                num_failures = 0

    def _wait(self, num_failures: int) -> bool:
        """Sleep until the next try; return False when there is to be none."""
        pause_s = min(self._interval_s * 2.0 ** min(num_failures, 10), LONGEST_BACKOFF_S)
        with self._lock:
            if time.monotonic() < self._hurry_until_s:
                pause_s = min(pause_s, HURRIED_BACKOFF_S)
            self._lock.wait_for(lambda: self._is_nudged, pause_s)
            self._is_nudged = False
            return not (self._is_abandoned or self._is_ended)

    def _drain(self) -> None:
        with self._buffer_lock:
            target, closing, recoveries = self._take_inbox()
        while batch := self._next_batch():
            # No lock is held here: a write may hang, put() must not.
            self._sink.write_points(batch)
            with self._buffer_lock:
                self._buffer.confirm(len(batch))
        if len(recoveries) > self._num_recoveries_written and not self._is_abandoned:
            self._sink.write_recoveries(recoveries)
            self._num_recoveries_written = len(recoveries)
        if closing and not self._is_abandoned:
            self._sink.end(*closing)
        with self._lock:
            self._num_written = target
            self._is_ended = closing is not None
            self._lock.notify_all()

    def _next_batch(self) -> tuple[Point, ...]:
        with self._buffer_lock:
            return () if self._is_abandoned else self._buffer.peek(MAX_POINTS_PER_WRITE)

    def _take_inbox(self) -> tuple[int, tuple[str, str] | None, tuple[Row, ...]]:
        with self._lock:
            records, self._inbox = self._inbox, []
            taken = self._num_put, self._closing, tuple(self._recoveries)
        known = set(self._buffer.rejected)
        self._buffer.add(records)
        for name in sorted(self._buffer.rejected - known):
            logger.warning("metric %r has a value that is no number; such values are left out", name)
        return taken
