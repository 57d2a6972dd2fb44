"""External leases over HTTP: requested, waited for, renewed, released."""

import asyncio
from typing import Any

import pytest
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.orders import Gone
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Fence, Seconds, TaskId
from gpubroker_server.http.times import rfc3339
from msgspec.structs import replace

from tests.builders import GIB, a_device, a_node, a_sample
from tests.gateway.harness import PATIENCE_SECONDS, Client, Gateway, a_body, before, fault, problem, until

ASKED = {"holder": "vllm", "gpu_mb": 50 * GIB}


async def ask(api: Client, **fields: Any) -> str:
    response = await api.post("/leases", json={**ASKED, **fields})
    assert response.status_code == 202, response.text
    return str(response.json()["id"])


async def listed(api: Client, query: str) -> list[str]:
    return [item["id"] for item in (await api.get(f"/leases?{query}")).json()["items"]]


async def state_of(api: Client, lease: str) -> str:
    return str((await api.get(f"/leases/{lease}")).json()["state"])


async def overdue(gateway: Gateway, lease: str) -> None:
    """Its holder was asked to leave, and its notice has expired."""
    task = gateway.task(lease)
    assert task.deadline_at is not None
    notice_seconds = task.grace_seconds + gateway.policy.kill_patience_seconds
    await gateway.pass_time(task.deadline_at + notice_seconds - gateway.clock.now())


async def test_a_lease_waits_in_the_queue_is_held_and_is_released(gateway: Gateway, api: Client) -> None:
    response = await api.post(
        "/leases", json={**ASKED, "priority": "interactive", "labels": {"team": "chat"}}
    )
    lease = response.json()
    assert response.headers["Location"] == lease["urls"]["self"] == f"/leases/{lease['id']}"
    assert (lease["state"], lease["holder"], lease["labels"]) == ("pending", "vllm", {"team": "chat"})
    assert lease["devices"] == []

    await gateway.plan(lease["id"])
    held = (await api.get(f"/leases/{lease['id']}")).json()
    assert (held["state"], held["node"], held["notice"]) == ("held", "n1", None)
    assert [(share["uuid"], share["gpu_mb"], share["state"]) for share in held["devices"]] == [
        ("gpu0", 50 * GIB, "held")
    ]
    [holder] = (await api.get("/gpus")).json()["items"][0]["holders"]
    assert (holder["kind"], holder["id"], holder["name"]) == ("external", lease["id"], "vllm")

    given_back = await api.delete(f"/leases/{lease['id']}")
    assert (given_back.status_code, given_back.json()["state"]) == (200, "ended")
    assert given_back.json()["error"] is None
    assert (await api.delete(f"/leases/{lease['id']}")).status_code == 200
    assert (await api.get("/gpus")).json()["items"][0]["free_mb"] == 80 * GIB


async def test_the_explanation_of_an_ended_lease_says_how_it_ended(gateway: Gateway, api: Client) -> None:
    async def explained(lease: str) -> str:
        return str((await api.get(f"/tasks/{lease}/explain")).json()["message"])

    held, waiting, lost = await ask(api), await ask(api), await ask(api)
    await gateway.plan(held)
    at = rfc3339(gateway.clock.now())
    for lease in (held, waiting):
        await api.delete(f"/leases/{lease}")
    assert await explained(held) == f"released at {at}; it holds nothing any more"
    assert await explained(waiting) == f"cancelled at {at}, before it held anything"
    await gateway.plan(lost)
    await overdue(gateway, lost)
    assert "without having been released" in await explained(lost)


async def test_a_lease_is_a_task_that_is_never_started(gateway: Gateway, api: Client) -> None:
    lease = await ask(api)
    await api.submit()
    assert [task["run"]["kind"] for task in (await api.get("/tasks")).json()["items"]] == [
        "entrypoint",
        "external",
    ]
    assert [found["id"] for found in (await api.get("/leases")).json()["items"]] == [lease]
    told = (await api.get(f"/tasks/{lease}/explain")).json()
    assert told["state"] == "pending"
    task = (await api.get("/tasks")).json()["items"][0]
    problem(await api.get(f"/leases/{task['id']}"), 404, "not-found")
    await gateway.plan(lease)
    assert (await api.get(f"/tasks/{lease}")).json()["state"] == "running"


