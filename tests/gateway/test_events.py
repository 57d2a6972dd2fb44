"""The event log over HTTP."""

import pytest
from gpubroker_server.core.domain.policy import Cutoffs
from gpubroker_server.gateway.events import routes

from tests.builders import GIB, NOW
from tests.gateway.harness import Client, Gateway, fault, problem


async def test_the_events_of_a_task_have_all_its_states(gateway: Gateway, api: Client) -> None:
    await api.submit()
    task_id = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task_id)
    events = (await api.get(f"/tasks/{task_id}/events")).json()["items"]
    assert [event["kind"] for event in events] == [
        "task.submitted",
        "task.admitted",
        "lease.reserved",
        "task.started",
        "lease.held",
        "task.succeeded",
        "lease.releasing",
        "lease.released",
    ]
    assert events[1]["fields"]["admitted_at"] == "1970-01-12T13:46:40.000Z"


async def test_pages_of_the_log_have_no_gap_and_no_repetition(gateway: Gateway, api: Client) -> None:
    for _ in range(3):
        await gateway.end(await api.submit())
    whole = (await api.get("/events", params={"limit": 500})).json()
    pieces, after = [], 0
    while True:
        page = (await api.get("/events", params={"after": after, "limit": 4})).json()
        if page["next_after"] == after:
            break
        pieces += page["items"]
        after = page["next_after"]
    assert pieces == whole["items"]
    assert [event["position"] for event in pieces] == list(range(1, after + 1))


async def test_a_tenant_sees_only_its_own_events(gateway: Gateway, api: Client) -> None:
    mine = await api.submit()
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="vision")
    theirs = await other.submit()
    page = (await other.get("/events")).json()
    assert [event["key"] for event in page["items"]] == [theirs]
    assert page["next_after"] == await gateway.store.head()
    assert mine not in str(page)


async def test_a_victims_events_do_not_name_another_tenants_preemptor(gateway: Gateway, api: Client) -> None:
    other = await gateway.client("other", "tasks:read", "tasks:write", "cluster:read", tenant="vision")
    victim = await other.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    await gateway.admit(victim)
    preemptor = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=90)
    gateway.clock.advance(1)
    await gateway.plan(preemptor)
    for path in (f"/tasks/{victim}/events", "/events"):
        page = await other.get(path)
        [notice] = [event for event in page.json()["items"] if event["kind"] == "task.stopping"]
        assert notice["fields"]["freeing_for"] is None
        assert preemptor not in page.text
    [seen] = [e for e in (await api.get("/events")).json()["items"] if e["kind"] == "task.stopping"]
    assert seen["fields"]["freeing_for"] == preemptor


async def test_a_victims_events_name_a_preemptor_of_its_own_tenant(gateway: Gateway) -> None:
    client = await gateway.client("plain", "tasks:read", "tasks:write")
    victim = await client.submit(resources={"gpu_mb": 60 * GIB}, priority=10)
    await gateway.admit(victim)
    preemptor = await client.submit(resources={"gpu_mb": 60 * GIB}, priority=90)
    gateway.clock.advance(1)
    await gateway.plan(preemptor)
    assert preemptor in (await client.get(f"/tasks/{victim}/events")).text


async def test_the_event_of_a_request_names_no_task_of_another_tenant(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    await api.post(f"/tasks/{task_id}/cancel")
    viewer = await gateway.client("viewer", "tasks:read", "cluster:read", tenant="vision")
    assert task_id not in (await viewer.get("/events")).text
    assert "request.done" in (await api.get(f"/tasks/{task_id}/events")).text


async def test_a_token_with_cluster_read_sees_events_of_nodes_and_devices(gateway: Gateway) -> None:
    viewer = await gateway.client("viewer", "tasks:read", "cluster:read", tenant="vision")
    assert {event["kind"] for event in (await viewer.get("/events")).json()["items"]} == {
        "node.seen",
        "device.seen",
    }


async def test_an_admin_sees_every_tenant(gateway: Gateway, api: Client) -> None:
    other = await gateway.client("other", tenant="vision")
    theirs = await other.submit()
    assert theirs in {event["key"] for event in (await api.get("/events")).json()["items"]}


async def test_invalid_log_positions_are_refused(api: Client) -> None:
    fault(await api.get("/events", params={"after": -1}), "query:after")
    fault(await api.get("/events", params={"after": 2**63}), "query:after")
    fault(await api.get("/events", params={"limit": 0}), "query:limit")


async def test_a_cursor_that_the_log_does_not_reach_is_gone(api: Client) -> None:
    """As after a restore from a backup: waiting there would miss all that comes."""
    await api.submit()
    head = (await api.get("/events")).json()["next_after"]
    assert (await api.get("/events", params={"after": head})).json()["next_after"] == head
    gone = problem(await api.get("/events", params={"after": head + 1}), 410, "events-gone")
    assert f"the log is at {head}" in gone["detail"]


async def test_a_cursor_before_the_oldest_kept_event_is_gone(gateway: Gateway, api: Client) -> None:
    task = await api.submit()
    first = (await api.get("/events")).json()
    assert first["oldest"] == 1
    gateway.clock.advance(100)
    await gateway.store.prune(
        gateway.term, Cutoffs(gateway.clock.now(), NOW, NOW, NOW, gateway.world.position)
    )
    await api.submit()
    for path in ("/events", f"/tasks/{task}/events"):
        gone = problem(await api.get(path, params={"after": 1}), 410, "events-gone")
        assert f"up to position {first['next_after']}" in gone["detail"]
    page = (await api.get("/events")).json()
    assert page["oldest"] == page["items"][0]["position"] == first["next_after"] + 1
    assert (await api.get("/events", params={"after": first["next_after"]})).status_code == 200


async def test_the_newest_events_of_the_log_are_those_that_the_token_may_see(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WINDOW", 4)
    other = await gateway.client("other", "tasks:read", "tasks:write", tenant="acme")
    mine = [await other.submit() for _ in range(3)]
    for _ in range(9):
        await api.submit()
    page = (await other.get("/events", params={"last": 2})).json()
    assert [event["key"] for event in page["items"]] == mine[1:]
    head = (await api.get("/events", params={"last": 1})).json()["items"][0]["position"]
    assert page["next_after"] == head
    assert len((await other.get("/events", params={"last": 500})).json()["items"]) == 3
    nobody = await gateway.client("nobody", "tasks:read", tenant="zeta")
    assert (await nobody.get("/events", params={"last": 3})).json()["items"] == []


async def test_the_newest_events_of_a_task(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "WINDOW", 2)
    task_id = await api.submit(resources={"gpu_mb": 1024})
    await gateway.end(task_id)
    whole = (await api.get(f"/tasks/{task_id}/events")).json()["items"]
    for last in (1, 3, 500):
        page = (await api.get(f"/tasks/{task_id}/events", params={"last": last})).json()
        assert page["items"] == whole[-last:]
        assert page["next_after"] == whole[-1]["position"]
