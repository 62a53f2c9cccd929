"""A job on a local cluster, and the trouble it may meet: for demonstrations, tests and benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from raytrain_platform.cluster.local import LocalCluster
from raytrain_platform.elastic.protocol import MemberId, Place
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.job import Job, Observer
from raytrain_platform.training.run import Result, run_job

_LIMIT_S = 180.0


class Rehearsal:
    """Runs a job in a thread; its methods wait for the job, or make trouble for it."""

    def __init__(
        self, cluster: LocalCluster, spec: JobSpec, task_type: type[Task], observers: Sequence[Observer] = ()
    ) -> None:
        """Start the job.

        Args:
            cluster: The cluster, already connected to.
            spec: The job.
            task_type: The task it trains.
            observers: Are told what happens, besides the rehearsal itself.
        """
        self.cluster = cluster
        self.steps: list[StepRecord] = []
        self.recoveries: list[RecoveryRecord] = []
        self.events: list[str] = []
        self._spec, self._task_type, self._observers = spec, task_type, observers
        self._job: Job | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rehearsal", daemon=True)
        self._thread.start()

    def on_steps(self, records: list[StepRecord]) -> None:
        """See ``Observer``."""
        self.steps += records

    def on_recovery(self, record: RecoveryRecord) -> None:
        """See ``Observer``."""
        self.recoveries.append(record)

    def on_event(self, text: str) -> None:
        """See ``Observer``."""
        self.events.append(text)

    @property
    def job(self) -> Job:
        """The job, once it has begun."""
        self._until(lambda: self._job is not None, "the job to begin")
        assert self._job is not None
        return self._job

    @property
    def newest_step(self) -> int:
        """Steps committed, as far as the driver knows."""
        return max((record.step for record in self.steps), default=0)

    def until_step(self, step: int) -> Self:
        """Wait until so many steps are committed."""
        return self._until(lambda: self.newest_step >= step, f"step {step}")

    def until_replicas(self, count: int) -> Self:
        """Wait until so many replicas have committed a step together."""

        def has_so_many() -> bool:
            generation = self._job.generation if self._job is not None else None
            if generation is None or len(generation.replicas) != count:
                return False
            newest = self.steps[-1].metrics.get("elastic/generation", 0) if self.steps else 0
            return newest == generation.number

        return self._until(has_so_many, f"a step of {count} replicas")

    def until_event(self, part: str) -> Self:
        """Wait until an event contains some words."""
        return self._until(lambda: any(part in event for event in self.events), f"the event {part!r}")

    def until_done(self) -> Result:
        """Wait for the result.

        Raises:
            RaytrainError: The job ended with it.
        """
        self._until(lambda: not self._thread.is_alive(), "the end of the job")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def place_of(self, rank: int) -> Place:
        """Where the worker of a rank runs."""
        return self.job.places[self._member(rank)]

    def kill_node_of(self, rank: int) -> Self:
        """SIGKILL every process of the node of a rank, at once and without warning."""
        self.cluster.kill_node(self.place_of(rank).node_id)
        return self

    def add_node(self) -> Self:
        """Add a node."""
        self.cluster.add_node()
        return self

    def stop(self) -> None:
        """End the job, if it has not ended."""
        if self._job is not None:
            self._job.stop("the rehearsal is over")
        self._thread.join(_LIMIT_S)

    def _member(self, rank: int) -> MemberId:
        generation = self.job.generation
        assert generation is not None
        return generation.members[rank]

    def _run(self) -> None:
        try:
            self._result = run_job(
                self._spec, self._task_type, observers=[self, *self._observers], on_start=self._follow
            )
        except BaseException as error:
            self._error = error

    def _follow(self, job: Job) -> None:
        self._job = job

    def _until(self, condition: Callable[[], bool], what: str) -> Self:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            if self._error is not None:
                raise self._error
            if not self._thread.is_alive() and not condition():
                raise AssertionError(f"the job ended before {what}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_LIMIT_S:.0f} s for {what}; step {self.newest_step}, {self.events[-3:]}")
            time.sleep(0.02)
        return self
