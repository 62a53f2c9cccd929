"""Members of a process group that carry out a script, as processes or as threads, under the hand of a test."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from raytrain_platform.comm.group import GlooGroup, Group, Rendezvous, RendezvousServer
from raytrain_platform.comm.local import LocalGroup, LocalHub

PATIENCE_S = 60.0
"""How long a test waits for what must happen; only a failure takes so long."""

Script = Callable[[Group, Connection], Any]
"""What a member does with its group; it may talk to the test, which then receives what it returns."""

# One process imports everything once; members are forked from it. It has no threads yet when it forks.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])


class Member:
    """One member, seen from the test."""

    def __init__(self, talk: Connection, runner: Any) -> None:
        self._talk, self.runner = talk, runner

    def send(self, message: object) -> None:
        self._talk.send(message)

    def receive(self) -> Any:
        """What the member says or returns; its error, if it failed, is raised here."""
        assert self._talk.poll(PATIENCE_S), "the member says nothing"
        is_error, said = self._talk.recv()
        if is_error:
            raise AssertionError(said)
        return said


@dataclass
class Team:
    """All members of one group."""

    members: list[Member]
    hub: LocalHub | None

    def kill(self, rank: int) -> None:
        """End a member without warning; for threads, what that means for the others."""
        if self.hub is not None:
            self.hub.break_up("a member died")
        else:
            os.kill(self.members[rank].runner.pid, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """Stop a member for good. A thread that stands still needs no more than that it is not told to go on."""
        if self.hub is None:
            os.kill(self.members[rank].runner.pid, signal.SIGSTOP)

    def receive(self) -> list[Any]:
        return [member.receive() for member in self.members]


@contextlib.contextmanager
def team(kind: str, size: int, script: Script) -> Iterator[Team]:
    """A group of ``gloo`` processes or ``local`` threads, each of which carries out the script."""
    hub = LocalHub(size) if kind == "local" else None
    server = RendezvousServer("127.0.0.1") if hub is None else None
    members: list[Member] = []
    for rank in range(size):
        here, there = _processes.Pipe()
        runner: Any
        if hub is not None:
            runner = threading.Thread(target=_run, args=(LocalGroup(hub, rank), script, there), daemon=True)
        else:
            assert server is not None
            place = server.rendezvous("group")
            runner = _processes.Process(target=_run_process, args=(place, rank, size, script, there), daemon=True)
        runner.start()
        members.append(Member(here, runner))
    try:
        yield Team(members, hub)
    finally:
        for member in members:
            if hub is None:
                member.runner.kill()
            else:
                hub.break_up("the test is over")
            with contextlib.suppress(OSError):
                member.send(None)
            member.runner.join(PATIENCE_S)


def _run_process(place: Rendezvous, rank: int, size: int, script: Script, talk: Connection) -> None:
    torch.set_num_threads(1)
    _run(GlooGroup(place, rank, size, timeout_s=PATIENCE_S), script, talk)


def _run(group: Group, script: Script, talk: Connection) -> None:
    try:
        said = False, script(group, talk)
    except Exception:
        said = True, traceback.format_exc()
    with contextlib.suppress(OSError):
        talk.send(said)
