"""Reaching the tracking store: MLflow imported late and made quiet, a fresh database set up by one process only."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_platform.errors import JobError, RaytrainError
from raytrain_platform.tracking.flusher import THREAD_NAME
from raytrain_platform.tracking.location import Location, mask_secrets

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_TIMEOUT_S = 60.0

# Read by MLflow at each use; what the user has set stays. By default one call to a server that is down blocks for
# four minutes, which would delay the news that it is back, and the end of a job.
_DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def connect(location: Location) -> MlflowClient:
    """Return a client whose store answers and has its tables.

    Raises:
        RaytrainError: The store cannot be reached or set up; the message has the cause.
    """
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    with translated(location), initialization_lock(location.database), warnings.catch_warnings():
        # MLflow uses what SQLAlchemy 2.1 deprecates; nobody here can act on it.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Imported here: it takes a second, and workers never need it.
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("urllib3.connectionpool").addFilter(_is_not_a_retry_of_the_flusher)
        client = MlflowClient(tracking_uri=location.uri)
        client.search_experiments(max_results=1)
    return client


def ensure_experiment(client: MlflowClient, location: Location, name: str) -> str:
    """Return the id of an experiment, made if it does not exist.

    Raises:
        JobError: The experiment was deleted, and MLflow keeps its name.
    """
    from mlflow.exceptions import MlflowException

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return str(client.create_experiment(name, artifact_location=location.artifact_root))
        except MlflowException:
            # Another job may have made it since we looked.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        raise JobError(
            f"the experiment {name!r} was deleted and MLflow keeps its name; "
            f"bring it back with `mlflow experiments restore --experiment-id {experiment.experiment_id}`, "
            f"or set tracking.experiment to another name"
        )
    return str(experiment.experiment_id)


@contextlib.contextmanager
def translated(location: Location) -> Iterator[None]:
    """Turn what MLflow and its database raise into one error that names the store, without its credentials."""
    try:
        yield
    except RaytrainError:
        raise
    except Exception as error:
        uri = mask_secrets(location.uri)
        raise JobError(
            f"the tracking store at {uri} does not do what was asked: {type(error).__name__}: "
            f"{mask_secrets(str(error))}; check that it is up and may be written, or set tracking.uri to another"
        ) from error


@contextlib.contextmanager
def initialization_lock(database: Path | None) -> Iterator[None]:
    """Keep other processes from setting up the same SQLite file at the same time.

    MLflow takes no lock for this: of eight processes that open a fresh file at once, seven fail.

    Args:
        database: The file, or None when the store is not a file, and nothing is locked.

    Raises:
        JobError: Another process has held the lock for a minute.
    """
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{database}.lock", "a") as lock_file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(lock_file.fileno()):
            if time.monotonic() > deadline_s:
                raise JobError(f"another process has held {lock_file.name} for {LOCK_TIMEOUT_S:g} s; end it first")
            time.sleep(0.05)
        yield


def _is_not_a_retry_of_the_flusher(entry: logging.LogRecord) -> bool:
    # The flusher tells of an outage once; urllib3 would tell of every try.
    return entry.threadName != THREAD_NAME


def _try_lock(file_descriptor: int) -> bool:
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
