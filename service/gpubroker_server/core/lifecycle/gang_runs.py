"""Changes of a gang by reports. The ranks of a gang begin together and stop when one fails; ranks of an
elastic gang may join or leave while it runs."""

from collections.abc import Collection, Iterator
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, Outcome, TaskWrite, write_move
from gpubroker_server.core.domain.holders import Gang, Member, MemberState
from gpubroker_server.core.domain.lease import LeaseState, Proof, quarantine
from gpubroker_server.core.domain.orders import (
    Ended,
    Ending,
    Failure,
    Gone,
    GoOrder,
    Order,
    Ready,
    StopOrder,
    WorldOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import removable_ranks, with_member, workers, world_number
from gpubroker_server.core.domain.submission import WITHDRAWN
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.stopping import after_stop, timeout_failure, with_cause
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.world import World

_SETTLED = (StopReason.TIMEOUT, StopReason.DEADLINE, StopReason.OVERUSE, StopReason.RANK_FAILED)
"""The stop reasons after which the outcome is final: another rank's success does not change it."""

_TOLD = (StopReason.OVERUSE, StopReason.RANK_FAILED, StopReason.START_TIMEOUT)
"""The stop reasons that say more than the report of rank 0 about its stop."""


def ready(update: TaskUpdate, world: World, task: Task, report: Ready, at: Instant) -> None:
    """Record that a rank is ready. The last rank to be ready starts the gang, or lets all joining ranks into
    a running one. A rank that repeats its Ready gets its orders again."""
    member = members_of(task)[report.rank]
    if task.state is TaskState.RUNNING and member.is_joining:
        _go_on(
            update,
            world,
            with_member(members_of(task), replace(member, address=report.address)),
            at,
            "rank_ready",
        )
        return
    if task.state is TaskState.RUNNING and member.state is MemberState.READY:
        update.orders += beginning_orders(world, task, member)
    if task.state is not TaskState.ADMITTED or member.has_ended:
        return
    members = with_member(members_of(task), replace(member, state=MemberState.READY, address=report.address))
    if any(other.state is not MemberState.READY for other in members):
        update.move(Move.CHANGED, "rank_ready", holder=Gang(members))
        return
    update.move(Move.STARTED, "started", started_at=at, ordered_at=task.ordered_at, holder=Gang(members))
    update.orders += [go_order(world, update.known, rank) for rank in members]


def beginning_orders(world: World, task: Task, member: Member) -> tuple[Order, ...]:
    """Return the orders that a rank at work may have missed: the list of the ranks at work, then the order to
    begin."""
    world_order = (order for order in world_orders(world, task) if order.rank == member.rank)
    return (*world_order, go_order(world, task, member))


def go_order(world: World, task: Task, member: Member) -> GoOrder:
    incarnation = world.nodes[member.node].incarnation
    address = members_of(task)[0].address
    return GoOrder(task.id, task.fence, member.node, incarnation, address, member.rank)


def ended(
    update: TaskUpdate, world: World, report: Ended, outcome: Outcome, now: Instant, policy: Policy
) -> None:
    """Record the end of a rank. The result of a gang is rank 0's; its failure is that of the rank which
    failed first."""
    task = update.known
    member = members_of(task)[report.rank]
    update.move_leases(report.fence, report.rank, LeaseState.RELEASING)
    if member.has_ended:
        return
    if _costs_only_itself(task, member, succeeded=report.ending is Ending.SUCCEEDED):
        _left(update, world, gone_early(member), outcome.at, now, policy)
        return
    succeeded = report.ending is Ending.SUCCEEDED
    state = MemberState.SUCCEEDED if succeeded else MemberState.ENDED
    members = with_member(members_of(task), replace(member, state=state))
    if task.state is TaskState.STOPPING:
        _ended_by_stop(update, world, task, report, outcome, members)
    elif succeeded:
        _succeeded(update, world, outcome, members, report.rank)
    elif report.ending is Ending.NEVER_STARTED:
        _stop_others(update, world, members, StopReason.RANK_LOST, now, policy, _loss_of(member))
    else:
        update.outcome = _of_rank(outcome, report.rank)
        if report.failure is not None and report.failure.kind in WITHDRAWN:
            # The stop reason alone would allow retries, which would change nothing.
            update.move(Move.CHANGED, "not_allowed", max_retries=0)
        _stop_others(update, world, members, StopReason.RANK_FAILED, now, policy, _failure_of(member))


def _costs_only_itself(task: Task, member: Member, *, succeeded: bool = False) -> bool:
    """Return True if the gang goes on however the rank ended: the rank was asked to leave, or joined late and
    failed."""
    came_late = task.state is TaskState.RUNNING and member.is_late and (member.is_joining or not succeeded)
    return not member.takes_part or came_late


def gone_early(member: Member, **changes: Any) -> Member:
    """Return the member as one that has left, or that was never at work."""
    # `Member.changes_of_world` takes a late member with an address for one that has joined, so a member that
    # was never at work gets none.
    address = "" if member.is_joining else member.address
    # A member that left without a deadline failed by itself, which counts against growing the gang again.
    asked = None if member.takes_part else member.stop_deadline_at
    left = {"state": MemberState.LEFT, "address": address, "stop_deadline_at": asked}
    return replace(member, **{**left, **changes})


def _succeeded(
    update: TaskUpdate, world: World, outcome: Outcome, members: tuple[Member, ...], rank: int
) -> None:
    """Go on after a rank has succeeded. Ranks that are joining are no longer needed, and stop."""
    task = update.known
    if rank == 0:
        update.outcome = outcome
    if task.state is TaskState.RUNNING:
        until = Instant(outcome.at + task.grace_seconds)
        late = [member for member in members if member.is_joining]
        update.orders += [stop_order(world, task, member, task.grace_seconds) for member in late]
        for member in late:
            leaving = gone_early(member, state=MemberState.LEAVING, stop_deadline_at=until)
            members = with_member(members, leaving)
    _go_on(update, world, members, outcome.at)


def _go_on(
    update: TaskUpdate, world: World, members: tuple[Member, ...], at: Instant, reason: str = "rank_ended"
) -> None:
    before = update.known
    next_move, changes = going_on(members, at)
    update.move(next_move, "ended" if next_move is Move.SUCCEEDED else reason, **changes)
    update.orders += news_of_world(world, before, update.known)


def _left(
    update: TaskUpdate, world: World, member: Member, at: Instant, now: Instant, policy: Policy
) -> None:
    """Go on after a rank has left. The outcome of such a rank does not count."""
    task = update.known
    members = with_member(members_of(task), member)
    if task.state is TaskState.STOPPING:
        _settle(update, task, members, "stopped", now, policy)
    else:
        _go_on(update, world, members, at)


def _ended_by_stop(
    update: TaskUpdate,
    world: World,
    task: Task,
    report: Ended,
    outcome: Outcome,
    members: tuple[Member, ...],
) -> None:
    if task.stop_reason not in _SETTLED and report.ending is Ending.SUCCEEDED:
        _succeeded(update, world, outcome, members, report.rank)
        return
    if report.rank == 0 and task.stop_reason not in _TOLD:
        failure = timeout_failure(task, task.stop_reason) or report.failure
        if report.ending is not Ending.NEVER_STARTED:
            ending = Ending.STOPPED if report.ending is Ending.SUCCEEDED else outcome.ending
            update.outcome = replace(outcome, ending=ending, result=None, failure=failure)
    update.move(Move.CHANGED, "rank_ended", holder=Gang(members))


def gone(
    update: TaskUpdate, world: World, report: Gone, killed: Failure, now: Instant, policy: Policy
) -> None:
    """Record that a rank is confirmed gone. `killed` is the failure of a rank that ended without a report."""
    task = update.known
    member = members_of(task)[report.rank]
    if member.gone:
        return
    is_lost = report.proof in (Proof.NEVER_STARTED, Proof.BOOT_CHANGED, Proof.AGENT_RESTARTED)
    if not member.has_ended and _costs_only_itself(task, member):
        lost = {"stop_deadline_at": now} if is_lost and member.takes_part else {}
        _left(update, world, gone_early(member, gone=True, **lost), now, now, policy)
        return
    state = member.state if member.has_ended else MemberState.ENDED
    members = with_member(members_of(task), replace(member, state=state, gone=True))
    if task.state is TaskState.STOPPING:
        _settle(update, task, members, "stopped", now, policy)
    elif member.has_ended:
        update.move(Move.CHANGED, "rank_gone", holder=Gang(members))
    elif is_lost:
        _stop_others(update, world, members, StopReason.RANK_LOST, now, policy, _loss_of(member))
    else:
        outcome = Outcome(task.id, task.fence, Ending.LOST, now, failure=killed)
        update.outcome = _of_rank(outcome, report.rank)
        _stop_others(update, world, members, StopReason.RANK_FAILED, now, policy, _failure_of(member))


def node_lost(update: TaskUpdate, world: World, node: NodeName, now: Instant, policy: Policy) -> None:
    """Give up the ranks on the node. If the gang can lose those that were at work, it goes on without them.
    Otherwise the other ranks stop."""
    task = update.known
    lost = [member for member in members_of(task) if member.node == node and not member.gone]
    at_work = {member.rank for member in lost if member.takes_part and not member.has_ended}
    goes_on = at_work <= {*removable_ranks(task)}
    members = members_of(task)
    for member in lost:
        state = member.state if member.has_ended else MemberState.ENDED
        after = replace(member, state=state, gone=True)
        if goes_on and member.rank in at_work:
            after = gone_early(member, gone=True, stop_deadline_at=now)
        elif not member.takes_part:
            after = gone_early(member, gone=True)
        members = with_member(members, after)
    if task.state is TaskState.STOPPING:
        _settle(update, task, members, "node_lost", now, policy)
    elif not goes_on:
        _stop_others(update, world, members, StopReason.RANK_LOST, now, policy, f"the loss of node {node}")
    else:
        _go_on(update, world, members, now)


def _failure_of(member: Member) -> str:
    return f"the failure of rank {member.rank} on {member.node}"


def _loss_of(member: Member) -> str:
    return f"the loss of rank {member.rank} on {member.node}"


def _stop_others(
    update: TaskUpdate,
    world: World,
    members: tuple[Member, ...],
    reason: StopReason,
    now: Instant,
    policy: Policy,
    cause: str,
) -> None:
    """Stop all ranks that still run. Once each rank is gone, or given up, the gang moves on."""
    task = update.known
    until = Instant(now + task.grace_seconds)
    stopping = replace(task, holder=Gang(members), stop_reason=reason)
    if all(member.gone for member in members):
        _settle(update, stopping, members, reason, now, policy)
        return
    notice = {"stop_reason": reason, "stop_deadline_at": until, **with_cause(task, cause)}
    update.move(Move.STOPPING, reason, holder=Gang(members), **notice)
    at_work = (member for member in members if not member.has_ended)
    update.orders += [stop_order(world, task, member, task.grace_seconds, reason) for member in at_work]


def _settle(
    update: TaskUpdate, task: Task, members: tuple[Member, ...], reason: str, now: Instant, policy: Policy
) -> None:
    changes: dict[str, Any] = {"holder": Gang(members)}
    next_move = Move.CHANGED
    if all(member.gone for member in members):
        next_move, moved = after_stop(task, now, policy)
        changes |= moved
    update.move(next_move, reason, **changes)


def _of_rank(outcome: Outcome, rank: int) -> Outcome:
    failure = outcome.failure
    assert failure is not None, "it did not succeed"
    return replace(outcome, failure=replace(failure, message=f"rank {rank}: {failure.message}"))


def stop_ranks(
    world: World,
    task: Task,
    ranks: Collection[int],
    preemptor: TaskId | None,
    now: Instant,
    grace_seconds: Seconds | None = None,
    cause: str | None = None,
) -> tuple[TaskWrite, tuple[Order, ...]]:
    """Ask ranks that a running gang can lose to stop, and send the other ranks the list of those that remain.

    `grace_seconds` replaces the task's own grace period. `cause` says why the ranks stop if no preemptor
    needs their room.
    """
    grace = task.grace_seconds if grace_seconds is None else grace_seconds
    until = Instant(now + grace)
    leaving = {"state": MemberState.LEAVING, "freeing_for": preemptor, "stop_deadline_at": until}
    members = tuple(
        gone_early(member, **leaving) if member.rank in ranks else member for member in members_of(task)
    )
    what, changes = going_on(members, now)
    write = write_move(task, what, **changes, **with_cause(task, cause))
    stops = (stop_order(world, write.task, members[rank], grace) for rank in sorted(ranks))
    return write, (*stops, *news_of_world(world, task, write.task))


def stop_order(
    world: World, task: Task, member: Member, grace_seconds: Seconds, why: StopReason = StopReason.PREEMPT
) -> StopOrder:
    incarnation = world.nodes[member.node].incarnation
    return StopOrder(task.id, task.fence, member.node, incarnation, why, grace_seconds, member.rank)


def world_orders(world: World, task: Task) -> Iterator[WorldOrder]:
    """Yield for each rank at work the order that lists the ranks at work; nothing if they are those of the
    start."""
    members = members_of(task)
    number, ranks = world_number(members), workers(members)
    has_grown = any(member.is_late for member in members)
    for rank in ranks if number else ():
        member = members[rank]
        if not member.has_ended:
            address = member.node, world.nodes[member.node].incarnation
            yield WorldOrder(task.id, task.fence, *address, ranks, rank, number if has_grown else None)


def news_of_world(world: World, before: Task, after: Task) -> Iterator[Order]:
    """Yield the orders after ranks have joined or left: all ranks at work are told, and new ranks begin."""
    members, past = members_of(after), members_of(before)
    if after.state is not TaskState.RUNNING or world_number(past) == world_number(members):
        return
    yield from world_orders(world, after)
    for rank in workers(members):
        if rank not in workers(past):
            yield go_order(world, after, members[rank])


def without_preemptor(task: Task, preemptor: TaskId) -> dict[str, Any]:
    """Return the changes of a task and its ranks when this preemptor no longer waits for their memory."""
    changes: dict[str, Any] = {"freeing_for": None} if task.freeing_for == preemptor else {}
    if any(member.freeing_for == preemptor for member in members_of(task)):
        members = (
            replace(member, freeing_for=None) if member.freeing_for == preemptor else member
            for member in members_of(task)
        )
        changes["holder"] = Gang(tuple(members))
    return changes


def kills(world: World, task: Task, late: Collection[Member]) -> Decision:
    orders = tuple(stop_order(world, task, member, Seconds(0.0)) for member in late)
    return Decision(task.id, "kill", orders=orders)


def give_up(world: World, task: Task, late: Collection[Member], now: Instant) -> Decision:
    """Give up ranks that have not been confirmed gone in time. The gang goes on, and the leases of these
    ranks go into quarantine."""
    ranks = {member.rank for member in late}
    members = tuple(
        replace(member, state=MemberState.LEFT, gone=True) if member.rank in ranks else member
        for member in members_of(task)
    )
    leases = tuple(
        quarantine(lease, now)
        for lease in world.leases_of(task)
        if lease.rank in ranks and lease.state is not LeaseState.QUARANTINED
    )
    next_move, changes = going_on(members, now)
    write = write_move(task, next_move, **changes)
    orders = tuple(news_of_world(world, task, write.task))
    return Decision(task.id, "unconfirmed", tasks=(write,), leases=leases, orders=orders)


def going_on(members: tuple[Member, ...], at: Instant) -> tuple[Move, dict[str, Any]]:
    """Return the move of a running gang after a rank became ready, succeeded or left, and the changed fields.

    The gang has succeeded when every rank that took part has, and no rank is still leaving. Joining ranks
    begin together, when all of them are ready.
    """
    joining = [member for member in members if member.is_joining]
    if joining and all(member.address for member in joining):
        members = tuple(
            replace(member, state=MemberState.READY, stop_deadline_at=None) if member.is_joining else member
            for member in members
        )
    if all(member.state in (MemberState.SUCCEEDED, MemberState.LEFT) for member in members):
        return Move.SUCCEEDED, {"finished_at": at, "holder": Gang(members)}
    return Move.CHANGED, {"holder": Gang(members)}
