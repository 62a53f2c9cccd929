"""The job's coordinator: feeds the membership machine with calls and time, and keeps the job's truth.

An asyncio object with no thread and no lock: as a Ray actor it serves a real job, on an event loop in a thread a
simulated one. It may be restarted at any time: the members announce themselves again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_platform.comm.group import Rendezvous, RendezvousServer
from raytrain_platform.elastic import protocol as p
from raytrain_platform.elastic.membership import advance, should_stop

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""A call of ``watch`` is answered after this long when there is no news; the next call is the next beat."""

_ANXIOUS_BEAT_S = 0.05
"""The same once a generation broke: now silence counts as death much sooner."""

_TICK_S = 0.02


@dataclass(frozen=True)
class Order:
    """The answer to an arrival: take part in this generation."""

    generation: p.Generation
    rendezvous: Rendezvous | None
    """Where its group meets; None where groups need no meeting place."""

    agree_s: float
    """Seconds from the first arrival until the generation was agreed."""


@dataclass(frozen=True)
class Dismissal:
    """The answer to an arrival: end."""

    why: str


@dataclass(frozen=True)
class Entry:
    """One line of a log that members keep until the coordinator has it. All members write the same lines."""

    log: str
    serial: int
    """Grows within a log; what has been received is not received again."""

    content: Any
    """Plain data: it may travel beside the state, and in a checkpoint."""


@dataclass(frozen=True)
class View:
    """What a member must know while it works."""

    is_over: bool = False
    """The member's generation is over: its group will not complete another collective."""

    should_stop: bool = False
    """Stop at the next step boundary."""

    received: tuple[tuple[str, int], ...] = ()
    """The highest serial received, for each log."""


@dataclass(frozen=True)
class Failure:
    """User code raised in a worker."""

    member: p.MemberId
    step: int
    summary: str
    """Type and message; the same summary at the same step twice is taken as deterministic."""

    traceback: str
    is_final: bool
    """Whether another try cannot help."""


@dataclass(frozen=True)
class Report:
    """What the driver learns when it asks."""

    generation: p.Generation | None
    waiting: tuple[str, ...]
    """Replicas that are prepared and in no generation."""

    lost: tuple[p.Lost, ...]
    """Replicas given up since the last report."""

    entries: tuple[Entry, ...]
    """Log lines received since the last report."""

    places: tuple[tuple[p.MemberId, p.Place], ...]
    """Workers that introduced themselves since the last report."""

    result: dict[str, Any] | None
    failure: Failure | None
    """What stopped the job."""


