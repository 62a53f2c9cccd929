from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from raytrain_platform.elastic import protocol as p
from raytrain_platform.elastic.membership import should_stop
from tests.core.membership_world import POLICY, SLICE_S, Worker, World

PICK = st.integers(0, 7)


class Attack(RuleBasedStateMachine):
    """Everything that can happen, in every order; the world checks its laws after each event."""

    @initialize(num_workers=st.integers(1, 2), min_replicas=st.integers(1, 2), num_more=st.integers(0, 2))
    def begin(self, num_workers: int, min_replicas: int, num_more: int) -> None:
        policy = replace(POLICY, num_workers=num_workers, min_replicas=min_replicas)
        self.world = World(policy, target=min_replicas + num_more)
        for _ in range(min_replicas + num_more):
            self.start()

    def pick(self, pick: int) -> Worker:
        workers = list(self.world.workers.values())
        return workers[pick % len(workers)]

    @rule()
    @precondition(lambda self: len(self.world.workers) < 8)
    def start(self) -> None:
        self.world.start(f"r{len(self.world.workers)}")

    @rule(pick=PICK, broke=st.booleans())
    def arrive(self, pick: int, broke: bool) -> None:
        worker = self.pick(pick)
        if worker.is_alive:
            self.world.arrive(worker, broke)

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        worker = self.pick(pick)
        if worker.is_working:
            self.world.commit(worker)

    @rule(pick=PICK, past=PICK)
    def beat_late(self, pick: int, past: int) -> None:
        """A beat of a generation that the worker has left."""
        worker = self.pick(pick)
        earlier = [generation for generation in self.world.formed if worker.member in generation.members]
        if earlier:
            self.world.beat(worker, earlier[past % len(earlier)])

    @rule(pick=PICK, how=st.sampled_from(["is_frozen", "is_stuck", "is_deaf"]), value=st.booleans())
    def disturb(self, pick: int, how: str, value: bool) -> None:
        setattr(self.pick(pick), how, value)

    @rule(pick=PICK)
    def kill(self, pick: int) -> None:
        self.pick(pick).is_alive = False

    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        self.world.fail(self.pick(pick))

    @rule(pick=PICK)
    def leave(self, pick: int) -> None:
        self.world.leave(self.pick(pick).member.replica)

    @rule(num_more=st.integers(0, 2))
    def retarget(self, num_more: int) -> None:
        self.world.retarget(self.world.policy.min_replicas + num_more)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.5, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seconds=st.sampled_from([0.15, 0.3, 1.1, 100.0]))
    def jump(self, seconds: float) -> None:
        self.world.jump(seconds)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @rule(chance=PICK)
    def finish(self, chance: int) -> None:
        if chance == 0:
            self.world.feed(p.Finish(self.world.now))

    @rule()
    def calm(self) -> None:
        self.check_calm()

    def teardown(self) -> None:
        if hasattr(self, "world") and self.world.is_sound:
            self.check_calm()

    def check_calm(self) -> None:
        """From here on everybody who is alive beats on time and does as it is told."""
        world = self.world
        self.settle()
        alive = [worker for worker in world.workers.values() if worker.is_alive]
        if world.state.is_finished:
            assert not alive, "everybody is told that the job is done"
            return
        names, current = [worker.member.replica for worker in alive], world.current
        wanted = {name for name in names if names.count(name) == world.policy.num_workers} - world.let_go
        if len(wanted) < world.policy.min_replicas:
            return
        assert current is not None, "enough replicas are there, and yet no generation"
        assert not world.is_over(world.workers[current.members[0]])
        assert set(current.replicas) <= wanted, "who was asked to leave is gone"
        assert len(current.replicas) >= min(world.target, len(wanted)), "who is wanted takes part"
        for worker in alive:
            is_member = worker.generation is current and worker.is_working
            assert is_member or worker.member in world.state.workers, "nobody waits for an answer that cannot come"
            assert worker.member.replica not in world.let_go

    def settle(self) -> None:
        world = self.world
        for worker in world.workers.values():
            worker.is_frozen = worker.is_stuck = worker.is_deaf = False
        world.pass_time(2 * world.policy.lost_after_s + world.policy.patience_s)
        for _ in range(3 + len(world.workers)):  # each round lets go of leavers, or takes newcomers in
            num_actions = world.num_actions
            if should_stop(world.state):
                world.reach_boundary()
            world.pass_time(world.policy.patience_s + 3 * SLICE_S)
            if world.num_actions == num_actions:
                break


TestAttack = Attack.TestCase
TestAttack.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
