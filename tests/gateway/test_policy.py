"""GET /policy, and the maximum of timeout, retries and grace."""

from typing import Any

import pytest
from gpubroker.wire.policy import GpuKind, TaskMaximum
from gpubroker_server.core.domain.policy import TenantPolicy
from gpubroker_server.core.domain.units import Mib, Seconds
from msgspec.structs import replace

from tests.gateway.harness import Client, Gateway, a_body, problem


async def test_the_policy_shows_what_concerns_a_submit(gateway: Gateway, api: Client) -> None:
    gateway.change(kinds=(GpuKind("H100", 2000, Mib(512)),))
    told = (await api.get("/policy")).json()
    assert told["bands"][0] == {"name": "critical", "lowest": 90, "highest": 100}
    assert told["placement"] == "stranded"
    assert told["kinds"] == [{"name": "H100", "power": 2000, "context_mb": 512}]
    assert (told["pools"][0]["name"], told["pools"][0]["gpus"]) == ("lab", 1)
    assert [limit["name"] for limit in told["custom_limits"]] == ["fpga", "licence", "seat"]
    assert told["custom_limits"][0]["per"] == "node"
    assert told["max_running"] == [{"of": "label:run=*", "limit": 1.0}]
    assert (told["maximum"]["memory_mb"], told["maximum"]["gpus"]) == (128 * 1024, None)
    assert (told["defaults"]["priority"], told["model_types"][0]["name"]) == (54, "llm")


@pytest.mark.parametrize(
    ("scopes", "seen"),
    [(("tasks:read",), {"vision"}), (("tasks:read", "cluster:read"), {"vision", "speech"})],
)
async def test_policy_and_tenants_show_the_same_tenants_to_the_same_token(
    gateway: Gateway, scopes: tuple[str, ...], seen: set[str]
) -> None:
    tenants = (TenantPolicy("*"), TenantPolicy("vision", weight=2.0), TenantPolicy("speech"))
    gateway.change(policy=replace(gateway.policy, tenants=tenants))
    viewer = await gateway.client("viewer", *scopes, tenant="vision")
    rules = {row["name"] for row in (await viewer.get("/policy")).json()["tenants"]}
    standings = {row["name"] for row in (await viewer.get("/tenants")).json()["items"]}
    assert (rules, standings) == ({"*"} | seen, seen)


async def test_the_policy_needs_the_scope_to_read_tasks(gateway: Gateway) -> None:
    writer = await gateway.client("writer", "tasks:write")
    problem(await writer.get("/policy"), 403, "forbidden")


@pytest.mark.parametrize(
    ("field", "value"), [("timeout_seconds", 61.0), ("max_retries", 3), ("grace_seconds", 11.0)]
)
async def test_timeout_retries_and_grace_above_the_maximum_are_refused(
    gateway: Gateway, api: Client, field: str, value: float
) -> None:
    most = TaskMaximum(timeout_seconds=Seconds(60.0), max_retries=2, grace_seconds=Seconds(10.0))
    gateway.change(policy=replace(gateway.policy, maximum=most))
    within: dict[str, Any] = {"timeout_seconds": 60.0, "max_retries": 2, "grace_seconds": 10.0}
    assert (await api.post("/tasks", json=a_body(**within))).status_code == 202
    document = problem(
        await api.post("/tasks", json=a_body(**{**within, field: value})), 422, "exceeds-maximum"
    )
    assert document["errors"][0]["pointer"] == f"/{field}"
    assert "one task may have at most" in document["detail"]
