"""What tenants may do, and what they see of themselves."""

import re

import pytest
from gpubroker_server.core.domain.units import Instant

from tests.builders import GIB
from tests.gateway.harness import Gateway, a_body, problem


async def test_the_priority_caps_of_tenant_and_token_both_hold(gateway: Gateway) -> None:
    modest = await gateway.client("m", tenant="modest")
    document = problem(await modest.post("/tasks", json=a_body(priority=70)), 403, "priority-not-allowed")
    assert 'the cap of tenant "modest"' in document["detail"]
    task = await modest.submit(priority=69)
    problem(await modest.patch(f"/tasks/{task}", json={"priority": 90}), 403, "priority-not-allowed")
    capped = await gateway.client("c", tenant="modest", max_priority=60)
    document = problem(await capped.post("/tasks", json=a_body(priority=65)), 403, "priority-not-allowed")
    assert 'the cap of token "c"' in document["detail"]


async def test_a_task_may_name_one_of_the_operators_streams(gateway: Gateway) -> None:
    task = (await gateway.admin.post("/tasks", json=a_body(stream="nightly"))).json()
    assert task["stream"] == "nightly"
    assert gateway.world.tasks[task["id"]].stream == "nightly"
    document = problem(
        await gateway.admin.post("/tasks", json=a_body(stream="hourly")), 422, "validation-failed"
    )
    assert "there are: nightly" in document["detail"]
    assert document["errors"][0]["pointer"] == "/stream"


async def test_a_demand_above_the_tenants_quota_is_refused(gateway: Gateway) -> None:
    acme = await gateway.client("a", tenant="acme")
    body = a_body(resources={"gpu_mb": 31 * 1024})
    document = problem(await acme.post("/tasks", json=body), 422, "exceeds-quota")
    assert "tenant acme may have 30.0 GiB at most" in document["detail"]
    assert document["errors"][0]["pointer"] == "/resources/gpu_mb"
    assert (await acme.post("/tasks", json=a_body(resources={"gpu_mb": 30 * 1024}))).status_code == 202


async def test_tenants_are_listed_with_quota_and_holding(gateway: Gateway) -> None:
    acme = await gateway.client("a", tenant="acme")
    for _ in range(2):
        await acme.submit(resources={"gpu_mb": 24 * GIB})
    await gateway.turn(plans=True)
    gateway.clock.at = Instant(gateway.clock.at + 10.0)
    listed = (await gateway.admin.get("/tenants")).json()
    told = {tenant["name"]: tenant for tenant in listed["items"]}
    assert list(told) == ["acme", "modest", "zeta"]
    found = told["acme"]
    assert (found["guaranteed_mb"], found["borrow_mb"], found["cohort"]) == (20 * GIB, 10 * GIB, "labs")
    assert (found["held_mb"], found["borrowed_mb"], found["pledged_mb"]) == (24 * GIB, 4 * GIB, 0)
    assert (found["pending"], found["active"], found["max_priority"]) == (1, 1, 100)
    assert found["usage_mb_seconds"] == pytest.approx(240 * GIB, rel=1e-3)
    assert sum(tenant["fair_share"] for tenant in listed["items"]) == pytest.approx(1.0, abs=1e-5)
    assert found["level"] == pytest.approx(24 / 80, rel=1e-2)
    assert [told[name]["fair_share"] for name in told] == pytest.approx([0.25, 0.25, 0.5])
    [labs] = listed["cohorts"]
    assert (labs["name"], labs["held_mb"], labs["message"]) == ("labs", 24 * GIB, None)
    assert told["modest"]["guaranteed_mb"] is None
    assert listed["position"] == gateway.world.position
    metrics = (await gateway.admin.get("/metrics")).text
    for what, mb in (("held", 24 * GIB), ("guaranteed", 20 * GIB)):
        [told_bytes] = re.findall(rf'^gpubroker_tenant_{what}_bytes{{tenant="acme"}} (\S+)$', metrics, re.M)
        assert float(told_bytes) == mb * 2**20
    assert 'gpubroker_tenant_guaranteed_bytes{tenant="zeta"}' in metrics, "a guarantee that nobody uses"
    assert 'gpubroker_tenant_held_bytes{tenant="zeta"}' not in metrics


async def test_a_token_without_cluster_read_sees_only_its_own_tenant(gateway: Gateway) -> None:
    plain = await gateway.client("p", "tasks:read", tenant="zeta")
    seen = (await plain.get("/tenants")).json()
    assert ([tenant["name"] for tenant in seen["items"]], seen["cohorts"]) == (["zeta"], [])
    problem(await (await gateway.client("m", "metrics:read")).get("/tenants"), 403, "forbidden")


async def test_a_task_that_waits_for_quota_says_so(gateway: Gateway) -> None:
    acme = await gateway.client("a", tenant="acme")
    for _ in range(2):
        task = await acme.submit(resources={"gpu_mb": 24 * GIB})
    await gateway.turn(plans=True)
    assert (await acme.get(f"/tasks/{task}")).json()["pending"]["reason"] == "QuotaExhausted"
    told = (await acme.get(f"/tasks/{task}/explain")).json()
    assert "may take 6.0 GiB more, with what cohort labs lends" in told["message"]
    assert told["quota"] == {
        "tenant": "acme",
        "cohort": "labs",
        "guaranteed_mb": 20 * GIB,
        "used_mb": 24 * GIB,
        "borrowed_mb": 4 * GIB,
        "lent_mb": 6 * GIB,
        "left_mb": 6 * GIB,
        "counts_mb": 24 * GIB,
    }
    assert {"gpu_mb": 6 * GIB} in [remedy["change"] for remedy in told["remedies"]]
    asked = {"resources": {"gpu_mb": 8 * GIB}}
    assert (await acme.post("/tasks/simulate", json=asked)).json()["quota"]["counts_mb"] == 8 * GIB
    assert (await gateway.admin.post("/tasks/simulate", json=asked)).json()["quota"] is None
