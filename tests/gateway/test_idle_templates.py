"""Idle templates over HTTP, and the gateways that submit their tasks."""

import asyncio
from typing import Any

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.idle_templates import TemplateSeen
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Term
from gpubroker_server.gateway.cluster.idle_templates import (
    MAX_BYTES,
    MAX_TEMPLATES,
    fill,
)
from gpubroker_server.ports.store import TaskFilter
from msgspec.structs import replace
from structlog.testing import capture_logs

from tests.builders import NOW
from tests.contracts.scenes import opened
from tests.gateway.harness import Client, Gateway, a_body, problem


def a_template(name: str = "sweep", **fields: Any) -> dict[str, Any]:
    task = fields.pop("task", None) or a_body(resources={"gpus": 1})
    return {"name": name, "task": task, "max_running": 2, **fields}


async def made(api: Client, name: str = "sweep", **fields: Any) -> dict[str, Any]:
    response = await api.post("/idle-templates", json=a_template(name, **fields))
    assert response.status_code == 201, response.text
    found: dict[str, Any] = response.json()
    return found


async def listed(api: Client) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = (await api.get("/idle-templates")).json()["items"]
    return items


async def fills(gateway: Gateway, *seen: TemplateSeen, refused: dict[str, str] | None = None) -> list[Task]:
    """What one gateway submits of what the leader finds missing."""
    gateway.fleet, before = FleetSeen(templates=seen), set(gateway.world.tasks)
    leader = gateway.leader()
    assert leader is not None
    await fill(gateway.parts, leader, {} if refused is None else refused)
    return [task for id, task in gateway.world.tasks.items() if id not in before]


async def test_a_template_is_made_listed_and_deleted(gateway: Gateway, api: Client) -> None:
    template = await made(api, weight=3)
    assert (template["made_by"], template["tenant"], template["stopped"]) == ("admin", "default", None)
    gateway.clock.advance(1.0)  # one of the same name, token and time is the same template, sent again
    problem(await api.post("/idle-templates", json=a_template()), 409, "idle-template-exists")
    gateway.fleet = FleetSeen(templates=(TemplateSeen("sweep", running=2, waiting=1),))
    [found] = await listed(api)
    assert (found["weight"], found["max_running"], found["running"], found["waiting"]) == (3, 2, 2, 1)
    assert (await api.delete("/idle-templates/sweep")).status_code == 204
    assert await listed(api) == []
    problem(await api.delete("/idle-templates/sweep"), 404, "not-found")


async def test_it_says_that_a_template_pauses_since_its_task_failed(gateway: Gateway, api: Client) -> None:
    await made(api)
    gateway.fleet = FleetSeen(templates=(TemplateSeen("sweep", paused_until=Instant(NOW + 8.0)),))
    [found] = await listed(api)
    assert "its last task failed" in found["stopped"]


async def test_what_is_missing_is_submitted_for_the_token_that_made_it(gateway: Gateway) -> None:
    acme = await gateway.client("ops", "cluster:write", "cluster:read", "tasks:write", tenant="acme")
    await made(acme, task=a_body(resources={"gpus": 1, "gpu_mb": 1024}))
    tasks = await fills(gateway, TemplateSeen("sweep", number=4, missing=2))
    assert [(task.name, task.tenant, task.priority) for task in tasks] == [("idle/sweep", "acme", 0)] * 2
    assert {task.queue_ttl_seconds for task in tasks} == {60.0}
    assert all(task.demand.gpus == 1 for task in tasks)


async def test_no_task_is_submitted_twice_for_the_same_number(gateway: Gateway, api: Client) -> None:
    await made(api)
    seen = TemplateSeen("sweep", number=0, missing=1)
    assert len(await fills(gateway, seen)) == 1
    assert await fills(gateway, seen) == []  # another gateway, or this one before the leader has seen it
    assert len(await fills(gateway, seen._replace(number=1))) == 1
    gateway.term = Term(gateway.term + 1)  # another leader counts anew
    assert len(await fills(gateway, seen)) == 1
    await api.delete("/idle-templates/sweep")
    assert await fills(gateway, seen._replace(number=2)) == []
    gateway.clock.advance(1.0)
    await made(api, task=a_body(resources={"gpus": 1, "gpu_mb": 1024}))  # another one of that name
    assert len(await fills(gateway, seen)) == 1


async def test_without_a_look_of_a_leader_nothing_is_submitted(gateway: Gateway, api: Client) -> None:
    await made(api)
    leader = gateway.leader()
    assert leader is not None
    await fill(gateway.parts, replace(leader, fleet=None), {})
    assert await fills(gateway, TemplateSeen("sweep", running=1)) == []
    assert await fills(gateway, TemplateSeen("other", missing=1)) == []


