"""POST /plan: whether components fit a fleet: three that are described, and the one that is there."""

import asyncio
from typing import Any

import pytest

from tests.builders import GIB
from tests.gateway.harness import Client, Gateway, problem

TRAINING = [
    {"name": "rollout", "count": 8, "resources": {"cpu": 1}},
    {"name": "trainer", "count": 1, "resources": {"cpu": 4, "gpus": 1}},
    {"name": "pool", "count": 2, "resources": {"cpu": 1}},
    {"name": "loader", "count": 2, "resources": {"cpu": 1}},
]


def machines(name: str, count: int, cpu: int, gpus: int) -> dict[str, Any]:
    cards = [{"kind": "H100", "memory_mb": 80 * GIB, "count": gpus}] if gpus else []
    return {"name": name, "count": count, "cpu": cpu, "gpus": cards}


async def plan(api: Client, components: list[dict[str, Any]], *fleet: dict[str, Any]) -> dict[str, Any]:
    response = await api.post("/plan", json={"components": components, **({"fleet": fleet} if fleet else {})})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_one_machine_of_16_cpus_and_a_gpu_takes_a_small_training_and_no_second_trainer(
    api: Client,
) -> None:
    small = machines("small", 1, 16, 1)
    found = await plan(api, TRAINING, small)
    assert (found["fits"], found["message"]) == (True, "it fits")
    assert found["totals"] == {"gpus": 1, "whole_gpus": 1, "gpu_mb": 0, "cpu": 16.0, "memory_mb": 0}
    assert {place["node"] for place in found["places"]} == {"small"}
    two = [{**part, "count": 2} if part["name"] == "trainer" else part for part in TRAINING]
    found = await plan(api, two, small)
    assert (found["fits"], found["message"]) == (False, "it does not fit: there is no place for 1 of trainer")
    assert found["components"][1] == {"name": "trainer", "count": 2, "placed": 1, "missing": 1}


async def test_four_machines_of_two_gpus_take_a_trainer_for_each_gpu(api: Client) -> None:
    trainers = {"name": "trainer", "count": 8, "resources": {"cpu": 4, "gpus": 1}}
    rollouts = {"name": "rollout", "count": 96, "resources": {"cpu": 1}}
    found = await plan(api, [rollouts, trainers], machines("node", 4, 32, 2))
    assert (found["fits"], found["totals"]["cpu"]) == (True, 128.0)
    per_node = [place["node"] for place in found["places"] if place["component"] == "trainer"]
    assert sorted(per_node) == sorted(["node1", "node2", "node3", "node4"] * 2)
    more = {**rollouts, "count": 97}
    assert (await plan(api, [more, trainers], machines("node", 4, 32, 2)))["components"][0]["missing"] == 1


async def test_eight_machines_of_eight_gpus_and_16_of_cpus_are_planned_with_and_without_colocation(
    api: Client,
) -> None:
    fleet = (machines("gpu", 8, 64, 8), machines("cpu", 16, 64, 0))
    roles = {
        "train": {"cpu": 4, "gpus": 1},
        "rollout": {"cpu": 2, "gpus": 1},
        "validate": {"gpu_mb": 20 * GIB},
    }
    together = {"name": "worker", "count": 64, "resources": {"roles": roles}}
    rollouts = {"name": "actors", "count": 1024, "resources": {"cpu": 1}}
    found = await plan(api, [together, rollouts], *fleet)
    assert found["fits"]
    assert (found["totals"]["gpus"], found["totals"]["whole_gpus"], found["totals"]["cpu"]) == (
        64,
        64,
        1280.0,
    )
    apart = found["totals_without_colocation"]
    assert (apart["gpus"], apart["whole_gpus"], apart["gpu_mb"]) == (192, 128, 64 * 20 * GIB)
    assert apart["cpu"] == 64 * 6 + 1024
    alone = [{"name": name, "count": 64, "resources": size} for name, size in roles.items()]
    found = await plan(api, [*alone, rollouts], *fleet)
    assert (found["fits"], sum(part["missing"] for part in found["components"])) == (False, 128)


