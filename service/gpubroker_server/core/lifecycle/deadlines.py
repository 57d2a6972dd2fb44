"""Decisions that become due with time: limits of runs and of waiting, kills, unconfirmed runs, late
pledges."""

from collections.abc import Collection, Iterable, Iterator, Set
from math import inf
from typing import assert_never

from msgspec import Struct

from gpubroker_server.core.domain.decisions import (
    Decision,
    Outcome,
    PledgeWrite,
    write_move,
)
from gpubroker_server.core.domain.holders import (
    External,
    Gang,
    Inference,
    Member,
    MemberState,
    Model,
    Run,
    WorkerSeat,
)
from gpubroker_server.core.domain.lease import LeaseState, PledgeEnd, quarantine
from gpubroker_server.core.domain.orders import Ending, Failure
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import leaving_members, unready_members
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState, members_of, stop_notice
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle import gang_runs
from gpubroker_server.core.lifecycle.external_leases import not_released
from gpubroker_server.core.lifecycle.model_lifecycle import not_unloaded
from gpubroker_server.core.lifecycle.stopping import (
    after_stop,
    give_notice,
    orders_to_leave,
    timeout_failure,
    will_requeue,
    withdraw_pledges,
)
from gpubroker_server.core.world.world import World

KILL_AGAIN_SECONDS = 3.0
"""The period after which a kill order is repeated, until the run is given up: the order may have been lost
with its connection."""

GAP_SECONDS = 5.0
"""The length of a gap between two looks after which the leader may have missed reports, and reads those
first."""

MAX_NAMED = 3
"""The greatest number of ranks that a message names; the other ranks are counted."""


class ObservationWindow(Struct, frozen=True):
    """The instant since which the leader has looked without a gap, and the instant of its last look."""

    since: Instant
    last: Instant


def extend_window(watch: ObservationWindow | None, now: Instant) -> ObservationWindow:
    """Return the window after a look at `now`. Without a window, or after a gap, a new window starts."""
    if watch is None or now - watch.last > GAP_SECONDS:
        return ObservationWindow(since=now, last=now)
    return ObservationWindow(since=watch.since, last=now)


def due(world: World, now: Instant, policy: Policy, watch: ObservationWindow | None) -> list[Decision]:
    """Return the decisions that are due. `watch` is the window before this look. A leader that was late,
    slept or has just taken over counts no run as unconfirmed before the whole patience has passed again."""
    since = extend_window(watch, now).since
    decisions: list[Decision] = []
    # Tasks that a decision of this batch writes: a second write of such a row would be refused.
    moved: set[TaskId] = set()
    overdue = _overdue(world, now, policy, since)
    for task in overdue:
        if task.state is not TaskState.STOPPING:
            decisions.append(_stop_for_time(world, task, now, policy))
            moved.add(task.id)
        elif _is_over(task.stop_deadline_at, policy.kill_patience_seconds, since, now):
            decisions.append(_give_up(world, task, now, policy))
            moved.add(task.id)
        elif not isinstance(task.holder, External) and (
            watch is None or _is_kill_due(task.stop_deadline_at, watch.last, now)
        ):
            kills = orders_to_leave(world, task, Seconds(0.0))
            decisions.append(Decision(task.id, "kill", orders=kills))
    for decision in _late_members(world, now, policy, since, watch, overdue):
        decisions.append(decision)
        moved |= {write.task.id for write in decision.tasks}
    for (holder, fence, rank), ended_at in world.unconfirmed.releasing.items():
        run = world.holder(holder, fence)
        # A run that is asked to stop has a deadline, which was checked above.
        has_notice = run is not None and run.is_active and stop_notice(run, rank)[1]
        if not has_notice and _is_over(ended_at, policy.kill_patience_seconds, since, now):
            decisions.append(_quarantine(world, holder, fence, rank, now))
            if run is not None:
                moved.add(run.id)
    expiring = world.expiring.due(now)
    for preemptor, pledges in world.pledges.items():
        if preemptor in expiring:
            continue  # the expiry of the preemptor ends its pledges
        deadline_at = max(pledge.deadline_at for pledge in pledges.values())
        moving_task = world.tasks.get(preemptor)
        is_late = _is_over(deadline_at, policy.pledge_patience_seconds, since, now)
        if moving_task is not None and moving_task.is_moving:
            is_late = False  # the task has had no turn while its run stops
        if is_late:
            dissolved = _dissolve(world, preemptor, moved)
            decisions.append(dissolved)
            moved |= {write.task.id for write in dissolved.tasks}  # a gang may free memory for several tasks
    decisions += [_expire(world, world.tasks[task], now) for task in expiring]
    return decisions


