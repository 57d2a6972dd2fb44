"""Pausing the queue of a tenant or of a work stream."""

from typing import Any

import pytest

from tests.gateway.harness import Client, Gateway, a_body, problem


async def sent(client: Client, path: str, reason: str = "") -> Any:
    response = await client.post(path, json={"reason": reason})
    assert response.status_code == 200
    return response.json()["paused"]


async def test_a_paused_tenants_tasks_say_so_and_start_when_it_is_resumed(gateway: Gateway) -> None:
    acme, admin = await gateway.client("a", tenant="acme"), gateway.admin
    waits = await acme.submit()
    paused = await sent(admin, "/tenants/acme/pause", "moving house")
    assert (paused["queue"], paused["by"], paused["reason"], paused["waiting"]) == (
        "tenant:acme", "admin", "moving house", 1,
    )  # fmt: skip
    answer = (await acme.post("/tasks", json=a_body())).json()
    for pending in (answer["pending"], (await acme.get(f"/tasks/{waits}")).json()["pending"]):
        assert (pending["reason"], pending["position"]) == ("QueuePaused", None)
        assert "moving house" in pending["message"]
    explained = (await acme.get(f"/tasks/{waits}/explain")).json()
    assert (explained["reason"], explained["remedies"]) == ("QueuePaused", [])
    assert (await acme.post("/tasks/simulate", json=a_body())).json()["verdict"] == "waits"
    [stats] = (await admin.get("/stats")).json()["paused"]
    assert (stats["queue"], stats["waiting"]) == ("tenant:acme", 2)
    [tenant] = [it for it in (await acme.get("/tenants")).json()["items"] if it["name"] == "acme"]
    assert (tenant["pending"], tenant["paused"]["reason"]) == (2, "moving house")
    assert 'gpubroker_pending_tasks{reason="QueuePaused"} 2.0' in (await admin.get("/metrics")).text

    assert await sent(admin, "/tenants/acme/resume") is None
    assert (await admin.get("/stats")).json()["paused"] == []
    await gateway.admit(waits)
    assert [note.action for note in gateway.store.audited()[-2:]] == ["queue.pause", "queue.resume"]


async def test_a_paused_stream_holds_its_tasks_alone(gateway: Gateway, api: Client) -> None:
    nightly, other = await api.submit(stream="nightly"), await api.submit()
    await sent(gateway.admin, "/streams/nightly/pause")
    assert (await api.get(f"/tasks/{nightly}")).json()["pending"]["reason"] == "QueuePaused"
    await gateway.admit(other)
    await sent(gateway.admin, "/streams/nightly/resume")
    await gateway.admit(nightly)


async def test_pausing_twice_is_answered_at_once_with_the_first_pause(gateway: Gateway) -> None:
    await sent(gateway.admin, "/streams/nightly/pause", "first")
    again = await gateway.admin.post("/streams/nightly/pause", json={"reason": "second"})
    assert (again.status_code, again.json()["paused"]["reason"]) == (200, "first")
    await sent(gateway.admin, "/streams/nightly/resume")
    resumed = await gateway.admin.post("/streams/nightly/resume")
    assert (resumed.status_code, resumed.json()["paused"]) == (200, None)


async def test_a_pause_that_no_leader_has_carried_out_is_stored(gateway: Gateway) -> None:
    gateway.leads = False
    response = await gateway.admin.post("/tenants/acme/pause", json={})
    assert (response.status_code, response.json()["paused"]) == (202, None)
    await gateway.turn()
    assert list(gateway.world.queue.pauses) == ["tenant:acme"]


async def test_resume_is_not_dropped_by_a_gateway_that_does_not_know_the_pause() -> None:
    async with Gateway(settle_seconds=0.0) as gateway:
        gateway.hears = False
        for what in ("pause", "resume"):
            response = await gateway.admin.post(f"/tenants/acme/{what}")
            assert response.status_code == 202
        gateway.world.apply(await gateway.store.events(gateway.world.position, 100))
        assert [request.what for request in gateway.world.requests.values()] == ["pause", "unpause"]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/tenants/acne/pause", 'did you mean "acme"?'),
        ("/tenants/acne/resume", 'did you mean "acme"?'),
        ("/streams/nightli/pause", 'did you mean "nightly"?'),
        ("/streams/x/resume", "there are: nightly"),
    ],
)
async def test_a_queue_that_does_not_exist_is_refused_with_the_one_that_is_meant(
    gateway: Gateway, path: str, meant: str
) -> None:
    assert meant in problem(await gateway.admin.post(path, json={}), 404, "not-found")["detail"]


async def test_pausing_needs_the_scope_of_administrators(gateway: Gateway) -> None:
    operator = await gateway.client("operator", "cluster:write", "tasks:write")
    for path in ("/tenants/acme/pause", "/streams/nightly/resume"):
        assert "admin" in problem(await operator.post(path, json={}), 403, "forbidden")["detail"]
