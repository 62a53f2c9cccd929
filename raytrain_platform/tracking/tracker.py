"""The writer of a job's MLflow run, for the process that drives the job."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.buffer import PointBuffer
from raytrain_platform.tracking.connection import connect, ensure_experiment, translated
from raytrain_platform.tracking.flusher import Flusher, Unwritten
from raytrain_platform.tracking.location import Location, locate, mask_secrets, unwritten_file
from raytrain_platform.tracking.records import RecoveryRecord, StepRecord, recovery_row, recovery_step
from raytrain_platform.tracking.runs import RunSink, last_steps, open_run, read_recoveries
from raytrain_platform.tracking.ui import run_page
from raytrain_platform.tracking.unwritten import load_unwritten, merge_recoveries, save_unwritten

if TYPE_CHECKING:
    from mlflow.entities import Run
    from torch import nn

logger = logging.getLogger(__name__)

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Tracker:
    """Tells MLflow about one job: its steps, its recoveries, its model and how it ended.

    Nothing here slows or stops training. A store that fails is tried again until the job ends; what is still
    missing then is kept in a local file and written when the job of that name runs again. There must be one
    tracker for a run at a time.
    """

    def __init__(self, sink: RunSink, run: Run, location: Location, unwritten: Path) -> None:
        """Go on in a run; use ``Tracker.open`` to find or make it."""
        self.run_id: str = run.info.run_id
        """Id of the run."""
        self.run_url_hint: str = run_page(location.uri, run.info.experiment_id, self.run_id)
        """Where a browser shows the run; for a SQLite file, once ``raytrain ui`` serves it."""
        self._sink = sink
        self._unwritten = unwritten
        self._is_finished = False
        buffer = PointBuffer(last_steps(run))
        points, rows = load_unwritten(unwritten)
        buffer.add_points(points)
        self._flusher = Flusher(sink, buffer, merge_recoveries(read_recoveries(sink.client, self.run_id), rows))

    @classmethod
    def open(cls, spec: JobSpec, tags: Mapping[str, str]) -> Self:
        """Make the run of a job, or go on in it if the job of this name and with these numbers has not finished.

        Args:
            spec: The job.
            tags: More tags of the run; names beginning with ``raytrain.`` or ``mlflow.`` have a meaning.

        Raises:
            SpecError: The spec gives no place for the run, or one MLflow cannot use.
            JobError: The store cannot be reached, set up or written; the message has the cause.
        """
        location = locate(spec)
        client = connect(location)
        with translated(location):
            experiment_id = ensure_experiment(client, location, spec.tracking.experiment)
            run = open_run(client, experiment_id, spec, tags)
            sink = RunSink(client, run.info.run_id)
            return cls(sink, run, location, unwritten_file(spec, run.info.run_id))

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        """Take what some steps have to show, oldest first; never waits.

        Of each metric, a step at or below one that it already has is dropped: it was logged before.
        """
        self._flusher.put(records)

    def log_recovery(self, record: RecoveryRecord) -> None:
        """Take how the job got to a new generation, for the table and as metrics of its step; never waits."""
        self._flusher.put_recovery(recovery_row(record), recovery_step(record))

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until all that was logged is written.

        Returns:
            Whether it is; after ``timeout_s`` it is not.
        """
        return self._flusher.flush(timeout_s)

    def log_model(self, model: nn.Module, example: tuple[Any, ...] | None) -> str | None:
        """Keep the trained model with the run; waits until it is there.

        Args:
            model: The model, on any device.
            example: Inputs of ``model.forward``. With one tensor of two or more rows, the model is kept as a graph
                that serves any number of rows and loads without unpickling; else as a file of weights.

        Returns:
            ``models:/...`` or the name of the file of weights; None if the store failed, which a warning explains.
        """
        from raytrain_platform.tracking.model import log_model

        try:
            return log_model(self._sink.client, self.run_id, model, example)
        except Exception as error:
            logger.warning(
                "the model could not be kept with the run, it is in the newest checkpoint: %s: %s",
                type(error).__name__,
                mask_secrets(str(error)),
            )
            return None

    def finish(self, status: Status, reason: str = "", timeout_s: float = 15.0) -> Path | None:
        """Write what is left and give the run its final status; a second call does nothing.

        Args:
            status: How the job ended.
            reason: Why, for a human reader.
            timeout_s: How long to keep trying when the store fails.

        Returns:
            The file that keeps what could not be written, which a warning explains; None when all is written, or
            when that file cannot be written either.
        """
        if self._is_finished:
            return None
        self._is_finished = True
        left = self._flusher.close(status, reason, timeout_s)
        if left.is_ended:
            with contextlib.suppress(OSError):
                self._unwritten.unlink()
            return None
        return self._keep(left, status)

    def _keep(self, left: Unwritten, status: Status) -> Path | None:
        path: Path | None = self._unwritten
        kept = f"kept in {path} and written when the job of this name runs again"
        try:
            save_unwritten(self._unwritten, left)
        except OSError as error:
            # The job itself has ended well or badly by now; what became of its log must not change that.
            path = None
            kept = f"lost, since {self._unwritten} cannot be written either: {error.strerror}"
        logger.warning(
            "the run %s could not be ended as %s: %d points and %d rows of recoveries are not written but %s (%s)",
            self.run_id,
            status,
            len(left.points),
            len(left.recoveries),
            kept,
            left.error or "a call to the store does not return",
        )
        return path