def _late_members(
    world: World,
    now: Instant,
    policy: Policy,
    since: Instant,
    watch: ObservationWindow | None,
    but_not: Collection[Task],
) -> Iterator[Decision]:
    """Yield the decisions due for running gangs with ranks that should have joined or left by now. `but_not`
    are tasks that have other decisions in this batch."""
    for name in sorted(set(world.active.due(now)) - {task.id for task in but_not}):
        task = world.tasks[name]
        if unready := _late(unready_members(task), now):
            ranks = {member.rank for member in unready}
            write, orders = gang_runs.stop_ranks(
                world, task, ranks, None, now, Seconds(0.0), "the time limit of ranks that join"
            )
            yield Decision(task.id, "not_ready", tasks=(write,), orders=orders)
            continue
        late = _late(leaving_members(task), now)
        lost = [m for m in late if _is_over(m.stop_deadline_at, policy.kill_patience_seconds, since, now)]
        if lost:
            yield gang_runs.give_up(world, task, lost, now)
        elif late and (watch is None or any(_is_kill_due(m.stop_deadline_at, watch.last, now) for m in late)):
            yield gang_runs.kills(world, task, late)


def _late(members: Iterable[Member], now: Instant) -> list[Member]:
    return [member for member in members if now >= (member.stop_deadline_at or now)]


def _overdue(world: World, now: Instant, policy: Policy, since: Instant) -> list[Task]:
    """Return the active tasks that are past a time limit, or STOPPING and past their grace period, by id."""
    due = map(world.tasks.__getitem__, world.active.due(now))
    late = (task for task in due if now >= _limit_of(task, policy) and _was_waited_for(task, since, now))
    return sorted(late, key=lambda task: task.id)


def _was_waited_for(task: Task, since: Instant, now: Instant) -> bool:
    """Return False if the task is an external holder that could not renew its lease while no leader was
    listening, else True."""
    match task.holder:
        case External(ttl_seconds) if task.state is not TaskState.STOPPING:
            return now >= since + ttl_seconds
        case _:
            return True


def _limit_of(task: Task, policy: Policy) -> float:
    if task.state is TaskState.STOPPING:
        return inf if task.stop_deadline_at is None else task.stop_deadline_at
    deadline_at = inf if task.deadline_at is None else task.deadline_at
    return min(_timeout_of(task, policy), _start_limit_of(task, policy), deadline_at)


def _start_limit_of(task: Task, policy: Policy) -> float:
    match task.holder:
        case Gang() if task.started_at is None and task.admitted_at is not None:
            return task.admitted_at + policy.gang_start_seconds
        case _:
            return inf


def _timeout_of(task: Task, policy: Policy) -> float:
    """Return when the run's time limit ends. For a run that has not reported its start, because it may hang,
    the limit counts from the latest possible start."""
    if task.admitted_at is None or task.timeout_seconds is None:
        return inf
    latest_start_at = task.admitted_at + policy.gang_start_seconds
    return (latest_start_at if task.started_at is None else task.started_at) + task.timeout_seconds


def _is_over(deadline_at: Instant | None, patience_seconds: Seconds, since: Instant, now: Instant) -> bool:
    return deadline_at is not None and now >= max(deadline_at, since) + patience_seconds


def _is_kill_due(deadline_at: Instant | None, last: Instant, now: Instant) -> bool:
    """Return True at the deadline and every KILL_AGAIN_SECONDS after it, however often the leader looks."""
    assert deadline_at is not None
    return (now - deadline_at) // KILL_AGAIN_SECONDS > (last - deadline_at) // KILL_AGAIN_SECONDS


def _stop_for_time(world: World, task: Task, now: Instant, policy: Policy) -> Decision:
    """Stop a task that is past a time limit. The outcome is written with the stop notice; what the run still
    reports is added to the outcome."""
    limit = _limit_of(task, policy)
    if _start_limit_of(task, policy) <= limit:
        reason = StopReason.START_TIMEOUT
    else:
        reason = StopReason.TIMEOUT if _timeout_of(task, policy) <= limit else StopReason.DEADLINE
    notice, orders = give_notice(world, task, reason, task.grace_seconds, now)
    is_late = reason is StopReason.START_TIMEOUT
    failure = _not_ready(notice.task, policy) if is_late else timeout_failure(task, reason)
    verdict = Outcome(task.id, task.fence, Ending.FAILED, now, failure=failure)
    return Decision(task.id, reason, tasks=(notice,), outcome=verdict, orders=orders)


