from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raytrain_platform.elastic import protocol as p
from raytrain_platform.elastic.membership import advance, should_stop
from tests.core.membership_world import POLICY, SLICE_S, Worker, World


def job(*replicas: str, target: int | None = None, **policy: Any) -> World:
    """A job whose replicas have just arrived; by default no more are asked for."""
    world = World(replace(POLICY, **policy), len(replicas) if target is None else target)
    for replica in replicas:
        world.start(replica)
    return world


def of(world: World, replica: str, number: int = 0) -> Worker:
    return world.workers[p.MemberId(replica, number)]


def alone_ahead(world: World, replica: str) -> None:
    """One member commits the first step, the others do not come to it."""
    for name in sorted(world.members(world.current), key=lambda member: member.replica == replica):
        world.commit(world.workers[name])
    assert [worker.progress.step for worker in world.workers.values()].count(1) == 1


def generations(world: World) -> list[str]:
    """The generations so far, as cause and replicas."""
    return [f"{generation.cause}: {' '.join(generation.replicas)}" for generation in world.formed]


def test_the_first_generation_begins_as_soon_as_all_asked_for_are_there() -> None:
    world = job("r0", "r1", target=3)
    assert generations(world) == []
    world.start("r2")
    assert generations(world) == ["start: r0 r1 r2"]


def test_the_first_generation_does_without_the_rest_once_patience_runs_out() -> None:
    world = job("r0", "r1", target=3)
    world.pass_time(POLICY.patience_s - SLICE_S)
    assert generations(world) == []
    world.pass_time(2 * SLICE_S)
    assert generations(world) == ["start: r0 r1"]


def test_below_the_minimum_a_job_waits_and_goes_on_when_capacity_returns() -> None:
    world = job("r0", "r1")
    of(world, "r1").is_alive = False
    world.pass_time(10.0)
    assert generations(world) == ["start: r0 r1"]
    assert of(world, "r0").is_waiting
    world.start("r2")
    assert generations(world)[1:] == ["lost: r0 r2"]


def test_silence_loses_a_member_and_the_others_go_on() -> None:
    world = job("r0", "r1", "r2")
    of(world, "r0").is_alive = False
    world.pass_time(POLICY.lost_after_s - SLICE_S)
    assert len(world.formed) == 1
    world.pass_time(3 * SLICE_S)
    assert generations(world)[1:] == ["lost: r1 r2"]
    assert world.formed[-1].detail == "lost r0"


def test_once_a_member_saw_the_group_break_much_less_silence_is_enough() -> None:
    world = job("r0", "r1", "r2")
    of(world, "r0").is_alive = False
    world.pass_time(SLICE_S)
    world.arrive(of(world, "r1"), broke=True)
    assert world.is_over(of(world, "r2")), "everybody is told"
    world.pass_time(POLICY.suspect_after_s + SLICE_S)
    assert generations(world)[1:] == ["lost: r1 r2"]


def test_a_group_that_breaks_though_nobody_died_is_made_again() -> None:
    world = job("r0", "r1")
    world.arrive(of(world, "r0"), broke=True)
    world.pass_time(SLICE_S)
    assert generations(world)[1:] == ["broken: r0 r1"]


def test_who_beats_but_keeps_the_others_waiting_is_lost_in_the_end() -> None:
    world = job("r0", "r1", "r2")
    of(world, "r1").is_stuck = True
    world.arrive(of(world, "r0"))
    world.pass_time(POLICY.hang_after_s - SLICE_S)
    assert len(world.formed) == 1
    world.pass_time(3 * SLICE_S)
    assert generations(world)[1:] == ["lost: r0 r2"]


def test_a_replica_is_taken_as_a_whole() -> None:
    world = job("r0", "r1", num_workers=2, min_replicas=1)
    of(world, "r0", 1).is_alive = False
    world.pass_time(POLICY.lost_after_s + 3 * SLICE_S)
    assert world.formed[-1].members == (p.MemberId("r1", 0), p.MemberId("r1", 1))
    assert of(world, "r0", 0).is_waiting, "half a replica is no newcomer"


