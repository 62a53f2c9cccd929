"""What a benchmark found: a table for the reader and a JSON file for the README."""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_GOAL = re.compile(r"\s*(<=|>=|==|<|>)\s*([+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*")


@dataclass(frozen=True)
class Row:
    """One measured figure and what it had to reach.

    Raises:
        ValueError: The goal cannot be read, or a figure is not finite.
    """

    metric: str
    """What was measured, in the reader's words."""

    value: float | None
    """The figure, the median where there are several samples; None when what was waited for never came."""

    unit: str = ""
    """Unit of ``value``, such as ``s``; empty for a ratio or a count."""

    spread: tuple[float, float] | None = None
    """Smallest and largest sample; None when there was only one."""

    goal: str | None = None
    """What ``value`` must reach, such as ``<= 0.5``; None when it is only shown."""

    def __post_init__(self) -> None:
        _parse_goal(self.goal)
        figures = [figure for figure in (self.value, *(self.spread or ())) if figure is not None]
        if not all(math.isfinite(figure) for figure in figures):
            raise ValueError(f"{self.metric}: {figures} must be finite; a figure that never came is None")

    @property
    def met(self) -> bool | None:
        """Whether the goal was reached; None when there is no goal."""
        goal = _parse_goal(self.goal)
        if goal is None:
            return None
        compare, bound = goal
        return self.value is not None and compare(self.value, bound)


def summarize(metric: str, samples: Sequence[float], unit: str = "", goal: str | None = None) -> Row:
    """Make one row of several samples: their median, and the smallest and largest as the spread.

    Args:
        metric: What was measured.
        samples: At least one figure.
        unit: Unit of the samples.
        goal: What the median must reach.

    Raises:
        ValueError: There is no sample.
    """
    if not samples:
        raise ValueError(f"{metric}: no sample was measured; give a Row with value None if that is the finding")
    spread = (min(samples), max(samples)) if len(samples) > 1 else None
    return Row(metric, statistics.median(samples), unit, spread, goal)


def write(name: str, rows: Sequence[Row], folder: Path = RESULTS) -> Path:
    """Print the rows as a table and keep them as ``<name>.json``.

    Args:
        name: Name of the benchmark, as in ``make bench NAME=<name>``.
        rows: What was measured, in the order to show it.
        folder: Where the file goes.

    Returns:
        The file written.
    """
    Console().print(_table(name, rows))
    found = {
        "machine": describe_machine(),
        "command": f"make bench NAME={name}",
        "rows": [_as_json(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    # Written beside and renamed: a benchmark stopped half way must leave the last whole result.
    unfinished = path.with_suffix(".json.partial")
    unfinished.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    unfinished.replace(path)
    return path


def describe_machine() -> dict[str, str | int | float]:
    """Say what the figures depend on, and nothing that tells whose machine it was."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ray": metadata.version("ray"),
    }


def _parse_goal(goal: str | None) -> tuple[Callable[[float, float], bool], float] | None:
    if goal is None:
        return None
    match = _GOAL.fullmatch(goal)
    if match is None:
        raise ValueError(f"cannot read the goal {goal!r}; write one of {' '.join(_COMPARISONS)} and a number")
    return _COMPARISONS[match[1]], float(match[2])


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "metric": row.metric,
        "value": row.value,
        "unit": row.unit,
        "spread": None if row.spread is None else list(row.spread),
        "goal": row.goal,
        "met": row.met,
    }


def _table(name: str, rows: Sequence[Row]) -> Table:
    table = Table(title=name, title_justify="left")
    table.add_column("metric")
    for heading in ("median", "spread", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("met")
    verdicts = {True: "[green]yes[/]", False: "[bold red]no[/]", None: ""}
    for row in rows:
        value = "never" if row.value is None else f"{row.value:.4g} {row.unit}".rstrip()
        spread = "" if row.spread is None else f"{row.spread[0]:.4g}..{row.spread[1]:.4g}"
        table.add_row(row.metric, value, spread, row.goal or "", verdicts[row.met])
    return table


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
