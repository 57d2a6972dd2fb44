"""The ways to ask a run to stop, for overuse among others, and the changes of its task once it has
stopped."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, assert_never

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision, Outcome, PledgeWrite, TaskWrite, write_move
from gpubroker_server.core.domain.holders import External, Gang, Inference, Model, Run, WorkerSeat
from gpubroker_server.core.domain.lease import Lease, LeaseState, PledgeEnd, mark_overused
from gpubroker_server.core.domain.model_orders import DropOrder, UnloadOrder, unload_order
from gpubroker_server.core.domain.orders import Ending, Failure, ForgetOrder, StopOrder
from gpubroker_server.core.domain.policy import Policy, next_retry_at
from gpubroker_server.core.domain.ranks import node_of, ranks_of
from gpubroker_server.core.domain.task import Move, RetryOn, StopReason, Task, TaskState, stop_notice
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId, in_gib
from gpubroker_server.core.world.world import World

_OFF_THE_NODE: dict[str, Any] = {
    "node": None,
    "admitted_at": None,
    "ordered_at": None,
    "started_at": None,
    "not_before": None,
    "stop_reason": None,
    "stop_deadline_at": None,
    "stop_cause": None,
    "freeing_for": None,
}
AnyStopOrder = StopOrder | UnloadOrder | DropOrder
"""An order to a node agent, a model server, or the sender of inferences."""

_COME_BACK = (StopReason.PREEMPT, StopReason.MOVE, StopReason.RANK_LOST)

START_RETRIES = 3
"""The least number of retries of a gang that was not ready in time, even if its task has fewer."""


def requeued_fields(task: Task, **changes: Any) -> dict[str, Any]:
    """Return the changes of a task that is requeued. Its fence and its checkpoint stay."""
    ranks = {"holder": Gang()} if isinstance(task.holder, Gang) else {}
    return {**_OFF_THE_NODE, **ranks, **changes}


def give_notice(
    world: World,
    task: Task,
    reason: StopReason,
    grace_seconds: Seconds,
    now: Instant,
    cause: str | None = None,
    **changes: Any,
) -> tuple[TaskWrite, tuple[AnyStopOrder, ...]]:
    """Move an ADMITTED or RUNNING task to STOPPING, and return its row and the orders to send."""
    notice = {"stop_reason": reason, "stop_deadline_at": Instant(now + grace_seconds)}
    write = write_move(task, Move.STOPPING, **changes, **notice, **with_cause(task, cause))
    return write, orders_to_leave(world, write.task, grace_seconds)


def with_cause(task: Task, cause: str | None) -> dict[str, Any]:
    """Return the change of the task's cause, if it changes. An earlier notice may have left another cause."""
    return {} if cause == task.stop_cause else {"stop_cause": cause}


def withdraw_pledges(world: World, task: Task) -> tuple[PledgeWrite, ...]:
    pledges = world.pledges.get(task.id, {})
    return tuple(PledgeWrite(pledges[device], PledgeEnd.WITHDRAWN) for device in sorted(pledges))


def cancel_pending(world: World, task: Task, now: Instant, done: Decision) -> Decision:
    write = write_move(task, Move.CANCELLED, finished_at=now)
    return replace(done, tasks=(write,), pledges=withdraw_pledges(world, task))


def after_stop(task: Task, now: Instant, policy: Policy) -> tuple[Move, dict[str, Any]]:
    """Return the move of a STOPPING task whose runs are gone or given up, and the changed fields. A
    preemption, a move or a lost rank uses up no retry. An external holder does not come back; a model does
    while it is wanted."""
    match task.holder:
        case Model() as model:
            return _after_unload(task, model, now)
        case External() if task.stop_reason is not StopReason.CANCEL:
            return Move.EXPIRED, {"finished_at": now, "freeing_for": None}
        case _:
            return _after_run(task, now, policy)