async def test_the_fleet_that_is_there_is_planned_with_what_runs_and_whom_it_would_displace(
    gateway: Gateway, api: Client
) -> None:
    holder = await api.submit(resources={"gpu_mb": 60 * GIB}, priority=20)
    await gateway.admit(holder)
    gateway.clock.advance(1.0)
    before = await gateway.store.head()
    beside = await plan(api, [{"name": "a", "count": 2, "resources": {"gpu_mb": 10 * GIB}}])
    assert (beside["message"], beside["displaced"]) == ("it fits", [])
    found = await plan(api, [{"name": "a", "count": 3, "resources": {"gpu_mb": 20 * GIB}, "priority": 50}])
    assert (found["fits"], found["message"]) == (True, "it fits if 1 run of lower priority leave")
    assert [run["id"] for run in found["displaced"]] == [holder]
    assert [place["displaces"] for place in found["places"]] == [0, 1, 0]
    many = await plan(api, [{"name": "a", "count": 3, "resources": {"gpu_mb": 20 * GIB}, "priority": 20}])
    assert (many["fits"], many["components"][0]["missing"]) == (False, 2)
    assert (gateway.task(holder).state.value, await gateway.store.head()) == ("running", before)


async def test_what_cannot_be_planned_is_refused(gateway: Gateway, api: Client) -> None:
    part = {"name": "a", "count": 2000, "resources": {"cpu": 1}}
    problem(await api.post("/plan", json={"components": [part, part]}), 422, "validation-failed")
    twice = {"components": [{"name": "a"}, {"name": "a"}]}
    problem(await api.post("/plan", json=twice), 422, "validation-failed")
    gang = {"components": [{"name": "a", "resources": {"bundles": [{"count": 2, "gpus": 1}]}}]}
    problem(await api.post("/plan", json=gang), 422, "validation-failed")
    problem(await api.post("/plan", json={"components": []}), 422, "validation-failed")
    strange = {"components": [{"name": "a", "resources": {"pool": "none", "gpus": 1}}]}
    problem(await api.post("/plan", json=strange), 422, "pool-mismatch")
    reader = await gateway.client("reader", "tasks:read")
    problem(await reader.post("/plan", json={"components": [part]}), 403, "forbidden")


async def test_a_fleet_that_is_too_large_is_refused(api: Client) -> None:
    nodes = [{"name": f"rack{number}", "count": 600, "cpu": 8} for number in range(2)]
    body = {"components": [{"name": "a"}], "fleet": nodes}
    refusal = problem(await api.post("/plan", json=body), 422, "validation-failed")
    assert "at most 1000 nodes and 10000 GPUs" in str(refusal["errors"])


async def test_a_plan_for_another_fleet_lets_others_have_their_turn(api: Client) -> None:
    asked = {
        "components": [{"name": "a", "count": 400, "resources": {"gpus": 1}}],
        "fleet": [{"name": "n", "count": 50, "cpu": 64, "gpus": [{"memory_mb": 81920, "count": 8}]}],
    }
    plan = asyncio.ensure_future(api.post("/plan", json=asked))
    answered = 0
    while not plan.done():
        assert (await api.get("/healthz")).status_code == 200
        answered += 1
        await asyncio.sleep(0)
    assert plan.result().json()["fits"]
    assert answered > 2


async def test_a_plan_that_takes_too_long_is_refused(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.gateway.routes.plan.UNPAUSED_SECONDS", 0.0)
    body = {"components": [{"name": "a", "count": 2, "resources": {"cpu": 1}}]}
    refusal = problem(await api.post("/plan", json=body), 422, "validation-failed")
    assert "ask about fewer tasks at a time" in str(refusal["errors"])
