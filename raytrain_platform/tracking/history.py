"""What a job's run holds, as pandas tables."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pandas as pd

from raytrain_platform.errors import JobError
from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.connection import connect, translated
from raytrain_platform.tracking.location import Location, locate, locate_uri, mask_secrets
from raytrain_platform.tracking.records import PHASES
from raytrain_platform.tracking.runs import newest_run, read_recoveries

if TYPE_CHECKING:
    from mlflow import MlflowClient

RECOVERY_COLUMNS = (
    "generation",
    "cause",
    "detail",
    "at_step",
    "num_replicas_before",
    "num_replicas",
    "pause_s",
    *PHASES,
    "time_s",
)


def history(job: JobSpec | str, uri: str | None = None) -> pd.DataFrame:
    """Return every metric of a run: one row a step, one column a metric, NaN where a step has no value.

    Args:
        job: A spec, for the newest run of its name; or the id of a run.
        uri: Tracking URI of the store when ``job`` is an id; by default the one a job without one would use.

    Raises:
        JobError: There is no such run, or the store does not answer.
    """
    client, run_id, location = _find(job, uri)
    columns = {}
    with translated(location):
        for key in sorted(client.get_run(run_id).data.metrics):
            points = client.get_metric_history(run_id, key)
            values = pd.Series(
                [_unclip(point.value) for point in points], [point.step for point in points], dtype=float
            )
            # A run written by something else may hold a step twice: what was logged last counts.
            columns[key] = values.groupby(level=0).last() if values.index.has_duplicates else values
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def recoveries(job: JobSpec | str, uri: str | None = None) -> pd.DataFrame:
    """Return every change of membership of a run, oldest first, with the seconds of each phase.

    Args:
        job: A spec, for the newest run of its name; or the id of a run.
        uri: Tracking URI of the store when ``job`` is an id; by default the one a job without one would use.

    Raises:
        JobError: There is no such run, or the store does not answer.
    """
    client, run_id, location = _find(job, uri)
    with translated(location):
        rows = read_recoveries(client, run_id)
    found = dict.fromkeys(column for row in rows for column in row)
    return pd.DataFrame(rows, columns=list(dict.fromkeys([*RECOVERY_COLUMNS, *found])))


def _find(job: JobSpec | str, uri: str | None) -> tuple[MlflowClient, str, Location]:
    location = locate(job) if isinstance(job, JobSpec) else locate_uri(uri)
    shown = mask_secrets(location.uri)
    if location.database is not None and not location.database.exists():
        raise JobError(f"nothing was tracked yet: {location.database} does not exist; run a job first")
    client = connect(location)
    if not isinstance(job, JobSpec):
        return client, job, location
    with translated(location):
        experiment = client.get_experiment_by_name(job.tracking.experiment)
        run = newest_run(client, experiment.experiment_id, job.name) if experiment else None
    if run is None:
        raise JobError(f"no run of a job called {job.name!r} in experiment {job.tracking.experiment!r} of {shown}")
    return client, run.info.run_id, location


def _unclip(value: float) -> float:
    # MLflow keeps an infinite value as the largest finite one.
    return value if abs(value) < sys.float_info.max else value * 10
