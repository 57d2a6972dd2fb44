"""Which workers of a set come and which leave, and what clients ask of a set."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.decisions import (
    Decision,
    Notice,
    Request,
    TaskWrite,
    withdraw_pledges,
    write_move,
)
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.submission import WorkerSet, worker_set_from
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.lifecycle.stopping import AnyStopOrder, orders_to_leave, will_requeue
from gpubroker_server.core.lifecycle.worker_sets.scaling import Autoscaler
from gpubroker_server.core.world.world import World

REQUESTS = frozenset({"form", "scale", "signal"})

STABLE_SECONDS = Seconds(600.0)
"""After so long at work, the failures of a worker are forgotten: its next restart waits as briefly as its
first."""

_LEAVES = {TaskState.PENDING: 0, TaskState.STOPPING: 1, TaskState.ADMITTED: 2, TaskState.RUNNING: 3}
"""What has the least to lose leaves first."""


def carry_out(world: World, request: Request, done: Decision) -> Decision:
    """Settles the request. One about a set that is over, or that is there already, changes nothing."""
    known = world.worker_sets.get(request.task)
    match request.what, known:
        case "form", None:
            formed = worker_set_from(request.fields)
            return replace(done, worker_sets=(formed,)) if formed.id in world.tasks else done
        case "scale", WorkerSet():
            return replace(done, worker_sets=(changed(known, **request.fields),))
        case "signal", WorkerSet():
            return replace(done, worker_sets=(changed(known, signal=float(request.fields["value"])),))
        case _:
            return done


def due(world: World, loads: Mapping[TaskId, Loaded], autoscaler: Autoscaler, now: Instant) -> list[Decision]:
    """What brings each set to the number of workers that it shall have."""
    decisions = (_due(world, workers, loads, autoscaler, now) for workers in world.worker_sets.values())
    return [decision for decision in decisions if not decision.is_empty()]


def _due(
    world: World, workers: WorkerSet, loads: Mapping[TaskId, Loaded], autoscaler: Autoscaler, now: Instant
) -> Decision:
    rows = (world.tasks.get(worker) for worker in workers.workers)
    alive = [task for task in rows if task is not None and not task.is_terminal]
    if not alive:
        autoscaler.forget(workers.id)
        notices = tuple(_came_and_left(world, workers, {}))
        return Decision(workers.id, "worker_set_over", sets_over=(workers,), notices=notices)
    count = autoscaler.count(workers, alive, loads, now)
    joined = {task.id: task.fence for task in alive if task.state is TaskState.RUNNING}
    decision = Decision(workers.id, "scale", notices=tuple(_came_and_left(world, workers, joined)))
    if (count, joined) != (workers.count, workers.joined):
        decision = replace(decision, worker_sets=(changed(workers, count=count, joined=joined),))
    wanted = sorted((task for task in alive if not task.held), key=_leaving_order)
    surplus = len(wanted) - count
    if surplus > 0:
        return _with_leaving(world, decision, wanted[:surplus], now)
    coming = [task for task in alive if task.held][:-surplus]
    writes = [write_move(task, Move.CHANGED, held=False) for task in coming]
    stable = (task for task in wanted if task.failures and _is_stable(task, now))
    writes += [write_move(task, Move.CHANGED, failures=0) for task in stable]
    return replace(decision, tasks=tuple(writes))


def _came_and_left(world: World, workers: WorkerSet, joined: Mapping[TaskId, Fence]) -> Iterator[Notice]:
    """Since the row was last written. A worker that starts again has left and joined."""
    for worker, fence in workers.joined.items() - joined.items():
        left = {"set": workers.id, "attempt": fence}
        yield Notice("worker.left", worker, left, workers.tenant)
    for worker, fence in joined.items() - workers.joined.items():
        came = {"set": workers.id, "attempt": fence, "node": world.tasks[worker].node}
        yield Notice("worker.joined", worker, came, workers.tenant)


def _leaving_order(task: Task) -> tuple[int, float, TaskId]:
    """The newest first."""
    return _LEAVES[task.state], -(task.started_at or task.submitted_at), task.id


def _is_stable(task: Task, now: Instant) -> bool:
    began_at = task.started_at
    return task.state is TaskState.RUNNING and began_at is not None and now - began_at >= STABLE_SECONDS


def _with_leaving(world: World, decision: Decision, leaving: list[Task], now: Instant) -> Decision:
    writes: list[TaskWrite] = []
    orders: tuple[AnyStopOrder, ...] = ()
    for task in leaving:
        if task.state in (TaskState.ADMITTED, TaskState.RUNNING):
            # As for a preemption: it is requeued once it is gone, and held then.
            deadline_at = Instant(now + task.grace_seconds)
            notice: dict[str, Any] = {"stop_reason": StopReason.PREEMPT, "stop_deadline_at": deadline_at}
            write = write_move(task, Move.STOPPING, held=True, **notice)
            writes.append(write)
            orders += orders_to_leave(world, write.task, task.grace_seconds)
        elif task.state is TaskState.PENDING or will_requeue(task):
            writes.append(write_move(task, Move.CHANGED, held=True))
    pledges = (pledge for task in leaving for pledge in withdraw_pledges(world.pledges.get(task.id, {})))
    return replace(decision, tasks=tuple(writes), orders=orders, pledges=tuple(pledges))
