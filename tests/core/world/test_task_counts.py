from collections import Counter

from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.task_counts import (
    finished_tasks,
    live_tasks,
    models_by_state,
    oldest_queued,
    pending_tasks,
    tasks_by_tenant,
)

from tests.builders import NOW, a_device, a_task, a_world, holding, submit


def test_live_tasks_are_counted_by_state_and_band() -> None:
    world = a_world(a_device(), holding(a_task("runs", priority=50), "gpu0"))
    for id, priority in (("a", 95), ("b", 95), ("c", 5)):
        submit(world, a_task(id, priority=priority))
    submit(world, a_task("held", priority=5, held=True))
    assert live_tasks(world) == {
        (TaskState.RUNNING, "batch"): 1, (TaskState.PENDING, "critical"): 2, (TaskState.PENDING, "idle"): 2,
    }  # fmt: skip


def test_pending_tasks_are_counted_by_what_is_known_without_planning() -> None:
    world = a_world(a_device())
    for id in "ab":
        submit(world, a_task(id))
    submit(world, a_task("held", held=True))
    submit(world, a_task("later", not_before=Instant(NOW + 60.0)))
    assert pending_tasks(world) == {
        "Held": 1, "DependencyPending": 0, "NotBefore": 1, "QueuePaused": 0, "Queued": 2,
    }  # fmt: skip


def test_the_oldest_queued_task_of_each_band_is_found() -> None:
    world = a_world(a_device())
    for id, ago, fields in (("a", 5.0, {}), ("b", 9.0, {"gpu_mb": 8}), ("c", 7.0, {"priority": 95})):
        submit(world, a_task(id, submitted_at=Instant(NOW - ago), **fields))
    assert oldest_queued(world) == {"batch": NOW - 9.0, "critical": NOW - 7.0}


def test_finished_tasks_are_summed_over_tenants() -> None:
    world = a_world()
    world.finished = Counter(
        {("a", TaskState.FAILED): 2, ("b", TaskState.FAILED): 3, ("b", TaskState.EXPIRED): 1}
    )
    assert finished_tasks(world) == {TaskState.FAILED: 5, TaskState.EXPIRED: 1}


def test_models_are_counted_apart_from_tasks() -> None:
    world = a_world(
        a_device(), holding(a_task("loaded", holder=Model("main", "loaded"), priority=50), "gpu0")
    )
    waits = a_task("waits", holder=Model("main", "waits"), priority=50, gpu_mb=8)
    parked = a_task("parked", holder=Model("main", "parked", yields=True), not_before=Instant(NOW + 60.0))
    submit(world, waits, parked, a_task("task"))
    assert live_tasks(world) == {(TaskState.PENDING, "batch"): 1}
    assert {reason: count for reason, count in pending_tasks(world).items() if count} == {"Queued": 1}
    assert tasks_by_tenant(world) == (Counter({"default": 1}), Counter())
    assert models_by_state(world) == (Counter({TaskState.RUNNING: 1, TaskState.PENDING: 1}), 0)


def test_a_model_is_not_the_oldest_task_that_is_queued() -> None:
    world = a_world(a_device())
    submit(world, a_task("model", holder=Model("main", "m"), gpu_mb=8, submitted_at=Instant(NOW - 9.0)))
    assert oldest_queued(world) == {}
