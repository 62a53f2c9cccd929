"""How many replicas to start and which to let go: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

MAX_FAILED_STARTS = 3
"""Runs in a row that end before they are ready; then the job is given up."""


REPLACE_AFTER_S = 1.0
"""Seconds before a lost replica is replaced: the others first take their next step, with the processor to themselves,
and a replica that only seemed dead has come back."""


class Phase(Enum):
    """Where a replica stands."""

    STARTING = "starting"
    """Asked of Ray; waiting for capacity, or preparing."""

    READY = "ready"
    """Prepared, waiting to be admitted."""

    WORKING = "working"
    LOST = "lost"
    """Given up by the coordinator; its run may still be about to end."""

    ENDED = "ended"


@dataclass(frozen=True)
class Plan:
    """What to do about the replicas now."""

    num_to_start: int = 0
    to_release: tuple[str, ...] = ()


def decide_replicas(*, phases: Mapping[str, Phase], target: int, num_just_lost: int = 0) -> Plan:
    """Choose what to start and what to release so that ``target`` replicas live.

    Args:
        phases: Where each replica stands, the oldest first.
        target: Replicas the job should have.
        num_just_lost: Of the lost ones, those not replaced yet: they were lost less than ``REPLACE_AFTER_S`` ago.
    """
    living = [name for name, phase in phases.items() if phase not in (Phase.LOST, Phase.ENDED)]
    if len(living) <= target:
        return Plan(num_to_start=max(0, target - len(living) - num_just_lost))
    # The least is lost with those that have not begun, and among equals with the youngest.
    order = (Phase.STARTING, Phase.READY, Phase.WORKING)
    dearest_last = sorted(reversed(living), key=lambda name: order.index(phases[name]))
    return Plan(to_release=tuple(dearest_last[: len(living) - target]))


def should_give_up(failed_starts: int) -> bool:
    """Whether so many runs in a row ended before they were ready that another will not help."""
    return failed_starts >= MAX_FAILED_STARTS
