"""Ended tasks run again as new tasks."""

import base64
from typing import Any

import pytest
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.units import TaskId
from msgspec.structs import replace

from tests.builders import GIB, a_sample
from tests.gateway.harness import PYTHON, Client, Gateway, fault, problem
from tests.gateway.test_objects import DAY, upload

RESIZE = {"entrypoint": "tools:resize", "args": [1], "kwargs": {"to": "x"}}
CHANGES = {
    "id", "urls", "state", "attempt", "failures", "node", "devices", "submitted_at", "admitted_at",
    "started_at", "finished_at", "phases", "error", "pending", "retry_of", "after",
}  # fmt: skip


async def a_failed_task(gateway: Gateway, api: Client, run: Any = None, **fields: Any) -> str:
    task_id = await api.submit(run or RESIZE, **fields)
    await gateway.end(task_id, failure=Failure("exception", "no luck"))
    return task_id


async def test_a_retry_is_a_new_task_that_asks_for_the_same(gateway: Gateway, api: Client) -> None:
    fields = {
        "name": "shrink", "priority": 33, "labels": {"run": "7"}, "resources": {"gpu_mb": 18 * GIB},
        "timeout_seconds": 60, "grace_seconds": 5, "expected_seconds": 9, "stream": "nightly",
        "env": {"SEED": "4"},
    }  # fmt: skip
    first = await a_failed_task(gateway, api, **fields)
    gateway.clock.advance(50.0)
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    answer = await api.post(f"/tasks/{first}/retry")
    assert answer.status_code == 202
    new = answer.json()
    assert answer.headers["location"] == f"/tasks/{new['id']}"
    assert (new["retry_of"], new["state"], new["attempt"]) == (first, "pending", 0)
    old = (await api.get(f"/tasks/{first}")).json()
    assert old["retry_of"] is None
    assert {name for name in old if old[name] != new[name]} <= CHANGES
    old_spec, spec = [(await gateway.store.specs([TaskId(it)]))[TaskId(it)] for it in (first, new["id"])]
    assert (spec.entrypoint, spec.arguments) == (old_spec.entrypoint, old_spec.arguments)
    assert (spec.env, spec.retry_of) == ({"SEED": "4"}, first)
    await gateway.end(new["id"])
    again = (await api.post(f"/tasks/{new['id']}/retry")).json()
    assert again["retry_of"] == new["id"]


async def test_a_retry_waits_for_nothing_but_counts_its_time_to_wait_anew(
    gateway: Gateway, api: Client
) -> None:
    before = await api.submit()
    first = await api.submit(after=[before], held=True, queue_ttl_seconds=100, deadline_seconds=500)
    await api.post(f"/tasks/{first}/cancel")
    await gateway.turn()
    gateway.clock.advance(1000.0)
    new = gateway.task((await api.post(f"/tasks/{first}/retry")).json()["id"])
    assert (new.after, new.awaits, new.held, new.deadline_at) == ((), False, False, None)
    assert new.expires_at == gateway.clock.now() + 100.0
    await gateway.admit(new.id)


async def test_a_task_that_has_not_ended_is_not_retried(gateway: Gateway, api: Client) -> None:
    task_id = await api.submit()
    refused = problem(await api.post(f"/tasks/{task_id}/retry"), 409, "task-not-finished")
    assert "can be retried when it has ended" in refused["detail"]
    assert len(gateway.world.tasks) == 1


async def test_a_lease_is_not_retried(gateway: Gateway, api: Client) -> None:
    lease = (await api.post("/leases", json={"holder": "me", "gpu_mb": 1024})).json()["id"]
    await api.delete(f"/leases/{lease}")
    await gateway.turn()
    refused = problem(await api.post(f"/tasks/{lease}/retry"), 409, "task-not-retryable")
    assert "kind external" in refused["detail"]


@pytest.mark.parametrize(
    ("run", "scope"),
    [
        ({"command": ["true"]}, "tasks:command"),
        ({"function": "AAAA", "python": PYTHON}, "tasks:code"),
    ],
)
async def test_a_retry_needs_the_scopes_of_its_submit(
    gateway: Gateway, api: Client, run: dict[str, Any], scope: str
) -> None:
    first = await a_failed_task(gateway, api, run)
    plain = await gateway.client("c1", "tasks:read", "tasks:write")
    assert scope in problem(await plain.post(f"/tasks/{first}/retry"), 403, "forbidden")["detail"]
    able = await gateway.client("c2", "tasks:read", "tasks:write", scope)
    assert (await able.post(f"/tasks/{first}/retry")).status_code == 202
    reader = await gateway.client("c3", "tasks:read", scope)
    problem(await reader.post(f"/tasks/{first}/retry"), 403, "forbidden")


