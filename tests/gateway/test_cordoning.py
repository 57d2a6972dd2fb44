"""Cordon, drain and uncordon over HTTP."""

from typing import Any

import pytest
from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.task import TaskState

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway


async def the_node(api: Client) -> dict[str, Any]:
    [node] = (await api.get("/nodes")).json()["items"]
    return dict(node)


async def test_a_cordoned_node_says_why_and_waiting_tasks_name_it(gateway: Gateway, api: Client) -> None:
    olga = await gateway.client("olga", "cluster:write", "cluster:read", tenant="ops")
    closed = await olga.post("/nodes/n1/cordon", json={"reason": "a fan is broken"})
    assert closed.status_code == 200
    assert closed.json() == await the_node(api)
    assert (closed.json()["cordoned"], closed.json()["cordon_reason"], closed.json()["drain"]) == (
        True,
        "a fan is broken",
        None,
    )
    task = await api.submit(resources={"gpu_mb": GIB})
    told = (await api.get(f"/tasks/{task}/explain")).json()
    assert (told["reason"], "n1" in told["message"]) == ("NodeCordoned", True)
    assert (await api.get("/stats")).json()["nodes"] == {"total": 1, "ready": 1, "cordoned": 1, "draining": 0}
    [note] = gateway.store.audited()
    assert (note.actor, note.tenant, note.action, note.subject, note.reason) == (
        "olga",
        "ops",
        "node.cordon",
        "n1",
        "a fan is broken",
    )
    opened = await olga.post("/nodes/n1/uncordon")
    assert (opened.json()["cordoned"], opened.json()["cordon_reason"]) == (False, "")
    await gateway.admit(task)


async def test_a_drain_says_by_when_how_much_is_left_and_when_it_is_done(
    gateway: Gateway, api: Client
) -> None:
    task = await api.submit(resources={"gpu_mb": GIB}, grace_seconds=5)
    await gateway.admit(task)
    drained = (await api.post("/nodes/n1/drain", json={"deadline_seconds": 600})).json()
    assert drained["cordoned"] is True
    drain = drained["drain"]
    assert (drain["left"], drain["done"]) == (1, False)
    assert drain["since"] < drain["deadline_at"]
    assert (await api.get("/stats")).json()["nodes"]["draining"] == 1
    await gateway.turn()
    assert gateway.task(task).state is TaskState.STOPPING
    told = (await api.get(f"/tasks/{task}")).json()
    assert (told["stop_reason"], told["stop_cause"]) == ("preempt", "the drain of n1 by admin")
    stopping = (await api.get(f"/tasks/{task}/events")).json()["items"][-1]["fields"]
    assert (stopping["stop_cause"], "freeing_for" in stopping) == (told["stop_cause"], False)
    await gateway.end(task)
    assert (await the_node(api))["drain"] == {**drain, "left": 0, "done": True}
    assert (await api.get("/stats")).json()["nodes"]["draining"] == 0
    assert (await api.post("/nodes/n1/uncordon")).json()["drain"] is None


async def test_a_leader_that_does_not_answer_yet_makes_it_202(gateway: Gateway, api: Client) -> None:
    gateway.leads = False
    asked = await api.post("/nodes/n1/drain", json={})
    assert (asked.status_code, asked.json()["cordoned"]) == (202, False)
    [request] = gateway.world.requests.values()
    assert (request.task, request.what, request.fields["deadline_seconds"]) == ("n1", "drain", None)


@pytest.mark.parametrize("what", ["cordon", "drain", "uncordon"])
async def test_an_unknown_node_and_a_token_without_the_scope_are_refused(
    gateway: Gateway, api: Client, what: str
) -> None:
    unknown = await api.post(f"/nodes/n9/{what}")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not-found")
    assert unknown.json()["detail"] == 'there is no node "n9"; nodes: n1'
    reader = await gateway.client("reader", "cluster:read", "tasks:write")
    assert (await reader.post(f"/nodes/n1/{what}")).status_code == 403
    assert gateway.store.audited() == []


@pytest.mark.parametrize("body", [{"deadline_seconds": -1}, {"deadline": 5}, {"reason": "a\nb"}])
async def test_a_wrong_drain_is_refused(api: Client, body: dict[str, Any]) -> None:
    assert (await api.post("/nodes/n1/drain", json=body)).status_code == 422


async def test_a_node_that_was_drained_and_left_is_not_missed(gateway: Gateway, api: Client) -> None:
    async def ready() -> list[str]:
        text = (await api.get("/metrics")).text
        return [line for line in text.splitlines() if line.startswith("gpubroker_node_ready{")]

    await api.post("/nodes/n1/drain")
    assert ready_is(await ready(), 1)
    [node] = gateway.world.nodes.values()
    await gateway.hear(NodeLost(node.name, node.incarnation, gateway.clock.now(), "it was taken away"))
    assert await ready() == []
    await api.post("/nodes/n1/cordon")
    assert ready_is(await ready(), 0)


def ready_is(lines: list[str], value: int) -> bool:
    return len(lines) == 1 and float(lines[0].rpartition(" ")[2]) == value
