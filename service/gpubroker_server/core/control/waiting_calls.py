"""Find worker sets that cannot keep up with their calls."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.world import World


class WaitingCalls(NamedTuple):
    """A worker set with too few workers: each worker has as many calls as it may take, and at least as many
    calls wait."""

    workers_of: TaskId
    """The id of the worker set."""
    tenant: str
    name: str
    workers: int
    max_concurrency: int
    running: int
    waiting: int
    cpu_percent: float
    """The average use of the workers, in percent of one core."""


def waiting_calls(world: World, loads: Mapping[TaskId, Loaded]) -> Iterator[WaitingCalls]:
    """Yield the worker sets whose calls wait while all workers are busy. `loads` has the last report of each
    worker."""
    for workers in world.worker_sets.values():
        reported = [
            loads[worker] for worker in workers.workers if worker in loads and _runs(world, loads[worker])
        ]
        running, waiting = sum(load.running for load in reported), sum(load.waiting for load in reported)
        if reported and running == len(reported) * workers.max_concurrency <= waiting:
            percent = sum(load.cpu_percent for load in reported) / len(reported)
            about = workers.id, workers.tenant, workers.name, len(reported), workers.max_concurrency
            yield WaitingCalls(*about, running, waiting, percent)


def _runs(world: World, load: Loaded) -> bool:
    task = world.tasks.get(load.task)
    return task is not None and task.state is TaskState.RUNNING and task.fence == load.fence