def _after_run(task: Task, now: Instant, policy: Policy) -> tuple[Move, dict[str, Any]]:
    match task.stop_reason:
        case StopReason.PREEMPT:
            # A held task is a worker that its set no longer wants. It made room for no task, so the
            # preemption does not count.
            return Move.REQUEUED, requeued_fields(task, preemptions=task.preemptions + (not task.held))
        case StopReason.MOVE:
            # The reason stays, and tells the planner that the task only goes to the room kept for it.
            moved = {"preemptions": task.preemptions + 1, "stop_reason": StopReason.MOVE}
            return Move.REQUEUED, requeued_fields(task, **moved)
        case StopReason.RANK_LOST:
            return Move.REQUEUED, requeued_fields(task, not_before=next_retry_at(1, now, policy))
        case StopReason.RANK_FAILED | StopReason.START_TIMEOUT:
            return after_failure(task, now, now, policy)
        case StopReason.TIMEOUT if _is_retried_on(task, RetryOn.TIMEOUT):
            return after_failure(task, now, now, policy, RetryOn.TIMEOUT)
        case StopReason.CANCEL:
            return Move.CANCELLED, {"finished_at": now, "freeing_for": None}
        case StopReason.DEADLINE:
            return Move.EXPIRED, {"finished_at": now, "freeing_for": None}
        case _:
            return Move.FAILED, {"finished_at": now, "freeing_for": None}


def _after_unload(task: Task, model: Model, now: Instant) -> tuple[Move, dict[str, Any]]:
    if task.stop_reason is StopReason.CANCEL:
        return Move.CANCELLED, {"finished_at": now, "freeing_for": None}
    if task.expires_at is None or now < task.expires_at:
        changes: dict[str, Any] = {
            "preemptions": task.preemptions + 1,
            "priority": model.asked_priority,
            "holder": replace(model, left_at=now),  # queue the model behind those that wait now
        }
        if model.yields:  # the model waits until a request needs it, and then takes its turn
            changes["not_before"] = task.expires_at
        return Move.REQUEUED, requeued_fields(task, **changes)
    return Move.SUCCEEDED, {"finished_at": now, "freeing_for": None}


def after_failure(
    task: Task, at: Instant, now: Instant, policy: Policy, cause: RetryOn = RetryOn.FAILURE
) -> tuple[Move, dict[str, Any]]:
    """Return the move of a task whose run failed at `at`, which may be past, and the changed fields."""
    failures = task.failures + 1
    if failures > _retries_of(task, cause):
        return Move.FAILED, {"failures": failures, "finished_at": at, "freeing_for": None}
    not_before = next_retry_at(failures, now, policy)
    return Move.REQUEUED, requeued_fields(task, failures=failures, not_before=not_before)


def will_requeue(task: Task) -> bool:
    """Return True if a STOPPING task is requeued once its runs are gone."""
    if task.stop_reason is StopReason.TIMEOUT:
        return task.failures < _retries_of(task, RetryOn.TIMEOUT)
    if task.stop_reason in (StopReason.RANK_FAILED, StopReason.START_TIMEOUT):
        return task.failures < _retries_of(task, RetryOn.FAILURE)
    return task.stop_reason in _COME_BACK


def _retries_of(task: Task, cause: RetryOn) -> int:
    retries = task.max_retries if _is_retried_on(task, cause) else 0
    return max(retries, START_RETRIES) if task.stop_reason is StopReason.START_TIMEOUT else retries


def _is_retried_on(task: Task, cause: RetryOn) -> bool:
    """Return True if the task is retried after this cause. A worker of an array always is: the results of its
    items are stored, and its next run continues."""
    return isinstance(task.holder, WorkerSeat) or cause in task.retry_on


def timeout_failure(task: Task, reason: StopReason | None) -> Failure | None:
    """Return the failure of a run that was stopped at a time limit, whatever else it reports; None for
    another reason."""
    match reason:
        case StopReason.TIMEOUT:
            return Failure("timeout", f"the run passed its limit of {task.timeout_seconds:g} s")
        case StopReason.DEADLINE if isinstance(task.holder, External):
            return Failure("deadline", "it was not renewed in time")
        case StopReason.DEADLINE:
            began_at = task.started_at or task.admitted_at or task.submitted_at
            ran_seconds = (task.deadline_at or began_at) - began_at
            return Failure("deadline", f"its deadline passed after the run had run for {ran_seconds:.0f} s")
        case _:
            return None