async def test_a_template_stops_with_its_token(gateway: Gateway, api: Client) -> None:
    expires_at = Instant(NOW + 100)
    brief = await gateway.client("brief", "cluster:write", "tasks:write", expires_at=expires_at)
    gone = await gateway.client("gone", "cluster:write", "tasks:write")
    weaker = await gateway.client("weaker", "cluster:write", "tasks:write", "tasks:command")
    await made(brief, "a")
    await made(gone, "b")
    await made(weaker, "c", task=a_body({"command": ["true"]}, resources={"gpus": 1}))
    await api.delete("/tokens/gone")
    gateway.clock.advance(100.0)
    await api.delete("/tokens/weaker")
    again = await gateway.client("weaker", "cluster:write", "tasks:write")  # another token of that name
    assert [template["name"] for template in await listed(api)] == ["a", "b", "c"]
    for template in await listed(api):
        assert "was deleted or has expired" in template["stopped"]
    with capture_logs() as logs:
        refused: dict[str, str] = {}
        seen = [TemplateSeen(name, missing=1) for name in "abc"]
        assert await fills(gateway, *seen, refused=refused) == []
        assert await fills(gateway, *seen, refused=refused) == []
    assert [line["template"] for line in logs if "idle template" in line["event"]] == ["a", "b", "c"]
    assert await gateway.store.idle_templates(gateway.clock.now()) == []
    problem(await again.post("/idle-templates", json=a_template("a")), 409, "idle-template-exists")


async def test_a_template_stops_when_its_tasks_are_not_allowed_any_more(
    gateway: Gateway, api: Client
) -> None:
    await made(api)
    gateway.change(permissions=replace(gateway.parts.rules.permissions, entrypoints=("other:*",)))
    [template] = await listed(api)
    assert "myteam.training:train" in template["stopped"]
    assert await fills(gateway, TemplateSeen("sweep", missing=1)) == []


async def test_a_template_needs_the_scopes_of_its_tasks(gateway: Gateway) -> None:
    command = a_body({"command": ["true"]}, resources={"gpus": 1})
    only = await gateway.client("only", "cluster:write")
    both = await gateway.client("both", "cluster:write", "tasks:write")
    none = await gateway.client("none", "tasks:write")
    for client, body in ((only, a_template()), (both, a_template(task=command)), (none, a_template())):
        problem(await client.post("/idle-templates", json=body), 403, "forbidden")
    entrypoint = a_template(task=a_body({"entrypoint": "evil:run"}))
    problem(await both.post("/idle-templates", json=entrypoint), 422, "entrypoint-not-allowed")
    impossible = a_template(task=a_body(resources={"gpus": 7}))
    refused = problem(await both.post("/idle-templates", json=impossible), 422, "exceeds-capacity")
    assert refused["errors"][0]["pointer"].startswith("/task/resources")


async def test_a_template_says_nothing_that_the_service_chooses(api: Client) -> None:
    chosen: tuple[tuple[str, Any], ...] = (
        ("priority", 5),
        ("held", True),
        ("name", "x"),
        ("after", []),
        ("queue_ttl_seconds", 9),
    )
    for field, value in chosen:
        refused = problem(
            await api.post("/idle-templates", json=a_template(task={**a_body(), field: value})),
            422, "validation-failed",
        )  # fmt: skip
        assert [fault["pointer"] for fault in refused["errors"]] == [f"/task/{field}"]
    gang = a_body(resources={"bundles": [{"gpus": 1}]})
    problem(await api.post("/idle-templates", json=a_template(task=gang)), 422, "validation-failed")
    large = a_body({"entrypoint": "myteam.training:train", "args": ["x" * MAX_BYTES]})
    problem(await api.post("/idle-templates", json=a_template(task=large)), 422, "validation-failed")


async def test_there_are_so_many_at_most(api: Client) -> None:
    for n in range(MAX_TEMPLATES):
        await made(api, f"t{n}")
    problem(await api.post("/idle-templates", json=a_template("more")), 422, "validation-failed")


async def test_other_tenants_see_and_delete_none_of_it(gateway: Gateway, api: Client) -> None:
    await made(api)
    zeta = await gateway.client("z", "cluster:write", "cluster:read", tenant="zeta")
    assert await listed(zeta) == []
    problem(await zeta.delete("/idle-templates/sweep"), 404, "not-found")


async def test_only_templates_have_tasks_of_their_name(api: Client) -> None:
    refused = problem(await api.post("/tasks", json=a_body(name="idle/sweep")), 422, "validation-failed")
    assert [fault["pointer"] for fault in refused["errors"]] == ["/name"]


async def test_gateways_on_one_database_submit_each_number_once(postgres_url: str) -> None:
    async with Gateway() as one, Gateway() as other, opened(postgres_url) as a, opened(postgres_url) as b:
        [token] = await one.store.tokens()
        await other.store.drop_token("admin", by="test")
        await other.store.put_token(token, by="test")
        await other.parts.tokens.load()
        for gateway, store in ((one, a), (other, b)):
            gateway.change(store=store)
        await made(one.admin)
        for number in range(0, 30, 3):  # both at once, and one of them with what it has seen before
            looks = (one, number), (other, number), (other, max(0, number - 3))
            await asyncio.gather(*(fills(it, TemplateSeen("sweep", number=n, missing=3)) for it, n in looks))
        records = await a.records(TaskFilter("default", limit=100))
        assert [record.task.name for record in records] == ["idle/sweep"] * 30
