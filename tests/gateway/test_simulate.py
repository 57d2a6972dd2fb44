"""POST /tasks/simulate: what would happen to a task, without doing anything."""

import asyncio
from typing import Any

from gpubroker_server.core.domain.units import Position

from tests.builders import GIB, a_sample
from tests.gateway.harness import Client, Gateway, a_body, problem, until


async def simulate(client: Client, run: bool = True, **fields: Any) -> dict[str, Any]:
    body = a_body(**fields) if run else fields
    response = await client.post("/tasks/simulate", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_task_with_room_would_start_and_nothing_is_stored(gateway: Gateway, api: Client) -> None:
    before = gateway.world.position, dict(gateway.world.tasks), len(gateway.world.queue)
    found = await simulate(api, resources={"gpu_mb": 8 * GIB})
    assert (found["verdict"], found["refusal"], found["reason"]) == ("starts", None, "PendingEvaluation")
    assert found["message"] == "the task would start now on n1"
    assert found["places"] == [
        {"node": "n1", "devices": [{"key": "test/n1/gpu0", "index": 0, "gpu_mb": 8 * GIB}]}
    ]
    assert (found["position"], found["queue_length"], found["priority"]) == (1, 0, 54)
    at = found["evaluated_at"]
    assert (found["start"]["p50_at"], found["start"]["p90_at"]) == (at, at)
    assert (found["start"]["p90_seconds"], found["start"]["n"], found["start"]["basis"]) == (0.0, 0, "stated")
    assert (gateway.world.position, dict(gateway.world.tasks), len(gateway.world.queue)) == before
    assert await gateway.store.head() == before[0]


async def test_a_bare_demand_is_judged_too(api: Client) -> None:
    found = await simulate(api, run=False, resources={"gpus": 1}, priority=70)
    assert (found["verdict"], found["resources"]["gpus"], found["priority"]) == ("starts", 1, 70)


async def test_victims_are_shown_and_other_tenants_victims_only_by_size(
    gateway: Gateway, api: Client
) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=20)
    await gateway.admit(holder)
    gateway.clock.advance(1.0)
    found = await simulate(api, resources={"gpu_mb": 40 * GIB})
    assert (found["verdict"], found["places"], found["start"]["p50_seconds"]) == ("preempts", [], 30.0)
    [victim] = found["victims"]
    assert (victim["id"], victim["priority"], victim["band"]) == (holder, 20, "background")
    assert (victim["gpu_mb"], victim["node"], victim["lost_gpu_seconds"]) == (60 * GIB, "n1", 1.0)
    assert gateway.task(holder).state.value == "running"
    other = await gateway.client("other", "tasks:read", tenant="vision")
    theirs = await other.post("/tasks/simulate", json={"resources": {"gpu_mb": 40 * GIB}})
    [victim] = theirs.json()["victims"]
    assert (victim["id"], victim["name"], victim["gpu_mb"]) == (None, None, 60 * GIB)
    assert holder not in theirs.text


async def test_a_task_that_would_wait_shows_why_and_what_would_help(gateway: Gateway, api: Client) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=80, expected_seconds=60)
    await gateway.admit(holder)
    first = await api.submit(resources={"gpu_mb": 50 * GIB})
    gateway.clock.advance(20.0)
    gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
    found = await simulate(api, resources={"gpu_mb": 40 * GIB})
    assert (found["verdict"], found["reason"], found["position"]) == ("waits", "WaitingForMemory", 2)
    assert (found["start"]["p50_seconds"], found["preemption"]["why"]) == (40.0, "all_shielded")
    assert [remedy["change"] for remedy in found["remedies"]] == [{"gpu_mb": 20 * GIB}, {"priority": 81}]
    assert found["devices"][0]["holders"][0]["ends"] == found["start"]
    after = await simulate(api, after=[first], resources={"gpu_mb": 1})
    assert (after["verdict"], after["reason"], after["position"]) == ("waits", "DependencyPending", None)
    assert after["message"] == f"runs after {first} (pending)"


async def test_a_refusal_is_shown_with_what_would_help(api: Client) -> None:
    found = await simulate(api, resources={"gpu_mb": 100 * GIB})
    assert (found["verdict"], found["refusal"]["code"]) == ("refused", "exceeds-capacity")
    assert found["refusal"]["errors"][0]["pointer"] == "/resources/gpu_mb"
    assert found["remedies"][0]["change"] == {"gpu_mb": 80 * GIB}
    pool = await simulate(api, resources={"gpus": 1, "pool": "none"})
    assert (pool["refusal"]["code"], pool["remedies"], pool["resources"]) == ("pool-mismatch", [], None)
    response = await api.post("/tasks/simulate", json={"run": {"entrypoint": "os:system"}})
    assert response.json()["refusal"]["code"] == "entrypoint-not-allowed"


async def test_a_simulation_needs_the_scopes_of_the_submit(gateway: Gateway, api: Client) -> None:
    problem(await api.post("/tasks/simulate", json={"gpus": 1}), 422, "validation-failed")
    problem(await api.post("/tasks/simulate", json={"after": ["task_x"]}), 422, "validation-failed")
    problem(await api.post("/tasks/simulate", json={"stream": "hourly"}), 422, "validation-failed")
    reader = await gateway.client("reader", "tasks:read", max_priority=40)
    problem(await reader.post("/tasks/simulate", json=a_body()), 403, "forbidden")
    problem(await reader.post("/tasks/simulate", json={"priority": 41}), 403, "priority-not-allowed")
    nobody = await gateway.client("nobody", "metrics:read")
    problem(await nobody.post("/tasks/simulate", json={}), 403, "forbidden")


async def test_a_simulation_sees_everything_committed_before_it(gateway: Gateway, api: Client) -> None:
    gateway.age = 31
    problem(await api.post("/tasks/simulate", json={}), 503, "follower-stale")
    gateway.age = 0
    found = await simulate(api, run=False)
    assert found["log_position"] == await gateway.store.head()
    held = gateway.world.position
    gateway.world.position = Position(held - 1)  # as if the last event were still on its way
    waiting = gateway.parts.waiters
    asked = asyncio.ensure_future(api.post("/tasks/simulate", json={}))
    await until(lambda: bool(waiting._behind))
    gateway.world.position = held
    waiting.on_events([(await gateway.store.events(Position(held - 1), 1))[0]])
    assert (await asked).json()["log_position"] == held
