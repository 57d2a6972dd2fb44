"""Demands beside sizes: model types, limits, kinds, nodes and pools."""

from typing import Any

import pytest
from gpubroker.wire.policy import GpuKind
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.lifecycle.reconcile import InventoryRules

from tests.builders import GIB, a_device
from tests.gateway.harness import Client, Gateway, a_body, problem


async def test_a_model_type_fills_in_what_a_submit_leaves_out(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(model_type="llm"))).json()
    assert (task["priority"], task["timeout_seconds"], task["max_retries"]) == (79, 900.0, 1)
    asked = task["resources"]
    assert (asked["gpus"], asked["gpu_mb"], asked["cpu"], asked["memory_mb"]) == (1, 8192, 2.0, 4096)


async def test_a_model_type_fills_in_what_a_rank_leaves_out_but_gives_it_no_gpus(api: Client) -> None:
    bundles = [{"gpus": 1, "gpu_mb": 1024}, {"cpu": 1, "memory_mb": 64}]
    task = (await api.post("/tasks", json=a_body(model_type="llm", resources={"bundles": bundles}))).json()
    asked = [(b["gpus"], b["cpu"], b["memory_mb"]) for b in task["resources"]["bundles"]]
    assert asked == [(1, 2.0, 4096), (0, 1.0, 64)]


async def test_a_submit_overrides_its_model_type(api: Client) -> None:
    said: dict[str, Any] = {
        "priority": 0,
        "timeout_seconds": 5.0,
        "max_retries": 0,
        "resources": {"gpu_mb": 1024, "cpu": 0, "memory_mb": 0},
    }
    task = (await api.post("/tasks", json=a_body(model_type="llm", **said))).json()
    assert (task["priority"], task["timeout_seconds"], task["max_retries"]) == (0, 5.0, 0)
    asked = task["resources"]
    assert (asked["gpu_mb"], asked["cpu"], asked["memory_mb"]) == (1024, 0, 0)


@pytest.mark.parametrize("gpus", [{"gpus": 1}, {"gpus": 0}, {"exclusive": True}, {"gpu_fraction": 0.5}])
async def test_a_model_type_gives_no_gpu_size_if_the_submit_mentions_gpus(
    api: Client, gpus: dict[str, object]
) -> None:
    task = (await api.post("/tasks", json=a_body(model_type="llm", resources=gpus))).json()
    assert task["resources"]["gpu_mb"] is None


async def test_a_demand_above_the_maximum_per_task_is_refused(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"memory_mb": 200 * 1024}))
    document = problem(response, 422, "exceeds-maximum")
    assert document["errors"][0]["pointer"] == "/resources/memory_mb"
    assert "one task may have at most 131072" in document["detail"]


async def test_more_of_a_custom_resource_than_one_node_has_is_refused(api: Client) -> None:
    assert (await api.post("/tasks", json=a_body(resources={"custom": {"fpga": 2}}))).status_code == 202
    response = await api.post("/tasks", json=a_body(resources={"custom": {"fpga": 3}}))
    assert "each node's limit of 2" in problem(response, 422, "exceeds-capacity")["detail"]


async def test_resource_kept_for_higher_priorities_is_refused_with_the_threshold(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(priority=69, resources={"custom": {"seat": 1}}))
    document = problem(response, 422, "priority-too-low")
    assert document["errors"][0]["pointer"] == "/resources/custom/seat"
    assert "priority 70 and above" in document["detail"]


async def test_a_priority_cannot_be_lowered_below_the_threshold_of_a_resource(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(priority=70, resources={"custom": {"seat": 1}}))).json()
    response = await api.patch(f"/tasks/{task['id']}", json={"priority": 69})
    assert problem(response, 422, "priority-too-low")["errors"][0]["pointer"] == "/priority"


WISHES = {
    "kinds": ["H100", "H200"],
    "min_power": 0,
    "min_device_mb": 40960,
    "nodes": {"node": ["n1", "n2"]},
    "prefer_kinds": ["H200"],
    "prefer_nodes": {"zone": ["a"]},
}


