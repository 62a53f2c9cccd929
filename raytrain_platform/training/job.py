"""A job, seen from its driver: it holds the coordinator and the replicas, and passes on what they report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_platform.elastic.coordinator import Coordinator, Report
from raytrain_platform.elastic.protocol import Generation, MemberId, Place, Policy
from raytrain_platform.errors import JobAlreadyRunningError, JobFailedError
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.journal import recoveries_in, steps_in
from raytrain_platform.training.replica import Assignment, run_worker
from raytrain_platform.training.staffing import REPLACE_AFTER_S, Phase, decide_replicas, should_give_up

logger = logging.getLogger(__name__)

NAMESPACE = "raytrain"
_POLL_S = 0.1
_END_S = 30.0


class Observer(Protocol):
    """Is told what happens, in the order in which it does."""

    def on_steps(self, records: list[StepRecord]) -> None:
        """Steps were committed."""

    def on_recovery(self, record: RecoveryRecord) -> None:
        """The job got from one generation to the next."""

    def on_event(self, text: str) -> None:
        """Something a person should see happened."""


@dataclass
class _Run:
    """One replica's Ray Train run, in a thread of the driver."""

    assignment: Assignment
    phase: Phase = Phase.STARTING
    lost_s: float = -math.inf
    """When it was given up, by the monotonic clock."""

    has_been_ready: bool = False
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    def start(self) -> None:
        self.thread = threading.Thread(target=self._fit, name=self.assignment.replica, daemon=True)
        self.thread.start()

    def _fit(self) -> None:
        spec = self.assignment.spec.replicas
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={"assignment": self.assignment},
            torch_config=_NoProcessGroup(),
            scaling_config=ScalingConfig(
                num_workers=spec.workers_per_replica, resources_per_worker=dict(spec.resources_per_worker)
            ),
            run_config=RunConfig(
                name=f"{self.assignment.spec.name}-{self.assignment.replica}",
                storage_path=f"{self.assignment.spec.job_storage}/ray",
                failure_config=FailureConfig(max_failures=0),
            ),
        )
        try:
            trainer.fit()
        except Exception as error:
            self.error = error

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()


class _NoProcessGroup(TorchConfig):
    """Leaves out Ray Train's own process group: nobody would use it, and its store listens on every interface."""

    @property
    def backend_cls(self) -> type[Backend]:
        return Backend


