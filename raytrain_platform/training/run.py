"""From a task or a spec to a trained model: what ``raytrain train`` and ``train()`` do."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import fsspec
import torch
import yaml

from raytrain_platform.checkpoint.store import CheckpointStore
from raytrain_platform.cluster.capacity import check_cluster
from raytrain_platform.cluster.connect import connect
from raytrain_platform.errors import JobFailedError, SpecError
from raytrain_platform.spec import JobSpec, parse_spec
from raytrain_platform.task import Task, build_task, importable, load_task
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord
from raytrain_platform.training.job import Job, Observer
from raytrain_platform.training.monitor import make_monitor
from raytrain_platform.training.replica import checkpoints_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """What a job ended with."""

    name: str
    step: int
    """Steps committed."""

    weights_sha256: str
    """Equal for equal weights, bit for bit."""

    metrics: dict[str, float]
    """The last value of every metric."""

    num_skipped: int
    """Steps whose update was left out because the loss was not finite."""

    run_id: str
    """The MLflow run."""

    recoveries: tuple[RecoveryRecord, ...] = field(repr=False)
    """Every change of generation, with its phases."""

    seconds: float


def train(task: type[Task] | JobSpec, *, resume: bool = True, **fields: Any) -> Result:
    """Train a task on Ray, and wait for it.

    Without a cluster it starts Ray on this machine; with ``RAY_ADDRESS``, or in ``ray job submit``, it uses that one.

    Args:
        task: The task's class, with the fields of ``JobSpec`` as keywords; or a whole spec.
        resume: Whether to go on from the newest checkpoint of the same name; if not, old checkpoints are moved aside.
        fields: Fields of ``JobSpec``; ``name`` defaults to that of the task in lower case.

    Raises:
        SpecError: Fields are wrong; the message names all of them.
        TaskError: The task cannot be built with its parameters.
        JobError: The job cannot run here, or stopped.
    """
    if isinstance(task, JobSpec):
        if fields:
            raise SpecError(
                f"a whole spec takes no further fields, got {', '.join(fields)}; use model_copy(update=...)"
            )
        spec, task_type = task, load_task(task.task)
    else:
        task_type = importable(task)
        path = f"{task_type.__module__}:{task_type.__qualname__}"
        spec = parse_spec({"name": task_type.__qualname__.lower(), "task": path} | fields)
    return run_job(spec, task_type, resume=resume)


def run_job(
    spec: JobSpec,
    task_type: type[Task],
    *,
    resume: bool = True,
    observers: Sequence[Observer] | None = None,
    on_start: Callable[[Job], None] = lambda _: None,
) -> Result:
    """Run a job to its end.

    Args:
        spec: The job.
        task_type: The task it trains.
        resume: See ``train``.
        observers: Are told what happens; by default a live view of the terminal.
        on_start: Is given the job before it begins.

    Raises:
        JobError: The job cannot run here, or stopped.
    """
    begin = time.monotonic()
    task = build_task(task_type, spec.params)
    with connect(), make_monitor(spec, observers) as shown:
        check_cluster(spec.replicas)
        _prepare_checkpoints(spec, resume, shown)
        job = Job(spec, task_type)
        on_start(job)
        with _Tracking(spec) as tracking:
            outcome = job.run([tracking, *shown])
            if outcome is None:
                raise _StoppedError(
                    f"job {spec.name!r} was stopped before its end; run it again by the same name to go on"
                )
            try:
                tracking.log_model(task)
            except Exception as error:  # the job is done and its weights are saved: this must not undo it
                for observer in shown:
                    observer.on_event(f"the model was not logged to MLflow: {type(error).__name__}: {error}")
        return Result(
            name=spec.name,
            run_id=tracking.run_id,
            recoveries=tuple(tracking.recoveries),
            seconds=time.monotonic() - begin,
            **outcome,
        )


class _StoppedError(JobFailedError):
    """Somebody asked for the end."""


def describe(spec: JobSpec) -> str:
    """The resolved spec, and what a job of it will ask of Ray, for a reader."""
    resolved = yaml.safe_dump(spec.model_dump(), sort_keys=False)
    size = spec.replicas
    worker = ", ".join(f"{amount:g} {name}" for name, amount in size.resources_per_worker.items())
    return (
        f"{resolved}\n# What will be asked of Ray:\n"
        f"#   {size.min} to {size.max} replicas, each a Ray Train run of {size.workers_per_replica} worker(s)\n"
        f"#   {worker} for each worker, in one placement group for each replica\n"
        f"#   one coordinator actor (no CPU) on the node of the driver\n"
        f"#   checkpoints under {checkpoints_of(spec)}\n"
    )


def summarize(result: Result) -> str:
    """The result in a few lines, for a reader."""
    metrics = "   ".join(
        f"{name} {value:.4g}" for name, value in result.metrics.items() if name.startswith(("train/loss", "val/"))
    )
    changes = [record for record in result.recoveries if record.num_replicas_before]
    longest_s = max((record.pause_s for record in changes), default=0.0)
    return (
        f"job {result.name!r} is done: {result.step} steps in {result.seconds:.1f} s\n"
        f"  {metrics}\n"
        f"  {len(changes)} change(s) of membership, longest pause {longest_s:.2f} s\n"
        f"  weights sha256 {result.weights_sha256}\n"
        f"  MLflow run {result.run_id} (see it with `raytrain ui`)"
    )


def _prepare_checkpoints(spec: JobSpec, resume: bool, observers: Sequence[Observer]) -> None:
    url = checkpoints_of(spec)
    steps = CheckpointStore(url).list_steps()
    if not steps:
        return
    if resume:
        text = f"going on from the checkpoint of step {steps[-1]} under {url} (--no-resume starts over)"
    else:
        aside = f"{url}-before-{time.strftime('%Y%m%d-%H%M%S')}"
        filesystem, path = fsspec.core.url_to_fs(url)
        filesystem.mv(path, filesystem._strip_protocol(aside), recursive=True)
        text = f"earlier checkpoints are now under {aside}"
    for observer in observers:
        observer.on_event(text)


class _Tracking:
    """Feeds the tracker from a thread of its own, so that MLflow delays neither the start nor a step."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self.recoveries: list[RecoveryRecord] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracking")
        self._tracker = self._thread.submit(self._open)
        self._last: Future[Any] = self._tracker
        self._is_finished = False

    def __enter__(self) -> _Tracking:
        return self

    def __exit__(self, _: object, error: BaseException | None, *trace: object) -> None:
        """End the run as the job ended. A tracker that could not open has its own error shown instead."""
        self._thread.shutdown()
        if self._tracker.exception() is not None:
            return
        match error:
            case None:
                self._tracker.result().finish("FINISHED")
            case KeyboardInterrupt() | _StoppedError():
                self._tracker.result().finish("KILLED", "stopped")
            case _:
                self._tracker.result().finish("FAILED", str(error).split("\n")[0])

    def _open(self) -> Any:
        from raytrain_platform.tracking.tracker import Tracker

        return Tracker.open(self._spec, {})

    @property
    def run_id(self) -> str:
        """The MLflow run."""
        return str(self._tracker.result().run_id)

    def on_steps(self, records: list[StepRecord]) -> None:
        """See ``Observer``. The store must have answered by the first step: a job nobody can follow is no use."""
        self._tracker.result().log_steps(records)

    def on_recovery(self, record: RecoveryRecord) -> None:
        """See ``Observer``."""
        self.recoveries.append(record)
        self._submit(lambda: self._tracker.result().log_recovery(record))

    def on_event(self, text: str) -> None:
        """See ``Observer``."""
        logger.info(text)

    def log_model(self, task: Task) -> None:
        """Keep the model of the newest checkpoint with the run."""
        loaded = CheckpointStore(checkpoints_of(self._spec)).load_newest()
        if loaded.snapshot is None:
            return
        model = task.build_model()
        model.load_state_dict(loaded.snapshot.state()["model"])
        self._tracker.result().log_model(model, _example(task, model))

    def _submit(self, call: Callable[[], Any]) -> None:
        self._last = self._thread.submit(call)


def _example(task: Task, model: torch.nn.Module) -> tuple[Any, ...] | None:
    """What the task feeds its model with, taken from two samples; None if it calls it with keywords."""
    seen: list[tuple[Any, ...]] = []
    handle = model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    data = task.train_data()
    with torch.no_grad():
        task.loss(model, task.collate([data[0], data[min(1, len(data) - 1)]]))
    handle.remove()
    return seen[0] if seen and seen[0] else None
