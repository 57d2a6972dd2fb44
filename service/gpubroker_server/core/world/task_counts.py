"""Counts of tasks and models for overviews and metrics. The cost grows with the number of different demands,
not with the queue.

A model, or a server's base cost, has a row like a task but is no task: it is counted among the models only.
"""

from collections import Counter
from collections.abc import Mapping

from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.policy import band_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import TaskState, model_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.model_index import is_unasked
from gpubroker_server.core.world.world import World

QUEUED = "Queued"
"""The reason given for tasks that may be planned, since planning alone tells why each of them waits."""


def live_tasks(world: World) -> Counter[tuple[TaskState, str]]:
    """Count the tasks that have not ended, by state and band."""
    queue = world.queue
    live: Counter[tuple[TaskState, str]] = Counter()
    for (_tenant, priority, *_equivalence), group in queue.groups.items():
        live[TaskState.PENDING, band_of(priority)[0]] += len(group)
    for task in (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused, *world.active):
        row = world.tasks[task]
        live[row.state, band_of(row.priority)[0]] += 1
    live.subtract(Counter((model.state, band_of(model.priority)[0]) for model in world.models.live()))
    return +live


def tasks_by_tenant(world: World) -> tuple[Counter[str], Counter[str]]:
    """Count the pending and the active tasks of each tenant."""
    queue, active = world.queue, Counter(world.tasks[task].tenant for task in world.active)
    pending: Counter[str] = Counter()
    for group in queue.groups.values():
        pending[group.tenant] += len(group)
    apart = (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused)
    pending.update(world.tasks[task].tenant for task in apart)
    for model in world.models.live():
        (pending if model.state is TaskState.PENDING else active)[model.tenant] -= 1
    return +pending, +active


def models_by_state(world: World) -> tuple[Counter[TaskState], int]:
    """Count the models that are wanted or loaded, by state, and the servers with a base cost. A model that
    has made room, and that no request has needed since, is not wanted."""
    models = [task for task in world.models.live() if model_of(task).model]
    bases = sum(1 for _ in world.models.live()) - len(models)
    return Counter(task.state for task in models if not is_unasked(task)), bases


def pending_tasks(world: World) -> Mapping[str, int]:
    """Count the pending tasks by the reason that is known without planning."""
    queue = world.queue
    models = [task.id for task in world.models.live() if task.state is TaskState.PENDING]
    return {
        Reason.HELD.value: len(queue.held) - sum(model in queue.held for model in models),
        Reason.DEPENDENCY_PENDING.value: len(queue.awaiting),
        Reason.NOT_BEFORE.value: len(queue.delayed) - sum(model in queue.delayed for model in models),
        Reason.QUEUE_PAUSED.value: len(queue.paused) - sum(model in queue.paused for model in models),
        QUEUED: sum(map(len, queue.groups.values())) - sum(model in queue for model in models),
    }


def oldest_queued(world: World) -> Mapping[str, Instant]:
    """Return when the oldest task of each band that may be planned was submitted."""
    oldest: dict[str, Instant] = {}
    for (_tenant, priority, *_alike), group in world.queue.groups.items():
        submitted_at, task = group.member(0)
        if not isinstance(world.tasks[task].holder, Model):  # one task stands for all of its demand
            band = band_of(priority)[0]
            oldest[band] = Instant(min(submitted_at, oldest.get(band, submitted_at)))
    return oldest


def finished_tasks(world: World) -> Counter[TaskState]:
    """Count the tasks of all tenants that have ended, by the state in which they ended."""
    finished: Counter[TaskState] = Counter()
    for (_tenant, state), count in world.finished.items():
        finished[state] += count
    return finished
