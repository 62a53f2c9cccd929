"""A world of simulated workers around the membership machine, and the laws that hold whatever happens in it.

The workers follow the protocol as real ones do, unless told to die, to freeze, to get stuck or to miss an answer. The
laws are checked from what the workers are and were told, never from the machine's own state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from raytrain_platform.elastic import protocol as p
from raytrain_platform.elastic.membership import advance, validate

SLICE_S = 0.1
"""Everybody beats this often, which is on time under any of ``POLICY``'s timeouts."""

POLICY = p.Policy(min_replicas=2, num_workers=1, patience_s=1.0, lost_after_s=1.0, suspect_after_s=0.2, hang_after_s=4)


@dataclass(eq=False)
class Worker:
    """A worker as it is, whatever the machine believes."""

    member: p.MemberId
    heard_s: float
    progress: p.Progress = field(default_factory=lambda: p.Progress(-1))
    content: int = 0
    """What its state holds: the same number, the same bits. As in ``fast`` reduction, no two generations agree."""

    generation: p.Generation | None = None
    """The last one it was told to begin."""

    is_synced: bool = False
    is_waiting: bool = False  # for an answer to its arrival
    broke: bool = False  # what it then said
    must_repeat: bool = False  # its call was cut off
    is_alive: bool = True  # until it is killed or dismissed
    is_frozen: bool = False  # neither beats nor acts
    is_stuck: bool = False  # beats, but does not act
    is_deaf: bool = False  # the next answer does not reach it, and it asks again

    @property
    def number(self) -> int:
        return self.generation.number if self.generation else 0

    @property
    def is_working(self) -> bool:
        return self.is_alive and self.generation is not None and not self.is_waiting


