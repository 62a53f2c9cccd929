"""What Ray Train runs: the code of one worker of one replica."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
import torch

from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.comm.group import GlooGroup, Group
from raytrain_platform.elastic.coordinator import Failure, Order
from raytrain_platform.elastic.protocol import MemberId, Place
from raytrain_platform.errors import CheckpointError, SpecError, TaskError
from raytrain_platform.spec import JobSpec
from raytrain_platform.task import Task, build_task
from raytrain_platform.training.link import Link, RayCoordinatorClient
from raytrain_platform.training.worker import Surroundings, Worker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assignment:
    """What a replica is to do."""

    spec: JobSpec
    task_type: type[Task]
    replica: str
    coordinator: Any
    """Handle of the coordinator's actor."""


def run_worker(config: dict[str, Assignment]) -> None:
    """Take part in a job as one worker of a replica. Errors of user code go to the coordinator, which decides."""
    assignment = config["assignment"]
    spec = assignment.spec
    torch.set_num_threads(spec.num_threads)
    member = MemberId(assignment.replica, ray.train.get_context().get_world_rank())
    client = RayCoordinatorClient(assignment.coordinator)
    here = ray.get_runtime_context()
    client.introduce(member, Place(here.get_node_id(), str(ray.util.get_node_ip_address()), os.getpid()))
    with contextlib.ExitStack() as cleanup:
        worker: Worker | None = None
        try:
            around = Surroundings(
                link=Link(client, member),
                make_group=_make_group(spec.timeouts.hang_after_s),
                store=CheckpointStore(checkpoints_of(spec)),
                turn=contextlib.nullcontext(),
            )
            cleanup.callback(around.link.close)
            worker = Worker(build_task(assignment.task_type, spec.params), spec, around)
            cleanup.callback(worker.close)
            dismissal = worker.run()
            logger.info("%s ends: %s", member, dismissal.why if dismissal else "the job is done")
        except Exception as error:
            client.fail(
                Failure(
                    member=member,
                    step=worker.state.step if worker is not None else 0,
                    summary=f"{type(error).__name__}: {error}",
                    traceback=traceback.format_exc(),
                    is_final=isinstance(error, TaskError | SpecError | CheckpointError),
                )
            )


def checkpoints_of(spec: JobSpec) -> str:
    """Where the checkpoints of a job lie."""
    return f"{spec.job_storage}/checkpoints"


def _make_group(timeout_s: float) -> Any:
    def make(order: Order, rank: int) -> Group:
        assert order.rendezvous is not None
        return GlooGroup(order.rendezvous, rank, len(order.generation.members), timeout_s)

    return make