def overuse_failure(reason: StopReason | None, leases: Iterable[Lease]) -> Failure | None:
    if reason is not StopReason.OVERUSE:
        return None
    used = "; ".join(
        f"{in_gib(lease.overused_mb, lease.mb)} of a GPU of which it leased "
        f"{in_gib(lease.mb, lease.overused_mb)}"
        for lease in leases
        if lease.overused_mb
    )
    return Failure("over_use", f"the run used {used}; ask for more gpu_mb, or for gpu_mb: learned")


def orders_to_leave(world: World, task: Task, grace_seconds: Seconds) -> tuple[AnyStopOrder, ...]:
    """Return the orders that ask a STOPPING task to leave its node, its server or its place there."""
    match task.holder:
        case Run() | Gang() | WorkerSeat():
            return stop_orders(world, task, grace_seconds)
        case Model() as model:
            return (unload_order(task, grace_seconds),) if model.model else ()
        case Inference():
            return (DropOrder(task.id, task.fence),)
        case External():
            return ()  # an external holder releases its lease by itself
        case _:
            assert_never(task.holder)


def stop_orders(world: World, task: Task, grace_seconds: Seconds) -> tuple[StopOrder, ...]:
    """Return one order per run of a STOPPING task that is not gone."""
    assert task.stop_reason is not None
    terms = task.stop_reason, grace_seconds
    return tuple(
        StopOrder(task.id, task.fence, node, world.nodes[node].incarnation, *terms, rank)
        for rank, node in ranks_of(task)
    )


def forget_order(world: World, task: Task, rank: int) -> ForgetOrder:
    """Return the order that lets the agent drop what it keeps of this run of an active task."""
    node = node_of(task, rank)
    return ForgetOrder(task.id, task.fence, node, world.nodes[node].incarnation, rank)


def overuse_decisions(world: World, now: Instant, policy: Policy) -> list[Decision]:
    """Return decisions that mark each lease that its run exceeds, once, and stop the run if the policy says
    so. A run that is not RUNNING, or is asked to stop, is left alone."""
    over: dict[TaskId, list[str]] = defaultdict(list)
    for key, holding in world.learned.above.items():
        lease = holding.lease
        task = world.holder(lease.holder, lease.fence)
        is_over = holding.measured_mb > lease.mb * (1 + policy.overuse_tolerance)
        if is_over and task is not None and _is_at_work(task, lease.rank):
            over[task.id].append(key)
    decisions = (_decision(world, world.tasks[name], over[name], now, policy) for name in sorted(over))
    return [decision for decision in decisions if not decision.is_empty()]


def _is_at_work(task: Task, rank: int) -> bool:
    is_model = isinstance(task.holder, Model)
    return task.state is TaskState.RUNNING and not is_model and not stop_notice(task, rank)[1]


def _decision(world: World, task: Task, keys: list[str], now: Instant, policy: Policy) -> Decision:
    leases = {lease.key: lease for lease in world.leases_of(task)}
    marks = tuple(
        mark_overused(leases[key], world.learned.above[key].measured_mb)
        for key in sorted(keys)
        if leases[key].state is LeaseState.HELD and not leases[key].overused_mb
    )
    if policy.overuse == "report":
        return Decision(task.id, "overuse", leases=marks)
    notice, orders = give_notice(world, task, StopReason.OVERUSE, task.grace_seconds, now)
    marked = {**leases, **{lease.key: lease for lease in marks}}
    verdict = Outcome(
        task.id, task.fence, Ending.FAILED, now, failure=overuse_failure(StopReason.OVERUSE, marked.values())
    )
    return Decision(task.id, "overuse", tasks=(notice,), leases=marks, outcome=verdict, orders=orders)
