"""A worker's link to the coordinator: it beats in the background, hands over log lines and learns what is new."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray

from raytrain_platform.elastic.coordinator import Dismissal, Entry, Failure, Order, View
from raytrain_platform.elastic.protocol import Generation, MemberId, Place, Progress
from raytrain_platform.errors import GroupBrokenError

logger = logging.getLogger(__name__)

_RETRY_S = 0.1


class CoordinatorClient(Protocol):
    """The coordinator as a worker sees it; calls block, and retry while it is being restarted."""

    def arrive(self, member: MemberId, progress: Progress, generation: int, broke: bool) -> Order | Dismissal:
        """See ``Coordinator``."""

    def watch(self, member: MemberId, working: Generation | None, seen: View, new: Sequence[Entry]) -> View:
        """See ``Coordinator``."""

    def fail(self, failure: Failure) -> None:
        """See ``Coordinator``."""

    def finish(self, result: dict[str, Any], new: Sequence[Entry]) -> None:
        """See ``Coordinator``."""


class RayCoordinatorClient:
    """Calls the coordinator's actor."""

    def __init__(self, actor: Any) -> None:
        """Wrap the handle of the actor."""
        self._actor = actor

    def arrive(self, member: MemberId, progress: Progress, generation: int, broke: bool) -> Order | Dismissal:
        """See ``Coordinator``."""
        answer: Order | Dismissal = self._call(self._actor.arrive, member, progress, generation, broke)
        return answer

    def watch(self, member: MemberId, working: Generation | None, seen: View, new: Sequence[Entry]) -> View:
        """See ``Coordinator``."""
        view: View = self._call(self._actor.watch, member, working, seen, new)
        return view

    def fail(self, failure: Failure) -> None:
        """See ``Coordinator``."""
        self._call(self._actor.fail, failure)

    def introduce(self, member: MemberId, place: Place) -> None:
        """See ``Coordinator``."""
        self._call(self._actor.introduce, member, place)

    def finish(self, result: dict[str, Any], new: Sequence[Entry]) -> None:
        """See ``Coordinator``."""
        self._call(self._actor.finish, result, new)

    @staticmethod
    def _call(method: Any, *arguments: Any) -> Any:
        while True:
            try:
                return ray.get(method.remote(*arguments))
            except ray.exceptions.ActorUnavailableError:
                time.sleep(_RETRY_S)  # it is being restarted


class Link:
    """One worker's membership: it beats from the moment it is made until ``close``."""

    def __init__(self, client: CoordinatorClient, member: MemberId) -> None:
        """Begin to beat."""
        self.member = member
        self.client = client
        self.generation: Generation | None = None
        self._view = View()
        self._give_up: Callable[[str], None] | None = None
        self._outbox: list[Entry] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="beat", daemon=True).start()

    @property
    def should_stop(self) -> bool:
        """Whether the coordinator wants this generation to stop at a step boundary."""
        return self._view.should_stop

    def check(self) -> None:
        """Raise if the present generation is over: a worker that is alone in it waits for nobody who could tell.

        Raises:
            GroupBrokenError: It is over.
        """
        if self._view.is_over:
            raise GroupBrokenError("the generation is over")

    def arrive(self, progress: Progress, broke: bool = False) -> Order | Dismissal:
        """Leave the present generation, if any, and wait for the next."""
        number = self.generation.number if self.generation else 0
        with self._lock:
            self.generation, self._give_up, self._view = None, None, View()
        answer = self.client.arrive(self.member, progress, number, broke)
        if isinstance(answer, Order):
            with self._lock:
                self.generation, self._view = answer.generation, View()
        return answer

    def on_over(self, give_up: Callable[[str], None]) -> None:
        """Have ``give_up`` called with a reason, from another thread, when the present generation is over."""
        with self._lock:
            self._give_up = give_up

    def log(self, log: str, serial: int, content: Any) -> None:
        """Keep a log line until the coordinator has it. Only the leader hands lines over."""
        with self._lock:
            self._outbox.append(Entry(log, serial, content))

    def unconfirmed(self) -> list[tuple[str, int, Any]]:
        """The log lines that the coordinator has not confirmed, as plain data."""
        return [(entry.log, entry.serial, entry.content) for entry in self._unsent()]

    def take_over(self, lines: Sequence[tuple[str, int, Any]]) -> None:
        """Keep the lines that another member had not handed over when its state was copied."""
        with self._lock:
            mine = {(entry.log, entry.serial): entry for entry in self._outbox}
            mine |= {(log, serial): Entry(log, serial, content) for log, serial, content in lines}
            self._outbox = [mine[key] for key in sorted(mine)]

    def finish(self, result: dict[str, Any]) -> None:
        """Tell the coordinator that the job is done."""
        self.client.finish(result, self._unsent())

    def close(self) -> None:
        """Stop to beat."""
        self._closed.set()

    def _unsent(self) -> list[Entry]:
        with self._lock:
            received = dict(self._view.received)
            self._outbox = [entry for entry in self._outbox if entry.serial > received.get(entry.log, -1)]
            return list(self._outbox)

    def _watch(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                working, seen = self.generation, self._view
            is_leader = working is not None and working.members[0] == self.member
            new = self._unsent() if is_leader else ()
            try:
                view = self.client.watch(self.member, working, seen, new)
            except Exception as error:
                logger.warning("no answer from the coordinator: %s", error)
                self._closed.wait(_RETRY_S)
                continue
            self._take(view, working)

    def _take(self, view: View, working: Generation | None) -> None:
        with self._lock:
            if self.generation is not working:
                return  # an answer about an earlier generation
            self._view = view
            give_up = self._give_up if view.is_over else None
        if give_up is not None:
            give_up("the generation is over")