class World:
    """The machine, its workers, and a record of what it has told them."""

    def __init__(self, policy: p.Policy = POLICY, target: int = 3) -> None:
        self.policy, self.target, self.now = policy, target, 1000.0
        self.workers: dict[p.MemberId, Worker] = {}
        self.contents: dict[int, tuple[p.Progress, int]] = {}  # what the source of each generation held
        self.formed: list[p.Generation] = []
        self.is_forked = False  # numbers are given twice: the coordinator forgot them, and nobody was left to tell
        self.num_actions = 0
        self.is_sound = True  # no law is broken
        self._begin_life(p.State(policy, target, hold_until_s=self.now))

    def _begin_life(self, state: p.State) -> None:
        self.state = state
        self.current: p.Generation | None = None
        self.newest = 0  # number heard of in this life
        self.arrived: dict[p.MemberId, float] = {}  # since when they wait for an answer, in this life
        self.unheard: set[p.MemberId] = set()  # fell silent while they waited
        self.gone: set[str] = set()  # lost or dismissed since the current generation was formed
        self.let_go: set[str] = set()  # asked to leave, or ended
        self.is_broken = False

    # What can happen.

    def start(self, replica: str) -> None:
        for number in range(self.policy.num_workers):
            member = p.MemberId(replica, number)
            self.workers[member] = Worker(member, self.now)
            self.arrive(self.workers[member])

    def arrive(self, worker: Worker, broke: bool = False) -> None:
        """Also repeats an arrival that is not answered yet."""
        worker.broke = worker.broke if worker.is_waiting else broke
        worker.is_waiting, worker.must_repeat, worker.heard_s = True, False, self.now
        self._note_arrival(worker)
        self.feed(p.Arrived(self.now, worker.member, worker.progress, worker.number, worker.broke))

    def _note_arrival(self, worker: Worker) -> None:
        self.arrived.setdefault(worker.member, self.now)
        self.unheard.discard(worker.member)
        self.newest = max(self.newest, worker.number)
        if worker.member in self.members(self.current):
            self.is_broken |= worker.broke or worker.number != self.number

    def beat(self, worker: Worker, generation: p.Generation | None = None) -> None:
        """Of the generation that it works in, or of an earlier one."""
        worker.heard_s = self.now
        if worker.member in self.unheard:
            self._note_arrival(worker)
        current = worker.generation if worker.is_working else None
        self.feed(p.Beat(self.now, worker.member, generation or current))

    def commit(self, worker: Worker) -> None:
        """Take a step, if the others have come as far: each step needs all members."""
        assert worker.generation is not None
        if not worker.is_synced:
            progress, worker.content = self.contents[worker.number]
            worker.progress, worker.is_synced = replace(progress, step=max(0, progress.step)), True
        step, others = worker.progress.step, [self.workers[member] for member in worker.generation.members]
        if all(o.number == worker.number and o.is_synced and o.progress.step + o.is_working > step for o in others):
            worker.progress = p.Progress(step + 1)
            worker.content = hash((worker.content, worker.number, worker.progress.step))

    def leave(self, replica: str) -> None:
        self.let_go.add(replica)
        self.feed(p.Leave(self.now, replica))

    def fail(self, worker: Worker) -> None:
        """Its code raised; the other workers of the replica live on until they are told."""
        worker.is_alive = False
        self.let_go.add(worker.member.replica)
        self.feed(p.Ended(self.now, worker.member.replica))

    def retarget(self, target: int) -> None:
        self.target = target
        self.feed(p.Retarget(self.now, target))

    def jump(self, seconds: float) -> None:
        """Time in which nothing is heard from anybody."""
        self.now += seconds
        self.feed(p.Tick(self.now))

    def restart(self) -> None:
        """The coordinator dies, and a new one knows nothing; calls that were waiting are made again."""
        self._begin_life(p.State(self.policy, self.target, hold_until_s=self.now + self.policy.lost_after_s))
        for worker in self.workers.values():
            worker.must_repeat = worker.is_waiting

    def pass_time(self, seconds: float) -> None:
        """Time in which everybody who can beats on time, and does as it is told."""
        for _ in range(round(seconds / SLICE_S)):
            self.now += SLICE_S
            for worker in list(self.workers.values()):
                if worker.is_alive and not worker.is_frozen:
                    self.beat(worker)
                    self._act(worker)
            self.feed(p.Tick(self.now))

    def reach_boundary(self) -> None:
        """Everybody at work comes to the same step, and stops."""
        working = [worker for worker in self.workers.values() if worker.is_working]
        for _ in range(2):
            furthest = max((worker.progress.step for worker in working), default=0)
            for worker in working:
                if not worker.is_synced or worker.progress.step < furthest:
                    self.commit(worker)
        for worker in working:
            self.arrive(worker)

    def _act(self, worker: Worker) -> None:
        if worker.must_repeat:
            self.arrive(worker)
        elif worker.is_working and not worker.is_stuck:
            if self.is_over(worker):
                self.arrive(worker, broke=True)
                return
            others = [self.workers[member] for member in self.members(worker.generation)]
            if any(other.is_waiting and other.number == worker.number for other in others):
                self.arrive(worker)  # a step boundary, at which they have agreed to stop

    def is_over(self, worker: Worker) -> bool:
        """What the coordinator answers to a worker's beat."""
        state = self.state
        return (
            state.generation != worker.generation or state.is_finished or state.broken_s is not None or bool(state.lost)
        )

    # What the machine makes of it, and what must be true of that.

    def feed(self, event: p.Event) -> tuple[p.Action, ...]:
        self.is_sound = False
        self.state, actions = advance(self.state, event)
        validate(self.state)
        if isinstance(event, p.Beat) and event.generation is not None:
            self._see_adoption(event.generation)
        self.num_actions += len(actions)
        for action in actions:
            match action:
                case p.Form(generation):
                    self._on_form(generation)
                case p.Dismiss(member, _):
                    self._on_dismiss(member)
                case p.Lost(replica, why):
                    self._on_lost(replica, why, event)
                case p.Break(number):
                    assert number == self.number > 0
        assert self.state.generation is self.current
        self.is_sound = True
        return actions

    def _on_form(self, generation: p.Generation) -> None:
        assert generation.number > self.newest, "numbers grow"
        back = {
            member for member in self.members(self.current) if member in self.arrived or member.replica in self.gone
        }
        assert back == set(self.members(self.current)), "nobody may still be at work"
        assert all(self.workers[m].is_waiting for m in generation.members), "only who asked takes part"
        names, numbers = generation.replicas, range(self.policy.num_workers)
        assert list(generation.members) == [p.MemberId(n, number) for n in names for number in numbers], "none in part"
        assert len(names) >= self.policy.min_replicas
        self._check_order(generation)
        self._check_progress(generation)
        self.is_forked |= any(generation.number <= earlier.number for earlier in self.formed)
        self.formed.append(generation)
        source = self.workers[generation.members[generation.source]]
        self.contents[generation.number] = generation.progress[generation.source], source.content
        self._follow(generation)
        for member, progress in zip(generation.members, generation.progress, strict=True):
            worker = self.workers[member]
            self.arrived.pop(member, None)
            worker.heard_s = self.now
            if worker.is_deaf:
                worker.is_deaf, worker.must_repeat = False, True
            else:
                worker.generation, worker.is_waiting, worker.is_synced = generation, False, False
                worker.progress = progress

    def _follow(self, generation: p.Generation) -> None:
        self.current, self.newest = generation, max(self.newest, generation.number)
        self.gone, self.is_broken = set(), False

    @property
    def number(self) -> int:
        return self.current.number if self.current is not None else 0

    @staticmethod
    def members(generation: p.Generation | None) -> tuple[p.MemberId, ...]:
        return generation.members if generation is not None else ()

    def survivors(self) -> list[str]:
        """Replicas of the current generation that can go on."""
        names = self.current.replicas if self.current is not None else ()
        return [name for name in names if name not in self.gone]

    def _check_order(self, generation: p.Generation) -> None:
        survivors, names = self.survivors(), generation.replicas
        stay = [name for name in survivors if name in names]
        assert list(names[: len(stay)]) == stay, "survivors keep their order and come first"
        assert set(survivors) - set(names) <= self.let_go, "only who was asked to goes"
        staying = [name for name in survivors if name not in self.let_go]
        assert len(set(names) - self.let_go) <= max(self.target, len(staying)), "nobody joins who was not asked for"

    def _check_progress(self, generation: p.Generation) -> None:
        steps = [progress.step for progress in generation.progress]
        assert steps[generation.source] == max(steps), "the source is the furthest"
        assert generation.step >= self._furthest(self.survivors()), "no step is lost that a survivor has"
        ahead = [m for m, progress in zip(generation.members, generation.progress, strict=True) if progress.step >= 0]
        furthest = {self.workers[m].content for m in ahead if self.workers[m].progress.step == generation.step}
        assert self.is_forked or len(furthest) <= 1, "the same step is the same state"

    def _furthest(self, replicas: Iterable[str]) -> int:
        """Steps that these replicas of the current generation hold."""
        members = self.members(self.current)
        here = [self.workers[m] for m in members if m.replica in replicas]
        return max((w.progress.step for w in here if w.generation is self.current), default=-1)

    def _on_dismiss(self, member: p.MemberId) -> None:
        worker = self.workers[member]
        assert not worker.is_alive or worker.is_waiting, "only who asked is answered"
        assert self.state.is_finished or member.replica in self.let_go
        if member.replica in self.survivors() and not self.state.is_finished:
            others = [name for name in self.survivors() if name not in self.let_go]
            assert self._furthest([member.replica]) <= self._furthest(others), "who goes has handed on what it holds"
            self.gone.add(member.replica)
        self.arrived.pop(member, None)
        worker.must_repeat = worker.is_deaf
        worker.is_alive, worker.is_deaf = worker.is_alive and worker.is_deaf, False

    def _on_lost(self, replica: str, why: str, event: p.Event) -> None:
        workers = [worker for worker in self.workers.values() if worker.member.replica == replica]
        assert isinstance(event, p.Ended) or any(map(self._deserves_it, workers)), f"{replica}: {why}"
        self.unheard |= {member for member in self.arrived if member.replica == replica}
        self.arrived = {member: since for member, since in self.arrived.items() if member.replica != replica}
        self.gone.add(replica)

    def _deserves_it(self, worker: Worker) -> bool:
        policy, silence_s = self.policy, self.now - worker.heard_s
        waiting_s = max((self.now - self.arrived.get(m, self.now) for m in self.members(self.current)), default=0)
        has_hung = worker.member not in self.arrived and waiting_s > policy.hang_after_s
        return has_hung or silence_s > (policy.suspect_after_s if self.is_broken else policy.lost_after_s)

    def _see_adoption(self, generation: p.Generation) -> None:
        """The newest generation heard of is the truth for a coordinator that was restarted."""
        if generation.number > self.number and generation.number >= self.newest:
            self._follow(generation)
            arrived = [self.workers[member] for member in self.arrived]
            self.is_broken = any(worker.broke or worker.number != self.newest for worker in arrived)
