"""Counts of tasks for overviews and metrics. The cost grows with the number of different demands, not with
the queue."""

from collections import Counter
from collections.abc import Mapping

from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.world import World

QUEUED = "Queued"
"""The reason of tasks that may be planned: why each of them waits is not known without planning."""


def live_tasks(world: World) -> Counter[tuple[TaskState, str]]:
    """Count the tasks that have not ended, by state and band."""
    queue = world.queue
    live: Counter[tuple[TaskState, str]] = Counter()
    for (_tenant, priority, *_equivalence), group in queue.groups.items():
        live[TaskState.PENDING, band_of(priority)[0]] += len(group)
    for task in (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused, *world.active):
        row = world.tasks[task]
        live[row.state, band_of(row.priority)[0]] += 1
    return live


def pending_tasks(world: World) -> Mapping[str, int]:
    """Count the pending tasks by the reason that is known without planning."""
    queue = world.queue
    return {
        Reason.HELD.value: len(queue.held),
        Reason.DEPENDENCY_PENDING.value: len(queue.awaiting),
        Reason.NOT_BEFORE.value: len(queue.delayed),
        Reason.QUEUE_PAUSED.value: len(queue.paused),
        QUEUED: sum(map(len, queue.groups.values())),
    }


def oldest_queued(world: World) -> Mapping[str, Instant]:
    """Return when the oldest task of each band that may be planned was submitted."""
    oldest: dict[str, Instant] = {}
    for (_tenant, priority, *_equivalence), group in world.queue.groups.items():
        submitted_at, _task = group.member(0)
        band = band_of(priority)[0]
        oldest[band] = Instant(min(submitted_at, oldest.get(band, submitted_at)))
    return oldest


def finished_tasks(world: World) -> Counter[TaskState]:
    """Count the tasks of all tenants that have ended, by the state in which they did."""
    finished: Counter[TaskState] = Counter()
    for (_tenant, state), count in world.finished.items():
        finished[state] += count
    return finished
