"""A model is measured only where its size can be told, and is out of memory afterwards, however it ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.task import model_of
from gpubroker_server.core.domain.units import Mib

from tests.builders import GIB, a_device, a_sample
from tests.gateway.harness import Gateway, problem, until
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import ResidentModels, resident_models
from tests.simulated_host import SimulatedHost, SimulatedModel

MEASURE = "/models/any/measure"


@asynccontextmanager
async def a_real_gpu(**model: Any) -> AsyncIterator[ResidentModels]:
    """As far as the service can tell."""
    facts = {"most_rows": 8, **model}
    async with resident_models(Heard(), SimulatedModel("any", Mib(8 * GIB), **facts), models={}) as there:
        await there.gateway.join(a_device("gpu0", simulated=False))
        there.gateway.world.measure([a_sample("gpu0", there.gateway.clock.now())])
        yield there


async def refused(there: ResidentModels, code: str, body: dict[str, Any] | None = None) -> str:
    answer = await there.gateway.admin.post(MEASURE, json=body or {})
    assert there.host.asked == []
    return str(problem(answer, 409, code)["detail"])


async def test_on_a_simulated_gpu_nothing_is_measured() -> None:
    async with resident_models(Heard(), SimulatedModel("any", Mib(8 * GIB))) as there:
        assert "GPU gpu0 is simulated" in await refused(there, "not-measurable")
        assert there.of() is None


async def test_a_model_that_runs_on_cpus_has_no_size_to_measure() -> None:
    async with a_real_gpu(on_cpu=True) as there:
        assert "it runs on CPUs" in await refused(there, "not-measurable")
        assert there.of() is None


async def test_a_model_over_several_gpus_is_not_measured() -> None:
    async with a_real_gpu() as there:
        await there.gateway.join(a_device("gpu0", simulated=False), a_device("gpu1"))
        [residency] = there.residencies
        residency.rules.models["any"] = ModelRules(Mib(GIB), gpus=2)  # type: ignore[index]  # as if the settings said so
        assert "spread over 2 GPUs" in await refused(there, "not-measurable")


async def test_a_model_that_is_wanted_or_in_memory_is_not_measured() -> None:
    async with a_real_gpu() as there:
        await there.gateway.admin.post("/models/any/load", json={})
        assert "unload it first" in await refused(there, "model-in-use")
        await there.gateway.plan((await there.wanted()).id)
        await there.index(any=ModelState.READY)
        there.host.asked.clear()
        assert "(running," in await refused(there, "model-in-use")


async def test_measuring_needs_the_scope_to_manage_models() -> None:
    async with a_real_gpu() as there:
        api = await there.gateway.client("asks", "models:infer")
        problem(await api.post(MEASURE, json={}), 403, "forbidden")
        unknown = await there.gateway.admin.post("/models/none/measure", json={})
        assert "it is in no repository" in problem(unknown, 404, "not-found")["detail"]
        unknown = await there.gateway.admin.post(f"{MEASURE}?server=none", json={})
        assert "no server" in problem(unknown, 404, "not-found")["detail"]


async def test_a_server_that_does_not_answer_is_named() -> None:
    async with a_real_gpu() as there:
        there.host.go_away()
        answer = await there.gateway.admin.post(MEASURE, json={})
        assert "server main does not describe" in problem(answer, 502, "model-not-loaded")["detail"]


async def test_where_two_servers_have_a_model_one_is_chosen() -> None:
    served = [
        (ServerRules(name, "n1"), SimulatedHost(name, [SimulatedModel("any", Mib(GIB))])) for name in "ab"
    ]
    async with Gateway() as gateway:
        gateway.change(served=tuple(served))
        gateway.admin = await gateway.client("boss")
        detail = problem(await gateway.admin.post(MEASURE, json={}), 409, "model-ambiguous")["detail"]
        assert "(a, b)" in detail
        chosen = await gateway.admin.post(f"{MEASURE}?server=b", json={})
        assert "simulated" in problem(chosen, 409, "not-measurable")["detail"]


async def measured(there: ResidentModels, body: dict[str, Any], *, samples: bool = True) -> httpx.Response:
    """The leader carries out what it is asked, and learns nothing."""
    gateway = there.gateway
    asked = asyncio.ensure_future(gateway.admin.post(MEASURE, json=body))
    task = await there.load()
    assert (model_of(task).measured, model_of(task).sized) == (True, False)
    while not gateway.world.requests:
        gateway.clock.advance(1.0)
        if samples:
            gateway.world.measure([a_sample("gpu0", gateway.clock.now())])
        await asyncio.sleep(0)
    [request] = gateway.world.requests.values()
    assert request.what == "cancel"
    await gateway.turn()
    await there.index()
    await until(lambda: there.of() is None)
    return await asked


@pytest.mark.parametrize(
    ("most_rows", "body", "rows"),
    [
        (8, {}, {1, 8}),
        (1, {}, {1}),
        (0, {}, {0}),
        (8, {"batch_sizes": [2, 4]}, {2, 4}),
    ],
)
async def test_model_is_measured_at_its_batch_sizes_if_the_load_teaches_a_size(
    most_rows: int, body: dict[str, Any], rows: set[int]
) -> None:
    async with a_real_gpu(most_rows=most_rows) as there:
        answer = await measured(there, body)
        assert {asked for _, asked in there.host.tried} == rows
        assert "nothing was learned of any" in problem(answer, 409, "not-measurable")["detail"]


async def test_model_that_refuses_a_measuring_request_is_quoted_and_unloaded() -> None:
    async with a_real_gpu() as there:
        answer = await measured(there, {"batch_sizes": [16]})
        assert "batch-size must be <= 8" in problem(answer, 409, "not-measurable")["detail"]


async def test_a_gpu_that_is_measured_no_more_ends_the_measurement() -> None:
    async with a_real_gpu() as there:
        answer = await measured(there, {}, samples=False)
        assert "GPU gpu0 was not measured meanwhile" in problem(answer, 409, "not-measurable")["detail"]