class Coordinator:
    """Agrees generations with the members of one job."""

    def __init__(self, policy: p.Policy, target: int, host: str | None, is_restarted: bool = False) -> None:
        """Start with nobody.

        Args:
            policy: Sizes and timeouts.
            target: Replicas asked for.
            host: Address at which to open a meeting place for process groups; None for none.
            is_restarted: Whether members of an earlier life may still be at work.
        """
        now = time.monotonic()
        self._state = p.State(policy, target, hold_until_s=now + policy.lost_after_s if is_restarted else now)
        self._server = RendezvousServer(host) if host is not None else None
        self._orders: dict[p.MemberId, asyncio.Future[Order | Dismissal]] = {}
        self._news = asyncio.Event()
        self._entries: list[Entry] = []
        self._received: dict[str, int] = {}
        self._places: dict[p.MemberId, p.Place] = {}
        self._lost: list[p.Lost] = []
        self._failures: list[Failure] = []
        self._failure: Failure | None = None
        self._result: dict[str, Any] | None = None
        self._agreeing_since: float | None = None
        self._ticking: asyncio.Task[None] | None = None

    async def introduce(self, member: p.MemberId, place: p.Place) -> None:
        """Tell where a worker runs."""
        self._places[member] = place

    async def arrive(self, member: p.MemberId, progress: p.Progress, generation: int, broke: bool) -> Order | Dismissal:
        """Ask to take part; the answer comes when the next generation is agreed.

        Args:
            member: The worker.
            progress: How far its state is.
            generation: The one it comes from; 0 for a new worker.
            broke: Whether that one's group broke, rather than ended at a step boundary.
        """
        self._ensure_ticking()
        earlier = self._orders.pop(member, None)
        if earlier is not None and not earlier.done():
            earlier.set_result(Dismissal("it arrived again"))
        order: asyncio.Future[Order | Dismissal] = asyncio.get_running_loop().create_future()
        self._orders[member] = order
        self._agreeing_since = self._agreeing_since or time.monotonic()
        self._feed(p.Arrived(time.monotonic(), member, progress, generation, broke))
        return await order

    async def watch(self, member: p.MemberId, working: p.Generation | None, seen: View, new: Sequence[Entry]) -> View:
        """Beat, hand over log lines, and learn what is new; answered at once when there is news.

        Args:
            member: The worker.
            working: The generation it works in; None while it is in none.
            seen: The view it has.
            new: Lines of its logs, for each log without a gap after the highest serial received.
        """
        self._ensure_ticking()
        self._receive(new)
        self._feed(p.Beat(time.monotonic(), member, working))
        view = self._view(working)
        if view == seen:
            # Whoever is alive answers news with its next call: that is how a break finds out the dead.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), _ANXIOUS_BEAT_S if view.is_over else BEAT_S)
            view = self._view(working)
        return view

    async def fail(self, failure: Failure) -> None:
        """Report that user code raised. The same at the same step twice, or a final one, stops the job."""
        logger.warning("%s failed at step %d: %s", failure.member, failure.step, failure.summary)
        is_repeated = any((f.step, f.summary) == (failure.step, failure.summary) for f in self._failures)
        self._failures.append(failure)
        if self._failure is None and (failure.is_final or is_repeated):
            self._failure = failure
            self._feed(p.Finish(time.monotonic()))
        else:
            self._feed(p.Ended(time.monotonic(), failure.member.replica))

    async def finish(self, result: dict[str, Any], new: Sequence[Entry]) -> None:
        """Report that the last step is committed and the state saved."""
        self._receive(new)
        self._result = result
        self._feed(p.Finish(time.monotonic()))

    async def stop(self) -> None:
        """End the job for everybody."""
        self._feed(p.Finish(time.monotonic()))

    async def close(self) -> None:
        """Answer whoever still waits, and stop to tick."""
        for order in self._orders.values():
            if not order.done():
                order.set_result(Dismissal("the coordinator is closed"))
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking

    async def retarget(self, target: int) -> None:
        """Ask for another number of replicas."""
        self._feed(p.Retarget(time.monotonic(), target))

    async def leave(self, replica: str) -> None:
        """Let a replica go at the next step boundary."""
        self._feed(p.Leave(time.monotonic(), replica))

    async def ended(self, replica: str) -> None:
        """Report that a replica's run has ended."""
        self._feed(p.Ended(time.monotonic(), replica))

    async def report(self) -> Report:
        """Tell the driver how things are, and what is new since it last asked."""
        self._ensure_ticking()
        waiting = {member.replica for member, worker in self._state.workers.items() if worker.arrived_s is not None}
        report = Report(
            generation=self._state.generation,
            waiting=tuple(sorted(waiting)),
            lost=tuple(self._lost),
            entries=tuple(self._entries),
            places=tuple(self._places.items()),
            result=self._result,
            failure=self._failure,
        )
        for reported in (self._lost, self._entries, self._places):
            reported.clear()
        return report

    def _ensure_ticking(self) -> None:
        if self._ticking is None:
            self._ticking = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._feed(p.Tick(time.monotonic()))

    def _feed(self, event: p.Event) -> None:
        stopping = should_stop(self._state)
        self._state, actions = advance(self._state, event)
        for action in actions:
            self._carry_out(action)
        if actions or should_stop(self._state) != stopping:
            self._announce()

    def _carry_out(self, action: p.Action) -> None:
        match action:
            case p.Form(generation):
                self._send_out(generation)
            case p.Dismiss(member, why):
                self._answer(member, Dismissal(why))
            case p.Lost(replica, why):
                logger.warning("lost replica %s: %s", replica, why)
                self._lost.append(action)
            case p.Break(number):
                logger.info("generation %d is over", number)

    def _send_out(self, generation: p.Generation) -> None:
        now = time.monotonic()
        agree_s, self._agreeing_since = now - (self._agreeing_since or now), None
        rendezvous = self._server.rendezvous(f"generation-{generation.number}") if self._server else None
        logger.info(
            "generation %d (%s%s): %s",
            generation.number,
            generation.cause,
            f", {generation.detail}" if generation.detail else "",
            ", ".join(map(str, generation.members)),
        )
        for member in generation.members:
            self._answer(member, Order(generation, rendezvous, agree_s))

    def _answer(self, member: p.MemberId, answer: Order | Dismissal) -> None:
        order = self._orders.pop(member, None)
        if order is not None and not order.done():
            order.set_result(answer)

    def _announce(self) -> None:
        """Wake every call of ``watch``."""
        self._news.set()
        self._news = asyncio.Event()

    def _view(self, working: p.Generation | None) -> View:
        state = self._state
        is_over = working is not None and (
            state.is_finished
            or state.generation is None
            or state.generation.number != working.number
            or state.broken_s is not None
            or bool(state.lost)
        )
        return View(is_over, working is not None and should_stop(state), tuple(sorted(self._received.items())))

    def _receive(self, new: Sequence[Entry]) -> None:
        for entry in new:
            if entry.serial > self._received.get(entry.log, -1):
                self._received[entry.log] = entry.serial
                self._entries.append(entry)
