"""Checkpoints on storage: committed as a whole or not there at all.

    <url>/step-00000040/state.safetensors
    <url>/step-00000040/manifest.json        written last, under another name first: its rename is the commit

A reader looks for manifests only, so a state without one, whole or not, does not exist. The manifest holds the size and
sha256 of the state and of itself, so that nothing torn, altered or of another step is ever taken for a checkpoint.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import fsspec
from pydantic import JsonValue

from raytrain_platform.checkpoint.manifest import describe, seal, unseal, verify
from raytrain_platform.checkpoint.snapshot import Snapshot, decode, encode
from raytrain_platform.errors import CheckpointError

_MANIFEST = "manifest.json"
_UNCOMMITTED_MANIFEST = "manifest.json.tmp"
# A step that is saved again goes to the name that its committed manifest does not use.
_STATE_NAMES = ("state.safetensors", "state-2.safetensors")
_FOLDER = re.compile(r"step-(\d{8,})")
_WRITE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Loaded:
    """What was found on storage, and what was passed over to find it."""

    snapshot: Snapshot | None
    """The newest checkpoint that verifies; None when none was ever committed."""

    skipped: tuple[str, ...] = ()
    """Newer ones that could not be used, newest first, each with the reason."""

    extra: dict[str, JsonValue] = field(default_factory=dict)
    """``extra_manifest`` as it was saved with the snapshot."""


class CheckpointStore:
    """The checkpoints of one job, under one folder of any fsspec file system.

    One process writes at a time; any number read.
    """

    def __init__(self, url: str) -> None:
        """Name the folder; it is made by the first save.

        Args:
            url: A local path (``~`` is the home folder) or an fsspec URL such as ``s3://bucket/job``.

        Raises:
            CheckpointError: No file system is known or installed for this URL.
        """
        self.url = url
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot open storage {url!r}: {error}") from error
        self._root = str(root).rstrip("/")
        self._is_local = bool(getattr(self._files, "local_file", False))

    def save(self, snapshot: Snapshot, extra_manifest: Mapping[str, JsonValue] | None = None) -> None:
        """Commit a snapshot; until the moment it is committed, what was there before stays readable.

        Args:
            snapshot: What to write. Its tensors must not change meanwhile.
            extra_manifest: More to keep in the manifest; ``load_newest`` returns it.

        Raises:
            CheckpointError: Storage refused, or the state does not fit; older checkpoints are untouched.
        """
        with self._translating(
            f"save step-{snapshot.step}", "older checkpoints are untouched; check free space and rights"
        ):
            names = self._names(self._folder(snapshot.step))
            state_name = self._unused_state_name(snapshot.step, names)
            try:
                self._write(snapshot, state_name, dict(extra_manifest or {}))
            except Exception:
                # What is left of a failed save takes up the space that the next one needs.
                with suppress(Exception):
                    self._discard_uncommitted(snapshot.step, state_name)
                raise
            for name in names - {_MANIFEST, state_name}:
                with suppress(Exception):
                    self._files.rm_file(f"{self._folder(snapshot.step)}/{name}")

    def load_newest(self) -> Loaded:
        """Return the newest checkpoint whose manifest and state verify.

        Raises:
            CheckpointError: There are committed checkpoints, but none can be used; the message says why for each.
        """
        committed, unfinished = self._scan()
        skipped: dict[int, str] = {}
        for step in reversed(committed):
            try:
                snapshot, extra = self._read(step)
            except CheckpointError as error:
                skipped[step] = f"step-{step}: {error}"
                continue
            skipped.update({other: f"step-{other}: unfinished" for other in unfinished if other > step})
            return Loaded(snapshot, tuple(skipped[other] for other in sorted(skipped, reverse=True)), extra)
        if skipped:
            raise CheckpointError(
                f"no usable checkpoint under {self.url} ({'; '.join(skipped.values())}){_in_words(unfinished)}; "
                f"restore one of them, or start fresh with --no-resume"
            )
        return Loaded(None, tuple(f"step-{step}: unfinished" for step in reversed(unfinished)))

    def require_newest(self) -> Loaded:
        """Return the newest checkpoint where there has to be one.

        Raises:
            CheckpointError: None was ever committed, or none can be used.
        """
        loaded = self.load_newest()
        if loaded.snapshot is None:
            unfinished = _in_words(self.list_unfinished())
            raise CheckpointError(f"no committed checkpoint under {self.url}{unfinished}; start fresh with --no-resume")
        return loaded

    def list_steps(self) -> tuple[int, ...]:
        """Return the committed steps in ascending order, without verifying them."""
        return self._scan()[0]

    def list_unfinished(self) -> tuple[int, ...]:
        """Return the steps in ascending order that have a folder but were never committed."""
        return self._scan()[1]

    def is_valid(self, step: int) -> bool:
        """Tell whether a committed step verifies; reads all of it."""
        try:
            self._read_content(step)
        except CheckpointError:
            return False
        return True

    def delete(self, step: int) -> None:
        """Remove a step, committed or not; a step that is not there is no error.

        Raises:
            CheckpointError: Storage refused.
        """
        folder = self._folder(step)
        with self._translating(f"delete step-{step}", "check the rights on it"):
            # The manifest goes first: a reader, or a crash, then finds an unfinished step and no torn one.
            for path, is_folder in ((f"{folder}/{_MANIFEST}", False), (folder, True)):
                with suppress(FileNotFoundError):
                    self._files.rm(path, recursive=is_folder)

    def _folder(self, step: int) -> str:
        return f"{self._root}/step-{step:08d}"

    def _names(self, folder: str) -> set[str]:
        """Names in a folder, which need not exist; an unreachable one raises, unlike with fsspec's ``exists``."""
        self._files.invalidate_cache(folder)
        try:
            return {path.rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(folder, detail=False)}
        except FileNotFoundError:
            return set()

    def _scan(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Committed and unfinished steps, ascending."""
        with self._translating("list the checkpoints", "check that storage is reachable"):
            matches = [_FOLDER.fullmatch(name) for name in self._names(self._root)]
            steps = sorted(int(match[1]) for match in matches if match)
            committed = tuple(step for step in steps if _MANIFEST in self._names(self._folder(step)))
        return committed, tuple(step for step in steps if step not in committed)

    def _unused_state_name(self, step: int, names: set[str]) -> str:
        if _MANIFEST not in names:
            return _STATE_NAMES[0]
        content = self._files.cat_file(f"{self._folder(step)}/{_MANIFEST}")
        try:
            used = unseal(content, step)["files"]
        except CheckpointError:
            return _STATE_NAMES[0]
        return next(name for name in _STATE_NAMES if name not in used)

    def _write(self, snapshot: Snapshot, state_name: str, extra: dict[str, JsonValue]) -> None:
        folder = self._folder(snapshot.step)
        self._files.makedirs(folder, exist_ok=True)
        files = {state_name: self._write_file(f"{folder}/{state_name}", encode(snapshot.tensors))}
        text = seal(describe(snapshot, files, extra))
        self._write_file(f"{folder}/{_UNCOMMITTED_MANIFEST}", iter([memoryview(text)]))
        self._files.mv(f"{folder}/{_UNCOMMITTED_MANIFEST}", f"{folder}/{_MANIFEST}")
        if self._is_local:
            for path in (folder, self._root):
                _sync_folder(path)

    def _write_file(self, path: str, chunks: Iterator[memoryview]) -> dict[str, JsonValue]:
        """Write a file through to storage; returns what the manifest says of it."""
        sha256 = hashlib.sha256()
        num_bytes = 0
        with self._files.open(path, "wb") as handle:
            for chunk in chunks:
                for start in range(0, len(chunk), _WRITE_BYTES):
                    part = chunk[start : start + _WRITE_BYTES]
                    handle.write(part)
                    sha256.update(part)
                    num_bytes += len(part)
            if self._is_local:
                # Or a power cut could keep the rename of the manifest and lose the state it speaks of.
                handle.flush()
                os.fsync(handle.fileno())
        return {"num_bytes": num_bytes, "sha256": sha256.hexdigest()}

    def _discard_uncommitted(self, step: int, state_name: str) -> None:
        folder = self._folder(step)
        names = self._names(folder)
        # A rename made of copying and deleting may have committed before it failed.
        is_committed = _MANIFEST in names and state_name in self._read_manifest(step)["files"]
        for name in names & ({_UNCOMMITTED_MANIFEST} if is_committed else {_UNCOMMITTED_MANIFEST, state_name}):
            self._files.rm_file(f"{folder}/{name}")

    def _read_manifest(self, step: int) -> dict[str, Any]:
        return unseal(self._cat(step, _MANIFEST), step)

    def _read_content(self, step: int) -> tuple[dict[str, Any], bytes]:
        """The manifest and the state, both verified."""
        manifest = self._read_manifest(step)
        [(name, written)] = manifest["files"].items()
        content = self._cat(step, name)
        verify(content, name, written)
        return manifest, content

    def _read(self, step: int) -> tuple[Snapshot, dict[str, JsonValue]]:
        manifest, content = self._read_content(step)
        return Snapshot(step, decode(content), manifest["meta"]), manifest["extra"]

    def _cat(self, step: int, name: str) -> bytes:
        try:
            return bytes(self._files.cat_file(f"{self._folder(step)}/{name}"))
        except FileNotFoundError:
            raise CheckpointError(f"{name} is missing") from None
        except Exception as error:
            raise CheckpointError(f"{name} cannot be read: {_reason(error)}") from error

    @contextmanager
    def _translating(self, what: str, cure: str) -> Iterator[None]:
        """Every file system has exceptions of its own: turn them into ours."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot {what} under {self.url}: {_reason(error)}; {cure}") from error


def _in_words(unfinished: tuple[int, ...]) -> str:
    return f" ({len(unfinished)} unfinished: {', '.join(f'step-{step}' for step in unfinished)})" if unfinished else ""


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text or type(error).__name__


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
