"""What the coordinator's calls promise to members and driver; who takes part is the membership machine's own matter."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any

from raytrain_platform.elastic.coordinator import BEAT_S, Coordinator, Dismissal, Entry, Failure, Order, View
from raytrain_platform.elastic.protocol import Generation, MemberId, Policy, Progress

POLICY = Policy(min_replicas=1, num_workers=1, patience_s=60.0, lost_after_s=60.0, suspect_after_s=60.0)
"""Nobody is lost for silence: in most stories the members beat only when the story says so."""

AT_ONCE_S = 0.8 * BEAT_S
"""Sooner than a call without news is answered."""

R0, R1, R2 = (MemberId(name, 0) for name in ("r0", "r1", "r2"))

Story = Callable[[], Coroutine[Any, Any, None]]


def told(story: Story) -> Callable[[], None]:
    """A test that is a coroutine."""

    @functools.wraps(story)
    def test() -> None:
        asyncio.run(asyncio.wait_for(story(), 60.0))

    return test


@contextlib.asynccontextmanager
async def coordinator(target: int, policy: Policy = POLICY, **options: Any) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(policy, target, **{"host": None, **options})
    try:
        yield coordinator
    finally:
        await coordinator.close()


async def begin(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Make a call whose answer is asked for later."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    return task


async def arrive(
    coordinator: Coordinator, member: MemberId, step: int = -1, generation: int = 0, broke: bool = False
) -> asyncio.Task[Any]:
    return await begin(coordinator.arrive(member, Progress(step), generation, broke))


async def form(coordinator: Coordinator, *members: MemberId) -> Generation:
    calls = [await arrive(coordinator, member) for member in members]
    (generation,) = {(await call).generation for call in calls}  # all are told the same
    assert isinstance(generation, Generation)
    return generation


async def watch(coordinator: Coordinator, member: MemberId, working: Generation | None, *new: Entry) -> View:
    """The view now, whatever the member has seen."""
    return await coordinator.watch(member, working, View(is_over=True, should_stop=True), new)


async def beat(coordinator: Coordinator, member: MemberId) -> None:
    """Beat as a living worker does that waits, until the story ends."""
    while True:
        await coordinator.watch(member, None, View(), ())


async def timed(call: Awaitable[Any]) -> tuple[float, Any]:
    begin_s = time.monotonic()
    answer = await call
    return time.monotonic() - begin_s, answer


def failure(member: MemberId, step: int = 3, summary: str = "ValueError: 7", is_final: bool = False) -> Failure:
    return Failure(member, step, summary, traceback="...", is_final=is_final)


@told
async def test_an_arrival_is_answered_when_the_generation_is_agreed() -> None:
    async with coordinator(target=2) as c:
        first = await arrive(c, R0)
        await asyncio.sleep(0.1)
        assert not first.done()
        second = await arrive(c, R1)
        order = await first
        assert order.generation.members == (R0, R1)
        assert (await second).generation == order.generation
        assert order.rendezvous is None, "no host was given to meet at"
        assert 0.1 <= order.agree_s < 30.0
        assert (await c.report()).generation == order.generation


@told
async def test_every_generation_meets_in_a_place_of_its_own() -> None:
    async with coordinator(target=1, host="127.0.0.1") as c:
        first, second = [(await (await arrive(c, R0, generation=n))).rendezvous for n in (0, 1)]
        assert (first.host, first.port) == (second.host, second.port) == ("127.0.0.1", first.port)
        assert first.prefix != second.prefix


@told
async def test_an_arrival_made_again_takes_the_place_of_the_first() -> None:
    async with coordinator(target=2) as c:
        first, again = await arrive(c, R0), await arrive(c, R0)
        assert await first == Dismissal("it arrived again")
        await arrive(c, R1)
        assert isinstance(await again, Order)


@told
async def test_without_news_a_beat_is_answered_after_a_while() -> None:
    async with coordinator(target=1) as c:
        generation = await form(c, R0)
        taken_s, seen = await timed(c.watch(R0, generation, View(is_over=True), ()))
        assert (taken_s < AT_ONCE_S, seen) == (True, View()), "what it had not seen is answered at once"
        taken_s, view = await timed(c.watch(R0, generation, seen, ()))
        assert (taken_s > 0.9 * BEAT_S, view) == (True, seen)


async def news(c: Coordinator, generation: Generation, what: Callable[[], Awaitable[Any]]) -> View:
    """What a member that watches learns from an event, at once."""
    watching = await begin(c.watch(R0, generation, View(), ()))
    await what()
    taken_s, view = await timed(watching)
    assert taken_s < AT_ONCE_S
    assert isinstance(view, View)
    return view


@told
async def test_members_learn_at_once_that_their_generation_is_over() -> None:
    for what in (lambda c: arrive(c, R1, generation=1, broke=True), lambda c: c.ended("r1")):
        async with coordinator(target=2) as c:
            generation = await form(c, R0, R1)
            assert await news(c, generation, functools.partial(what, c)) == View(is_over=True)


@told
async def test_members_learn_at_once_that_somebody_is_to_leave() -> None:
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        assert await news(c, generation, lambda: c.leave("r1")) == View(should_stop=True)
        staying, leaving = await arrive(c, R0, 5, 1), await arrive(c, R1, 5, 1)
        assert (await leaving, (await staying).generation.members) == (Dismissal("asked to leave"), (R0,))


@told
async def test_members_learn_at_once_that_somebody_may_join() -> None:
    async with coordinator(target=1) as c:
        generation = await form(c, R0)
        joining = await arrive(c, R1)
        assert (await c.report()).waiting == ("r1",)
        assert await news(c, generation, lambda: c.retarget(2)) == View(should_stop=True)
        await arrive(c, R0, 5, 1)
        assert (await joining).generation.members == (R0, R1)
        assert (await c.report()).waiting == ()


@told
async def test_a_member_of_a_generation_that_is_over_is_asked_to_beat_more_often() -> None:
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        await arrive(c, R1, generation=1, broke=True)
        taken_s, view = await timed(c.watch(R0, generation, View(is_over=True), ()))
        assert view.is_over
        assert taken_s < AT_ONCE_S


@told
async def test_time_passes_though_nobody_calls() -> None:
    async with coordinator(target=2, policy=replace(POLICY, patience_s=0.3)) as c:
        order = await (await arrive(c, R0))
        assert order.generation.members == (R0,), "patience for the second has run out"


def lines(log: str, *serials: int) -> list[Entry]:
    return [Entry(log, serial, f"{log} {serial}") for serial in serials]


@told
async def test_a_log_line_is_kept_once_whoever_hands_it_over() -> None:
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        view = await watch(c, R0, generation, *lines("steps", 1, 2, 3), *lines("recoveries", 1))
        assert view.received == (("recoveries", 1), ("steps", 3))
        await watch(c, R0, generation, *lines("steps", 2, 3, 4))
        assert (await c.report()).entries == (*lines("steps", 1, 2, 3), *lines("recoveries", 1), *lines("steps", 4))
        assert (await c.report()).entries == (), "each line is reported once"


@told
async def test_a_change_of_leader_loses_no_line() -> None:
    """Every member writes all lines; the leader hands them over, the others keep what was not received."""
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        await watch(c, R0, generation, *lines("steps", 1, 2))
        view = await watch(c, R1, generation)
        kept = [entry for entry in lines("steps", 1, 2, 3, 4) if entry.serial > dict(view.received)["steps"]]
        await c.ended("r0")
        await watch(c, R1, (await (await arrive(c, R1, 4, 1, broke=True))).generation, *kept)
        await c.finish({"step": 5}, lines("steps", 4, 5))
        assert [entry.serial for entry in (await c.report()).entries] == [1, 2, 3, 4, 5]


@told
async def test_an_error_costs_its_replica_and_the_others_go_on() -> None:
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        assert (await news(c, generation, lambda: c.fail(failure(R1)))).is_over
        assert (await (await arrive(c, R0, 3, 1, broke=True))).generation.members == (R0,)
        report = await c.report()
        assert ([lost.replica for lost in report.lost], report.failure) == (["r1"], None)
        assert (await c.report()).lost == (), "each loss is reported once"


@told
async def test_the_same_error_at_the_same_step_stops_the_job() -> None:
    async with coordinator(target=3) as c:
        generation = await form(c, R0, R1, R2)
        await c.fail(failure(R1))
        await c.fail(failure(R2))
        assert (await c.report()).failure == failure(R2)
        assert (await watch(c, R0, generation)).is_over
        assert await (await arrive(c, R0, 3, 1)) == Dismissal("the job is finished")


@told
async def test_another_error_or_another_step_is_another_failure() -> None:
    async with coordinator(target=3) as c:
        await c.fail(failure(R1))
        await c.fail(failure(R2, step=4))
        await c.fail(failure(R0, summary="OSError: 5"))
        assert (await c.report()).failure is None


@told
async def test_a_final_error_stops_the_job_at_once_and_the_first_to_stop_it_is_told() -> None:
    async with coordinator(target=2) as c:
        await c.fail(failure(R1, is_final=True))
        await c.fail(failure(R0, summary="later", is_final=True))
        assert (await c.report()).failure == failure(R1, is_final=True)


@told
async def test_a_finished_job_dismisses_everybody() -> None:
    async with coordinator(target=2) as c:
        generation = await form(c, R0, R1)
        standing_by, joining = await arrive(c, R1, 9, 1), await arrive(c, R2)
        assert (await news(c, generation, lambda: c.finish({"step": 9}, ()))).is_over
        for waiting in (standing_by, joining, await arrive(c, MemberId("late", 0))):
            assert await waiting == Dismissal("the job is finished")
        assert (await c.report()).result == {"step": 9}


@told
async def test_stopping_and_closing_answer_whoever_waits() -> None:
    for end in (Coordinator.stop, Coordinator.close):
        async with coordinator(target=2) as c:
            waiting = await arrive(c, R0)
            await end(c)
            assert isinstance(await waiting, Dismissal)


@told
async def test_a_restarted_coordinator_lets_the_running_generation_work() -> None:
    """Its members only beat, as they do in the middle of a step; one of them, after a while, at a step boundary."""
    policy = replace(POLICY, lost_after_s=1.0)
    generation = Generation(7, (R0, R1), (Progress(4), Progress(4)), "join")
    async with coordinator(target=3, policy=policy, is_restarted=True) as c:
        joining = await arrive(c, R2)
        for _ in range(3):
            for member in (R0, R1, R2):
                assert not (await watch(c, member, None if member is R2 else generation)).is_over
            await asyncio.sleep(0.4)
        assert (await watch(c, R0, generation)).should_stop, "R2 can join"
        assert (await c.report()).generation == generation
        assert not joining.done()
        await arrive(c, R0, 6, 7)
        await arrive(c, R1, 6, 7)
        after = (await joining).generation
        assert (after.number, after.members, after.step) == (8, (R0, R1, R2), 6)


@told
async def test_a_restarted_coordinator_first_gives_a_running_generation_time_to_show_itself() -> None:
    async with coordinator(target=1, policy=replace(POLICY, lost_after_s=1.0), is_restarted=True) as c:
        await begin(beat(c, R0))
        taken_s, order = await timed(await arrive(c, R0))
        assert isinstance(order, Order) and taken_s >= 0.9
