"""The words of the membership protocol: who a member is, what can happen, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class MemberId:
    """One worker of one replica."""

    replica: str
    worker: int

    def __str__(self) -> str:
        return f"{self.replica}/{self.worker}"


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    node_id: str
    address: str
    pid: int


@dataclass(frozen=True)
class Progress:
    """How far a worker's state is. A larger one holds everything that a smaller one does."""

    step: int
    """Steps committed; -1 when the worker holds no state yet, not even the initial one."""

    evaluated: int = -1
    """The last step after which this worker took part in a whole evaluation."""


@dataclass(frozen=True)
class Generation:
    """One agreed membership."""

    number: int
    members: tuple[MemberId, ...]
    """In rank order; the first is the leader."""

    progress: tuple[Progress, ...]
    """How far each member is, in rank order; -1 for one whose state does not count, since others went on without it."""

    cause: str
    """Why: ``start``, ``lost``, ``broken``, ``join``, ``leave`` or ``restore`` (nobody of the one before was left)."""

    detail: str = ""
    """Who was lost, joined or left."""

    @property
    def source(self) -> int:
        """Rank of the furthest member, whose state the others take; the lowest such rank."""
        return max(range(len(self.progress)), key=lambda rank: (self.progress[rank].step, -rank))

    @property
    def step(self) -> int:
        """Steps committed by the furthest member; -1 when no member holds state."""
        return self.progress[self.source].step

    @property
    def evaluated(self) -> int:
        """The last step whose evaluation every member that is as far as the source has taken part in."""
        return min(p.evaluated for p in self.progress if p.step == self.step)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas, in rank order."""
        return tuple(dict.fromkeys(member.replica for member in self.members))


@dataclass(frozen=True)
class Policy:
    """Sizes and timeouts of a job, all in replicas and seconds."""

    min_replicas: int
    num_workers: int  # of each replica
    patience_s: float = 10.0
    lost_after_s: float = 2.0
    suspect_after_s: float = 0.2
    hang_after_s: float = 300.0


@dataclass(frozen=True)
class Worker:
    """What is known of one worker."""

    seen_s: float
    arrived_s: float | None = None
    """When it arrived; None while it works in a generation."""

    order: int = 0
    """Place among all arrivals of newcomers, so that ranks do not depend on chance."""

    progress: Progress = Progress(-1)

    generation: int = 0
    """Number of the generation it came from when it arrived; 0 for a new worker."""

    broke: bool = False
    """Whether that generation's group broke."""


@dataclass(frozen=True)
class State:
    """All that the machine knows."""

    policy: Policy
    target: int
    """Replicas asked for now."""

    generation: Generation | None = None
    next_number: int = 1
    workers: Mapping[MemberId, Worker] = field(default_factory=dict)
    broken_s: float | None = None
    """When a member first reported that the current generation's group broke."""

    leaving: frozenset[str] = frozenset()
    """Replicas to be let go at the next step boundary, and all that were: one let go never comes back."""

    unheard: Mapping[MemberId, Worker] = field(default_factory=dict)
    """Workers given up for silence while they waited. Heard again, they still wait for the answer to their arrival."""

    enough_since_s: float | None = None
    """Since when the minimum has been waiting for a first generation."""

    hold_until_s: float = 0.0
    """No first generation before this time: after a restart, the members of a living one must have beaten by then."""

    num_arrivals: int = 0
    lost: tuple[str, ...] = ()
    """Replicas lost since the current generation was formed."""

    left: tuple[str, ...] = ()
    """Replicas let go since the current generation was formed."""

    is_finished: bool = False

    @property
    def current(self) -> tuple[str, ...]:
        """Replicas of the current generation that are neither lost nor let go, in rank order."""
        replicas = self.generation.replicas if self.generation is not None else ()
        return tuple(name for name in replicas if name not in self.lost + self.left)

    @property
    def waiting(self) -> dict[MemberId, Worker]:
        """Workers whose arrival is not answered yet."""
        return {member: worker for member, worker in self.workers.items() if worker.arrived_s is not None}

    @property
    def newcomers(self) -> list[str]:
        """Replicas that can join, all of whose workers have arrived, in order of arrival."""
        others = self.leaving.union(self.current)
        arrived: dict[str, list[int]] = {}
        for member, worker in self.waiting.items():
            if member.replica not in others:
                arrived.setdefault(member.replica, []).append(worker.order)
        complete = [name for name, orders in arrived.items() if len(orders) == self.policy.num_workers]
        return sorted(complete, key=lambda name: max(arrived[name]))

    def members_of(self, replicas: Iterable[str]) -> tuple[MemberId, ...]:
        """The workers of replicas, in rank order."""
        return tuple(MemberId(name, worker) for name in replicas for worker in range(self.policy.num_workers))


@dataclass(frozen=True)
class Arrived:
    """A prepared worker asks to take part."""

    now: float
    member: MemberId
    progress: Progress
    generation: int = 0
    """Number of the generation it comes from; 0 for a new worker."""

    broke: bool = False
    """Whether that generation's group broke, rather than ended at a step boundary."""


@dataclass(frozen=True)
class Beat:
    """A worker shows that it lives, and which generation it works in, if any."""

    now: float
    member: MemberId
    generation: Generation | None


@dataclass(frozen=True)
class Leave:
    """A replica is to be let go at the next step boundary."""

    now: float
    replica: str


@dataclass(frozen=True)
class Ended:
    """A replica is known to be gone."""

    now: float
    replica: str


@dataclass(frozen=True)
class Retarget:
    """The number of replicas asked for changes."""

    now: float
    target: int


@dataclass(frozen=True)
class Finish:
    """A member has carried the job to its end."""

    now: float


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    now: float


Event = Arrived | Beat | Leave | Ended | Retarget | Finish | Tick


@dataclass(frozen=True)
class Form:
    """Tell the members of this generation to begin."""

    generation: Generation


@dataclass(frozen=True)
class Break:
    """Tell the members of the current generation that it is over: its group will not complete another collective."""

    number: int


@dataclass(frozen=True)
class Lost:
    """A replica is given up; ``why`` in words."""

    replica: str
    why: str


@dataclass(frozen=True)
class Dismiss:
    """Tell a worker to end."""

    member: MemberId
    why: str


Action = Form | Break | Lost | Dismiss