async def test_a_wait_ends_when_a_lease_is_held_and_when_it_is_under_notice(
    gateway: Gateway, api: Client
) -> None:
    lease = await ask(api, priority=10)
    waiting = asyncio.ensure_future(api.get(f"/leases/{lease}/wait?state=pending&timeout_seconds=30"))
    await until(lambda: len(gateway.parts.waiters) == 1)
    await gateway.plan(lease)
    told = await before(PATIENCE_SECONDS, waiting)
    assert (told.status_code, told.json()["state"]) == (200, "held")

    still = await api.get(f"/leases/{lease}/wait?state=held&timeout_seconds=0")
    assert still.status_code == 202
    waiting = asyncio.ensure_future(api.get(f"/leases/{lease}/wait?state=held&timeout_seconds=30"))
    await until(lambda: len(gateway.parts.waiters) == 1)
    gateway.clock.advance(1.0)
    high = await api.submit(priority=90, resources={"gpu_mb": 60 * GIB})
    await gateway.plan(high)
    told = (await before(PATIENCE_SECONDS, waiting)).json()
    assert (told["state"], told["notice"]["reason"]) == ("stopping", "preempt")
    problem(await api.post(f"/leases/{lease}/renew"), 409, "lease-under-notice")
    await api.delete(f"/leases/{lease}")
    await gateway.plan(high)
    assert gateway.task(high).state is TaskState.ADMITTED


async def test_a_renewal_moves_the_deadline(gateway: Gateway, api: Client) -> None:
    lease = await ask(api, ttl_seconds=30)
    await gateway.plan(lease)
    first = (await api.get(f"/leases/{lease}")).json()["deadline_at"]
    gateway.clock.advance(20.0)
    renewed = await api.post(f"/leases/{lease}/renew")
    assert (renewed.status_code, renewed.json()["state"]) == (200, "held")
    assert renewed.json()["deadline_at"] > first
    longer = await api.post(f"/leases/{lease}/renew", json={"ttl_seconds": 600})
    assert longer.json()["deadline_at"] > renewed.json()["deadline_at"]
    await api.delete(f"/leases/{lease}")
    problem(await api.post(f"/leases/{lease}/renew"), 409, "lease-ended")


async def test_a_lease_that_is_not_released_is_quarantined_until_a_statement(
    gateway: Gateway, api: Client
) -> None:
    lease = await ask(api)
    await gateway.plan(lease)
    await overdue(gateway, lease)
    found = (await api.get(f"/leases/{lease}")).json()
    assert (found["state"], found["error"]["kind"]) == ("quarantined", "not_released")
    assert [share["state"] for share in found["devices"]] == ["quarantined"]
    assert await listed(api, "state=quarantined") == [lease]
    renewed = problem(await api.post(f"/leases/{lease}/renew"), 409, "lease-ended")
    assert f"DELETE /leases/{lease}" in renewed["detail"]
    released = await api.delete(f"/leases/{lease}")
    assert (released.status_code, released.json()["state"]) == (200, "ended")
    assert released.json()["error"]["kind"] == "not_released"


async def test_a_lease_ends_with_its_process(gateway: Gateway, api: Client) -> None:
    lease = await ask(api, pid=4711)
    await gateway.plan(lease)
    await gateway.hear(Gone(TaskId(lease), Fence(1), gateway.clock.now(), Proof.PROCESS_ABSENT))
    ended = (await api.get(f"/leases/{lease}")).json()
    assert (ended["state"], ended["pid"], ended["error"]["kind"]) == ("ended", 4711, "process_gone")


async def test_leases_are_listed_by_state_and_holder_page_by_page(gateway: Gateway, api: Client) -> None:
    first = await ask(api)
    await gateway.plan(first)
    others = [await ask(api, holder=name) for name in ("a", "b")]

    assert await listed(api, "state=held") == [first]
    assert await listed(api, "state=pending,held") == [*reversed(others), first]
    assert await listed(api, "holder=a") == [others[0]]
    page = (await api.get("/leases?limit=2")).json()
    assert page["has_more"]
    assert await listed(api, f"limit=2&cursor={page['next_cursor']}") == [first]