async def test_kinds_and_nodes_are_returned_as_given_and_alone_mean_one_gpu(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(resources=WISHES))).json()
    assert {name: task["resources"][name] for name in WISHES} == WISHES
    assert (task["resources"]["gpus"], task["resources"]["cpu"]) == (1, 0.0)


@pytest.mark.parametrize(
    ("resources", "pointer"),
    [
        ({"kinds": ["B200"]}, "/resources/kinds"),
        ({"min_power": 1}, "/resources/min_power"),
        ({"gpu_mb": 1, "min_device_mb": 100 * GIB}, "/resources/min_device_mb"),
        ({"nodes": {"zone": ["a"]}}, "/resources/nodes"),
    ],
)
async def test_an_unknown_kind_or_node_is_refused_with_the_known_ones(
    api: Client, resources: dict[str, object], pointer: str
) -> None:
    document = problem(await api.post("/tasks", json=a_body(resources=resources)), 422, "no-matching-device")
    assert document["errors"][0]["pointer"] == pointer
    assert "ask for one of th" in document["detail"]


async def test_zero_gpus_and_a_kind_of_gpu_contradict_each_other(api: Client) -> None:
    response = await api.post("/tasks", json=a_body(resources={"gpus": 0, "kinds": ["H100"]}))
    assert problem(response, 422, "validation-failed")["errors"][0]["pointer"] == "/resources"


async def test_the_context_of_a_process_is_shown_separately(gateway: Gateway, api: Client) -> None:
    gateway.change(inventory=InventoryRules("test", kinds=(GpuKind("H100", 2000, Mib(512)),)))
    await gateway.join(a_device())
    task = (await api.post("/tasks", json=a_body(resources={"gpu_mb": 1024}))).json()
    await gateway.admit(task["id"])
    [device] = (await api.get(f"/tasks/{task['id']}")).json()["devices"]
    assert (device["gpu_mb"], device["context_mb"]) == (1536, 512)
    [gpu] = (await api.get("/gpus")).json()["items"]
    assert (gpu["power"], gpu["context_mb"], gpu["leased_mb"]) == (2000, 512, 1536)
    assert gpu["holders"][0]["context_mb"] == 512


async def test_a_task_gets_the_kinds_of_its_pool_and_shows_it(api: Client) -> None:
    task = (await api.post("/tasks", json=a_body(resources={"gpu_mb": 1024, "pool": "lab"}))).json()
    assert (task["resources"]["pool"], task["resources"]["kinds"]) == ("lab", ["H100"])


@pytest.mark.parametrize(
    ("resources", "pointer"),
    [({"pool": "nowhere"}, "/resources/pool"), ({"pool": "lab", "kinds": ["L4"]}, "/resources/kinds")],
)
async def test_a_demand_that_does_not_fit_its_pool_is_refused(
    api: Client, resources: dict[str, object], pointer: str
) -> None:
    response = await api.post("/tasks", json=a_body(resources=resources))
    assert problem(response, 422, "pool-mismatch")["errors"][0]["pointer"] == pointer


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"labels": {"run": "7"}}, "the limit of 1 for the running tasks with label run=7 is reached"),
        ({"resources": {"gpu_mb": 45 * GIB, "pool": "lab"}}, "of the pool's gpus (pool lab)"),
    ],
)
async def test_a_task_above_a_limit_waits_with_the_limit_as_its_reason(
    gateway: Gateway, api: Client, fields: dict[str, Any], said: str
) -> None:
    first = (await api.post("/tasks", json=a_body(**fields))).json()
    await gateway.admit(first["id"])
    second = (await api.post("/tasks", json=a_body(**fields))).json()
    told = (await api.get(f"/tasks/{second['id']}/explain")).json()
    assert told["reason"] == "ConcurrencyLimited"
    assert said in told["message"]
