"""What a server of models has in memory without a holder is entered once it is sure that nobody has it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from gpubroker_server.adapters.memory.model_host import SimulatedModel
from gpubroker_server.core.domain.model_orders import ModelState
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.lifecycle.deadlines import due, extend_window
from gpubroker_server.gateway.proxy.residency.holders import Adoption

from tests.builders import GIB, NOW
from tests.chaos.history import violations
from tests.contracts.scenes import log_of
from tests.gateway.harness import until
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import ResidentModels, resident_models


@asynccontextmanager
async def looking(*models: SimulatedModel, **rules: Any) -> AsyncIterator[tuple[ResidentModels, Adoption]]:
    async with resident_models(Heard(), *models, **rules) as there:
        assert there.gateway.parts.residencies is not None
        yield there, Adoption(there.gateway.parts.residencies)


async def test_a_model_that_is_there_at_two_checks_gets_a_holder_and_stays_where_it_is() -> None:
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
        [residency] = there.gateway.parts.residencies or ()
        residency.rules = replace(residency.rules, base_mb=Mib(0))
        await looks.check()
        await until(lambda: there.gateway.world.models.of(ModelKey("main", "")) is None)


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


async def test_a_model_whose_holder_was_given_up_is_adopted_with_the_memory_of_that_holder() -> None:
    async with looking() as (there, looks):
        gateway, [residency] = there.gateway, there.gateway.parts.residencies or ()
        asked = asyncio.ensure_future(residency.ready("any", 50))
        first = await there.load()
        await asked
        await there.unload()
        gateway.clock.advance(100.0)
        now = gateway.clock.now()
        watch = replace(extend_window(None, NOW), last=now)
        for decision in due(gateway.world, now, gateway.policy, watch):
            await gateway.commit(decision)
        assert list(gateway.world.unconfirmed.quarantined) == [first.id]
        for _ in range(2):
            await looks.check()
        await there.index(any=ModelState.READY)
        task = there.of()
        assert task is not None
        assert (task.state, task.id == first.id) == (TaskState.RUNNING, False)
        assert list(gateway.world.unconfirmed.quarantined) == []
        assert violations(await log_of(gateway.store)) == []
