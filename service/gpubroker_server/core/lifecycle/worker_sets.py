"""Worker sets: the requests about a set, the number of its workers, and which workers come and leave."""

from collections.abc import Mapping, Sequence
from math import ceil

from gpubroker.wire.worker_sets import Scaling
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import (
    Decision,
    Notice,
    Request,
    TaskWrite,
    WorkerSetWrite,
    write_move,
)
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.submission import WorkerSet, worker_set_from
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle.stopping import (
    AnyStopOrder,
    give_notice,
    will_requeue,
    withdraw_pledges,
)
from gpubroker_server.core.world.world import World

REQUESTS = frozenset({"form", "scale", "signal"})

STABLE_SECONDS = Seconds(600.0)
"""The time at work after which the failures of a worker are reset, so that its next restart waits as briefly
as its first."""

_LEAVES = {TaskState.PENDING: 0, TaskState.STOPPING: 1, TaskState.ADMITTED: 2, TaskState.RUNNING: 3}
"""The order in which workers leave: those that have the least to lose leave first."""


def carry_out(world: World, known: WorkerSet | None, request: Request) -> Decision:
    """Settle a request about a worker set. `known` is the set as earlier requests of the batch left it. A
    request changes nothing if the set is over, or if it asks to form a set that exists."""
    rows: tuple[WorkerSetWrite, ...] = ()
    match request.what, known:
        case "form", None:
            formed = worker_set_from(request.fields)
            rows = (WorkerSetWrite(formed, "formed"),) if formed.id in world.tasks else ()
        case "scale", WorkerSet():
            rows = _rewritten(known, scaled(known, **request.fields))
        case "signal", WorkerSet():
            rows = _rewritten(known, replace(known, signal=float(request.fields["value"])))
    return Decision(request.task, request.what, requests_done=(request.id,), worker_sets=rows)


def _rewritten(known: WorkerSet, after: WorkerSet) -> tuple[WorkerSetWrite, ...]:
    """Return the write of the changed set; nothing if nothing changed."""
    hot = ("least", "most", "count", "signal")
    names = tuple(name for name in hot if getattr(after, name) != getattr(known, name))
    return (WorkerSetWrite(after, "changed", names),) if names else ()


def scaled(
    workers: WorkerSet, count: int | None = None, least: int | None = None, most: int | None = None
) -> WorkerSet:
    """Return the set with the requested count and bounds. Values that were not given are adjusted so that
    least <= count <= most. Bounds follow a count only if nothing scales the set."""
    follows = None if workers.scaling is not None else count
    most = max(workers.most, least or 0, follows or 0) if most is None else most
    most = min(most, len(workers.workers))
    least = min(workers.least, workers.least if follows is None else follows) if least is None else least
    least = min(least, most)
    count = workers.count if count is None else count
    return replace(workers, least=least, most=most, count=min(max(count, least), most))


DOWN_SHARE = 0.8
"""The share of the target below which fewer workers are wanted. It is less than 1, because at the target
itself the next call would bring the worker back."""


class Autoscaler:
    """Chooses the number of workers of sets. The autoscaler lives in the memory of one leader: the next
    leader waits again before it takes workers away."""

    def __init__(self) -> None:
        self._low_since: dict[TaskId, Instant] = {}
        """Maps a worker set to the instant since which fewer workers would be enough."""

    def count(
        self, workers: WorkerSet, alive: Sequence[Task], loads: Mapping[TaskId, Loaded], now: Instant
    ) -> int:
        """Return the number of workers. It rises at once, but falls only after fewer workers have been enough
        for some time."""
        scaling, count = workers.scaling, _within(workers, workers.count)
        if scaling is None:
            return count
        load, is_complete = _load(scaling, workers, alive, loads)
        higher = _within(workers, ceil(load / scaling.target))
        down = _within(workers, ceil(load / (scaling.target * DOWN_SHARE)))
        if higher > count or down >= count or not is_complete:
            self._low_since.pop(workers.id, None)
            return max(higher, count)
        since = self._low_since.setdefault(workers.id, now)
        if now - since < scaling.down_after_seconds:
            return count
        del self._low_since[workers.id]
        return down

    def forget(self, workers: TaskId) -> None:
        self._low_since.pop(workers, None)


def _within(workers: WorkerSet, count: int) -> int:
    return min(max(count, workers.least), workers.most)


