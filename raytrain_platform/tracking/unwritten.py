"""What could not be written to a run before its job ended, kept in a local file until the job runs again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytrain_platform.tracking.flusher import Row, Unwritten
from raytrain_platform.tracking.records import Point


def save_unwritten(path: Path, unwritten: Unwritten) -> None:
    """Write points and recoveries, one JSON object a line, whole or not at all."""
    lines = [json.dumps({"point": list(point)}) for point in unwritten.points]
    lines += [json.dumps({"recovery": dict(row)}) for row in unwritten.recoveries]
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(f"{line}\n" for line in lines))
    draft.replace(path)


def load_unwritten(path: Path) -> tuple[list[Point], list[dict[str, Any]]]:
    """Read the points and recoveries back, oldest first; nothing if there is no file."""
    if not path.exists():
        return [], []
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    points = [Point(*entry["point"]) for entry in entries if "point" in entry]
    return points, [entry["recovery"] for entry in entries if "recovery" in entry]


def merge_recoveries(*tables: Sequence[Row]) -> list[Row]:
    """Return the rows of some tables in order of time, each generation reached at one time once."""
    rows = {(row["generation"], row["time_s"]): row for table in tables for row in table}
    return sorted(rows.values(), key=lambda row: float(row["time_s"]))