def test_survivors_keep_their_order_and_newcomers_follow_in_order_of_arrival() -> None:
    world = job("r0", "r1", "r2")
    world.retarget(5)
    world.start("z")
    world.start("a")
    of(world, "r0").is_alive = False
    world.pass_time(POLICY.lost_after_s + 3 * SLICE_S)
    assert generations(world)[1:] == ["lost: r1 r2 z a"]
    assert world.formed[-1].detail == "lost r0; joined z, a"


def test_the_furthest_member_is_the_source_of_state() -> None:
    world = job("r0", "r1", "r2")
    alone_ahead(world, "r1")
    world.arrive(of(world, "r0"), broke=True)
    world.pass_time(SLICE_S)
    generation = world.formed[-1]
    assert (generation.source, generation.step) == (generation.replicas.index("r1"), 1)


def test_state_that_others_went_on_without_does_not_count() -> None:
    world = job("r0", "r1", "r2")
    alone_ahead(world, "r0")
    of(world, "r0").is_frozen = True
    world.pass_time(POLICY.lost_after_s + 3 * SLICE_S)
    of(world, "r0").is_frozen = False
    world.pass_time(SLICE_S)
    world.reach_boundary()
    assert world.formed[-1].replicas == ("r1", "r2", "r0")
    assert [progress.step for progress in world.formed[-1].progress] == [1, 1, -1]


def test_newcomers_join_together_at_a_boundary_and_no_more_than_asked_for() -> None:
    world = job("r0", "r1")
    for name in ("r2", "r3", "r4"):
        world.start(name)
    assert not should_stop(world.state), "nobody asked for them"
    world.retarget(4)
    assert should_stop(world.state)
    world.reach_boundary()
    assert generations(world)[1:] == ["join: r0 r1 r2 r3"]
    assert not should_stop(world.state)


def test_a_replica_leaves_at_a_boundary() -> None:
    world = job("r0", "r1", "r2")
    world.leave("r0")
    assert should_stop(world.state)
    world.pass_time(10.0)
    assert of(world, "r0").is_working
    world.reach_boundary()
    assert generations(world)[1:] == ["leave: r1 r2"]
    assert not of(world, "r0").is_alive
    assert world.formed[-1].detail == "left r0"


def test_a_replica_may_leave_though_too_few_remain_and_then_the_job_waits() -> None:
    world = job("r0", "r1")
    world.leave("r1")
    world.reach_boundary()
    assert not of(world, "r1").is_alive
    assert of(world, "r0").is_waiting
    world.start("r2")
    assert generations(world)[1:] == ["leave: r0 r2"]


def test_the_last_who_holds_the_state_hands_it_on_before_it_leaves() -> None:
    world = job("r0", min_replicas=1)
    world.leave("r0")
    assert not should_stop(world.state), "there is nobody to hand it to"
    world.start("r1")
    for _ in range(2):
        world.reach_boundary()
    assert generations(world)[1:] == ["join: r0 r1", "leave: r1"]


def test_a_leaver_that_is_ahead_when_the_group_breaks_hands_its_step_on() -> None:
    world = job("r0", "r1", "r2")
    alone_ahead(world, "r0")
    world.leave("r0")
    world.arrive(of(world, "r1"), broke=True)
    world.pass_time(SLICE_S)
    assert generations(world)[1:] == ["broken: r0 r1 r2"]
    world.reach_boundary()
    assert generations(world)[2:] == ["leave: r1 r2"]


def test_who_was_let_go_never_comes_back() -> None:
    world = job("r0", "r1", "r2")
    world.leave("r3")
    world.start("r3")
    assert not of(world, "r3").is_alive
    of(world, "r0").is_frozen = of(world, "r1").is_stuck = True
    world.pass_time(POLICY.lost_after_s + SLICE_S)
    world.arrive(of(world, "r0"))
    world.leave("r0")
    assert not of(world, "r0").is_alive, "lost, back, and let go"


