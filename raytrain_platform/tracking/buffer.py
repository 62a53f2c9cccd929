"""Points on their way to MLflow: in order, each (key, step) at most once, none gone before it is written."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Mapping

from raytrain_platform.tracking.records import Point, StepRecord

MAX_KEY_LENGTH = 250


class PointBuffer:
    """A queue that lets every (key, step) through once.

    MLflow keeps a second row when a step is logged again, and draws it as a zigzag; it has no way to delete one.
    So each key has a mark, the highest step it has seen, and points at or below it are dropped. A job that goes on
    from a checkpoint computes the steps after it once more: the marks of the run, read when it is opened again,
    keep those out. Not safe to share between threads.
    """

    def __init__(self, marks: Mapping[str, int]) -> None:
        """Start empty.

        Args:
            marks: Highest step already written, by metric name.
        """
        self._marks = dict(marks)
        self._points: deque[Point] = deque()
        self._clean_keys: dict[str, str] = {}
        self.rejected: set[str] = set()
        """Names of metrics that had a value that is no number; such values are left out."""

    def __len__(self) -> int:
        return len(self._points)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Queue the points of some steps that are above their key's mark."""
        for record in records:
            step, time_ms = int(record.step), max(0, round(record.time_s * 1000))
            for name, raw in record.metrics.items():
                key = self._clean_keys.get(name) or self._clean_keys.setdefault(name, clean_key(name))
                try:
                    value = float(raw)
                except (TypeError, ValueError):
                    # One value that MLflow refuses would hold up everything queued behind it, for ever.
                    self.rejected.add(name)
                    continue
                self._push(Point(key, value, step, time_ms))

    def add_points(self, points: Iterable[Point]) -> None:
        """Queue points kept from an earlier try, those above their key's mark."""
        for point in points:
            self._push(point)

    def peek(self, limit: int) -> tuple[Point, ...]:
        """Return up to ``limit`` of the oldest points; they stay queued until confirmed."""
        return tuple(itertools.islice(self._points, limit))

    def confirm(self, num_points: int) -> None:
        """Forget that many of the oldest points: they are written."""
        for _ in range(num_points):
            self._points.popleft()

    def _push(self, point: Point) -> None:
        mark = self._marks.get(point.key)
        if mark is None or point.step > mark:
            self._marks[point.key] = point.step
            self._points.append(point)


def clean_key(name: str) -> str:
    """Return the nearest name that MLflow accepts: letters, digits, ``_.-/: `` and no empty path segment."""
    parts = re.sub(r"[^\w./: -]", "_", name).split("/")
    kept = "/".join(part for part in parts if part not in ("", ".", ".."))
    return kept[:MAX_KEY_LENGTH].rstrip("/") or "unnamed"
