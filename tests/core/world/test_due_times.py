"""What is due when, however often entries change."""

from collections.abc import Iterator
from typing import Any

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.world.due_times import DueTimes
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import GIB, NOW, a_task, a_world, holding

WATCHED = ObservationWindow(since=Instant(0.0), last=Instant(NOW - 0.5))
acts = st.lists(st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(0, 9))), max_size=300)


@given(acts, st.integers(0, 9))
def test_due_entries_are_those_that_a_full_scan_finds(acts: list[tuple[int, int | None]], now: int) -> None:
    table = DueTimes()
    for number, at in acts:
        if at is None:
            table.pop(TaskId(f"t{number}"), None)
        else:
            table[TaskId(f"t{number}")] = Instant(float(at))
        expected = sorted(
            (task for task in table if table[task] <= now), key=lambda task: (table[task], task)
        )
        assert table.due(Instant(float(now))) == expected
        assert table.due(Instant(float(now))) == expected


def test_removed_entries_do_not_accumulate() -> None:
    table = DueTimes()
    table[TaskId("stays")] = Instant(1.0)
    for number in range(10_000):
        table[TaskId("goes")] = Instant(float(number))
        del table[TaskId("goes")]
    assert len(table._heap) < 200
    assert table.due(Instant(1.0)) == ["stays"]


class Looked(dict[TaskId, Task]):
    """Tasks, and which of them were examined."""

    def __init__(self, tasks: dict[TaskId, Task]) -> None:
        super().__init__(tasks)
        self.at: set[TaskId] = set()

    def __getitem__(self, name: TaskId) -> Task:
        self.at.add(name)
        return super().__getitem__(name)

    def values(self) -> Any:
        raise AssertionError("it looked at all of them")


def test_only_tasks_that_may_be_due_are_examined() -> None:
    """However many run: the leader looks in each of its turns."""

    def runs() -> Iterator[Any]:
        for number in range(50):
            limit = {"timeout_seconds": 1000.0} if number % 2 else {"deadline_at": Instant(NOW + 1000.0)}
            yield holding(a_task(f"r{number:02}", gpu_mb=GIB, **limit), "gpu0", started_at=NOW)

    world = a_world(*runs(), holding(a_task("late", gpu_mb=GIB, timeout_seconds=100.0), "gpu0"))
    world.tasks = looked = Looked(world.tasks)
    assert [decision.subject for decision in due(world, NOW, Policy(), WATCHED)] == ["late"]
    assert looked.at == {"late"}
