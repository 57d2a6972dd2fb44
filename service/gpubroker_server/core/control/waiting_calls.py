"""Worker sets that cannot keep up with their calls."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.world import World


class WaitingCalls(NamedTuple):
    """A worker set with too few workers: as many calls wait as are under way, and each worker has as many as
    it may."""

    workers_of: TaskId
    """The set."""
    tenant: str
    name: str
    workers: int
    max_concurrency: int
    running: int
    waiting: int
    cpu_percent: float
    """The average use of the workers, in percent of one core."""


def waiting_calls(world: World, loads: Mapping[TaskId, Loaded]) -> Iterator[WaitingCalls]:
    """Yield the worker sets whose calls wait while all workers are busy, by what the workers last
    reported."""
    for one in world.worker_sets.values():
        told = [loads[it] for it in one.workers if it in loads and _runs(world, loads[it])]
        running, waiting = sum(it.running for it in told), sum(it.waiting for it in told)
        if told and running == len(told) * one.max_concurrency <= waiting:
            percent = sum(it.cpu_percent for it in told) / len(told)
            about = one.id, one.tenant, one.name, len(told), one.max_concurrency
            yield WaitingCalls(*about, running, waiting, percent)


def _runs(world: World, told: Loaded) -> bool:
    task = world.tasks.get(told.task)
    return task is not None and task.state is TaskState.RUNNING and task.fence == told.fence
