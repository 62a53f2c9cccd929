"""What an MLflow run says about its job: parameters, tags and a note, made from the spec, without secrets."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import yaml

from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.buffer import clean_key
from raytrain_platform.tracking.location import mask_secrets

MAX_VALUE_LENGTH = 500
JOB_TAG: Final = "raytrain.job"
FINGERPRINT_TAG: Final = "raytrain.fingerprint"

_DECIDES_THE_NUMBERS = frozenset(
    {"task", "params", "seed", "batch_size", "num_shards", "reduction", "precision", "clip_grad_norm", "on_nan"}
)
_SECRET_NAME = re.compile(
    r"(^|[_.-])(password|passwd|secret|credentials?|(api|access|private|secret)[_-]?key|(auth|access|api)[_-]?token)$",
    re.IGNORECASE,
)


def fingerprint(spec: JobSpec) -> str:
    """Return a digest of the fields that decide the values of a step.

    Two jobs of one name and one fingerprint compute the same curve, so the second goes on in the run of the first.
    How long, on how many replicas and where it is kept is no part of it.
    """
    fields = spec.model_dump(mode="json", include=set(_DECIDES_THE_NUMBERS))
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def run_params(spec: JobSpec) -> dict[str, str]:
    """Return the spec as flat parameters such as ``replicas.max``, each value cut to what MLflow shows."""
    flat: dict[str, str] = {}
    _flatten(_safe_fields(spec), "", flat)
    return flat


def spec_text(spec: JobSpec) -> str:
    """Return the whole spec as YAML, nothing cut."""
    return yaml.safe_dump(_safe_fields(spec), sort_keys=False)


def run_tags(spec: JobSpec, tags: Mapping[str, str]) -> dict[str, str]:
    """Return the tags of the run of a job: who, from where, from which commit, and those of the caller."""
    found = {
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": sys.argv[0] or "python",
        "mlflow.user": _user(),
        "mlflow.source.git.commit": _git_commit(),
        "mlflow.note.content": _note(spec),
        "raytrain.version": _version(),
        **{clean_key(key): mask_secrets(str(value)) for key, value in tags.items()},
        JOB_TAG: spec.name,
        FINGERPRINT_TAG: fingerprint(spec),
    }
    return {key: value for key, value in found.items() if value}


def _note(spec: JobSpec) -> str:
    length = f"{spec.steps} steps" if spec.steps is not None else f"{spec.epochs:g} epochs"
    size = f"{spec.replicas.min} to {spec.replicas.max} replicas of {spec.replicas.workers_per_replica} worker(s)"
    return (
        f"**{spec.name}** trains `{spec.task}` for {length} of batch {spec.batch_size} on {size}, "
        f"`{spec.reduction}` reduction.\n\n"
        f"* What happened to it: `raytrain/recoveries.json` under Artifacts, and `elastic/` and `recovery/` "
        f"under Metrics.\n"
        f"* Checkpoints: `{mask_secrets(spec.storage)}`. The same spec submitted again goes on from the newest, "
        f"in this run.\n"
    )


def _safe_fields(spec: JobSpec) -> dict[str, Any]:
    fields = spec.model_dump(mode="json", exclude_none=True)
    safe = _without_secrets(fields)
    assert isinstance(safe, dict)
    return safe


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: "***" if _SECRET_NAME.search(k) and v else _without_secrets(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return mask_secrets(value) if isinstance(value, str) else value


def _flatten(value: Any, name: str, flat: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(inner, f"{name}.{key}" if name else key, flat)
        return
    text = value if isinstance(value, str) else json.dumps(value)
    flat[clean_key(name)] = text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 1] + "…"


def _user() -> str:
    # A container may run under a user id that has no name.
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return ""


def _version() -> str:
    # A submitted working directory is imported without being installed.
    with contextlib.suppress(PackageNotFoundError):
        return version("raytrain-platform")
    return ""


def _git_commit() -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=Path.cwd(), capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return ""
