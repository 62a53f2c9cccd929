"""File systems that stop working at a chosen operation: a crash of the process, or an error that passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Crash(BaseException):
    """The process is gone: nothing catches it, and no operation works after it."""


class Script:
    """Which operation fails, and how. Every few bytes written are one; changes count once before and once after."""

    def __init__(self) -> None:
        self.piece_bytes = 2**30
        self.num_done = 0
        self.fail_at: int | None = None
        self.error: BaseException = Crash()
        self.is_lasting = True

    def touch(self) -> None:
        self.num_done += 1
        if self.fail_at is not None and (
            self.num_done == self.fail_at or (self.is_lasting and self.num_done > self.fail_at)
        ):
            raise self.error


SCRIPT = Script()


@contextmanager
def failing(
    at: int | None, error: BaseException | None = None, *, is_lasting: bool = True, piece_bytes: int = 16
) -> Iterator[Script]:
    """Let operation ``at`` fail (None: none of them), and all after it unless the failure passes."""
    SCRIPT.num_done, SCRIPT.fail_at, SCRIPT.is_lasting, SCRIPT.piece_bytes = 0, at, is_lasting, piece_bytes
    SCRIPT.error = error or Crash()
    try:
        yield SCRIPT
    finally:
        SCRIPT.fail_at, SCRIPT.piece_bytes = None, 2**30


class _File:
    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def write(self, data: Any) -> int:
        for start in range(0, len(data), SCRIPT.piece_bytes):
            try:
                SCRIPT.touch()
            except BaseException:
                self._handle.flush()
                raise
            self._handle.write(data[start : start + SCRIPT.piece_bytes])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.close()
        SCRIPT.touch()


class _Scripted:
    """Counts the operations of the file system it is mixed into."""

    cachable = False

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        SCRIPT.touch()
        handle = super()._open(path, mode, **kwargs)  # type: ignore[misc]
        return _File(handle) if "w" in mode else handle


def _counted(name: str) -> Any:
    def operation(self: Any, *args: Any, **kwargs: Any) -> Any:
        SCRIPT.touch()
        result = getattr(super(_Scripted, self), name)(*args, **kwargs)
        SCRIPT.touch()
        return result

    return operation


for _name in ("makedirs", "ls", "cat_file", "mv", "rm", "rm_file", "cp_file", "invalidate_cache"):
    setattr(_Scripted, _name, _counted(_name))


class FailingLocalFileSystem(_Scripted, LocalFileSystem):
    protocol = "failing-local"


class FailingMemoryFileSystem(_Scripted, MemoryFileSystem):
    protocol = "failing-memory"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("failing-memory://")))


for _kind in (FailingLocalFileSystem, FailingMemoryFileSystem):
    fsspec.register_implementation(_kind.protocol, _kind, clobber=True)
