"""When a task may start and must end."""

from typing import Any

import pytest
from gpubroker_server.core.admission.submission import AskedTimes
from gpubroker_server.core.admission.times import HORIZON_SECONDS, Timing, changed_times, timing_of
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import Instant, Seconds

from tests.builders import NOW, a_task

LATER = Instant(NOW + 100)


def timing(*, has_dependencies: bool = False, **asked: Any) -> Timing:
    faults: list[Refusal] = []
    found = timing_of(AskedTimes(**asked), NOW, has_dependencies=has_dependencies, faults=faults)
    assert not faults, faults
    return found


def fault(**asked: Any) -> Refusal:
    faults: list[Refusal] = []
    timing_of(AskedTimes(**asked), NOW, has_dependencies=False, faults=faults)
    [found] = faults
    return found


def test_the_queue_ttl_counts_from_when_the_task_may_start() -> None:
    assert timing(queue_ttl_seconds=60.0).expires_at == NOW + 60
    assert timing(queue_ttl_seconds=60.0, not_before=LATER).expires_at == LATER + 60
    waiting = timing(queue_ttl_seconds=60.0, has_dependencies=True)
    assert (waiting.queue_ttl_seconds, waiting.expires_at) == (60.0, None)


def test_a_start_time_in_the_past_has_no_effect() -> None:
    assert timing(not_before=NOW - 1) == timing()
    assert timing(not_before=LATER).not_before == LATER


def test_a_deadline_is_a_time_or_counts_from_the_submit() -> None:
    assert timing(deadline_at=LATER).deadline_at == LATER
    assert timing(deadline_seconds=100.0).deadline_at == LATER


@pytest.mark.parametrize(
    ("asked", "field", "said"),
    [
        ({"deadline_at": NOW}, "/deadline_at", "the deadline is 0 s before it was sent"),
        ({"deadline_at": LATER, "not_before": LATER + 300}, "/deadline_at", "5 minutes before the task may"),
        (
            {"deadline_seconds": 50.0, "not_before": LATER},
            "/deadline_seconds",
            "50 s before the task may start",
        ),
        ({"not_before": NOW + HORIZON_SECONDS + 86_400}, "/not_before", "is 3651 days ahead; at most 3650"),
    ],
)
def test_a_deadline_leaves_time_to_run_and_no_time_is_too_far_ahead(
    asked: dict[str, Any], field: str, said: str
) -> None:
    found = fault(**asked)
    assert found.field == field
    assert said in found.message


def changes(given: dict[str, float | None], **task: Any) -> tuple[dict[str, float | None], list[str]]:
    faults: list[Refusal] = []
    return changed_times(given, a_task(**task), NOW, faults), [found.field for found in faults]


def test_given_times_change_and_a_null_removes_one() -> None:
    given = {"not_before": None, "queue_ttl_seconds": 5.0, "deadline_at": LATER}
    assert changes(given) == (given, [])
    assert changes({}) == ({}, [])


def test_a_changed_time_is_held_against_those_that_stay() -> None:
    assert changes({"not_before": LATER}, deadline_at=Instant(NOW + 50))[1] == ["/not_before"]
    assert changes({"deadline_at": LATER}, not_before=Instant(NOW + 200))[1] == ["/deadline_at"]
    assert changes({"deadline_at": LATER, "not_before": None}, not_before=Instant(NOW + 200))[1] == []
    far = NOW + HORIZON_SECONDS + 1
    assert changes({"deadline_at": far, "not_before": far})[1] == ["/not_before", "/deadline_at"]


def test_an_external_lease_has_no_such_times() -> None:
    terms = External(Seconds(60.0))
    assert changes({"not_before": None, "deadline_at": LATER}, holder=terms) == (
        {},
        ["/deadline_at", "/not_before"],
    )
