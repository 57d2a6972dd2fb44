"""The order of the queue, and the groups it is kept in."""

from gpubroker_server.core.domain.policy import BAND_NAMES, Policy, band_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.world.queue import (
    EVEN,
    PendingQueue,
    QueueGroup,
    TenantOrderKey,
    order_key,
    order_within_tenant,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW, a_demand, a_task

POLICY = Policy(ageing_seconds_per_point=Seconds(60.0))


def in_order(*tasks: Task, now: float = NOW, **weights: float) -> list[str]:
    def place(task: Task) -> TenantOrderKey:
        weight = weights.get(task.stream, 1.0)
        return order_within_tenant(task.priority, weight, task.submitted_at, task.id, Instant(now), POLICY)

    return [task.id for task in sorted(tasks, key=place)]


def test_a_higher_band_goes_first_however_long_the_other_has_waited() -> None:
    old = a_task("old", priority=69, submitted_at=NOW - 1e6)
    assert in_order(old, a_task("new", priority=70)) == ["new", "old"]


def test_heavier_stream_goes_first_until_a_lighter_one_has_aged() -> None:
    heavy, light = a_task("heavy", stream="h"), a_task("light", stream="l", submitted_at=NOW - 59.0)
    assert in_order(light, heavy, h=2.0) == ["heavy", "light"]
    old = a_task("old", stream="l", submitted_at=NOW - 3600.0)
    younger = a_task("younger", stream="h", submitted_at=NOW - 3599.0)
    assert in_order(younger, old, h=2.0) == ["old", "younger"]


def aged_priority(priority: int, waited_seconds: float) -> int:
    return -order_within_tenant(priority, 1.0, Instant(NOW - waited_seconds), TaskId("t"), NOW, POLICY)[1]


def test_within_a_band_waiting_makes_up_for_priority() -> None:
    old = a_task("old", priority=50, submitted_at=NOW - 660.0)
    assert in_order(old, a_task("new", priority=60)) == ["old", "new"]


def test_ageing_ends_at_the_top_of_the_band() -> None:
    assert aged_priority(50, 1e9) == 69


def test_a_task_from_the_future_has_not_aged() -> None:
    assert aged_priority(50, -1e9) == 50


def test_equal_priorities_go_by_submission_and_then_by_id() -> None:
    tasks = (a_task("b"), a_task("a"), a_task("c", submitted_at=NOW - 1.0))
    assert in_order(*tasks) == ["c", "a", "b"]


def test_every_priority_lies_in_a_band_and_every_band_name_in_its_own() -> None:
    assert [band_of(priority)[0] for priority in (100, 90, 89, 70, 69, 40, 39, 10, 9, 0, -1)] == [
        "critical",
        "critical",
        "interactive",
        "interactive",
        "batch",
        "batch",
        "background",
        "background",
        "idle",
        "idle",
        "idle",
    ]
    assert all(band_of(middle)[0] == name for name, middle in BAND_NAMES.items())


members = st.tuples(st.integers(0, 20).map(float), st.text("abc", min_size=1, max_size=3).map(TaskId))


@given(st.lists(st.tuples(st.booleans(), members), max_size=200))
def test_a_group_stays_sorted_whatever_is_added_and_removed(
    changes: list[tuple[bool, tuple[float, TaskId]]],
) -> None:
    group = QueueGroup(("default", 50, a_demand(), "", 50))
    plain: list[tuple[float, TaskId]] = []
    for comes, member in changes:
        if comes and member not in plain:
            group.add(member)
            plain = sorted([*plain, member])
        elif not comes and plain:
            gone = plain.pop(0 if member[0] < 15 else len(plain) // 2)
            group.remove(gone)
        assert [group.member(index) for index in range(len(group))] == list(group) == plain


def test_a_group_drops_its_removed_members() -> None:
    group = QueueGroup(("default", 50, a_demand(), "", 50))
    for number in range(500):
        group.add((float(number), TaskId("t")))
    for number in range(400):
        group.remove((float(number), TaskId("t")))
    assert len(group) == 100
    assert len(group._members) < 300


def test_a_group_counts_its_members_before_a_place() -> None:
    group = QueueGroup(("default", 50, a_demand(), "", 50))
    for number in range(10):
        group.add((NOW - 10.0 * number, TaskId(f"t{number}")))
    third = order_within_tenant(50, 1.0, Instant(NOW - 70.0), TaskId("t7"), NOW, POLICY)
    assert group.count_own(third, NOW, POLICY) == 3
    assert group.count_until(order_key(third, EVEN), EVEN, NOW, POLICY) == 3
    assert group.count_until(order_key(third, EVEN), (1, 0), NOW, POLICY) == 0
    assert group.count_until(order_key(third, (1, 0)), EVEN, NOW, POLICY) == 10
    higher = order_within_tenant(95, 1.0, NOW, TaskId("x"), NOW, POLICY)
    assert group.count_until(order_key(higher, EVEN), EVEN, NOW, POLICY) == 0


def test_held_and_delayed_tasks_are_kept_apart_and_count_as_pending() -> None:
    queue = PendingQueue({})
    held, delayed = a_task("held", held=True), a_task("delayed", not_before=Instant(NOW + 5.0))
    for task in (held, delayed, a_task("ready")):
        queue.add(task)
    assert len(queue) == 3
    assert [task in queue for task in (TaskId("held"), TaskId("delayed"), TaskId("ready"))] == [
        False,
        False,
        True,
    ]
    queue.remove(held)
    queue.remove(delayed)
    assert len(queue) == 1


def test_delayed_tasks_are_queued_at_their_time_earliest_first() -> None:
    queue = PendingQueue({})
    tasks = [a_task(f"t{at}", not_before=Instant(NOW + at)) for at in (3, 1, 2)]
    for task in tasks:
        queue.add(task)
    assert queue.delayed.due(Instant(NOW + 2.0)) == ["t1", "t2"]
    queue.enter(tasks[1])
    assert TaskId("t1") in queue
    assert queue.delayed.due(Instant(NOW + 2.0)) == ["t2"]


def test_an_empty_group_is_dropped() -> None:
    queue = PendingQueue({})
    queue.add(a_task())
    queue.remove(a_task())
    assert queue.groups == {}


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["lab", "web"]), st.integers(0, 100), st.integers(0, 3), st.integers(0, 400)
        ),
        max_size=30,
    )
)
def test_the_tasks_of_a_tenant_come_in_the_order_of_the_queue(drawn: list[tuple[str, int, int, int]]) -> None:
    tasks = [
        a_task(f"t{n:02}", tenant=tenant, priority=priority, gpu_mb=size * 1024, submitted_at=NOW - waited)
        for n, (tenant, priority, size, waited) in enumerate(drawn)
    ]
    queue = PendingQueue({})
    for task in tasks:
        queue.add(task)
    for tenant in ("lab", "web", "nobody"):
        own = [task for task in tasks if task.tenant == tenant]
        assert list(queue.of_tenant(tenant, NOW, POLICY)) == in_order(*own)
