"""The one MLflow run of a job: found again or made, and how it is written."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.description import (
    FINGERPRINT_TAG,
    JOB_TAG,
    fingerprint,
    run_params,
    run_tags,
    spec_text,
)
from raytrain_platform.tracking.flusher import Row
from raytrain_platform.tracking.location import mask_secrets
from raytrain_platform.tracking.records import Point

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

ATTEMPTS_TAG: Final = "raytrain.attempts"
RECOVERIES_FILE: Final = "raytrain/recoveries.json"
SPEC_FILE: Final = "raytrain/spec.yaml"

MAX_REASON_LENGTH = 5000
_MAX_ENTRIES_PER_BATCH = 100


def newest_run(client: MlflowClient, experiment_id: str, name: str) -> Run | None:
    """Return the newest run of the job called ``name``, or None."""
    found = client.search_runs(
        [experiment_id], f"tags.`{JOB_TAG}` = '{name}'", order_by=["attributes.start_time DESC"], max_results=1
    )
    return found[0] if found else None


def open_run(client: MlflowClient, experiment_id: str, spec: JobSpec, tags: Mapping[str, str]) -> Run:
    """Return the run this job writes to, its status RUNNING.

    It is the newest run of the job's name if that one has not finished and computes the same numbers: a job that
    was killed, failed or preempted then goes on where it was. Else it is a new run.
    """
    tags = run_tags(spec, tags)
    run = newest_run(client, experiment_id, spec.name)
    if run is None or run.info.status == "FINISHED" or run.data.tags.get(FINGERPRINT_TAG) != fingerprint(spec):
        run = client.create_run(experiment_id, tags=tags | {ATTEMPTS_TAG: "1"}, run_name=spec.name)
    else:
        tags[ATTEMPTS_TAG] = str(int(run.data.tags.get(ATTEMPTS_TAG, "1")) + 1)
        client.update_run(run.info.run_id, status="RUNNING")
    params = run_params(spec)
    known = run.data.params
    # MLflow refuses to change a parameter, so what is different this time is told by tags.
    changed = {f"raytrain.now.{key}": value for key, value in params.items() if known.get(key, value) != value}
    _describe(client, run.info.run_id, {k: v for k, v in params.items() if k not in known}, tags | changed)
    client.log_text(run.info.run_id, spec_text(spec), SPEC_FILE)
    return run


def last_steps(run: Run) -> dict[str, int]:
    """Return the highest step of each metric of a run."""
    # The store keeps the row with the highest step of each metric at hand; only the protobuf form shows the step.
    return {metric.key: int(metric.step) for metric in run.data.to_proto().metrics}


def read_recoveries(client: MlflowClient, run_id: str) -> list[dict[str, Any]]:
    """Return the rows of the table of recoveries, oldest first; none if there is no table."""
    folder = RECOVERIES_FILE.rpartition("/")[0]
    if RECOVERIES_FILE not in {file.path for file in client.list_artifacts(run_id, folder)}:
        return []
    with tempfile.TemporaryDirectory() as scratch:
        table = json.loads(Path(client.download_artifacts(run_id, RECOVERIES_FILE, scratch)).read_text())
    return [
        {column: cell for column, cell in zip(table["columns"], cells, strict=True) if cell is not None}
        for cells in table["data"]
    ]


@dataclass(frozen=True)
class RunSink:
    """Writes to one run; every call can be repeated without harm."""

    client: MlflowClient
    """Connection to the store."""

    run_id: str
    """The run."""

    def write_points(self, points: Sequence[Point]) -> None:
        """Write points in one request; MLflow ignores one that it already has with the same time and value."""
        from mlflow.entities import Metric

        metrics = [Metric(point.key, point.value, point.time_ms, point.step) for point in points]
        self.client.log_batch(self.run_id, metrics=metrics)

    def write_recoveries(self, rows: Sequence[Row]) -> None:
        """Replace the table of recoveries, in the form that MLflow's UI shows as a table."""
        columns = list(dict.fromkeys(column for row in rows for column in row))
        table = {"columns": columns, "data": [[row.get(column) for column in columns] for row in rows]}
        self.client.log_text(self.run_id, json.dumps(table, indent=1), RECOVERIES_FILE)
        listed = json.dumps([{"path": RECOVERIES_FILE, "type": "table"}])
        self.client.set_tag(self.run_id, "mlflow.loggedArtifacts", listed)

    def end(self, status: str, reason: str) -> None:
        """Give the run its final status and say why."""
        self.client.set_tag(self.run_id, "raytrain.stop_reason", mask_secrets(reason)[-MAX_REASON_LENGTH:])
        self.client.set_terminated(self.run_id, status)


def _describe(client: MlflowClient, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    from mlflow.entities import Param, RunTag

    entries = [*(Param(key, value) for key, value in params.items()), *(RunTag(k, v) for k, v in tags.items())]
    for start in range(0, len(entries), _MAX_ENTRIES_PER_BATCH):
        batch = entries[start : start + _MAX_ENTRIES_PER_BATCH]
        client.log_batch(
            run_id,
            params=[entry for entry in batch if isinstance(entry, Param)],
            tags=[entry for entry in batch if isinstance(entry, RunTag)],
        )
