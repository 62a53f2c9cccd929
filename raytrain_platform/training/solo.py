"""Jobs within one process: one worker alone, or several as threads. The code is that of a real job, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.comm.local import LocalGroup, LocalHub
from raytrain_platform.elastic.coordinator import Coordinator, Dismissal, Entry, Failure, Order, Report, View
from raytrain_platform.elastic.protocol import Generation, MemberId, Policy, Progress
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task, build_task
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


def train_alone(task_type: type[Task], spec: JobSpec, storage: str) -> dict[str, Any]:
    """Train in this process, without Ray: what an undisturbed run of the job ends in.

    With ``reduction="exact"`` the weights are those of the same job at any number of replicas.

    Args:
        task_type: The task.
        spec: The job; its replicas are not looked at.
        storage: Where checkpoints go.

    Returns:
        The result, as a job has it: ``step``, ``weights_sha256``, ``metrics``, ...
    """
    coordinator = LocalCoordinator(Policy(min_replicas=1, num_workers=1), target=1)
    link = Link(coordinator, MemberId("alone", 0))
    around = Surroundings(
        link=link,
        make_group=lambda order, rank: LocalGroup(LocalHub(len(order.generation.members)), rank),
        store=CheckpointStore(storage),
        turn=contextlib.nullcontext(),
    )
    worker = Worker(build_task(task_type, spec.params), spec, around)
    try:
        worker.run()
    finally:
        worker.close()
        result = coordinator.report().result
        coordinator.close()
    assert result is not None
    return result
