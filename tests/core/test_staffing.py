from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain_platform.training.staffing import MAX_FAILED_STARTS, Phase, Plan, decide_replicas, should_give_up

# A shared machine may stop for longer than the deadline of an example.
unhurried = settings(deadline=None, max_examples=60)

GONE = {Phase.LOST, Phase.ENDED}
PHASES = st.lists(st.sampled_from(Phase), max_size=8).map(lambda ps: {f"r{n}": phase for n, phase in enumerate(ps)})
TARGETS = st.integers(0, 8)


@unhurried
@given(PHASES, TARGETS)
def test_the_living_become_as_many_as_asked_for(phases: dict[str, Phase], target: int) -> None:
    plan = decide_replicas(phases=phases, target=target)
    living = [name for name, phase in phases.items() if phase not in GONE]
    assert len(living) + plan.num_to_start - len(plan.to_release) == target
    assert set(plan.to_release) <= set(living)
    assert not (plan.num_to_start and plan.to_release), "nobody is replaced without need"


@unhurried
@given(PHASES, TARGETS)
def test_who_has_begun_is_kept_before_who_has_not_and_the_older_before_the_younger(
    phases: dict[str, Phase], target: int
) -> None:
    plan = decide_replicas(phases=phases, target=target)
    worth = {Phase.STARTING: 0, Phase.READY: 1, Phase.WORKING: 2}
    ages = {name: -number for number, name in enumerate(phases)}
    kept = [name for name, phase in phases.items() if phase not in GONE and name not in plan.to_release]
    for name in kept:
        for released in plan.to_release:
            assert (worth[phases[name]], ages[name]) > (worth[phases[released]], ages[released])


@unhurried
@given(PHASES, TARGETS)
def test_a_plan_that_is_carried_out_leaves_nothing_to_do(phases: dict[str, Phase], target: int) -> None:
    plan = decide_replicas(phases=phases, target=target)
    after = phases | dict.fromkeys(plan.to_release, Phase.ENDED)
    after |= {f"new{n}": Phase.STARTING for n in range(plan.num_to_start)}
    assert decide_replicas(phases=after, target=target) == Plan()


def test_a_lost_replica_is_replaced_before_its_run_has_ended() -> None:
    plan = decide_replicas(phases={"r0": Phase.WORKING, "r1": Phase.LOST}, target=2)
    assert plan.num_to_start == 1


def test_a_replica_just_lost_may_still_come_back() -> None:
    phases = {"r0": Phase.WORKING, "r1": Phase.LOST, "r2": Phase.LOST}
    assert decide_replicas(phases=phases, target=3, num_just_lost=1) == Plan(num_to_start=1)
    assert decide_replicas(phases=phases, target=1, num_just_lost=2) == Plan()


def test_a_smaller_job_lets_go_of_what_has_not_begun_then_of_the_youngest() -> None:
    phases = {"r0": Phase.WORKING, "r1": Phase.STARTING, "r2": Phase.WORKING, "r3": Phase.READY}
    assert decide_replicas(phases=phases, target=1).to_release == ("r1", "r3", "r2")


def test_a_job_is_given_up_after_some_failed_starts_in_a_row_and_not_before() -> None:
    assert [should_give_up(n) for n in range(MAX_FAILED_STARTS + 2)] == [False] * MAX_FAILED_STARTS + [True, True]
