"""Where a job's MLflow run is kept, decided from its spec; and what of it may be shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain_platform.errors import SpecError
from raytrain_platform.spec import JobSpec

DEFAULT_STORAGE: str = JobSpec.model_fields["storage"].default
DATABASE_NAME = "mlflow.db"
ARTIFACTS_NAME = "mlartifacts"

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SERVERS = ("http", "https", "databricks")


@dataclass(frozen=True)
class Location:
    """An MLflow tracking store and where its files go."""

    uri: str
    """Tracking URI; a SQLite file has its absolute path here."""

    artifact_root: str | None
    """Where a new experiment keeps its files; None leaves that to the server."""

    @property
    def database(self) -> Path | None:
        """The SQLite file, or None when the store is something else."""
        return _sqlite_file(self.uri)


def locate(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> Location:
    """Decide where the run of a job is kept.

    ``tracking.uri`` of the spec comes first, then ``MLFLOW_TRACKING_URI``, then a SQLite file under ``storage``.

    Raises:
        SpecError: MLflow cannot use the URI, or there is none and ``storage`` is not a folder of this machine.
    """
    folder = local_folder(spec.storage)
    if spec.tracking.uri is not None:
        return _locate_uri(spec.tracking.uri, spec.storage, origin="tracking.uri")
    if environ.get("MLFLOW_TRACKING_URI"):
        return _locate_uri(environ["MLFLOW_TRACKING_URI"], spec.storage, origin="MLFLOW_TRACKING_URI")
    if folder is None:
        raise SpecError(
            f"tracking.uri: is required when storage is remote ({mask_secrets(spec.storage)!r}), since MLflow cannot "
            f"keep its database there; give the address of an MLflow server, or set MLFLOW_TRACKING_URI, or use "
            f"'sqlite:////absolute/path/{DATABASE_NAME}'"
        )
    return _locate_uri(f"sqlite:///{folder / DATABASE_NAME}", spec.storage, origin="storage")


def locate_uri(uri: str | None, environ: Mapping[str, str] = os.environ) -> Location:
    """Decide which store a bare URI means; None means what a job that names none would use.

    Raises:
        SpecError: MLflow cannot use the URI.
    """
    given = uri or environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{DEFAULT_STORAGE}/{DATABASE_NAME}"
    return _locate_uri(given, DEFAULT_STORAGE, origin="uri" if uri else "MLFLOW_TRACKING_URI")


def local_folder(storage: str) -> Path | None:
    """Return the folder of this machine that ``storage`` names, or None when it is remote."""
    scheme, separator, rest = storage.partition("://")
    if separator and scheme not in ("file", "local"):
        return None
    return Path(rest if separator else storage).expanduser().absolute()


def unwritten_file(spec: JobSpec, run_id: str) -> Path:
    """Return the file for what could not be written to a run before the job ended."""
    folder = local_folder(spec.storage) or local_folder(DEFAULT_STORAGE)
    assert folder is not None
    return folder / "unwritten" / f"{run_id}.jsonl"


def mask_secrets(text: str) -> str:
    """Return the text with credentials in its URLs and connection strings replaced by ``***``."""
    text = re.sub(r"([A-Za-z][\w+.-]*://)[^/\s]+@", r"\1***@", text)
    names = r"[\w-]*(?:password|passwd|pwd|secret|token|signature|credential|api[_-]?key|access[_-]?key|sig)"
    return re.sub(rf"([?&;]{names}=)[^&;\s'\"]+", r"\1***", text, flags=re.IGNORECASE)


def _locate_uri(uri: str, storage: str, origin: str) -> Location:
    scheme = uri.partition(":")[0].partition("+")[0].lower()
    if scheme in _SERVERS:
        return Location(uri, artifact_root=None)
    if scheme not in _DATABASES:
        raise SpecError(
            f"{origin}: MLflow cannot keep runs in {mask_secrets(uri)!r}; use 'http://host:5000' for a server, "
            f"'sqlite:////absolute/path/{DATABASE_NAME}' for a file, or leave it out"
        )
    database = _sqlite_file(uri)
    if scheme == "sqlite" and database is None:
        raise SpecError(f"{origin}: {uri!r} keeps nothing; use 'sqlite:////absolute/path/{DATABASE_NAME}'")
    if database is not None:
        # Left to itself MLflow puts files under the working directory, which differs from node to node.
        return Location(f"sqlite:///{database}", (database.parent / ARTIFACTS_NAME).as_uri())
    folder = local_folder(storage)
    return Location(uri, (folder / ARTIFACTS_NAME).as_uri() if folder else f"{storage.rstrip('/')}/{ARTIFACTS_NAME}")


def _sqlite_file(uri: str) -> Path | None:
    match = re.fullmatch(r"sqlite(?:\+\w+)?:///(?P<path>[^?]+)(?:\?.*)?", uri)
    if match is None or match["path"] == ":memory:":
        return None
    return Path(match["path"]).expanduser().absolute()
