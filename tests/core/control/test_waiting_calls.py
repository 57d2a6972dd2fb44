"""Sets whose workers all have as many calls as they may, and as many that wait."""

from typing import Any

import pytest
from gpubroker_server.core.control.waiting_calls import WaitingCalls, waiting_calls
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, TaskId

from tests.builders import NOW, a_task, a_world, holding


def told(worker: str, running: int, waiting: int, **fields: Any) -> Loaded:
    return Loaded(TaskId(worker), fields.get("fence", Fence(1)), NOW, running, waiting, 50.0)


@pytest.mark.parametrize(
    ("loads", "is_found"),
    [
        ([told("a", 2, 4), told("b", 2, 0)], True),
        ([told("a", 2, 4)], True),
        ([told("a", 2, 3), told("b", 2, 0)], False),
        ([told("a", 2, 9), told("b", 1, 0)], False),
        ([told("a", 2, 9, fence=Fence(7))], False),
        ([told("starts", 2, 9), told("gone", 2, 9)], False),
        ([], False),
    ],
)
def test_all_are_full_and_as_many_calls_wait_as_are_under_way(loads: list[Loaded], is_found: bool) -> None:
    workers = [holding(a_task(name), fence=Fence(1)) for name in ("a", "b")]
    starts = holding(a_task("starts"), state=TaskState.ADMITTED, fence=Fence(1))
    world = a_world(*workers, starts)
    names = tuple(map(TaskId, ("a", "b", "starts", "gone")))
    world.worker_sets[TaskId("a")] = WorkerSet(TaskId("a"), "acme", "judges", names, 0, 4, 4, 2, NOW)
    found = list(waiting_calls(world, {one.task: one for one in loads}))
    running, waiting = 2 * len(loads), sum(one.waiting for one in loads)
    expected = WaitingCalls(TaskId("a"), "acme", "judges", len(loads), 2, running, waiting, 50.0)
    assert found == ([expected] if is_found else [])
