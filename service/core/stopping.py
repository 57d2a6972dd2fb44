"""How a run is asked to leave, and what becomes of its task once it has left."""

from collections.abc import Iterable
from typing import Any

from service.core.lease import Lease
from service.core.orders import Failure, ForgetOrder, StopOrder
from service.core.plan import TaskWrite, write_move
from service.core.task import Move, StopReason, Task
from service.core.units import Instant, Seconds, in_gib
from service.core.world import World

OFF_THE_NODE: dict[str, Any] = {
    "node": None,
    "admitted_at": None,
    "started_at": None,
    "not_before": None,
    "stop_reason": None,
    "stop_deadline_at": None,
    "freeing_for": None,
}
"""What a task forgets when it goes back to the queue. Its fence and its checkpoint stay."""


def give_notice(
    world: World, task: Task, reason: StopReason, grace_seconds: Seconds, now: Instant
) -> tuple[TaskWrite, StopOrder]:
    """An ADMITTED or RUNNING task on its way to STOPPING, and the notice its agent gets."""
    deadline_at = Instant(now + grace_seconds)
    write = write_move(task, Move.STOPPING, stop_reason=reason, stop_deadline_at=deadline_at)
    return write, stop_order(world, write.task, grace_seconds)


def after_stop(task: Task, now: Instant) -> tuple[Move, dict[str, Any]]:
    """How a STOPPING task moves on when its run is gone, or is given up. A preemption uses up no retry."""
    match task.stop_reason:
        case StopReason.PREEMPT:
            return Move.REQUEUED, {**OFF_THE_NODE, "preemptions": task.preemptions + 1}
        case StopReason.CANCEL:
            return Move.CANCELLED, {"finished_at": now, "freeing_for": None}
        case StopReason.DEADLINE:
            return Move.EXPIRED, {"finished_at": now, "freeing_for": None}
        case _:
            return Move.FAILED, {"finished_at": now, "freeing_for": None}


def out_of_time(task: Task, reason: StopReason | None) -> Failure | None:
    """What people read of a run that was stopped by the clock, whatever else it left behind."""
    match reason:
        case StopReason.TIMEOUT:
            return Failure("timeout", f"the run passed its limit of {task.timeout_seconds:g} s")
        case StopReason.DEADLINE:
            began_at = task.started_at or task.admitted_at or task.submitted_at
            ran_seconds = (task.deadline_at or began_at) - began_at
            return Failure("deadline", f"its deadline passed when the run had had {ran_seconds:.0f} s")
        case _:
            return None


def over_use(reason: StopReason | None, leases: Iterable[Lease]) -> Failure | None:
    """What people read of a run that was stopped because it used more than it leased."""
    if reason is not StopReason.OVERUSE:
        return None
    used = "; ".join(
        f"{in_gib(lease.overused_mb)} of a GPU of which it leased {in_gib(lease.mb)}"
        for lease in leases
        if lease.overused_mb
    )
    return Failure("over_use", f"the run used {used}; ask for more gpu_mb, or for gpu_mb: learned")


def stop_order(world: World, task: Task, grace_seconds: Seconds) -> StopOrder:
    """For a task that is STOPPING: it is on a node, for a reason."""
    assert task.node is not None
    assert task.stop_reason is not None
    incarnation = world.nodes[task.node].incarnation
    return StopOrder(task.id, task.fence, task.node, incarnation, task.stop_reason, grace_seconds)


def forget_order(world: World, task: Task) -> ForgetOrder:
    """For a task that is on a node: the agent may drop what it kept of this run."""
    assert task.node is not None
    return ForgetOrder(task.id, task.fence, task.node, world.nodes[task.node].incarnation)
