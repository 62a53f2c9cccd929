"""Process groups of one generation, made without the global one, in which no wait is without a bound."""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from raytrain_platform.errors import GroupBrokenError

_POLL = timedelta(milliseconds=20)


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return once the result is there.

        Raises:
            GroupBrokenError: A member is gone, or the generation was given up.
        """


class Group(Protocol):
    """The collectives of one generation. All members call the same ones in the same order."""

    rank: int
    size: int

    def connect(self) -> None:
        """Wait until every member is connected.

        Raises:
            GroupBrokenError: A member did not come, or the generation was given up.
        """

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, out_splits: Sequence[int], splits: Sequence[int]
    ) -> Pending:
        """Send ``splits[r]`` elements of ``given`` to rank ``r``, and receive ``out_splits[r]`` of ``out`` from it."""

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Pending:
        """Collect the equally long ``given`` of all ranks in ``out``, in rank order."""

    def all_reduce(self, values: torch.Tensor) -> Pending:
        """Sum over all ranks in place, in whatever order the backend likes."""

    def abandon(self, reason: str) -> None:
        """Make every wait of this group raise, now and from now on; may be called from any thread."""

    def close(self) -> None:
        """Let go of the group without waiting for anything."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a generation find each other."""

    host: str
    port: int
    prefix: str
    """Keeps the keys of one generation apart from those of the others."""


class RendezvousServer:
    """A meeting place on one address, and on no other."""

    def __init__(self, host: str) -> None:
        """Listen on any free port of ``host``."""
        self._host = host
        listener = socket.create_server((host, 0))
        self._port: int = listener.getsockname()[1]
        # Given a host name alone, the store would listen on every address of the machine.
        self._store = TCPStore(
            host, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def rendezvous(self, prefix: str) -> Rendezvous:
        """The place at which the members of one generation meet."""
        return Rendezvous(self._host, self._port, prefix)


class GlooGroup:
    """A gloo group over TCP for tensors in host memory."""

    def __init__(self, rendezvous: Rendezvous, rank: int, size: int, timeout_s: float) -> None:
        """Start to connect; the first collective, or ``connect``, waits for it.

        Args:
            rendezvous: The store to meet at.
            rank: This worker's rank, from 0.
            size: Number of workers.
            timeout_s: After this long the backend itself gives up on a collective; ``abandon`` ends waits far earlier.
        """
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._abandoned: str | None = None
        self._backend: Any = None
        self._works: list[Any] = []
        self._failure: BaseException | None = None
        self._connected = threading.Event()
        # The constructor of the backend waits for its peers in C++, where nothing could wake it.
        threading.Thread(target=self._connect, args=(rendezvous,), name="gloo-connect", daemon=True).start()

    def _connect(self, rendezvous: Rendezvous) -> None:
        try:
            store = TCPStore(
                rendezvous.host, rendezvous.port, is_master=False, timeout=self._timeout, wait_for_workers=False
            )
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=_address_towards(rendezvous))]
            options._timeout = self._timeout
            options._threads = 2  # one for the exchange of a chunk, one for the gathering of the chunk before
            self._backend = ProcessGroupGloo(PrefixStore(rendezvous.prefix, store), self.rank, self.size, options)
        except Exception as error:
            self._failure = error
        finally:
            self._connected.set()

    def connect(self) -> None:
        """See ``Group``."""
        while not self._connected.wait(_POLL.total_seconds()):
            self._check()
        self._check()

    def _check(self) -> None:
        if self._abandoned is not None:
            raise GroupBrokenError(self._abandoned)
        if self._failure is not None:
            raise GroupBrokenError(f"could not connect the group: {self._failure}") from self._failure

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, out_splits: Sequence[int], splits: Sequence[int]
    ) -> Pending:
        """See ``Group``."""
        return self._launch(lambda: self._backend.alltoall_base(out, given, list(out_splits), list(splits)))

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Pending:
        """See ``Group``."""
        return self._launch(lambda: self._backend._allgather_base(out, given))

    def all_reduce(self, values: torch.Tensor) -> Pending:
        """See ``Group``."""
        return self._launch(lambda: self._backend.allreduce([values]))

    def _launch(self, start: Callable[[], Any]) -> Pending:
        self.connect()
        try:
            work = start()
        except RuntimeError as error:
            raise GroupBrokenError(str(error)) from error
        self._works = [earlier for earlier in self._works if not earlier.is_completed()] + [work]
        return _GlooPending(work, self)

    def abandon(self, reason: str) -> None:
        """See ``Group``."""
        self._abandoned = reason

    def close(self) -> None:
        """See ``Group``."""
        self._abandoned = self._abandoned or "the group is closed"
        works = [work for work in self._works if not work.is_completed()]
        backend, self._backend = self._backend, None
        self._works.clear()
        if backend is not None:
            _let_go(backend, works)


_lingering: list[tuple[Any, list[Any]]] = []
"""Closed backends and their collectives that have not ended yet."""


def _let_go(backend: Any, works: list[Any]) -> None:
    """Destroy a backend once nothing of it is under way, as it and others may be by now.

    Its destructor joins threads that may sit in a collective with a dead peer until the timeout: called too early, even
    at the end of the process, it would block.
    """
    _never_destroy(backend)
    _lingering.append((backend, works))
    for entry in list(_lingering):
        if all(work.is_completed() for work in entry[1]):
            _lingering.remove(entry)
            _may_destroy(entry[0])


def _never_destroy(backend: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


def _may_destroy(backend: Any) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(backend))


class _GlooPending:
    def __init__(self, work: Any, group: GlooGroup) -> None:
        self._work, self._group = work, group

    def wait(self) -> None:
        while not self._poll():
            self._group._check()

    def _poll(self) -> bool:
        """Wait a little; return whether the collective is done."""
        try:
            self._work.wait(_POLL)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            # It is over: either it failed, or it ended just after the poll ran out. Asked again, it tells which.
            try:
                self._work.wait()
            except RuntimeError as error:
                raise GroupBrokenError(str(error).split("\n")[0]) from error
        return True


def _address_towards(rendezvous: Rendezvous) -> str:
    """This machine's address on the network that leads to the rendezvous: the one its peers can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((rendezvous.host, rendezvous.port))  # sends nothing: UDP
        address: str = probe.getsockname()[0]
        return address