async def test_leases_are_sorted_by_priority_page_by_page(api: Client) -> None:
    for name, level in (("a", 10), ("b", 30), ("c", 10)):
        await ask(api, holder=name, priority=level)
    first = (await api.get("/leases?sort=priority&limit=2")).json()
    rest = (await api.get(f"/leases?sort=priority&limit=2&cursor={first['next_cursor']}")).json()
    assert [lease["holder"] for lease in (*first["items"], *rest["items"])] == ["a", "c", "b"]


async def test_ended_and_quarantined_leases_are_listed_separately(gateway: Gateway, api: Client) -> None:
    ended = await ask(api, gpu_mb=GIB)
    await gateway.plan(ended)
    await api.delete(f"/leases/{ended}")
    stuck = await ask(api, gpu_mb=GIB)
    await gateway.plan(stuck)
    await overdue(gateway, stuck)
    waiting = await ask(api, gpu_mb=GIB)
    assert await listed(api, "state=quarantined") == [stuck]
    assert await listed(api, "state=ended") == [ended]
    assert await listed(api, "state=quarantined,ended") == [stuck, ended]
    assert await listed(api, "state=pending,held,stopping,quarantined") == [waiting, stuck]


async def test_tasks_and_leases_can_be_listed_separately(api: Client) -> None:
    lease, task = await ask(api), await api.submit()
    for kind, expected in (("external", [lease]), ("entrypoint", [task]), ("command", [])):
        assert [item["id"] for item in (await api.get(f"/tasks?kind={kind}")).json()["items"]] == expected
    assert "external" in fault(await api.get("/tasks?kind=lease"), "query:kind")


