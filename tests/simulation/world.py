"""A whole job in one process: workers are threads, and each can be made to die wherever it meets the world."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.comm.local import LocalGroup, LocalHub
from raytrain_platform.elastic.coordinator import Order
from raytrain_platform.elastic.protocol import MemberId, Policy
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.journal import recoveries_in, steps_in
from raytrain_platform.training.link import Link
from raytrain_platform.training.solo import LocalCoordinator
from raytrain_platform.training.worker import Surroundings, Worker

LIMIT_S = 60.0


class Killed(BaseException):
    """A worker dies here. Not an ``Exception``: nothing may catch it."""


@dataclass
class Fate:
    """When a worker dies: the number of collectives, waits and saves it still survives."""

    points_left: float = float("inf")
    is_silent: bool = False
    """Whether its connections stay open, as those of a machine without power do."""

    is_dead: bool = False

    def meet(self) -> None:
        self.points_left -= 1
        if self.points_left < 0:
            self.is_dead = True
            raise Killed


class MortalGroup(LocalGroup):
    """A group whose member may die before any collective and before the end of any wait."""

    def __init__(self, hub: LocalHub, rank: int, fate: Fate) -> None:
        super().__init__(hub, rank)
        self._fate = fate

    def _start(self, *arguments: Any) -> Any:
        self._fate.meet()
        pending = super()._start(*arguments)
        return _MortalPending(pending, self._fate)

    def close(self) -> None:
        if not (self._fate.is_dead and self._fate.is_silent):
            super().close()


class _MortalPending:
    def __init__(self, pending: Any, fate: Fate) -> None:
        self._pending, self._fate = pending, fate

    def wait(self) -> None:
        self._fate.meet()
        self._pending.wait()


@dataclass
class World:
    """One job and its workers."""

    task_type: type[Task]
    spec: JobSpec
    storage: str
    target: int
    steps: list[StepRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        timeouts = self.spec.timeouts
        policy = Policy(
            min_replicas=self.spec.replicas.min,
            num_workers=self.spec.replicas.workers_per_replica,
            patience_s=0.3,
            lost_after_s=timeouts.lost_after_s,
            suspect_after_s=0.15,
        )
        self.coordinator = LocalCoordinator(policy, self.target)
        self.result: dict[str, Any] | None = None
        self._threads: dict[str, list[threading.Thread]] = {}
        self._hubs: dict[int, LocalHub] = {}
        self._turn, self._lock = threading.RLock(), threading.Lock()

    def add(self, name: str, fates: Sequence[Fate] = (Fate(),)) -> None:
        """Start a replica, with a fate for each of its workers."""
        threads = [
            threading.Thread(target=self._live, args=(MemberId(name, k), fate), name=f"{name}/{k}", daemon=True)
            for k, fate in enumerate(fates)
        ]
        self._threads[name] = threads
        for thread in threads:
            thread.start()

    def is_alive(self, name: str) -> bool:
        return all(thread.is_alive() for thread in self._threads[name])

    def poll(self) -> None:
        report = self.coordinator.report()
        self.result = self.result or report.result
        self.steps += steps_in(report.entries)
        self.recoveries += recoveries_in(report.entries)
        if report.failure is not None:
            raise AssertionError(report.failure.traceback)
        if self.errors:
            raise self.errors[0]

    @property
    def newest_step(self) -> int:
        return max((record.step for record in self.steps), default=0)

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, f"stuck at step {self.newest_step}"
            self.poll()
            time.sleep(0.01)

    def close(self) -> None:
        self.coordinator.stop()
        for threads in self._threads.values():
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive(), f"{thread.name} did not end"
        self.poll()
        self.coordinator.close()

    def _make_group(self, fate: Fate) -> Any:
        def make(order: Order, rank: int) -> MortalGroup:
            with self._lock:
                number, size = order.generation.number, len(order.generation.members)
                hub = self._hubs.setdefault(number, LocalHub(size))
            return MortalGroup(hub, rank, fate)

        return make

    def _live(self, member: MemberId, fate: Fate) -> None:
        link = Link(self.coordinator, member)
        around = Surroundings(link, self._make_group(fate), CheckpointStore(self.storage), self._turn)
        worker = None
        try:
            worker = Worker(self.task_type(), self.spec, around)
            worker.run()
        except Killed:
            pass
        except Exception as error:
            self.errors.append(error)
        finally:
            link.close()
            if worker is not None:
                worker.close()