def test_workers_of_a_replica_that_failed_are_dismissed() -> None:
    world = job("r0", "r1", num_workers=2, min_replicas=1)
    world.fail(of(world, "r0", 1))
    world.pass_time(2 * SLICE_S)
    assert generations(world)[1:] == ["lost: r1"]
    assert not of(world, "r0", 0).is_alive


def test_after_a_total_loss_a_job_begins_as_at_first() -> None:
    world = job("r0", "r1")
    world.jump(100.0)
    for name in ("r0", "r1"):
        of(world, name).is_alive = False
    world.start("r2")
    world.start("r3")
    assert generations(world)[1:] == ["restore: r2 r3"]


def test_who_was_not_heard_while_it_waited_still_gets_its_answer() -> None:
    world = job("r0", target=2)
    world.jump(100.0)
    world.start("r1")
    world.pass_time(SLICE_S)
    assert generations(world) == ["start: r1 r0"]


def test_a_member_that_missed_the_beginning_of_a_generation_ends_it_for_all() -> None:
    world = job("r0", target=2)
    of(world, "r0").is_deaf = True
    world.start("r1")
    world.pass_time(2 * SLICE_S)
    assert generations(world) == ["start: r0 r1", "broken: r0 r1"]


@pytest.mark.parametrize("broke", [False, True])
def test_what_comes_late_from_an_older_generation_ends_nothing(broke: bool) -> None:
    world = job("r0", "r1", "r2")
    of(world, "r0").is_frozen = True
    world.pass_time(POLICY.lost_after_s + 3 * SLICE_S)
    first, second = world.formed
    late = p.Beat(world.now, p.MemberId("r0", 0), first)
    assert advance(world.state, late) == advance(world.state, p.Tick(world.now))
    assert world.feed(p.Arrived(world.now, p.MemberId("r0", 0), p.Progress(7), first.number, broke)) == ()
    assert world.state.generation is second


def test_an_arrival_that_is_repeated_changes_nothing() -> None:
    world = job("r0", "r1", target=3)
    before = world.state
    world.arrive(of(world, "r0"))
    assert world.state.workers == before.workers


def test_a_coordinator_that_was_restarted_learns_of_the_generation_from_a_beat_and_lets_it_work() -> None:
    world = job("r0", "r1")
    world.restart()
    world.start("r2")
    world.pass_time(10.0)
    assert world.state.generation is world.formed[0]
    assert not world.is_over(of(world, "r0"))
    assert not should_stop(world.state)


def test_a_coordinator_that_was_restarted_believes_the_newest_generation() -> None:
    world = job("r0", "r1", "r2")
    of(world, "r0").is_frozen = True
    world.pass_time(POLICY.lost_after_s + 3 * SLICE_S)
    world.restart()
    world.beat(of(world, "r0"), world.formed[0])
    assert world.state.generation is world.formed[0]
    world.beat(of(world, "r1"))
    assert world.state.generation is world.formed[1]
    world.beat(of(world, "r0"), world.formed[0])
    assert world.state.generation is world.formed[1]


def test_a_coordinator_that_was_restarted_waits_for_a_generation_to_show_itself() -> None:
    world = job("r0", "r1")
    for name in ("r0", "r1"):
        of(world, name).is_frozen = True
    world.restart()
    world.start("r2")
    world.start("r3")
    for name in ("r0", "r1"):
        of(world, name).is_frozen = False
    world.pass_time(10.0)
    assert len(world.formed) == 1, "the living generation goes on"


def test_a_finished_job_lets_everybody_go_and_loses_nobody() -> None:
    world = job("r0", "r1", "r2", target=2, patience_s=0.1)
    assert world.feed(p.Finish(world.now)) == (p.Dismiss(p.MemberId("r2", 0), "the job is finished"),)
    world.pass_time(SLICE_S)
    assert not any(worker.is_alive for worker in world.workers.values())
    assert world.feed(p.Tick(world.now + 100.0)) == ()
