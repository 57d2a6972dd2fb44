"""What a server of models has in memory without a holder is entered once it is sure that nobody has it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelKey, ModelRules
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.inference.holders import Adoption
from msgspec.structs import replace

from tests.builders import GIB, a_device
from tests.chaos.history import violations
from tests.contracts.scenes import log_of
from tests.gateway.harness import until
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import ResidentModels, resident_models
from tests.simulated_host import SimulatedModel


@asynccontextmanager
async def looking(*models: SimulatedModel, **rules: Any) -> AsyncIterator[tuple[ResidentModels, Adoption]]:
    async with resident_models(Heard(), *models, **rules) as there:
        assert there.gateway.residencies is not None
        yield there, Adoption(there.gateway.residencies)


async def test_model_seen_at_two_checks_gets_a_holder_and_stays_where_it_is() -> None:
    async with looking() as (there, looks):
        await there.host.load("any", (), Seconds(1.0))
        await looks.check()
        assert there.of() is None, "it may be about to leave"
        await looks.check()
        task = there.of()
        assert task is not None
        assert (task.state, task.held, task.priority, task.demand.gpu_mb) == (
            TaskState.PENDING, True, 0, 50 * GIB,
        )  # fmt: skip
        await looks.check()
        assert there.of() == task


async def test_steps_of_an_ensemble_and_models_that_have_left_get_no_holder() -> None:
    models = (SimulatedModel("any", steps=("step",)), SimulatedModel("step", Mib(10)), SimulatedModel("gone"))
    async with looking(*models) as (there, looks):
        await there.host.load("any", (), Seconds(1.0))
        await there.host.load("gone", (), Seconds(1.0))
        await looks.check()
        await there.host.unload("gone", Seconds(1.0))
        await looks.check()
        await looks.check()
        assert [task.name for task in there.gateway.world.models.live()] == ["any"]


async def test_the_base_cost_of_a_server_is_held_while_the_settings_say_so() -> None:
    async with looking(base_mb=Mib(500)) as (there, looks):
        await looks.check()
        base = there.gateway.world.models.of(ModelKey("main", ""))
        assert base is not None
        assert (base.name, base.demand.gpu_mb, base.expires_at) == ("main itself", 500, None)
        [residency] = there.residencies
        residency.rules = replace(residency.rules, base_mb=Mib(0))
        await looks.check()
        await until(lambda: there.gateway.world.models.of(ModelKey("main", "")) is None)


async def test_the_base_cost_of_a_server_follows_a_new_size_and_a_corrected_gpu() -> None:
    async with looking(base_mb=Mib(500), devices=("gpu7",)) as (there, looks):
        assert there.gateway.residencies is not None
        [residency] = there.gateway.residencies
        await looks.check()
        first = there.gateway.world.models.of(ModelKey("main", ""))
        assert first is not None
        await looks.check()
        assert there.gateway.world.models.of(ModelKey("main", "")) == first, "the settings have not changed"
        for base_mb, devices in ((800, ("gpu7",)), (800, ("gpu0",)), (800, ())):
            residency.rules = replace(residency.rules, base_mb=Mib(base_mb), devices=devices)
            await Adoption(there.gateway.residencies).check()  # as a process that has just started
            base = there.gateway.world.models.of(ModelKey("main", ""))
            assert base is not None
            assert (base.demand.gpu_mb, base.demand.where.devices) == (base_mb, devices)


async def test_base_cost_is_held_on_every_gpu_of_a_server_that_names_none() -> None:
    async with looking(base_mb=Mib(500)) as (there, looks):
        await looks.check()
        gateway = there.gateway
        await gateway.join(a_device("gpu0"), a_device("gpu1"))
        await looks.check()
        await gateway.turn()
        await looks.check()
        base = gateway.world.models.of(ModelKey("main", ""))
        assert base is not None
        assert (base.demand.gpus, base.demand.gpu_mb) == (2, 500)


async def test_model_waiting_for_another_gpu_or_size_is_resubmitted_on_restart() -> None:
    """The settings have changed its GPU or size since."""
    async with looking(devices=("gpu0",)) as (there, _):
        assert there.gateway.residencies is not None
        await there.gateway.join(a_device(), a_device("gpu1"))
        [residency] = there.gateway.residencies
        first = await residency.want("any", 50)
        await Adoption(there.gateway.residencies).check()
        assert there.of() == first, "the settings have not changed"
        for size_mb, gpu in ((50 * GIB, "gpu1"), (40 * GIB, "gpu1")):
            rules = {"any": ModelRules(Mib(size_mb))}
            residency.rules = replace(residency.rules, devices=(gpu,), models=rules)
            await Adoption(there.gateway.residencies).check()
            await until(lambda: there.of() is None)
            again = await residency.want("any", 50)
            assert (again.demand.gpu_mb, again.demand.where.devices) == (size_mb, (gpu,))


async def test_a_holder_that_cannot_be_made_is_tried_again() -> None:
    async with looking(models={}) as (there, looks):
        await there.host.load("any", (), Seconds(1.0))
        await looks.check()
        there.host.go_away()
        await looks.check()
        there.host.come_back()
        await looks.check()
        await looks.check()
        assert there.of() is not None


async def test_a_model_that_cannot_be_described_keeps_no_other_out() -> None:
    odd = SimulatedModel("a", unreadable=True)
    async with looking(odd, SimulatedModel("b", Mib(8)), models={}) as (there, looks):
        for model in ("a", "b"):
            await there.host.load(model, (), Seconds(1.0))
        await looks.check()
        await looks.check()
        assert there.of("a") is None
        assert there.of("b") is not None


async def test_the_history_of_an_adopted_model_that_has_left_is_valid() -> None:
    async with looking(base_mb=Mib(500)) as (there, looks):
        await there.host.load("any", (), Seconds(1.0))
        for _ in range(2):
            await looks.check()
        for _ in range(2):  # one is adopted for each index
            await there.index(any=ModelState.READY)
        assert {task.state for task in there.gateway.world.models.live()} == {TaskState.RUNNING}
        await there.unload()
        await there.index()
        assert [task.name for task in there.gateway.world.models.live()] == ["main itself"]
        assert violations(await log_of(there.gateway.store)) == []


async def test_model_whose_holder_was_given_up_is_adopted_with_its_memory() -> None:
    async with looking() as (there, looks):
        gateway, [residency] = there.gateway, there.residencies
        asked = asyncio.ensure_future(residency.ready("any", 50))
        first = await there.load()
        await asked
        await there.unload()
        await gateway.pass_time(100.0)
        assert list(gateway.world.unconfirmed.quarantined) == [first.id]
        for _ in range(2):
            await looks.check()
        await there.index(any=ModelState.READY)
        task = there.of()
        assert task is not None
        assert (task.state, task.id == first.id) == (TaskState.RUNNING, False)
        assert list(gateway.world.unconfirmed.quarantined) == []
        assert violations(await log_of(gateway.store)) == []
