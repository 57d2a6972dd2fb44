"""`as_completed`, which yields tasks in the order in which they end."""

import pytest
from gpubroker import Broker, WaitTimeout

from tests.client.recorded_service import RecordedService, Reply, a_task

FIRST, SECOND = "task_01k9z6x8d2000aaaaaaaaaaaaa", "task_01k9z6x8d2000bbbbbbbbbbbbb"


def events(position: int, *keys: str) -> Reply:
    items = [{"position": position, "kind": "task.succeeded", "key": key} for key in keys]
    return Reply(200, {"items": items, "next_after": position, "oldest": 1})


def test_tasks_come_in_the_order_of_their_ends(service: RecordedService) -> None:
    service.reply_with(
        *(events(7), Reply(200, a_task(FIRST, "running")), Reply(200, a_task(SECOND, "running"))),
        *(events(9, SECOND, "task_other", SECOND), Reply(200, a_task(SECOND, "failed"))),
        *(events(11, FIRST), Reply(200, a_task(FIRST, "succeeded"))),
    )
    with Broker(service.url, "t") as broker:
        assert [task.id for task in broker.as_completed([FIRST, SECOND])] == [SECOND, FIRST]
    asked = [dict(request.params).get("after") for request in service.requests if request.path == "/events"]
    assert asked == [None, "7", "9"]


def test_tasks_that_had_ended_come_first(service: RecordedService) -> None:
    service.reply_with(events(7), Reply(200, a_task(FIRST, "succeeded")), events(8))
    with Broker(service.url, "t") as broker:
        assert [task.id for task in broker.as_completed(iter([FIRST]))] == [FIRST]
        assert list(broker.as_completed([])) == []


def test_a_task_that_does_not_end_in_time_is_named(service: RecordedService) -> None:
    service.reply_with(events(7), Reply(200, a_task(FIRST, "running")))
    service.always = events(7)
    with Broker(service.url, "t") as broker, pytest.raises(WaitTimeout, match=FIRST):
        list(broker.as_completed([FIRST], timeout_seconds=0.1))
