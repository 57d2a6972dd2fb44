"""Tasks: read, list, change, cancel."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.progress import Progress, first_progress
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Instant, Position, Term
from gpubroker_server.http.times import rfc3339
from gpubroker_server.ports.store import CommitVerdict
from msgspec.structs import replace

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, fault, problem, until

UNKNOWN_ID = "task_" + "0" * 26


async def test_a_waiting_task_shows_its_reason(api: Client) -> None:
    task_id = await api.submit()
    pending = (await api.get(f"/tasks/{task_id}")).json()["pending"]
    assert pending["reason"]
    assert pending["message"]


async def test_a_running_task_shows_its_devices_and_its_progress(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 18 * GIB})
    await gateway.admit(task_id)
    gateway.progress[gateway.task(task_id).id] = Progress(Instant(1_000_001.5), 0.4, "400/1000")
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert (task["state"], task["attempt"], task["node"]) == ("running", 1, "n1")
    assert task["devices"] == [
        {"uuid": "gpu0", "gpu_mb": 18 * GIB, "context_mb": 0, "state": "held", "overused_mb": None}
    ]
    at = {"at": "1970-01-12T13:46:41.500Z", "rate_per_second": None, "eta_at": None}
    assert task["progress"] == {"fraction": 0.4, "message": "400/1000", **at}
    assert task["pending"] is None


async def test_progress_has_its_rate_and_the_end_that_follows(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.admit(task_id)
    first = first_progress(Instant(1_000_000.0), 0.25, "")
    gateway.progress[gateway.task(task_id).id] = first.followed_by(Instant(1_000_010.0), 0.5, "half")
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert task["progress"] == {
        "fraction": 0.5,
        "message": "half",
        "at": "1970-01-12T13:46:50.000Z",
        "rate_per_second": 0.025,
        "eta_at": "1970-01-12T13:47:10.000Z",
    }


async def test_a_running_row_is_not_shown_without_its_devices(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 18 * GIB})
    await gateway.admit(task_id)
    world, task, head = gateway.world, gateway.task(task_id), gateway.world.position
    leases = world.leases.pop((task.id, task.fence))  # as if these events were still on their way
    world.tasks[task.id] = replace(task, version=task.version - 1)
    world.position = Position(head - 1)
    asked = asyncio.ensure_future(api.get(f"/tasks/{task_id}"))
    await until(lambda: bool(gateway.parts.waiters._behind))
    world.leases[task.id, task.fence], world.tasks[task.id], world.position = leases, task, head
    gateway.parts.waiters.on_events(await gateway.store.events(Position(head - 1), 1))
    assert [device["gpu_mb"] for device in (await asked).json()["devices"]] == [18 * GIB]


async def test_a_finished_task_holds_nothing(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task_id)
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert (task["state"], task["devices"], task["progress"]) == ("succeeded", [], None)
    assert task["finished_at"].endswith("Z")


async def test_a_finished_task_shows_what_is_not_yet_free(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task_id, is_gone=False)
    task = (await api.get(f"/tasks/{task_id}")).json()
    assert task["state"] == "succeeded"
    assert task["devices"] == [
        {"uuid": "gpu0", "gpu_mb": 1024, "context_mb": 0, "state": "releasing", "overused_mb": None}
    ]


async def test_the_urls_of_a_task_exist(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    urls = (await api.get(f"/tasks/{task_id}")).json()["urls"]
    await gateway.end(task_id)
    for name in ("self", "result", "events"):
        assert (await api.get(urls[name])).status_code == 200, name
    assert (await api.post(urls["cancel"])).status_code == 409


@pytest.mark.parametrize("task_id", [UNKNOWN_ID, "task_1", "nonsense", "task_%00", "task_" + "u" * 26, "é"])
@pytest.mark.parametrize("rest", ["", "/result", "/wait", "/events", "/explain"])
async def test_a_task_that_is_not_there_is_404(api: Client, task_id: str, rest: str) -> None:
    problem(await api.get(f"/tasks/{task_id}{rest}"), 404, "not-found")


async def test_a_task_of_another_tenant_is_404(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="vision")
    for rest in ("", "/result", "/wait", "/events", "/explain"):
        problem(await other.get(f"/tasks/{task_id}{rest}"), 404, "not-found")
    problem(await other.post(f"/tasks/{task_id}/cancel"), 404, "not-found")
    problem(await other.patch(f"/tasks/{task_id}", json={"priority": 1}), 404, "not-found")
    assert (await other.get("/tasks")).json()["items"] == []
    assert gateway.task(task_id).state is TaskState.PENDING


async def test_the_list_is_newest_first_and_pages_to_its_end(gateway: Gateway, api: Client) -> None:
    ids = []
    for _ in range(5):
        ids.append(await api.submit())
        gateway.clock.advance(0.001)
    seen: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = (await api.get("/tasks", params=params)).json()
        seen += [task["id"] for task in page["items"]]
        assert page["has_more"] is (page["next_cursor"] is not None)
        if not page["has_more"]:
            break
        params["cursor"] = page["next_cursor"]
    assert seen == ids[::-1]


async def test_a_new_task_does_not_shift_the_pages(api: Client) -> None:
    first = await api.submit()
    await api.submit()
    page = (await api.get("/tasks", params={"limit": 1})).json()
    await api.submit()
    rest = (await api.get("/tasks", params={"limit": 1, "cursor": page["next_cursor"]})).json()
    assert [task["id"] for task in rest["items"]] == [first]


async def test_tasks_are_listed_by_dependency_and_by_time(gateway: Gateway, api: Client) -> None:
    first = await api.submit(model_type="yolo")
    gateway.clock.advance(10)
    second = await api.submit(after=[first])
    third = await api.submit(after=[first, second])
    await gateway.end(first)
    between = rfc3339(Instant(gateway.clock.now() - 5))
    for params, wanted in [
        ({"after": first}, [third, second]),
        ({"after": first, "state": "running"}, []),
        ({"model_type": "yolo"}, [first]),
        ({"stream": "none"}, []),
        ({"submitted_from": between}, [third, second]),
        ({"submitted_before": between}, [first]),
        ({"finished_from": between}, [first]),
        ({"finished_before": between}, []),
    ]:
        page = (await api.get("/tasks", params=params)).json()
        assert [task["id"] for task in page["items"]] == wanted, params
    strangers = await (await gateway.client("other", tenant="other")).submit()
    member = await gateway.client("member", "tasks:read")
    problem(await member.get("/tasks", params={"after": strangers}), 404, "not-found")


async def test_filters_narrow_the_list(gateway: Gateway, api: Client) -> None:
    low = await api.submit(priority=10, labels={"team": "vision"}, name="a", held=True)
    high = await api.submit(priority=80, labels={"team": "vision", "run": "1"}, name="b", held=True)
    done = await api.submit(priority=50, name="c")
    await gateway.end(done)
    filters: list[tuple[Any, list[str]]] = [
        ({"state": "succeeded"}, [done]),
        ({"state": "succeeded,pending", "max_priority": "50"}, [done, low]),
        ([("state", "succeeded"), ("state", "running")], [done]),
        ({"min_priority": "interactive"}, [high]),
        ({"label.team": "vision"}, [high, low]),
        ({"label.team": "vision", "label.run": "1"}, [high]),
        ({"name": "a"}, [low]),
        ({"name": "a", "label.run": "1"}, []),
    ]
    for params, wanted in filters:
        page = (await api.get("/tasks", params=params)).json()
        assert [task["id"] for task in page["items"]] == wanted, params


async def test_a_page_is_cut_to_the_maximum() -> None:
    async with Gateway(page_items=2) as gateway:
        for _ in range(3):
            await gateway.admin.submit()
        page = (await gateway.admin.get("/tasks", params={"limit": 1000})).json()
        assert (len(page["items"]), page["has_more"]) == (2, True)


@pytest.mark.parametrize(
    ("params", "pointer"),
    [
        ({"limit": "0"}, "query:limit"),
        ({"limit": "-1"}, "query:limit"),
        ({"limit": "many"}, "query:limit"),
        ({"state": "done"}, "query:state"),
        ({"min_priority": "101"}, "query:min_priority"),
        ({"max_priority": "urgent"}, "query:max_priority"),
        ({"name": "nul\0"}, "query:name"),
        ({"label.team": "nul\0"}, "query:label.team"),
        ({"label.team": "x" * 256}, "query:label.team"),
        ({"label.nul\0": "x"}, "query:label.nul\0"),
        ({"label.": "x"}, "query:label."),
        ({"submitted_from": "2026-11-21T10:00:00"}, "query:submitted_from"),
    ],
)
async def test_a_bad_filter_is_refused_by_name(api: Client, params: dict[str, str], pointer: str) -> None:
    fault(await api.get("/tasks", params=params), pointer)


async def test_an_unknown_filter_is_refused_with_the_one_that_was_meant(api: Client) -> None:
    response = await api.get("/tasks", params={"states": "pending", "labels.team": "x"})
    assert fault(response, "query:states") == 'unknown parameter "states"; did you mean "state"?'
    fault(response, "query:labels.team")


@pytest.mark.parametrize("cursor", ["", "nonsense", "é", "%00", "A" * 68, "a"])
async def test_an_invalid_cursor_is_refused(api: Client, cursor: str) -> None:
    problem(await api.get("/tasks", params={"cursor": cursor}), 400, "cursor-invalid")


async def test_a_cursor_of_another_filter_is_refused(api: Client) -> None:
    for _ in range(2):
        await api.submit()
    cursor = (await api.get("/tasks", params={"limit": 1})).json()["next_cursor"]
    response = await api.get("/tasks", params={"cursor": cursor, "state": "pending"})
    assert "other filters" in problem(response, 400, "cursor-invalid")["detail"]


async def test_cancelling_a_waiting_task_ends_it(api: Client) -> None:
    task_id = await api.submit()
    response = await api.post(f"/tasks/{task_id}/cancel")
    assert (response.status_code, response.json()["state"]) == (202, "cancelled")


async def test_cancelling_a_running_task_shows_when_its_memory_is_free_again(
    gateway: Gateway, api: Client
) -> None:
    task_id = await api.submit(resources={"gpu_mb": 1024}, grace_seconds=30)
    await gateway.admit(task_id)
    body = {"grace_seconds": 5, "reason": "wrong data"}
    task = (await api.post(f"/tasks/{task_id}/cancel", json=body)).json()
    assert (task["state"], task["stop_reason"]) == ("stopping", "cancel")
    assert task["stop_deadline_at"] == "1970-01-12T13:46:45.000Z"
    made = [
        event
        for event in (await api.get(f"/tasks/{task_id}/events")).json()["items"]
        if event["kind"] == "request.made"
    ]
    assert made[0]["fields"]["fields"] == {**body, "by": "admin"}
    assert task["stop_cause"] == "its cancellation by admin: wrong data"


async def test_a_second_cancel_returns_the_task(api: Client) -> None:
    task_id = await api.submit()
    await api.post(f"/tasks/{task_id}/cancel")
    again = await api.post(f"/tasks/{task_id}/cancel")
    assert (again.status_code, again.json()["state"]) == (200, "cancelled")


async def test_cancelling_a_finished_task_is_refused(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id)
    problem(await api.post(f"/tasks/{task_id}/cancel"), 409, "task-already-finished")


async def test_a_cancel_without_a_leader_is_stored_for_the_next_one() -> None:
    async with Gateway(settle_seconds=0) as gateway:
        gateway.leads = False
        task_id = await gateway.admin.submit()
        response = await gateway.admin.post(f"/tasks/{task_id}/cancel")
        assert (response.status_code, response.json()["state"]) == (202, "pending")
        assert [request.what for request in gateway.world.requests.values()] == ["cancel"]


@pytest.mark.parametrize(
    "body", [{"grace_seconds": -1}, {"grace_seconds": True}, {"mode": "hard"}, {"reason": 1}]
)
async def test_an_invalid_cancel_is_refused(api: Client, body: dict[str, Any]) -> None:
    task_id = await api.submit()
    problem(await api.post(f"/tasks/{task_id}/cancel", json=body), 422, "validation-failed")


async def test_a_changed_priority_is_in_the_answer(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    response = await api.patch(f"/tasks/{task_id}", json={"priority": "critical"})
    assert (response.status_code, response.json()["priority"]) == (200, 95)
    assert gateway.task(task_id).priority == 95


async def test_a_task_is_held_and_released(api: Client) -> None:
    task_id = await api.submit()
    assert (await api.patch(f"/tasks/{task_id}", json={"held": True})).json()["held"] is True
    assert (await api.patch(f"/tasks/{task_id}", json={"held": False})).json()["held"] is False


async def test_a_change_without_a_leader_gets_202() -> None:
    async with Gateway(settle_seconds=0) as gateway:
        gateway.leads = False
        task_id = await gateway.admin.submit()
        response = await gateway.admin.patch(f"/tasks/{task_id}", json={"priority": 1})
        assert (response.status_code, response.json()["priority"]) == (202, 54)


async def test_a_change_above_the_cap_is_refused(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    capped = await gateway.client("capped", "tasks:write", max_priority=60)
    problem(await capped.patch(f"/tasks/{task_id}", json={"priority": 61}), 403, "priority-not-allowed")


async def test_a_running_task_cannot_be_held(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.admit(task_id)
    problem(await api.patch(f"/tasks/{task_id}", json={"held": True}), 409, "task-not-pending")


async def test_a_finished_task_cannot_be_changed(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await gateway.end(task_id)
    problem(await api.patch(f"/tasks/{task_id}", json={"priority": 1}), 409, "task-already-finished")


@pytest.mark.parametrize("body", [{"priority": 1}, {"held": True}, {"queue_ttl_seconds": 60}])
async def test_a_task_that_ends_before_the_leader_decides_was_not_changed(
    gateway: Gateway, api: Client, body: dict[str, Any]
) -> None:
    """Somebody else has cancelled it, in the same cycle: the change is decided again in the next one."""
    gateway.leads = False
    task_id = await api.submit()
    cancelling = asyncio.ensure_future(api.post(f"/tasks/{task_id}/cancel"))
    await until(lambda: len(gateway.world.requests) == 1)
    asked = asyncio.ensure_future(api.patch(f"/tasks/{task_id}", json=body))
    await until(lambda: len(gateway.world.requests) == 2)
    for _ in range(2):
        await gateway.turn()
    problem(await asked, 409, "task-already-finished")
    assert (await cancelling).json()["state"] == "cancelled"


async def test_a_task_that_starts_before_the_leader_decides_was_not_held(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request comes while the leader commits the start."""
    gateway.leads = False
    task_id = await api.submit()
    commit, asked = gateway.store.commit, list[asyncio.Future[httpx.Response]]()

    async def commit_later(term: Term, decisions: Sequence[Decision]) -> Sequence[CommitVerdict]:
        if not asked:
            asked.append(asyncio.ensure_future(api.patch(f"/tasks/{task_id}", json={"held": True})))
            await until(lambda: bool(gateway.world.requests))
        return await commit(term, decisions)

    monkeypatch.setattr(gateway.store, "commit", commit_later)
    await gateway.plan(task_id)
    await gateway.turn()
    problem(await asked[0], 409, "task-not-pending")


@pytest.mark.parametrize(
    "body", [{}, {"priority": None}, {"state": "cancelled"}, {"held": "yes"}, {"priority": 101}]
)
async def test_an_invalid_change_is_refused(api: Client, body: dict[str, Any]) -> None:
    task_id = await api.submit()
    problem(await api.patch(f"/tasks/{task_id}", json=body), 422, "validation-failed")


async def test_a_change_needs_a_body(api: Client) -> None:
    problem(await api.patch(f"/tasks/{await api.submit()}"), 400, "malformed-json")
