"""What a worker writes down: each step's metrics, and for each change of generation where the time went."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

from raytrain_platform.elastic.coordinator import Entry
from raytrain_platform.elastic.protocol import Generation
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.link import Link
from raytrain_platform.training.state import TrainState
from raytrain_platform.training.step import Totals

STEPS, RECOVERIES = "steps", "recoveries"
"""Names of the two logs; their lines are the fields of the records, as plain data."""


class Journal:
    """Keeps the logs of one worker. All members write the same lines, so that no line is lost with the leader."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.monotonic) -> None:
        """Write to the link's outbox."""
        self._link, self._clock = link, clock
        self._last_commit_s: float | None = None
        self._durations_s: deque[float] = deque(maxlen=50)
        self._marks: dict[str, float] = {}
        self._before: Generation | None = None
        self._current: Generation | None = None
        self.last_metrics: dict[str, float] = {}

    def stopped(self) -> None:
        """The generation, if any, is over, and the next one is asked for."""
        # While one recovery runs into the next, the time counts from where the first one began.
        if "stopped" not in self._marks:
            self._marks["stopped"] = self._clock()
            self._before = self._current

    def agreed(self) -> None:
        """The next generation is agreed."""
        self._marks["agreed"] = self._clock()

    def regrouped(self) -> None:
        """Its process group is connected."""
        self._marks["regrouped"] = self._clock()

    def synchronized(self) -> None:
        """Everybody is at the same step."""
        self._marks["synchronized"] = self._clock()

    def committed(self, generation: Generation, state: TrainState, totals: Totals, learning_rate: float) -> None:
        """A step is committed."""
        now = self._clock()
        if generation is not self._current:
            self._log_recovery(generation, state.step - 1, now)
        elif self._last_commit_s is not None:
            self._durations_s.append(now - self._last_commit_s)
        metrics = {
            "train/loss": totals.loss,
            "train/grad_norm": totals.grad_norm,
            "train/learning_rate": learning_rate,
            "train/num_skipped": float(state.num_skipped),
            "elastic/world_size": float(len(generation.members)),
            "elastic/generation": float(generation.number),
        }
        if self._last_commit_s is not None:
            step_s = now - self._last_commit_s
            metrics |= {"perf/step_s": step_s, "perf/samples_per_s": totals.num_samples / step_s}
        self._last_commit_s, self._current = now, generation
        self._log_step(2 * state.step, state.step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The model is evaluated after a step."""
        self._log_step(2 * step + 1, step, {f"val/{name}": value for name, value in metrics.items()})

    def _log_step(self, serial: int, step: int, metrics: Mapping[str, float]) -> None:
        self.last_metrics |= metrics
        self._link.log(STEPS, serial, asdict(StepRecord(step, time.time(), metrics)))

    def _log_recovery(self, generation: Generation, at_step: int, now: float) -> None:
        marks, self._marks = self._marks, {}
        begin = self._last_commit_s if self._last_commit_s is not None else marks["stopped"]
        ends = [begin, marks["stopped"], marks["agreed"], marks["regrouped"], marks["synchronized"], now]
        names = ("detect_s", "agree_s", "regroup_s", "sync_s", "first_step_s")
        phases = {name: ends[k + 1] - ends[k] for k, name in enumerate(names)}
        normal_s = statistics.median(self._durations_s) if self._durations_s else 0.0
        record = RecoveryRecord(
            generation=generation.number,
            cause=generation.cause,
            detail=generation.detail,
            at_step=at_step,
            num_replicas_before=len(self._before.replicas) if self._before else 0,
            num_replicas=len(generation.replicas),
            phases=phases,
            pause_s=max(0.0, now - begin - normal_s),
            time_s=time.time(),
        )
        self._link.log(RECOVERIES, generation.number, asdict(record))


def steps_in(entries: Iterable[Entry]) -> list[StepRecord]:
    """The step records among log lines."""
    return [StepRecord(**entry.content) for entry in entries if entry.log == STEPS]


def recoveries_in(entries: Iterable[Entry]) -> list[RecoveryRecord]:
    """The recovery records among log lines."""
    return [RecoveryRecord(**entry.content) for entry in entries if entry.log == RECOVERIES]
