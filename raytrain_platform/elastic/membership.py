"""Who takes part in a job: the state machine that agrees on generations.

It knows no sockets, clocks or actors: ``advance(state, event) -> (state, actions)``, the time in every event.

A worker *arrives* when it is prepared and in no generation: new, or back from one that ended at a step boundary or
broke. It *beats* to show that it lives. A generation is formed when every member of the one before has arrived or is
lost:

* silence for ``lost_after_s`` loses a member; once any member saw the group break, ``suspect_after_s`` is enough;
* a member that beats but keeps the others waiting for ``hang_after_s`` is lost too;
* a replica is taken as a whole: when one of its workers is lost, so is the replica;
* survivors keep their order, newcomers follow in order of arrival; the source of state is the furthest member;
* a replica asked to leave goes at a step boundary, unless nobody else holds the state: then it first hands it on;
* the first generation, or one after a total loss, forms when the minimum has arrived and either all asked for are
  there or the patience has run out; below the minimum the job waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from raytrain_platform.elastic.protocol import (
    Action,
    Arrived,
    Beat,
    Break,
    Dismiss,
    Ended,
    Event,
    Finish,
    Form,
    Generation,
    Leave,
    Lost,
    MemberId,
    Retarget,
    State,
    Tick,
    Worker,
)


def advance(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
    """Take one event in, and return the new state with what is to be done."""
    actions: list[Action] = []
    match event:
        case Arrived():
            state, actions = _on_arrival(state, event)
        case Beat():
            state = _on_beat(state, event)
        case Leave(replica=replica):
            state, actions = _on_leave(state, replica)
        case Ended(replica=replica):
            state, actions = _drop(state, {replica: "its run ended"})
        case Retarget(target=target):
            state = replace(state, target=target)
        case Finish():
            waiting = [member for member, worker in state.workers.items() if worker.arrived_s is not None]
            state = replace(state, is_finished=True)
            actions = [Dismiss(member, "the job is finished") for member in waiting]
        case Tick():
            pass
    state, given_up = _drop(state, _silent(state, event.now))
    state, formed = _form(state, event.now)
    return state, (*actions, *given_up, *formed)


def should_stop(state: State) -> bool:
    """Whether the members should stop at the next step boundary: somebody can join, or is to leave."""
    if state.generation is None or state.is_finished:
        return False
    current = set(state.generation.replicas)
    can_leave = bool(current & state.leaving) and not current <= state.leaving
    can_join = len(current) < state.target and bool(_newcomers(state))
    return can_leave or can_join


def _on_arrival(state: State, event: Arrived) -> tuple[State, list[Action]]:
    member, now = event.member, event.now
    if state.is_finished:
        return state, [Dismiss(member, "the job is finished")]
    if member.replica in state.leaving and not _is_current(state, member):
        return state, [Dismiss(member, "asked to leave")]
    known = state.workers.get(member)
    order = known.order if known and _is_current(state, member) else state.num_arrivals
    worker = Worker(seen_s=now, arrived_s=now, order=order, progress=event.progress)
    state = replace(
        state,
        workers={**state.workers, member: worker},
        num_arrivals=state.num_arrivals + 1,
        next_number=max(state.next_number, event.generation + 1),
    )
    if event.broke and state.broken_s is None and state.generation and event.generation == state.generation.number:
        return replace(state, broken_s=now), [Break(state.generation.number)]
    return state, []


def _on_leave(state: State, replica: str) -> tuple[State, list[Action]]:
    state = replace(state, leaving=state.leaving | {replica})
    if state.generation is not None and replica in state.generation.replicas:
        return state, []
    waiting = [member for member in state.workers if member.replica == replica]
    workers = {member: worker for member, worker in state.workers.items() if member not in waiting}
    return replace(state, workers=workers), [Dismiss(member, "asked to leave") for member in waiting]


def _on_beat(state: State, event: Beat) -> State:
    known = state.workers.get(event.member)
    if known is not None:
        return replace(state, workers={**state.workers, event.member: replace(known, seen_s=event.now)})
    generation = event.generation
    if generation is None or event.member not in generation.members or generation.number < state.next_number:
        return state
    # A coordinator that was restarted knows nothing: the members' own generation is the truth.
    workers = {member: worker for member, worker in state.workers.items() if worker.arrived_s is not None}
    for rank, member in enumerate(generation.members):
        workers.setdefault(member, Worker(seen_s=event.now, order=rank))
    return replace(state, generation=generation, next_number=generation.number + 1, workers=workers)


def _silent(state: State, now: float) -> dict[str, str]:
    """Replicas to give up, and why."""
    policy = state.policy
    arrivals = [w.arrived_s for m, w in state.workers.items() if w.arrived_s is not None and _is_current(state, m)]
    waiting_s = now - min(arrivals) if arrivals else 0.0
    since_break_s = now - state.broken_s if state.broken_s is not None else 0.0
    given_up: dict[str, str] = {}
    for member, worker in state.workers.items():
        silence_s = now - worker.seen_s
        works = worker.arrived_s is None
        if silence_s > policy.lost_after_s:
            given_up.setdefault(member.replica, f"worker {member} was silent for {silence_s:.1f} s")
        elif works and min(silence_s, since_break_s) > policy.suspect_after_s:
            given_up.setdefault(
                member.replica, f"worker {member} was silent for {silence_s:.2f} s after a connection broke"
            )
        elif works and waiting_s > policy.hang_after_s:
            given_up.setdefault(member.replica, f"worker {member} kept the others waiting for {waiting_s:.0f} s")
    return given_up


def _drop(state: State, given_up: Mapping[str, str]) -> tuple[State, list[Action]]:
    """Forget replicas; if they were part of the current generation, it is over."""
    known = {member.replica for member in state.workers}
    given_up = {name: why for name, why in given_up.items() if name in known}
    if not given_up:
        return state, []
    workers = {member: worker for member, worker in state.workers.items() if member.replica not in given_up}
    actions: list[Action] = [Lost(name, why) for name, why in given_up.items()]
    current = state.generation.replicas if state.generation else ()
    lost = tuple(name for name in current if name in given_up)
    state = replace(state, workers=workers, lost=state.lost + lost, leaving=state.leaving - set(given_up))
    if lost and not state.is_finished and state.generation is not None:
        actions.append(Break(state.generation.number))
    return state, actions


def _form(state: State, now: float) -> tuple[State, list[Action]]:
    """Form the next generation if everyone it has to wait for is accounted for."""
    if state.is_finished:
        return state, []
    remaining = [m for m in (state.generation.members if state.generation else ()) if m in state.workers]
    if any(state.workers[member].arrived_s is None for member in remaining):
        return state, []
    survivors = list(dict.fromkeys(member.replica for member in remaining))
    staying = [name for name in survivors if name not in state.leaving] or survivors
    leavers = [name for name in survivors if name not in staying]
    newcomers = _newcomers(state)[: max(0, state.target - len(staying))]
    chosen = [*staying, *newcomers]
    if len(chosen) < state.policy.min_replicas:
        return replace(state, enough_since_s=None), []
    if not survivors and now < state.hold_until_s:
        return state, []
    if not survivors and len(chosen) < state.target:
        since = now if state.enough_since_s is None else state.enough_since_s
        if now - since < state.policy.patience_s:
            return replace(state, enough_since_s=since), []
    return _begin(state, now, chosen, leavers)


def _begin(state: State, now: float, chosen: list[str], leavers: list[str]) -> tuple[State, list[Action]]:
    members = tuple(MemberId(name, worker) for name in chosen for worker in range(state.policy.num_workers))
    joined = [name for name in chosen if state.generation is None or name not in state.generation.replicas]
    generation = Generation(
        number=state.next_number,
        members=members,
        progress=tuple(state.workers[member].progress for member in members),
        cause=_cause(state, chosen, leavers),
        detail=_detail(state.lost, leavers, joined),
    )
    dismissed = [member for member in state.workers if member.replica in leavers]
    workers = {member: worker for member, worker in state.workers.items() if member not in dismissed}
    for member in members:
        workers[member] = replace(workers[member], seen_s=now, arrived_s=None)
    state = replace(
        state,
        generation=generation,
        next_number=state.next_number + 1,
        workers=workers,
        broken_s=None,
        leaving=state.leaving - set(leavers),
        enough_since_s=None,
        lost=(),
    )
    return state, [Form(generation), *(Dismiss(member, "asked to leave") for member in dismissed)]


def _cause(state: State, chosen: Iterable[str], leavers: Iterable[str]) -> str:
    if state.generation is None:
        return "start"
    if not set(chosen) & set(state.generation.replicas):
        return "restore"
    if state.lost:
        return "lost"
    if state.broken_s is not None:
        return "broken"
    return "leave" if leavers else "join"


def _detail(lost: Iterable[str], left: Iterable[str], joined: Iterable[str]) -> str:
    groups = (("lost", lost), ("left", left), ("joined", joined))
    return "; ".join(f"{word} {', '.join(names)}" for word, names in groups if names)


def _newcomers(state: State) -> list[str]:
    """Replicas outside the current generation all of whose workers have arrived, in order of arrival."""
    current = set(state.generation.replicas) if state.generation else set()
    arrived: dict[str, list[int]] = {}
    for member, worker in state.workers.items():
        if member.replica not in current | state.leaving and worker.arrived_s is not None:
            arrived.setdefault(member.replica, []).append(worker.order)
    complete = [name for name, orders in arrived.items() if len(orders) == state.policy.num_workers]
    return sorted(complete, key=lambda name: max(arrived[name]))


def _is_current(state: State, member: MemberId) -> bool:
    return state.generation is not None and member in state.generation.members and member.replica not in state.lost


def validate(state: State) -> None:
    """Check every invariant.

    Raises:
        AssertionError: One does not hold.
    """
    generation = state.generation
    assert state.policy.min_replicas >= 1
    if generation is not None:
        assert generation.number < state.next_number, "numbers only grow"
        assert len(set(generation.members)) == len(generation.members), "a member has one rank"
        assert len(generation.members) == len(generation.replicas) * state.policy.num_workers, "replicas are whole"
        working = {m for m, w in state.workers.items() if w.arrived_s is None}
        assert working <= set(generation.members), "only members of the live generation work"
        assert generation.progress[generation.source].step == max(p.step for p in generation.progress)
    else:
        assert all(w.arrived_s is not None for w in state.workers.values()), "nobody works without a generation"
