"""Ranks that leave a gang which goes on without them: the first to give memory back."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, TaskWrite, write_move
from gpubroker_server.core.domain.gang_member import Member, MemberState
from gpubroker_server.core.domain.lease import LeaseState, quarantine
from gpubroker_server.core.domain.orders import Order, StopOrder, WorldOrder
from gpubroker_server.core.domain.task import Move, StopReason, Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.world.world import World


def ask_to_leave(
    world: World, task: Task, ranks: Collection[int], preemptor: TaskId, now: Instant
) -> tuple[TaskWrite, tuple[Order, ...]]:
    """Of a gang at work, ranks that it can do without. They get notice, the others hear who is left."""
    until = Instant(now + task.grace_seconds)
    members = tuple(
        replace(member, state=MemberState.LEAVING, freeing_for=preemptor, stop_deadline_at=until)
        if member.rank in ranks
        else member
        for member in task.members
    )
    write = write_move(task, Move.CHANGED, members=members)
    stops = (stop_order(world, write.task, members[rank], task.grace_seconds) for rank in sorted(ranks))
    return write, (*stops, *world_orders(world, write.task))


def stop_order(world: World, task: Task, member: Member, grace_seconds: Seconds) -> StopOrder:
    incarnation = world.nodes[member.node].incarnation
    why = StopReason.PREEMPT, grace_seconds
    return StopOrder(task.id, task.fence, member.node, incarnation, *why, member.rank)


def world_orders(world: World, task: Task) -> Iterator[WorldOrder]:
    """For each rank at work which others are; none if all are that ever were."""
    if all(member.takes_part for member in task.members):
        return
    ranks = tuple(member.rank for member in task.members if member.takes_part)
    for member in task.members:
        if member.takes_part and not member.has_ended:
            incarnation = world.nodes[member.node].incarnation
            yield WorldOrder(task.id, task.fence, member.node, incarnation, ranks, member.rank)


def freed_for_nobody(task: Task, preemptor: TaskId) -> dict[str, Any]:
    """What changes of a task, and of its ranks, when this preemptor does not wait for them any longer."""
    changes: dict[str, Any] = {"freeing_for": None} if task.freeing_for == preemptor else {}
    if any(member.freeing_for == preemptor for member in task.members):
        changes["members"] = tuple(
            replace(member, freeing_for=None) if member.freeing_for == preemptor else member
            for member in task.members
        )
    return changes


def kills(world: World, task: Task, late: Collection[Member]) -> Decision:
    orders = tuple(stop_order(world, task, member, Seconds(0.0)) for member in late)
    return Decision(task.id, "kill", orders=orders)


def give_up(world: World, task: Task, late: Collection[Member], now: Instant) -> Decision:
    """Nobody confirms that these ranks are gone: the gang goes on, their memory does not come back."""
    ranks = {member.rank for member in late}
    members = tuple(
        replace(member, state=MemberState.LEFT, gone=True) if member.rank in ranks else member
        for member in task.members
    )
    leases = tuple(
        quarantine(lease, now)
        for lease in world.leases_of(task)
        if lease.rank in ranks and lease.state is not LeaseState.QUARANTINED
    )
    what, changes = going_on(members, now)
    write = write_move(task, what, **changes)
    return Decision(task.id, "unconfirmed", tasks=(write,), leases=leases)


def going_on(members: tuple[Member, ...], at: Instant) -> tuple[Move, dict[str, Any]]:
    """A gang at work after one of its ranks ended well, or left. It has succeeded when every rank that took
    part to the end has, and nobody is still on its way out."""
    if all(member.state in (MemberState.SUCCEEDED, MemberState.LEFT) for member in members):
        return Move.SUCCEEDED, {"finished_at": at, "members": members}
    return Move.CHANGED, {"members": members}
