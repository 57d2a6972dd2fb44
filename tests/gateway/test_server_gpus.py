"""The GPUs that a model leases are those that its server sees: Triton loads a model on each of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.inference.holders import Adoption

from tests.builders import GIB, a_device, a_sample
from tests.gateway.harness import problem
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import ResidentModels, resident_models
from tests.simulated_host import SimulatedModel

LOAD = "/models/any/load"


@asynccontextmanager
async def on_two_gpus(
    *, gpus: int = 1, on_cpu: bool = False, seen: tuple[str, ...] = (), **rules: Any
) -> AsyncIterator[ResidentModels]:
    """A server on a node with two; `seen`: what it says itself."""
    sized = {"any": ModelRules(None if on_cpu else Mib(50 * GIB), gpus=gpus)}
    model = SimulatedModel("any", Mib(50 * GIB), on_cpu=on_cpu)
    async with resident_models(Heard(), model, models=sized, **rules) as there:
        await there.gateway.join(a_device(), a_device("gpu1"))
        there.gateway.world.measure([a_sample("gpu0"), a_sample("gpu1")])
        there.host.seen = seen
        yield there


def leased_on(there: ResidentModels) -> list[str]:
    task = there.of()
    assert task is not None
    return sorted(lease.device.rpartition("/")[2] for lease in there.gateway.world.leases_of(task))


@pytest.mark.parametrize("devices", [(), ("gpu0", "gpu1")])
async def test_model_on_one_gpu_is_refused_by_a_server_of_two_with_a_remedy(
    devices: tuple[str, ...],
) -> None:
    async with on_two_gpus(devices=devices) as there:
        admin = there.gateway.admin
        detail = problem(await admin.post(LOAD, json={}), 422, "no-matching-device")["detail"]
        assert "server main sees 2 GPUs (gpu0, gpu1)" in detail
        assert "CUDA_VISIBLE_DEVICES" in detail
        assert there.of() is None
        assert "sees 2 GPUs" in (await admin.get("/models/any")).json()["reason"]


async def test_a_model_over_both_gpus_of_its_server_leases_both() -> None:
    async with on_two_gpus(gpus=2) as there:
        assert (await there.gateway.admin.post(LOAD, json={})).status_code == 202
        task = await there.wanted()
        await there.gateway.plan(task.id)
        assert leased_on(there) == ["gpu0", "gpu1"]
        assert (await there.gateway.admin.get("/models/any")).json()["reason"] == ""


async def test_a_model_over_two_gpus_is_refused_by_a_server_of_one() -> None:
    async with on_two_gpus(gpus=2, devices=("gpu1",)) as there:
        refused = await there.gateway.admin.post(LOAD, json={})
        assert "sees 1 GPU (gpu1)" in problem(refused, 422, "no-matching-device")["detail"]


async def test_a_model_on_cpus_is_loaded_however_many_gpus_its_server_sees() -> None:
    async with on_two_gpus(on_cpu=True) as there:
        assert (await there.gateway.admin.post(LOAD, json={})).status_code == 202


async def test_gpus_a_server_reports_count_and_not_those_its_settings_leave_open() -> None:
    async with on_two_gpus(seen=("gpu1",), tells_gpus=True) as there:
        assert (await there.gateway.admin.post(LOAD, json={})).status_code == 202
        task = await there.wanted()
        await there.gateway.plan(task.id)
        assert leased_on(there) == ["gpu1"]
        assert (await there.gateway.admin.get("/models/any")).json()["reason"] == ""
    async with on_two_gpus(seen=("gpu0", "gpu1"), devices=("gpu1",), tells_gpus=True) as there:
        refused = await there.gateway.admin.post(LOAD, json={})
        assert "sees 2 GPUs (gpu0, gpu1)" in problem(refused, 422, "no-matching-device")["detail"]


async def test_a_model_that_was_loaded_by_hand_counts_on_both_gpus_of_its_server() -> None:
    async with on_two_gpus() as there:
        assert there.gateway.residencies is not None
        await there.host.load("any", (), Seconds(1.0))
        adoption = Adoption(there.gateway.residencies)
        for _ in range(2):
            await adoption.check()
        await there.index(any=ModelState.READY)
        assert leased_on(there) == ["gpu0", "gpu1"]