class Job:
    """One training of a task. Make it, ``run`` it; ``stop`` and ``resize`` may be called from other threads."""

    def __init__(self, spec: JobSpec, task_type: type[Task]) -> None:
        """Claim the job's name on the cluster.

        Args:
            spec: The job.
            task_type: The task it trains.

        Raises:
            JobAlreadyRunningError: A job of this name is running.
        """
        self._spec, self._task_type = spec, task_type
        self._observers: Sequence[Observer] = ()
        self._target = spec.replicas.max
        self._runs: dict[str, _Run] = {}
        self._num_started = 0
        self._failed_starts = 0
        self._generation: Generation | None = None
        self.places: dict[MemberId, Place] = {}
        """Where each worker runs, of all that ever were."""

        self._was_waiting = False
        self._stopping: str | None = None
        self._coordinator = _start_coordinator(spec)

    @property
    def coordinator(self) -> Any:
        """Handle of the coordinator's actor."""
        return self._coordinator

    def run(self, observers: Sequence[Observer]) -> dict[str, Any] | None:
        """Train until the job is done.

        Args:
            observers: Are told what happens.

        Returns:
            What the leader reported at the end; None when the job was stopped.

        Raises:
            JobFailedError: Its own code stopped it, or no replica could be started.
        """
        self._observers = observers
        with self._closing():
            while True:
                report: Report = ray.get(self._coordinator.report.remote())
                self._update_phases(report)
                self._pass_on(report)
                if report.failure is not None:
                    failure = report.failure
                    what = f"job {self._spec.name!r} stopped at step {failure.step}: {failure.summary}"
                    raise JobFailedError(f"{what}\n\n{failure.traceback}")
                if report.result is not None or self._stopping is not None:
                    return report.result
                self._release_ended()
                self._staff()
                time.sleep(_POLL_S)

    @property
    def generation(self) -> Generation | None:
        """The newest generation agreed."""
        return self._generation

    def stop(self, reason: str = "asked to stop") -> None:
        """End the job at once; ``run`` returns None."""
        self._stopping = reason

    def resize(self, num_replicas: int) -> None:
        """Ask for another number of replicas, at least 1."""
        self._target = num_replicas
        ray.get(self._coordinator.retarget.remote(num_replicas))

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Release everything, however the job ends."""
        try:
            yield
        finally:
            with contextlib.suppress(ray.exceptions.RayActorError):
                ray.get(self._coordinator.stop.remote(), timeout=5)
            deadline = time.monotonic() + _END_S
            for run in self._runs.values():
                run.thread.join(max(0.0, deadline - time.monotonic()))
            ray.kill(self._coordinator)

    def _pass_on(self, report: Report) -> None:
        steps = steps_in(report.entries)
        for observer in self._observers:
            if steps:
                observer.on_steps(steps)
            for recovery in recoveries_in(report.entries):
                observer.on_recovery(recovery)
        for lost in report.lost:
            self._tell(f"lost replica {lost.replica}: {lost.why}")
        self._tell_generation(report)

    def _tell_generation(self, report: Report) -> None:
        generation = report.generation
        if generation is not None and generation != self._generation:
            detail = f" ({generation.detail})" if generation.detail else ""
            self._tell(f"generation {generation.number}: {len(generation.replicas)} replicas{detail}")
            self._generation, self._was_waiting = generation, False
        living = sum(run.phase is Phase.WORKING for run in self._runs.values())
        short = self._spec.replicas.min - len(report.waiting) - living
        if generation is not None and short > 0 and not self._was_waiting and report.result is None:
            self._was_waiting = True
            self._tell(f"waiting for capacity: {short} replica(s) short of the minimum of {self._spec.replicas.min}")

    def _tell(self, text: str) -> None:
        for observer in self._observers:
            observer.on_event(text)

    def _update_phases(self, report: Report) -> None:
        self.places |= dict(report.places)
        working = set(report.generation.replicas) if report.generation is not None else set()
        lost = {entry.replica for entry in report.lost}
        for name, run in self._runs.items():
            if name in report.waiting:
                run.phase = Phase.READY
            elif name in lost:
                run.phase, run.lost_s = Phase.LOST, time.monotonic()
            elif name in working and run.phase is not Phase.LOST:
                run.phase = Phase.WORKING
            run.has_been_ready |= run.phase in (Phase.READY, Phase.WORKING)

    def _release_ended(self) -> None:
        for name, run in self._runs.items():
            if run.has_ended and run.phase is not Phase.ENDED:
                run.phase = Phase.ENDED
                self._on_end(name, run)

    def _on_end(self, name: str, run: _Run) -> None:
        self._coordinator.ended.remote(name)
        self._failed_starts = 0 if run.has_been_ready else self._failed_starts + 1
        if run.error is not None:
            logger.info("the run of replica %s ended: %s", name, run.error)
        if should_give_up(self._failed_starts):
            raise JobFailedError(
                f"job {self._spec.name!r}: {self._failed_starts} replicas in a row ended before they were ready; "
                f"the last one with: {run.error or 'no error; see the log of its worker'}"
            ) from run.error

    def _staff(self) -> None:
        now = time.monotonic()
        num_just_lost = sum(
            run.phase in (Phase.LOST, Phase.ENDED) and now - run.lost_s < REPLACE_AFTER_S for run in self._runs.values()
        )
        plan = decide_replicas(
            phases={name: run.phase for name, run in self._runs.items()},
            target=self._target,
            num_just_lost=num_just_lost,
        )
        for _ in range(plan.num_to_start):
            self._start_replica()
        for name in plan.to_release:
            self._coordinator.leave.remote(name)

    def _start_replica(self) -> None:
        name = f"r{self._num_started}"
        self._num_started += 1
        run = self._runs[name] = _Run(Assignment(self._spec, self._task_type, name, self._coordinator))
        run.start()
        self._tell(f"asked Ray for replica {name}")


def coordinator_name(job: str) -> str:
    """Name of the actor of a job's coordinator, in ``NAMESPACE``."""
    return f"coordinator:{job}"


def _start_coordinator(spec: JobSpec) -> Any:
    timeouts = spec.timeouts
    policy = Policy(
        min_replicas=spec.replicas.min,
        num_workers=spec.replicas.workers_per_replica,
        patience_s=timeouts.patience_s,
        lost_after_s=timeouts.lost_after_s,
        suspect_after_s=timeouts.suspect_after_s,
        hang_after_s=timeouts.hang_after_s,
    )
    here = ray.get_runtime_context().get_node_id()
    options: Mapping[str, Any] = {
        "name": coordinator_name(spec.name),
        "namespace": NAMESPACE,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": -1,
        "max_concurrency": 10_000,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    try:
        return ray.remote(_CoordinatorActor).options(**options).remote(policy, spec.replicas.max)
    except ValueError as error:
        raise JobAlreadyRunningError(
            f"a job named {spec.name!r} is already running on this cluster; "
            "wait for it, stop it, or choose another name"
        ) from error


class _CoordinatorActor(Coordinator):
    """The coordinator as a Ray actor."""

    def __init__(self, policy: Policy, target: int) -> None:
        host: str = ray.util.get_node_ip_address()
        is_restarted = ray.get_runtime_context().was_current_actor_reconstructed
        super().__init__(policy, target, host, is_restarted=is_restarted)

    async def pid(self) -> int:
        """Process of the actor."""
        return os.getpid()
