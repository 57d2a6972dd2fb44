"""The holders of models and of their servers are tasks that the task routes show and never change."""

from typing import Any

import pytest
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.inference.holders import Adoption

from tests.gateway.harness import problem
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import resident_models
from tests.simulated_host import SimulatedModel


async def test_models_and_base_costs_are_no_tasks() -> None:
    async with resident_models(Heard(), SimulatedModel("any"), base_mb=Mib(500)) as there:
        gateway = there.gateway
        await there.host.load("any", (), Seconds(1.0))
        adoption = Adoption(there.residencies)
        for _ in range(2):
            await adoption.check()
            await there.index(any=ModelState.READY)
        api = await gateway.client("reader", "tasks:read", "cluster:read", "metrics:read")
        stats = (await api.get("/stats")).json()
        assert set(stats["tasks"].values()) == {0}
        counts = {"waiting": 0, "loading": 0, "resident": 1, "draining": 0, "servers": 1}
        assert stats["models"] == counts
        for query in ("", "?order=turn", "?state=running", "?tenant=default"):
            assert (await api.get(f"/tasks{query}")).json()["items"] == [], query
        assert len((await api.get("/tasks?kind=model")).json()["items"]) == 2
        for tenant in (await api.get("/tenants")).json()["items"]:
            assert (tenant["pending"], tenant["active"]) == (0, 0)
        metrics = (await api.get("/metrics")).text
        assert 'gpubroker_models{state="running"} 1' in metrics
        assert 'gpubroker_models{state="server"} 1' in metrics
        assert "gpubroker_tasks{" not in metrics
        await there.unload()
        await there.index()
        assert there.of() is None
        stats = (await api.get("/stats")).json()
        assert set(stats["tasks"].values()) == {0}, "an unload is no cancelled task"
        assert 'gpubroker_tasks_finished_total{state="cancelled"} 0' in (await api.get("/metrics")).text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tasks/{id}/cancel", {}),
        ("POST", "/tasks/{id}/cancel", {"grace_seconds": 0}),
        ("PATCH", "/tasks/{id}", {"priority": 1}),
        ("PATCH", "/tasks/{id}", {"held": True}),
    ],
)
@pytest.mark.parametrize("model", ["any", ""])
async def test_no_task_route_changes_the_holder_of_a_model_or_of_a_server(
    model: str, method: str, path: str, body: dict[str, Any]
) -> None:
    async with resident_models(Heard(), SimulatedModel("any"), base_mb=Mib(500)) as there:
        gateway = there.gateway
        assert gateway.residencies is not None
        await there.host.load("any", (), Seconds(1.0))
        adoption = Adoption(gateway.residencies)
        for _ in range(2):
            await adoption.check()
        for _ in range(2):
            await there.index(any=ModelState.READY)
        holder = gateway.world.models.of(ModelKey("main", model))
        assert holder is not None
        assert holder.state is TaskState.RUNNING
        api = await gateway.client("writer", "tasks:read", "tasks:write", tenant=holder.tenant)
        answer = await api.request(method, path.format(id=holder.id), json=body)
        refusal = problem(answer, 403, "forbidden")
        assert (f'model "{model}"' if model else "server main itself") in refusal["detail"]
        assert (await api.get(f"/tasks/{holder.id}")).json()["state"] == "running"
        assert (await api.get(f"/tasks/{holder.id}/explain")).status_code == 200
        assert gateway.world.models.of(ModelKey("main", model)) == holder
        assert gateway.world.leases_of(holder) != []