async def test_a_retry_may_not_pass_a_tokens_cap_env_or_tenant(gateway: Gateway, api: Client) -> None:
    first = await a_failed_task(gateway, api, priority=80)
    low = await gateway.client("c4", "tasks:write", max_priority=50)
    problem(await low.post(f"/tasks/{first}/retry"), 403, "priority-not-allowed")
    with_env = await a_failed_task(gateway, api, env={"BASH_ENV": "x"})
    plain = await gateway.client("c5", "tasks:write")
    assert "BASH_ENV" in problem(await plain.post(f"/tasks/{with_env}/retry"), 403, "forbidden")["detail"]
    other = await gateway.client("c6", "tasks:write", tenant="zeta")
    problem(await other.post(f"/tasks/{first}/retry"), 404, "not-found")


async def test_a_retry_that_is_sent_twice_makes_one_task(gateway: Gateway, api: Client) -> None:
    first, second = [await a_failed_task(gateway, api) for _ in range(2)]
    key = {"Idempotency-Key": "k"}
    once = await api.post(f"/tasks/{first}/retry", headers=key)
    twice = await api.post(f"/tasks/{first}/retry", headers=key)
    assert twice.json()["id"] == once.json()["id"]
    assert twice.headers["idempotency-replayed"] == "true"
    problem(await api.post(f"/tasks/{second}/retry", headers=key), 422, "idempotency-key-reused")
    gateway.change(permissions=replace(gateway.parts.rules.permissions, entrypoints=()))
    problem(await api.post(f"/tasks/{first}/retry"), 422, "entrypoint-not-allowed")
    third = await api.post(f"/tasks/{first}/retry", headers=key)
    assert third.json()["id"] == once.json()["id"], "also where a new one would be refused by now"


async def test_a_retry_needs_the_objects_that_its_arguments_name_and_uses_them(
    gateway: Gateway, api: Client
) -> None:
    mine = (await upload(api))["id"]
    first = await a_failed_task(gateway, api, {**RESIZE, "args": [{"object": mine}]})
    row = await gateway.store.record(TaskId(first))
    assert row is not None
    assert row.spec.objects == (mine,), "it is kept for as long as the task may open it"
    gateway.clock.advance(DAY / 2)
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    assert (await api.post(f"/tasks/{first}/retry")).status_code == 202
    gateway.clock.advance(DAY * 0.9)
    assert (await api.get(f"/objects/{mine}")).status_code == 200
    await api.delete(f"/objects/{mine}")
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    assert "you have no object" in fault(await api.post(f"/tasks/{first}/retry"), "/run/args/0")


async def test_a_retry_needs_the_objects_that_its_function_said_it_names(
    gateway: Gateway, api: Client
) -> None:
    mine, other = [(await upload(api, data))["id"] for data in (b"mine", b"other")]
    run = {"function": "AAAA", "python": PYTHON, "objects": [other, mine]}
    first = await a_failed_task(gateway, api, run)
    again = (await api.post(f"/tasks/{first}/retry")).json()["id"]
    await gateway.end(again)
    await api.delete(f"/objects/{mine}")
    assert "you have no object" in fault(await api.post(f"/tasks/{again}/retry"), "/run/objects/1")


async def test_what_a_function_pickled_is_not_opened_to_find_objects(gateway: Gateway, api: Client) -> None:
    packed = base64.b64encode(b'\x80{"object":"').decode()
    first = await a_failed_task(gateway, api, {"function": packed, "python": PYTHON})
    assert (await api.post(f"/tasks/{first}/retry")).status_code == 202


async def test_large_arguments_get_an_object_again(gateway: Gateway, api: Client) -> None:
    run = {"entrypoint": "tools:resize", "args": ["x" * 100_000]}
    first = await a_failed_task(gateway, api, run)
    new = (await api.post(f"/tasks/{first}/retry")).json()["id"]
    [digest] = gateway.blobs.objects
    assert (await gateway.store.specs([TaskId(new)]))[TaskId(new)].arguments_digest == digest
    assert gateway.task(new).queued_bytes > 100_000
    await gateway.blobs.delete(digest)
    assert (
        "missing or damaged"
        in problem(await api.post(f"/tasks/{first}/retry"), 500, "result-damaged")["detail"]
    )
