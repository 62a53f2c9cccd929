"""What a job tells about itself while it runs: plain data, importable without MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

PHASES: Final = ("detect_s", "agree_s", "regroup_s", "sync_s", "first_step_s")
"""Phases of a recovery, in the order they happen."""


@dataclass(frozen=True)
class StepRecord:
    """What one committed step has to show."""

    step: int
    """The step, counted from the start of the job."""

    time_s: float
    """When it committed, as Unix time."""

    metrics: Mapping[str, float]
    """Values by name, such as ``train/loss`` or ``elastic/world_size``; the prefix is the section in the UI."""


@dataclass(frozen=True)
class RecoveryRecord:
    """How the job got from one generation to the next, and what each phase took."""

    generation: int
    """Generation that was reached."""

    cause: str
    """Why membership changed: ``start``, ``lost``, ``join``, ``leave``, ``restore``."""

    detail: str
    """Who or what, for a human reader."""

    at_step: int
    """Newest step committed before the change."""

    num_replicas_before: int
    """Replicas of the generation before; 0 at the start."""

    num_replicas: int
    """Replicas of the generation that was reached."""

    phases: Mapping[str, float]
    """Seconds of each phase, by the names in ``PHASES``."""

    pause_s: float
    """Seconds without a step, less a normal step."""

    time_s: float
    """When the change was over, as Unix time."""


class Point(NamedTuple):
    """One value of one metric at one step, the way MLflow stores it."""

    key: str
    value: float
    step: int
    time_ms: int


def recovery_row(record: RecoveryRecord) -> dict[str, str | int | float]:
    """Return the record as one row of a table: a column for each field and each phase."""
    return {
        "generation": record.generation,
        "cause": record.cause,
        "detail": record.detail,
        "at_step": record.at_step,
        "num_replicas_before": record.num_replicas_before,
        "num_replicas": record.num_replicas,
        "pause_s": record.pause_s,
        **record.phases,
        "time_s": record.time_s,
    }


def recovery_step(record: RecoveryRecord) -> StepRecord:
    """Return the phases of a recovery as metrics of the step it happened at."""
    metrics = {f"recovery/{phase}": seconds for phase, seconds in record.phases.items()}
    return StepRecord(record.at_step, record.time_s, metrics | {"recovery/pause_s": record.pause_s})
