"""The demand that autoscalers read, and the bodies that docs/how-to/autoscale.md gives them."""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from gpubroker.wire.policy import TaskMaximum
from msgspec.structs import replace

from tests.architecture.source_tree import ROOT
from tests.builders import GIB, a_device, a_node, a_sample
from tests.gateway.harness import Client, Gateway, a_body, fault, problem

PAGE = (ROOT / "docs/how-to/autoscale.md").read_text(encoding="utf-8")


def documents() -> Iterator[dict[str, Any]]:
    for block in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        yield from yaml.safe_load_all(block)


def only(kind: str) -> dict[str, Any]:
    [found] = [document for document in documents() if document.get("kind") == kind]
    return found


async def test_what_waits_is_unmet_and_with_what_is_held_needed(gateway: Gateway, api: Client) -> None:
    await gateway.admit(await api.submit(resources={"gpu_mb": 70 * GIB, "cpu": 2.0}))
    for _ in range(3):
        await api.submit(resources={"gpu_mb": 40 * GIB, "cpu": 1.0, "memory_mb": GIB})
    gateway.clock.advance(90)
    found = (await api.get("/autoscaling/demand")).json()
    lacking = {"gpus": 2, "gpu_mb": 120 * GIB, "cpu": 3.0, "memory_mb": 3 * GIB}
    waits = {"tasks": 3, "waiting_seconds": 90.0}
    assert found["unmet"] == lacking | waits
    assert found["groups"] == [lacking | waits | {"pool": "", "kinds": []}]
    assert found["used"] == {"gpus": 1, "gpu_mb": 70 * GIB, "cpu": 2.0, "memory_mb": 0}
    assert found["needed"] == {"gpus": 3, "gpu_mb": 190 * GIB, "cpu": 5.0, "memory_mb": 3 * GIB}
    assert (found["limited_tasks"], found["spare"]["nodes"]) == (0, [])
    assert (await api.get("/autoscaling/demand?waited_seconds=91")).json()["unmet"]["gpus"] == 0
    assert (await api.get("/autoscaling/demand?pool=lab")).json()["unmet"]["gpus"] == 0
    assert (await api.get("/autoscaling/demand?kind=H100")).json()["unmet"]["gpus"] == 2


async def test_a_node_that_nobody_uses_can_be_given_back(api: Client) -> None:
    spare = (await api.get("/autoscaling/demand")).json()["spare"]
    [node] = spare["nodes"]
    assert (node["name"], node["kinds"], node["gpus"]) == ("n1", ["H100"], 1)
    assert {name: node[name] for name in ("gpus", "gpu_mb", "cpu", "memory_mb")} == {
        name: spare[name] for name in ("gpus", "gpu_mb", "cpu", "memory_mb")
    }


async def test_a_pool_that_does_not_exist_is_refused(api: Client) -> None:
    answer = await api.get("/autoscaling/demand?pool=lav")
    assert fault(answer, "query:pool") == "there is no pool 'lav'; configured are: lab"


async def test_only_tokens_that_may_read_the_cluster_see_it(gateway: Gateway) -> None:
    user = await gateway.client("user", "tasks:read")
    problem(await user.get("/autoscaling/demand"), 403, "forbidden")


async def test_keda_finds_its_value_at_the_documented_place(api: Client, gateway: Gateway) -> None:
    await gateway.admit(await api.submit(resources={"gpu_mb": 70 * GIB}))
    for _ in range(2):
        await api.submit(resources={"gpu_mb": 70 * GIB})
    gateway.clock.advance(60.0)
    [trigger] = only("ScaledObject")["spec"]["triggers"]
    assert trigger["type"] == "metrics-api"
    asked = urlsplit(trigger["metadata"]["url"])
    value: Any = (await api.get(f"{asked.path}?{asked.query}")).json()
    for name in trigger["metadata"]["valueLocation"].split("."):
        value = value[name]
    assert value == 3, "one in use, two that are missing"
    assert trigger["authenticationRef"]["name"] == only("TriggerAuthentication")["metadata"]["name"]


