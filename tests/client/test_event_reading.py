"""`broker.events(follow=True)`: a stream that is read on after lost connections and restarts."""

import json
from typing import Any

import pytest
from gpubroker import Broker
from gpubroker.errors import Refused, Unreachable

from tests.client.command_line import Run
from tests.client.conftest import Do
from tests.client.recorded_service import FULL_ID, HANG_UP, RecordedService, Reply, a_problem

LONGER = {"Content-Length": "100000"}
"""The connection is closed before the answer is complete."""
PATH = f"/tasks/{FULL_ID}/events"
END = b'event: end\ndata: {"task":"' + FULL_ID.encode() + b'","state":"succeeded"}\n\n'


def an_event(position: int) -> dict[str, Any]:
    return {
        "position": position,
        "at": "2026-11-21T10:02:11.412Z",
        "kind": "task.changed",
        "key": FULL_ID,
        "version": position,
        "fields": {"text": 'über "\n'},
    }


def message(position: int) -> bytes:
    return b"id: %d\nevent: task.changed\ndata: %s\n\n" % (
        position,
        json.dumps(an_event(position), ensure_ascii=False).encode(),
    )


def beat(position: int) -> bytes:
    return b": heartbeat\nid: %d\n\n" % position


def streamed(*parts: bytes, **headers: str) -> Reply:
    return Reply(200, b"retry: 3000\n\n" + b"".join(parts), {"Content-Type": "text/event-stream", **headers})


def resumed_at(service: RecordedService) -> list[str | None]:
    return [request.headers.get("last-event-id") for request in service.requests]


def test_stream_of_a_task_ends_with_the_task(service: RecordedService, do: Do) -> None:
    service.reply_with(streamed(message(3), message(5), beat(9), END))
    events = do("events", FULL_ID, follow=True, kind=["task.*", "lease.held"])
    assert [event.position for event in events] == [3, 5]
    assert events[0].fields == {"text": 'über "\n'}
    [request] = service.requests
    assert request.headers["accept"] == "text/event-stream"
    assert (request.path, request.params) == (PATH, [("kind", "task.*"), ("kind", "lease.held")])


def test_lost_connection_costs_no_event_and_repeats_none(service: RecordedService, do: Do) -> None:
    service.reply_with(
        streamed(message(3), message(4)[:-30], **LONGER),
        HANG_UP,
        a_problem(503, "store-unavailable"),
        a_problem(429, "event-streams-full"),
        streamed(message(4), beat(8), **LONGER),
        streamed(beat(9)),  # The gateway stops.
        streamed(message(11), END),
    )
    events = do("events", FULL_ID, follow=True, last=5)
    assert [event.position for event in events] == [3, 4, 11]
    assert resumed_at(service) == [None, "3", "3", "3", "3", "8", "9"]
    assert [dict(request.params) for request in service.requests][::6] == [{"last": "5"}, {"after": "9"}]


def test_answers_that_break_off_at_once_are_not_retried_for_ever(service: RecordedService) -> None:
    service.always = streamed(**LONGER)
    with Broker(service.url, "gpb_secret", retry_seconds=0.5) as broker, pytest.raises(Unreachable):
        list(broker.events(follow=True))
    service.always = a_problem(503, "store-unavailable")
    with Broker(service.url, "gpb_secret", retry_seconds=0.5) as broker, pytest.raises(Unreachable):
        list(broker.events(follow=True))
    assert len(service.requests) > 3


def test_refusals_are_raised(service: RecordedService, do: Do) -> None:
    service.reply_with(streamed(message(3)), a_problem(410, "events-gone"))
    with pytest.raises(Refused) as refused:
        do("events", follow=True)
    assert refused.value.code == "events-gone"


def test_whole_log_is_followed_with_all_filters(service: RecordedService, do: Do) -> None:
    service.reply_with(streamed(message(7)), a_problem(403, "forbidden"))
    with pytest.raises(Refused):
        do("events", follow=True, last=0, tasks=[FULL_ID], labels={"team": "a b"}, tenant="*")
    first = service.requests[0]
    assert first.path == "/events"
    assert sorted(first.params) == [("label.team", "a b"), ("last", "0"), ("task", FULL_ID), ("tenant", "*")]


def test_earlier_service_without_streams_is_asked_page_by_page(service: RecordedService, do: Do) -> None:
    def page(*positions: int, reached: int) -> Reply:
        return Reply(200, {"items": [an_event(one) for one in positions], "next_after": reached, "oldest": 1})

    service.reply_with(
        page(3, 4, reached=4), page(reached=4), page(6, reached=6), a_problem(404, "not-found")
    )
    with pytest.raises(Refused):
        do("events", FULL_ID, follow=True)
    assert [dict(request.params).get("after") for request in service.requests] == [None, "4", "4", "6"]


def test_pages_go_on_over_an_empty_one(service: RecordedService, do: Do) -> None:
    """As for a token that may see none of a hundred events."""
    pages = [([1], 100), ([], 200), ([201], 201), ([], 201)]
    for positions, reached in pages:
        service.reply_with(
            Reply(200, {"items": [an_event(one) for one in positions], "next_after": reached, "oldest": 1})
        )
    assert [event.position for event in do("events", last=1, kind="task.changed")] == [1, 201]
    assert [dict(request.params).get("after") for request in service.requests] == [None, "100", "200", "201"]


def test_task_has_its_events(service: RecordedService) -> None:
    service.reply_with(Reply(200, {"id": FULL_ID, "state": "running"}), streamed(message(3), END))
    with Broker(service.url, "gpb_secret") as broker:
        assert [event.position for event in broker.get(FULL_ID).events(follow=True)] == [3]


def test_command_follows_a_task_to_its_end(service: RecordedService, run: Run) -> None:
    service.reply_with(streamed(message(3), message(4), END))
    done = run("events", FULL_ID, "-f", "-o", "ndjson", "-k", "task.*")
    assert [json.loads(line)["position"] for line in done.out.splitlines()] == [3, 4]
    assert dict(service.requests[0].params) == {"after": "0", "kind": "task.*"}
    service.reply_with(Reply(200, {"items": [], "next_after": 9, "oldest": 1}))
    run("events", "--label", "team=a", "--tenant", "zeta", "-n", "0")
    assert dict(service.requests[1].params) == {
        "last": "0", "label.team": "a", "tenant": "zeta", "limit": "500",
    }  # fmt: skip