def _not_ready(task: Task, policy: Policy) -> Failure:
    members = members_of(task)
    late = [f"{m.rank} on {m.node}" for m in members if m.state is MemberState.PLACED]
    more = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
    message = (
        f"not all {len(members)} ranks were ready within {policy.gang_start_seconds:g} s, so that none "
        f"began; missing: {', '.join(late[:MAX_NAMED])}{more}; "
        f"{'it is tried again' if will_requeue(task) else f'it was tried {task.failures + 1} times'}"
    )
    return Failure("start_timeout", message)


def _expire(world: World, task: Task, now: Instant) -> Decision:
    """End a task that is still pending when its time to wait, or its deadline, is over."""
    has_missed = task.deadline_at is not None and now >= task.deadline_at
    limit = f"its time limit to wait of {task.queue_ttl_seconds or 0:g} s"
    match task.holder:
        case External() if has_missed:
            missed = Failure("deadline", f"it was not renewed while it waited{_attempts(task)}")
        case _ if has_missed:
            missed = Failure("deadline", f"its deadline passed while it waited{_attempts(task)}")
        case Model():
            missed = Failure("expired", "no request wanted it again, and it did not get its memory in time")
        case Inference():
            turn = f"a turn at its model {task.demand.answered_by}"
            missed = Failure("expired", f"it did not get {turn} within {limit}")
        case Run() | Gang() | WorkerSeat() | External():
            missed = Failure("expired", f"it did not get its devices within {limit}")
        case _:
            assert_never(task.holder)
    return Decision(
        task.id,
        "expire",
        tasks=(write_move(task, Move.EXPIRED, finished_at=now),),
        pledges=withdraw_pledges(world, task),
        outcome=Outcome(task.id, task.fence, TaskState.EXPIRED, now, failure=missed),
    )


def _attempts(task: Task) -> str:
    past = [
        f"{n} {outcome}" for n, outcome in ((task.failures, "failed"), (task.preemptions, "preempted")) if n
    ]
    return f" (attempts before: {', '.join(past)})" if past else ""


def _give_up(world: World, task: Task, now: Instant, policy: Policy) -> Decision:
    """Move on a task whose run is not confirmed gone. The leases of the run go into quarantine."""
    leases = (lease for lease in world.leases_of(task) if lease.state is not LeaseState.QUARANTINED)
    next_move, changes = after_stop(task, now, policy)
    outcome = None
    match task.holder:
        case External():
            outcome = not_released(task, now)
        case Model():  # fail the model, so that it is not loaded again beside what is left of it
            next_move, changes = Move.FAILED, {"finished_at": now, "freeing_for": None}
            outcome = not_unloaded(task, now)
        case Run() | Gang() | WorkerSeat() | Inference():
            pass
        case _:
            assert_never(task.holder)
    return Decision(
        task.id,
        "unconfirmed",
        tasks=(write_move(task, next_move, **changes),),
        leases=tuple(quarantine(lease, now) for lease in leases),
        outcome=outcome,
    )


def _quarantine(world: World, holder: TaskId, fence: Fence, rank: int, now: Instant) -> Decision:
    """Quarantine the leases of a run that has ended, but whose process was not confirmed gone in time."""
    claim = world.leases[holder, fence]
    leases = (claim[key] for key in sorted(claim) if claim[key].rank == rank)
    return Decision(holder, "unconfirmed", leases=tuple(quarantine(lease, now) for lease in leases))


def _dissolve(world: World, preemptor: TaskId, moved: Set[TaskId]) -> Decision:
    """Dissolve the pledges of a preemptor, which is planned again. Memory that its victims still free is no
    longer kept for it."""
    pledges = world.pledges[preemptor]
    victims = (world.tasks[name] for name in sorted(world.active.keys() - moved))
    return Decision(
        preemptor,
        "dissolved",
        tasks=tuple(
            write_move(victim, Move.CHANGED, **changes)
            for victim in victims
            if (changes := gang_runs.without_preemptor(victim, preemptor))
        ),
        pledges=tuple(PledgeWrite(pledges[key], PledgeEnd.DISSOLVED) for key in sorted(pledges)),
    )
