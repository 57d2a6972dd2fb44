"""Backpressure closes the lowest bands first, and opens all of them again."""

import pytest
from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.control.backpressure import Pressure, closed_below, follow, longest_wait_seconds
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Fence, Instant, Seconds

from tests.builders import NOW, a_task, a_world

THRESHOLDS = {"queue_length": Threshold(100.0, 80.0), "queue:*": Threshold(10.0, 5.0)}


def test_each_value_has_its_threshold_and_tenants_share_one() -> None:
    values = {"queue_length": 120.0, "queue:a": 10.0, "queue:b": 9.0, "disk": 1.0}
    alarms = follow({}, values, THRESHOLDS, Instant(7.0))
    assert alarms == {"queue_length": Alarm(True, Instant(7.0)), "queue:a": Alarm(True, Instant(7.0)),
                      "queue:b": Alarm()}  # fmt: skip
    later = follow(alarms, {"queue_length": 79.0, "queue:a": 5.0}, THRESHOLDS, Instant(8.0))
    assert later == {"queue_length": Alarm(False, Instant(8.0)), "queue:a": Alarm(True, Instant(7.0))}


@pytest.mark.parametrize(
    ("seconds", "below"), [(0.0, 40), (29.9, 40), (30.0, 70), (59.9, 70), (60.0, 90), (1e9, 90), (-5.0, 40)]
)
def test_higher_bands_are_refused_later_and_critical_work_never_is(seconds: float, below: int) -> None:
    alarm = Alarm(True, Instant(100.0))
    assert closed_below(alarm, Instant(100.0 + seconds), Seconds(30.0)) == below


@pytest.mark.parametrize(("name", "tenant"), [("queue:blue", "blue"), ("queue_length", ""), ("disk", "")])
def test_a_pressure_is_about_one_tenant_or_about_all(name: str, tenant: str) -> None:
    pressure = Pressure(name, NOW, 1.0, high=1.0, closed_below=40, retry_after_seconds=Seconds(30.0))
    assert pressure.tenant == tenant


def test_longest_wait_counts_tasks_above_background_that_only_wait_a_turn() -> None:
    def longest(*tasks: Task) -> float:
        world, now = a_world(*tasks), Instant(NOW + 100.0)
        world.enter_due(now)
        return longest_wait_seconds(world, now)

    assert longest() == 0.0
    recent = a_task("recent", submitted_at=Instant(NOW + 90.0))
    assert longest(recent) == 10.0
    others = (
        a_task("background", priority=39), a_task("held", held=True), a_task("later", not_before=NOW + 60.0),
        a_task("preempted", version=5, fence=Fence(1)),
    )  # fmt: skip
    assert longest(*others) == 0.0
    assert longest(*others, recent) == 10.0
    assert longest(recent, a_task("urgent", priority=99)) == 100.0


def test_without_a_pace_all_but_critical_work_is_refused_at_once() -> None:
    assert closed_below(Alarm(True), Instant(0.0), Seconds(0.0)) == 90
