"""Start times, queue TTLs and deadlines, from POST /tasks to the end of the task."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Failure

from tests.gateway.harness import Client, Gateway, a_body, problem


def at(gateway: Gateway, seconds: float) -> str:
    now = datetime.fromtimestamp(gateway.clock.now(), UTC)
    return (now + timedelta(seconds=seconds)).isoformat()


async def test_times_come_back_in_utc_and_a_duration_is_counted_from_the_submit(
    gateway: Gateway, api: Client
) -> None:
    said: dict[str, Any] = {"not_before": "2099-01-01T02:00:00+02:00"}
    refused = problem(await api.post("/tasks", json=a_body(**said)), 422, "validation-failed")
    assert refused["errors"][0]["code"] == "too-far-ahead"
    fields: dict[str, Any] = {"not_before": at(gateway, 60), "queue_ttl_seconds": 30, "deadline_seconds": 600}
    task = (await api.post("/tasks", json=a_body(**fields, expected_seconds=20))).json()
    row = gateway.task(task["id"])
    assert row.not_before is not None
    assert (row.expires_at, row.expected_seconds) == (row.not_before + 30, 20)
    assert row.deadline_at == row.submitted_at + 600
    assert [task[name][-1] for name in ("not_before", "expires_at", "deadline_at")] == ["Z", "Z", "Z"]
    assert task["expected_seconds"] == 20


async def test_a_start_in_the_past_has_no_effect(gateway: Gateway, api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(not_before="0001-01-01T00:00:00+14:00"))).json()
    assert task["not_before"] is None


@pytest.mark.parametrize(
    ("fields", "pointer", "code"),
    [
        ({"not_before": "2026-11-21T22:00:00"}, "/not_before", "timezone-aware"),
        ({"not_before": 5}, "/not_before", None),
        ({"deadline_at": "1970-01-01T00:00:00Z"}, "/deadline_at", "deadline-passed"),
        ({"deadline_at": "1970-01-01T00:00:00Z", "deadline_seconds": 5}, "", "contradiction"),
        ({"deadline_seconds": 0}, "/deadline_seconds", None),
        ({"queue_ttl_seconds": -1}, "/queue_ttl_seconds", None),
        ({"expected_seconds": 1e300}, "/expected_seconds", None),
        ({"deadline_at": "9999-12-31T23:59:59Z"}, "/deadline_at", "too-far-ahead"),
    ],
)
async def test_impossible_times_are_refused_by_name(
    api: Client, fields: dict[str, Any], pointer: str, code: str | None
) -> None:
    (fault,) = problem(await api.post("/tasks", json=a_body(**fields)), 422, "validation-failed")["errors"]
    assert fault["pointer"] == pointer
    assert code is None or fault["code"] == code


async def test_a_deadline_before_the_start_is_refused_with_the_difference(
    gateway: Gateway, api: Client
) -> None:
    body = a_body(not_before=at(gateway, 600), deadline_seconds=60)
    refused = problem(await api.post("/tasks", json=body), 422, "validation-failed")
    assert "before the task may start; give it time to run" in refused["detail"]


async def test_the_times_of_a_waiting_task_can_be_changed_and_removed(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(queue_ttl_seconds=30)
    said = {"not_before": at(gateway, 60), "queue_ttl_seconds": 90, "deadline_at": at(gateway, 300)}
    task = (await api.patch(f"/tasks/{task_id}", json=said)).json()
    row, now = gateway.task(task_id), gateway.clock.now()
    assert (row.not_before, row.expires_at, row.deadline_at) == pytest.approx(
        (now + 60, now + 150, now + 300)
    )
    assert (task["queue_ttl_seconds"], task["pending"]["reason"]) == (90, "NotBefore")
    gone = {"not_before": None, "queue_ttl_seconds": None, "deadline_at": None}
    task = (await api.patch(f"/tasks/{task_id}", json=gone)).json()
    assert [task[name] for name in (*gone, "expires_at")] == [None] * 4


@pytest.mark.parametrize(
    ("said", "pointer", "code"),
    [
        ({"deadline_at": "1970-01-01T00:00:00Z"}, "/deadline_at", "deadline-passed"),
        ({"not_before": "9999-12-31T23:59:59Z"}, "/not_before", "too-far-ahead"),
        ({"queue_ttl_seconds": 0}, "/queue_ttl_seconds", None),
        ({}, "", "nothing_to_change"),
    ],
)
async def test_a_change_to_impossible_times_is_refused(
    api: Client, said: dict[str, Any], pointer: str, code: str | None
) -> None:
    task_id = await api.submit()
    refused = problem(await api.patch(f"/tasks/{task_id}", json=said), 422, "validation-failed")
    (fault,) = refused["errors"]
    assert fault["pointer"] == pointer
    assert code is None or fault["code"].replace("-", "_") == code.replace("-", "_")


async def test_a_start_after_the_deadline_is_refused_whichever_is_changed(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(deadline_at=at(gateway, 300))
    said = {"not_before": at(gateway, 400)}
    refused = problem(await api.patch(f"/tasks/{task_id}", json=said), 422, "validation-failed")
    assert "the deadline is 100 s before the task may start" in refused["detail"]


async def test_the_times_of_a_running_task_cannot_be_changed(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.admit(task_id)
    answer = await api.patch(f"/tasks/{task_id}", json={"deadline_at": at(gateway, 300)})
    refused = problem(answer, 409, "task-not-pending")
    assert "deadline_at can be changed only while a task is pending" in refused["detail"]


async def test_a_task_that_is_not_started_in_time_expires_and_says_so(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(queue_ttl_seconds=30)
    gateway.clock.advance(30)
    await gateway.pass_time()
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert (task["state"], task["error"]["kind"]) == ("expired", "expired")
    assert "within its time limit to wait of 30 s" in task["error"]["message"]
    assert [item["id"] for item in (await api.get("/tasks?state=expired")).json()["items"]] == [task_id]
    ended = (await api.get(f"/tasks/{task_id}/result")).json()
    assert (ended["state"], ended["error"]["kind"]) == ("expired", "expired")
    assert (await api.get("/stats")).json()["tasks"]["expired"] == 1


async def test_run_past_its_deadline_gets_the_stop_notice_and_may_still_succeed(
    gateway: Gateway, api: Client
) -> None:
    late, done = [await api.submit(deadline_seconds=30) for _ in range(2)]
    for task_id in (late, done):
        await gateway.admit(task_id)
    gateway.clock.advance(30)
    await gateway.pass_time()
    stopping = (await api.get(f"/tasks/{late}")).json()
    assert (stopping["state"], stopping["stop_reason"]) == ("stopping", "deadline")
    await gateway.end(done, b"7")
    await gateway.end(late, failure=Failure("exception", "interrupted"))
    assert (await api.get(f"/tasks/{done}/result")).json()["result"] == 7
    ended = (await api.get(f"/tasks/{late}")).json()
    assert (ended["state"], ended["error"]["kind"]) == ("expired", "deadline")


async def test_invalid_time_is_refused_with_an_example_and_a_past_one_in_days(
    gateway: Gateway, api: Client
) -> None:
    for wrong in ("tomorrow", "2026-11-21T22:00:00"):
        detail = problem(await api.post("/tasks", json=a_body(not_before=wrong)), 422, "validation-failed")
        assert "such as 2026-11-21T22:00:00Z" in detail["detail"]
    late = await api.post("/tasks", json=a_body(deadline_at=at(gateway, -3 * 86400)))
    assert "3 days before it was sent" in problem(late, 422, "validation-failed")["detail"]
