"""Jobs within one process: one worker alone, or several as threads. The code is that of a real job, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch

from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.comm.local import LocalGroup, LocalHub
from raytrain_platform.elastic.coordinator import Coordinator, Dismissal, Entry, Failure, Order, Report, View
from raytrain_platform.elastic.protocol import Generation, MemberId, Policy, Progress
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task, build_task
from raytrain_platform.tracking.records import StepRecord
from raytrain_platform.training.journal import steps_in
from raytrain_platform.training.link import Link
from raytrain_platform.training.worker import Surroundings, Worker

_T = TypeVar("_T")


class LocalCoordinator:
    """A coordinator on an event loop in a thread of its own, as a client that workers can call."""

    def __init__(self, policy: Policy, target: int) -> None:
        """Start the loop."""
        self._coordinator = Coordinator(policy, target, host=None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)
        self._thread.start()

    def arrive(self, member: MemberId, progress: Progress, generation: int, broke: bool) -> Order | Dismissal:
        """See ``Coordinator``."""
        return self._call(self._coordinator.arrive(member, progress, generation, broke))

    def watch(self, member: MemberId, working: Generation | None, seen: View, new: Sequence[Entry]) -> View:
        """See ``Coordinator``."""
        return self._call(self._coordinator.watch(member, working, seen, new))

    def fail(self, failure: Failure) -> None:
        """See ``Coordinator``."""
        self._call(self._coordinator.fail(failure))

    def finish(self, result: dict[str, Any], new: Sequence[Entry]) -> None:
        """See ``Coordinator``."""
        self._call(self._coordinator.finish(result, new))

    def stop(self) -> None:
        """See ``Coordinator``."""
        self._call(self._coordinator.stop())

    def retarget(self, target: int) -> None:
        """See ``Coordinator``."""
        self._call(self._coordinator.retarget(target))

    def leave(self, replica: str) -> None:
        """See ``Coordinator``."""
        self._call(self._coordinator.leave(replica))

    def report(self) -> Report:
        """See ``Coordinator``."""
        return self._call(self._coordinator.report())

    def close(self) -> None:
        """Stop the loop."""
        self._call(self._coordinator.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, call: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def train_alone(
    task_type: type[Task], spec: JobSpec, on_steps: Callable[[list[StepRecord]], None] | None = None
) -> dict[str, Any]:
    """Train in this process, without Ray: what an undisturbed run of the job ends in.

    With ``reduction="exact"`` the weights are those of the same job at any number of replicas.

    Args:
        task_type: The task.
        spec: The job; of its replicas, only the CPUs of a worker are looked at.
        on_steps: Is told of the steps, in a thread of its own.

    Returns:
        The result, as a job has it: ``step``, ``weights_sha256``, ``metrics``, ...
    """
    coordinator = LocalCoordinator(Policy(min_replicas=1, num_workers=1), target=1)
    around = Surroundings(
        link=Link(coordinator, MemberId("alone", 0)),
        make_group=lambda order, rank: LocalGroup(LocalHub(len(order.generation.members)), rank),
        store=CheckpointStore(f"{spec.job_storage}/checkpoints"),
        turn=contextlib.nullcontext(),
    )
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(spec.num_threads)
    done = threading.Event()
    watching = threading.Thread(target=_pass_on, args=(coordinator, on_steps or (lambda _: None), done), daemon=True)
    watching.start()
    try:
        worker = Worker(build_task(task_type, spec.params), spec, around)
        try:
            worker.run()
        finally:
            worker.close()
        result = coordinator.report().result
    finally:
        done.set()
        watching.join()
        around.link.close()
        coordinator.close()
        torch.set_num_threads(num_threads_before)
    assert result is not None
    return result


def _pass_on(
    coordinator: LocalCoordinator, on_steps: Callable[[list[StepRecord]], None], done: threading.Event
) -> None:
    while not done.wait(0.1):
        records = steps_in(coordinator.report().entries)
        if records:
            on_steps(records)