def _load(
    scaling: Scaling, workers: WorkerSet, alive: Sequence[Task], loads: Mapping[TaskId, Loaded]
) -> tuple[float, bool]:
    """Return the load of all workers together, as far as it is known, and whether it is known of all workers.
    An incomplete load is enough to have more workers come, but not to have one leave."""
    if scaling.by == "signal":
        return workers.signal or 0.0, workers.signal is not None
    total, is_complete = 0.0, True
    for task in alive:
        if task.state is not TaskState.RUNNING:
            continue
        load = loads.get(task.id)
        if load is None or load.fence != task.fence:
            is_complete = False  # the worker still makes its object
            continue
        total += load.cpu_percent if scaling.by == "cpu" else load.running + load.waiting
    return total, is_complete


def due(world: World, loads: Mapping[TaskId, Loaded], autoscaler: Autoscaler, now: Instant) -> list[Decision]:
    """Return the decisions that bring each set to its number of workers."""
    decisions = (_due(world, workers, loads, autoscaler, now) for workers in world.worker_sets.values())
    return [decision for decision in decisions if not decision.is_empty()]


def _due(
    world: World, workers: WorkerSet, loads: Mapping[TaskId, Loaded], autoscaler: Autoscaler, now: Instant
) -> Decision:
    rows = (world.tasks.get(worker) for worker in workers.workers)
    alive = [task for task in rows if task is not None and not task.is_terminal]
    if not alive:
        autoscaler.forget(workers.id)
        return Decision(workers.id, "worker_set_over", worker_sets=(WorkerSetWrite(workers, "over"),))
    count = autoscaler.count(workers, alive, loads, now)
    decision = Decision(workers.id, "scale", worker_sets=_rewritten(workers, replace(workers, count=count)))
    wanted = sorted((task for task in alive if not task.held), key=_leaving_order)
    surplus = len(wanted) - count
    if surplus > 0:
        cause = f"the scaling of its set to {count} {'worker' if count == 1 else 'workers'}"
        return _with_leaving(world, decision, wanted[:surplus], now, cause)
    # Pending workers come first: a worker that still leaves could come only once it is gone.
    places = sorted(
        (task for task in alive if task.held), key=lambda task: task.state is not TaskState.PENDING
    )
    coming = places[:-surplus]  # the surplus is not positive here; without any, the slice [:0] is empty
    writes = [write_move(task, Move.CHANGED, held=False) for task in coming]
    stable = (task for task in wanted if task.failures and _is_stable(task, now))
    writes += [write_move(task, Move.CHANGED, failures=0) for task in stable]
    return replace(decision, tasks=tuple(writes))


def with_notices(world: World, decision: Decision) -> Decision:
    """Return the decision with a notice of each worker that it lets join or leave, so that the log has the
    notice in the commit by which the worker runs, or no longer does."""
    notices = tuple(notice for write in decision.tasks if (notice := _came_or_left(world, write.task)))
    return replace(decision, notices=decision.notices + notices) if notices else decision


def _came_or_left(world: World, task: Task) -> Notice | None:
    before, workers = world.tasks.get(task.id), world.worker_sets.of(task.id)
    runs = task.state is TaskState.RUNNING
    if workers is None or before is None or runs is (before.state is TaskState.RUNNING):
        return None
    about = {"set": workers.id, "attempt": task.fence}
    if runs:
        return Notice("worker.joined", task.id, {**about, "node": task.node}, workers.tenant)
    return Notice("worker.left", task.id, about, workers.tenant)


def _leaving_order(task: Task) -> tuple[int, float, TaskId]:
    """Return the key that orders workers by `_LEAVES`, then the newest first."""
    return _LEAVES[task.state], -(task.started_at or task.submitted_at), task.id


def _is_stable(task: Task, now: Instant) -> bool:
    began_at = task.started_at
    return task.state is TaskState.RUNNING and began_at is not None and now - began_at >= STABLE_SECONDS


def _with_leaving(
    world: World, decision: Decision, leaving: list[Task], now: Instant, cause: str
) -> Decision:
    writes: list[TaskWrite] = []
    orders: tuple[AnyStopOrder, ...] = ()
    for task in leaving:
        if task.state in (TaskState.ADMITTED, TaskState.RUNNING):
            # Stop the worker like a preempted run: it is requeued once it is gone, and is then held.
            write, told = give_notice(
                world, task, StopReason.PREEMPT, task.grace_seconds, now, cause, held=True
            )
            writes.append(write)
            orders += told
        elif task.state is TaskState.PENDING or will_requeue(task):
            writes.append(write_move(task, Move.CHANGED, held=True))
    pledges = (pledge for task in leaving for pledge in withdraw_pledges(world, task))
    return replace(decision, tasks=tuple(writes), orders=orders, pledges=tuple(pledges))
