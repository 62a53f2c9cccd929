"""The file that makes a folder a checkpoint: what was written, and proof that it is still that."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pydantic import JsonValue

from raytrain_platform.checkpoint.snapshot import Snapshot
from raytrain_platform.errors import CheckpointError

SCHEMA = 1
"""Version of the layout; a reader refuses any other."""


def describe(
    snapshot: Snapshot, files: Mapping[str, Mapping[str, JsonValue]], extra: Mapping[str, JsonValue]
) -> dict[str, Any]:
    """Return the manifest of a snapshot whose files are written.

    Args:
        snapshot: What was written.
        files: ``num_bytes`` and ``sha256`` of each file, by name.
        extra: More to keep, as JSON.
    """
    return {
        "schema": SCHEMA,
        "libraries": _library_versions(),
        "step": snapshot.step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": files,
        "meta": snapshot.meta,
        "extra": extra,
    }


def seal(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, with a sha256 of itself.

    Raises:
        ValueError: It holds NaN or an infinite number, or contains itself.
        TypeError: It holds something else that is not JSON.
    """
    # Through JSON and back first: what is read later has string keys and lists, and has to give the same sha256.
    as_read = json.loads(json.dumps(manifest, allow_nan=False))
    return json.dumps({**as_read, "sha256": _digest_of(as_read)}).encode()


def unseal(content: bytes, step: int) -> dict[str, Any]:
    """Return a manifest that ``seal`` made for this step.

    Raises:
        CheckpointError: It is damaged, of another step, or of another schema.
    """
    try:
        manifest = json.loads(content)
    except ValueError:
        raise CheckpointError("the manifest is no JSON: it is damaged") from None
    if not isinstance(manifest, dict) or manifest.pop("sha256", None) != _digest_of(manifest):
        raise CheckpointError("the manifest differs from what was written: it is damaged")
    if manifest.get("schema") != SCHEMA:
        raise CheckpointError(
            f"the manifest has schema {manifest.get('schema')}, this version reads {SCHEMA}; "
            f"it was written with {manifest.get('libraries')}"
        )
    if manifest["step"] != step:
        raise CheckpointError(f"the manifest is that of step-{manifest['step']}")
    return manifest


def verify(content: bytes, name: str, written: Mapping[str, Any]) -> None:
    """Check that a file holds what its manifest says.

    Raises:
        CheckpointError: It does not; the message names the file and the difference.
    """
    if len(content) != written["num_bytes"]:
        raise CheckpointError(f"{name} has {len(content)} bytes, {written['num_bytes']} were written")
    if hashlib.sha256(content).hexdigest() != written["sha256"]:
        raise CheckpointError(f"{name} differs from what was written: its sha256 is another")


def _digest_of(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@functools.cache
def _library_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("raytrain-platform", "torch", "safetensors"):
        # A job submitted with its working directory brings our source along without installing it.
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions
