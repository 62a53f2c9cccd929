"""Who takes part in a job: the state machine that agrees on generations.

It knows no sockets, clocks or actors: ``advance(state, event) -> (state, actions)``, the time in every event.

A worker *arrives* when it is prepared and in no generation: new, or back from one that ended at a step boundary or
broke. It *beats* to show that it lives. A generation is formed when every member of the one before has arrived or is
lost:

* silence for ``lost_after_s`` loses a member; once any member saw the group break, ``suspect_after_s`` is enough;
* a member that beats but keeps the others waiting for ``hang_after_s`` is lost too;
* a replica is taken as a whole: when one of its workers is lost, so is the replica; heard again, it is a newcomer;
* survivors keep their order, newcomers follow in order of arrival; the source of state is the furthest member;
* state counts only if it comes from the newest generation that left any: others may have gone another way since;
* a replica asked to leave goes at a step boundary, unless nobody else holds the state: then it first hands it on;
* the first generation, or one after a total loss, forms when the minimum has arrived and either all asked for are
  there or the patience has run out; below the minimum the job waits.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
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
    Progress,
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
            state, actions = _on_beat(state, event)
        case Leave(replica=replica):
            state, actions = _on_leave(state, replica)
        case Ended(replica=replica):
            # Workers of it that live on are dismissed when they are next heard of.
            state = replace(state, leaving=state.leaving | {replica})
            state, actions = _drop(state, {replica: "its run ended"})
        case Retarget(target=target):
            state = replace(state, target=target)
        case Finish():
            state = replace(state, is_finished=True)
            actions = [Dismiss(member, "the job is finished") for member in state.waiting]
        case Tick():
            pass
    if state.is_finished:
        return state, tuple(actions)
    state, broken = _notice_break(state, event.now)
    state, given_up = _drop(state, _silent(state, event.now))
    state, formed = _form(state, event.now)
    return state, (*actions, *broken, *given_up, *formed)


def should_stop(state: State) -> bool:
    """Whether the members should stop at the next step boundary: somebody can join, or is to leave."""
    if state.generation is None or state.is_finished:
        return False
    current = set(state.current)
    staying = current - state.leaving
    can_leave = bool(staying) and staying != current
    can_join = len(staying) < state.target and bool(state.newcomers)
    return can_leave or can_join


def _on_arrival(state: State, event: Arrived) -> tuple[State, list[Action]]:
    member, now = event.member, event.now
    state = replace(
        state,
        next_number=max(state.next_number, event.generation + 1),
        unheard={m: worker for m, worker in state.unheard.items() if m != member},
    )
    if state.is_finished:
        return state, [Dismiss(member, "the job is finished")]
    if member.replica in state.leaving and member.replica not in state.current:
        return state, [Dismiss(member, "asked to leave")]
    # A call that is made again, because its answer was cut off, keeps its place.
    known = state.workers.get(member, Worker(seen_s=now, order=state.num_arrivals))
    worker = replace(
        known,
        seen_s=now,
        arrived_s=now if known.arrived_s is None else known.arrived_s,
        progress=event.progress,
        generation=event.generation,
        broke=event.broke,
    )
    return replace(state, workers={**state.workers, member: worker}, num_arrivals=state.num_arrivals + 1), []


def _on_leave(state: State, replica: str) -> tuple[State, list[Action]]:
    state = replace(state, leaving=state.leaving | {replica})
    if replica in state.current:
        return state, []
    dismissed = [member for member in state.waiting if member.replica == replica]
    return _without(state, {replica}), [Dismiss(member, "asked to leave") for member in dismissed]


def _on_beat(state: State, event: Beat) -> tuple[State, list[Action]]:
    generation, newest = event.generation, state.next_number - 1
    current = state.generation.number if state.generation is not None else 0
    if generation is not None and event.member in generation.members and newest <= generation.number > current:
        state = _adopt(state, generation, event.now)
    waiting = state.unheard.get(event.member)
    if waiting is not None:
        arrival = Arrived(event.now, event.member, waiting.progress, waiting.generation, waiting.broke)
        return _on_arrival(state, arrival)
    known = state.workers.get(event.member)
    if known is None:
        return state, []
    return replace(state, workers={**state.workers, event.member: replace(known, seen_s=event.now)}), []


def _adopt(state: State, generation: Generation, now: float) -> State:
    """Take a generation over that is at work: to a coordinator that was restarted its members are the truth."""
    workers = {member: worker for member, worker in state.workers.items() if worker.arrived_s is not None}
    for rank, member in enumerate(generation.members):
        workers.setdefault(member, Worker(seen_s=now, order=rank))
    return _enter(state, generation, workers)


def _notice_break(state: State, now: float) -> tuple[State, list[Action]]:
    """A member back from a broken group ends the generation for all, and so does one that never heard of it."""
    generation = state.generation
    if generation is None or state.broken_s is not None:
        return state, []
    back = [worker for member, worker in state.waiting.items() if member in generation.members]
    if not any(worker.broke or worker.generation != generation.number for worker in back):
        return state, []
    return replace(state, broken_s=now), [Break(generation.number)]


def _silent(state: State, now: float) -> dict[str, str]:
    """Replicas to give up, and why."""
    policy, current = state.policy, state.current
    arrivals = [w.arrived_s for m, w in state.workers.items() if w.arrived_s is not None and m.replica in current]
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
    actions: list[Action] = [Lost(name, why) for name, why in given_up.items()]
    lost = tuple(name for name in state.current if name in given_up)
    unheard = {member: worker for member, worker in state.waiting.items() if member.replica in given_up}
    state = replace(_without(state, given_up), lost=state.lost + lost, unheard={**state.unheard, **unheard})
    if lost and state.generation is not None:
        actions.append(Break(state.generation.number))
    return state, actions


def _form(state: State, now: float) -> tuple[State, list[Action]]:
    """Form the next generation if everyone it has to wait for is accounted for."""
    survivors = state.current
    if any(worker.arrived_s is None for worker in state.workers.values()):
        return state, []
    state, dismissals = _let_go(state)
    num_staying = len(set(state.current) - state.leaving)
    chosen = [*state.current, *state.newcomers[: max(0, state.target - num_staying)]]
    if len(chosen) < state.policy.min_replicas:
        return replace(state, enough_since_s=None), dismissals
    if not survivors and now < state.hold_until_s:
        return state, []
    if not survivors and len(chosen) < state.target:
        since = now if state.enough_since_s is None else state.enough_since_s
        if now - since < state.policy.patience_s:
            return replace(state, enough_since_s=since), []
    state, form = _begin(state, now, chosen)
    return state, [*dismissals, form]


def _let_go(state: State) -> tuple[State, list[Action]]:
    """Dismiss the replicas that are to leave, once others hold what they hold."""
    members = state.members_of(state.current)
    steps = {m: progress.step for m, progress in zip(members, _counted_progress(state, members), strict=True)}
    furthest = {member.replica for member, step in steps.items() if step == max(steps.values())}
    if furthest <= state.leaving:
        return state, []
    leavers = tuple(name for name in state.current if name in state.leaving)
    dismissals: list[Action] = [Dismiss(member, "asked to leave") for member in members if member.replica in leavers]
    return replace(_without(state, leavers), left=state.left + leavers), dismissals


def _counted_progress(state: State, members: Iterable[MemberId]) -> tuple[Progress, ...]:
    """How far members are; -1 for those whose state is not of the newest generation that left any.

    Steps that the others took again without a member need not have given the same bits (``fast`` reduction).
    """
    current = state.generation
    given = dict(zip(current.members, current.progress, strict=True)) if current is not None else {}
    origins: list[tuple[int, Progress]] = []
    for member in members:
        worker = state.workers[member]
        # One that never heard of the current generation is as it was when that was formed.
        is_untouched = current is not None and given.get(member) == worker.progress
        origins.append((current.number if current and is_untouched else worker.generation, worker.progress))
    newest = max((number for number, progress in origins if progress.step >= 0), default=0)
    return tuple(progress if number == newest else Progress(-1) for number, progress in origins)


def _begin(state: State, now: float, chosen: Sequence[str]) -> tuple[State, Form]:
    members = state.members_of(chosen)
    generation = Generation(
        number=state.next_number,
        members=members,
        progress=_counted_progress(state, members),
        cause=_cause(state, chosen),
        detail=_detail(state.lost, state.left, [name for name in chosen if name not in state.current]),
    )
    working = {member: replace(state.workers[member], seen_s=now, arrived_s=None) for member in members}
    return _enter(state, generation, {**state.workers, **working}), Form(generation)


def _enter(state: State, generation: Generation, workers: Mapping[MemberId, Worker]) -> State:
    return replace(
        state,
        generation=generation,
        next_number=generation.number + 1,
        workers=workers,
        broken_s=None,
        enough_since_s=None,
        lost=(),
        left=(),
    )


def _cause(state: State, chosen: Iterable[str]) -> str:
    if state.generation is None:
        return "start"
    if not set(chosen) & set(state.current):
        return "restore"
    if state.lost:
        return "lost"
    if state.broken_s is not None:
        return "broken"
    return "leave" if state.left else "join"


def _detail(lost: Iterable[str], left: Iterable[str], joined: Iterable[str]) -> str:
    groups = (("lost", lost), ("left", left), ("joined", joined))
    return "; ".join(f"{word} {', '.join(names)}" for word, names in groups if names)


def _without(state: State, replicas: Container[str]) -> State:
    return replace(state, workers={m: worker for m, worker in state.workers.items() if m.replica not in replicas})


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
