"""How many workers a set shall have."""

from collections.abc import Mapping, Sequence
from math import ceil

from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.submission import Scaling, WorkerSet
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId

DOWN_SHARE = 0.8
"""Fewer workers are wanted when they would be at this share of the target: at the target itself, the next
call would bring the worker back."""


class Autoscaler:
    """In one leader's memory: the next leader waits again before it takes workers away."""

    def __init__(self) -> None:
        self._low_since: dict[TaskId, Instant] = {}
        """Since when fewer workers would be enough."""

    def count(
        self, workers: WorkerSet, alive: Sequence[Task], loads: Mapping[TaskId, Loaded], now: Instant
    ) -> int:
        """More at once; fewer only after less was enough for some time."""
        scaling, count = workers.scaling, _within(workers, workers.count)
        load = None if scaling is None else _load(scaling, workers, alive, loads)
        if scaling is None or load is None:
            self._low_since.pop(workers.id, None)
            return count
        up = _within(workers, ceil(load / scaling.target))
        down = _within(workers, ceil(load / (scaling.target * DOWN_SHARE)))
        if up > count or down >= count:
            self._low_since.pop(workers.id, None)
            return max(up, count)
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
) -> float | None:
    """Of all workers together; None if it is not known."""
    if scaling.by == "signal":
        return workers.signal
    total = 0.0
    for task in alive:
        if task.state is not TaskState.RUNNING:
            continue
        told = loads.get(task.id)
        if told is None or told.fence != task.fence:
            return None  # it has just begun
        total += told.cpu_percent if scaling.by == "cpu" else told.running + told.waiting
    return total