async def test_the_external_metric_of_the_hpa_is_one_of_ours(api: Client, gateway: Gateway) -> None:
    [adapter] = [rule for document in documents() for rule in document.get("externalRules", ())]
    [metric] = only("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == adapter["name"]["as"]
    await gateway.admit(await api.submit(resources={"gpu_mb": 70 * GIB}))
    await api.submit(resources={"gpu_mb": 70 * GIB})
    shown = (await api.get("/metrics")).text
    assert f"\n{adapter['seriesQuery']} 2.0\n" in shown
    assert '\ngpubroker_unmet_gpus{pool=""} 1.0\n' in shown
    assert "\ngpubroker_spare_gpus 0.0\n" in shown


H200 = {"gpus": 1, "kinds": ["H200"]}


async def test_without_an_autoscaler_what_no_node_could_take_is_refused(
    gateway: Gateway, api: Client
) -> None:
    problem(await api.post("/tasks", json=a_body(resources=H200)), 422, "no-matching-device")
    gateway.change(policy=replace(gateway.policy, autoscaler="keda", maximum=TaskMaximum(gpus=4)))
    problem(await api.post("/tasks", json=a_body(resources={"gpus": 5})), 422, "exceeds-maximum")


@pytest.mark.parametrize(
    ("resources", "gpus", "reason"),
    [
        (H200, 1, "NoMatchingDevice"),
        ({"gpus": 2}, 2, "ExceedsCapacity"),
        ({"gpu_mb": 200 * GIB}, 1, "ExceedsCapacity"),
        ({"bundles": [{"gpus": 1}] * 3}, 3, "ExceedsCapacity"),
        ({"cpu": 1000.0}, 0, "ExceedsCapacity"),
        ({"gpus": 1, "nodes": {"zone": ["moon"]}}, 1, "NoMatchingDevice"),
    ],
)
async def test_with_an_autoscaler_it_waits_with_its_reason_and_is_unmet_demand(
    gateway: Gateway, api: Client, resources: dict[str, Any], gpus: int, reason: str
) -> None:
    gateway.change(policy=replace(gateway.policy, autoscaler="keda"))
    would = (await api.post("/tasks/simulate", json=a_body(resources=resources))).json()
    assert would["reason"] == reason
    task = await api.submit(resources=resources)
    found = (await api.get(f"/tasks/{task}/explain")).json()
    assert found["reason"] == reason
    assert found["message"].startswith("it waits for a node that autoscaler keda may add: ")
    unmet = (await api.get("/autoscaling/demand")).json()["unmet"]
    assert (unmet["tasks"], unmet["gpus"]) == (1, gpus)
    findings = (await api.get("/diagnostics")).json()["items"]
    assert not any(task in str(one) for one in findings), "an operator need do nothing about it"


async def test_so_many_may_wait_for_nodes_whatever_else_they_wait_for(gateway: Gateway, api: Client) -> None:
    gateway.change(policy=replace(gateway.policy, autoscaler="keda", autoscaler_tasks=3))
    first = await api.submit(resources=H200)
    await api.submit(resources=H200, held=True)
    await api.submit(resources=H200, after=[first])
    await api.submit(resources={"gpus": 1})
    refused = problem(await api.post("/tasks", json=a_body(resources=H200)), 429, "tenant-queue-full")
    assert (
        "has 3 tasks that wait for nodes which autoscaler keda may add, and may have 3" in refused["detail"]
    )
    together = {"tasks": [a_body(resources=H200), a_body(resources=H200)]}
    assert (await api.post("/tasks/batch", json=together)).status_code == 429
    other = await gateway.client("other", tenant="other")
    await other.submit(resources=H200)


async def test_a_task_that_waits_for_a_node_starts_when_that_node_has_come(
    gateway: Gateway, api: Client
) -> None:
    gateway.change(policy=replace(gateway.policy, autoscaler="keda"))
    task = await api.submit(resources=H200)
    device = a_device("gpu0", "n2", kind="H200")
    await gateway.join(device, node=a_node("n2"))
    gateway.world.measure([a_sample(device.key, at=gateway.clock.now())])
    await gateway.admit(task)
    assert gateway.task(task).node == "n2"