async def test_the_same_key_makes_one_lease(api: Client) -> None:
    key = {"Idempotency-Key": '"k"'}
    first = await api.post("/leases", json=ASKED, headers=key)
    again = await api.post("/leases", json=ASKED, headers=key)
    assert again.headers["Idempotency-Replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    other = await api.post("/leases", json={**ASKED, "gpus": 1, "gpu_mb": 1}, headers=key)
    problem(other, 422, "idempotency-key-reused")


async def test_replayed_lease_is_answered_although_a_new_one_would_be_refused(
    gateway: Gateway, api: Client
) -> None:
    key = {"Idempotency-Key": "k"}
    first = await api.post("/leases", json=ASKED, headers=key)
    await gateway.join(a_device(mb=8 * GIB))
    problem(await api.post("/leases", json=ASKED), 422, "exceeds-capacity")
    again = await api.post("/leases", json=ASKED, headers=key)
    assert (again.status_code, again.headers["Idempotency-Replayed"]) == (202, "true")
    assert (again.json()["id"], again.headers["Location"]) == (first.json()["id"], first.headers["Location"])
    problem(await api.post("/leases", json={**ASKED, "gpus": 2}, headers=key), 422, "exceeds-capacity")


async def test_a_lease_of_another_tenant_is_not_found(gateway: Gateway, api: Client) -> None:
    lease = await ask(api)
    stranger = await gateway.client("stranger", "tasks:read", "tasks:write", tenant="other")
    for response in (
        await stranger.get(f"/leases/{lease}"),
        await stranger.delete(f"/leases/{lease}"),
        await stranger.post(f"/leases/{lease}/renew"),
        await stranger.get(f"/leases/{lease}/wait"),
    ):
        problem(response, 404, "not-found")
    reader = await gateway.client("reader", "tasks:read")
    problem(await reader.post("/leases", json=ASKED), 403, "forbidden")
    low = await gateway.client("low", max_priority=50)
    problem(await low.post("/leases", json={**ASKED, "priority": 60}), 403, "priority-not-allowed")


@pytest.mark.parametrize(
    ("asked", "code", "pointer"),
    [
        ({"gpu_mb": 81 * GIB}, "exceeds-capacity", "/gpu_mb"),
        ({"gpus": 2}, "exceeds-capacity", "/gpus"),
        ({"devices": ["nowhere"]}, "no-matching-device", "/devices"),
        ({"kinds": ["A100"]}, "no-matching-device", "/kinds"),
        ({"node": "n9"}, "no-matching-device", "/node"),
        ({"ttl_seconds": 0.5}, "validation-failed", "/ttl_seconds"),
        ({"holder": ""}, "validation-failed", "/holder"),
        ({"devices": ["GPU-1\x1b[2J"]}, "validation-failed", "/devices/0"),
        ({"grace_seconds": 61}, "exceeds-maximum", "/grace_seconds"),
        ({"pid": 0}, "validation-failed", "/pid"),
    ],
)
async def test_a_lease_that_could_never_be_held_is_refused(
    gateway: Gateway, api: Client, asked: dict[str, Any], code: str, pointer: str
) -> None:
    most = replace(gateway.policy.maximum, grace_seconds=Seconds(60.0))
    gateway.change(policy=replace(gateway.policy, maximum=most))
    response = await api.post("/leases", json={**ASKED, **asked})
    assert problem(response, 422, code)["errors"][0]["pointer"] == pointer


async def test_naming_a_process_needs_the_scope_for_commands(gateway: Gateway) -> None:
    writer = await gateway.client("writer", "tasks:write", "tasks:read")
    refused = problem(await writer.post("/leases", json={**ASKED, "pid": 4711}), 403, "forbidden")
    assert "tasks:command, which naming a process of a node needs" in refused["detail"]
    commander = await gateway.client("commander", "tasks:write", "tasks:command")
    await ask(commander, pid=4711)


async def test_only_a_token_with_cluster_read_gets_the_names_of_nodes(gateway: Gateway) -> None:
    writer = await gateway.client("writer", "tasks:write")
    answers = [
        problem(await api.post("/leases", json={**ASKED, "node": "n9"}), 422, "no-matching-device")["detail"]
        for api in (writer, gateway.admin)
    ]
    assert answers == [
        'there is no node "n9"; name another node, or none',
        'there is no node "n9"; nodes: n1; name another node, or none',
    ]


async def test_a_wait_for_a_quarantined_or_ended_lease_is_refused(api: Client) -> None:
    lease = await ask(api)
    for state in ("quarantined", "ended"):
        response = await api.get(f"/leases/{lease}/wait?state={state}")
        assert "stopping" in fault(response, "query:state")


async def test_the_times_of_a_lease_cannot_be_changed_only_renewed(gateway: Gateway, api: Client) -> None:
    lease = await ask(api)
    response = await api.patch(f"/tasks/{lease}", json={"deadline_at": None})
    assert f"POST /leases/{lease}/renew" in fault(response, "/deadline_at")
    assert gateway.task(lease).deadline_at is not None
    assert (await api.patch(f"/tasks/{lease}", json={"priority": 20})).json()["priority"] == 20


async def test_a_process_needs_a_node_if_there_are_several(gateway: Gateway, api: Client) -> None:
    await gateway.join(a_device("gpu1", node="n2"), node=a_node("n2"))
    gateway.world.measure([a_sample("n2/gpu1")])
    response = await api.post("/leases", json={**ASKED, "pid": 4711})
    assert "name the node, or devices" in fault(response, "/node")
    await ask(api, pid=4711, node="n2")
    on_a_device = await ask(api, pid=4711, devices=["gpu1"], gpu_mb=GIB)
    await gateway.plan(on_a_device)
    assert (await api.get(f"/leases/{on_a_device}")).json()["node"] == "n2"


async def test_the_body_of_a_task_is_not_a_lease(api: Client) -> None:
    problem(await api.post("/leases", json=a_body()), 422, "validation-failed")


async def test_unknown_lease_and_invalid_state_are_refused_in_terms_of_leases(
    api: Client,
) -> None:
    found = problem(await api.post("/leases/foo/renew"), 404, "not-found")
    assert found["detail"] == 'there is no lease "foo"; GET /leases lists yours'
    found = problem(await api.post("/leases", json={**ASKED, "ttl": 60}), 422, "validation-failed")
    assert 'did you mean "ttl_seconds"?' in found["detail"]
