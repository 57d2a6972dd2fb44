"""Ensembles in the ledger: their size, what their steps show, and who may unload a step."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.draining import Draining
from gpubroker_server.inference.lanes import NO_WISH
from msgspec.structs import replace

from tests.builders import GIB
from tests.gateway.harness import problem, until
from tests.gateway.inference_stage import Heard
from tests.gateway.resident_models import ResidentModels, resident_models
from tests.simulated_host import SimulatedModel

MODELS = (
    SimulatedModel("any", steps=("large", "small")),
    SimulatedModel("large", Mib(8 * GIB)),
    SimulatedModel("small", Mib(1)),
    SimulatedModel("other", Mib(1)),
)
UNLOAD = "/v2/repository/models/{}/unload"


@asynccontextmanager
async def with_ensemble(
    *models: SimulatedModel, loaded: bool = True, **rules: ModelRules
) -> AsyncIterator[ResidentModels]:
    """The ensemble `any` is in memory, and two steps with it. `rules`: of models, by name."""
    async with resident_models(Heard(), *(models or MODELS), models=rules) as there:
        [residency] = there.residencies
        await residency.want("any", 50)
        there.gateway.admin = await there.gateway.client("boss")
        if loaded:
            await there.load()
        yield there


async def size_of(there: ResidentModels) -> tuple[int | None, bool]:
    [residency] = there.residencies
    asked, _, sized = await residency.demand_of("any")
    assert isinstance(asked.gpu_mb, int | None)
    return asked.gpu_mb, sized


async def test_the_size_of_an_ensemble_is_that_of_its_steps() -> None:
    async with with_ensemble(loaded=False) as there:
        [residency] = there.residencies
        large, _, _ = await residency.demand_of("large")
        small, _, _ = await residency.demand_of("small")
        assert isinstance(large.gpu_mb, int)
        assert isinstance(small.gpu_mb, int)
        assert await size_of(there) == (large.gpu_mb + small.gpu_mb, False)


async def test_sizes_that_the_operator_gives_count_for_steps_and_for_the_whole() -> None:
    steps = {"large": ModelRules(Mib(9_000)), "small": ModelRules(Mib(500))}
    async with with_ensemble(loaded=False, **steps) as there:
        assert await size_of(there) == (9_500, True)
    async with with_ensemble(loaded=False, any=ModelRules(Mib(7_000)), **steps) as there:
        assert await size_of(there) == (7_000, True)


async def test_steps_show_as_loaded_with_the_ensemble_that_holds_their_memory() -> None:
    async with with_ensemble() as there:
        task = await there.wanted()
        shown = {model["name"]: model for model in (await there.gateway.admin.get("/models")).json()["items"]}
        assert {name: model["state"] for name, model in shown.items()} == {
            "any": "resident", "large": "resident", "small": "resident", "other": "cold",
        }  # fmt: skip
        one = (await there.gateway.admin.get("/models/large")).json()
        assert one == shown["large"]
        assert (one["task"], one["gpu_mb"]) == (task.id, 0)
        assert one["reason"] == "it is a step of the ensemble any, which holds its memory"


@pytest.mark.parametrize("model", ["large", "small"])
async def test_a_step_of_a_loaded_ensemble_is_not_unloaded(model: str) -> None:
    async with with_ensemble() as there:
        refused = await there.gateway.admin.post(f"/models/{model}/unload")
        assert 'the ensemble "any"' in problem(refused, 409, "model-is-step")["detail"]
        status, _, body = await there.stage.ask("POST", UNLOAD.format(model), b"")
        assert (status, b'the ensemble \\"any\\"' in body) == (409, True)
        task = await there.wanted()
        assert task.state is TaskState.RUNNING


async def test_steps_may_be_unloaded_when_their_ensemble_is_not_loaded() -> None:
    async with with_ensemble(loaded=False) as there:
        [residency] = there.residencies
        assert residency.ensemble_of("large") is None
        residency.check_unload("large")
        assert (await there.gateway.admin.post("/models/large/unload")).status_code == 200
        await there.load()
        with pytest.raises(Problem, match="any"):
            residency.check_unload("large")
        residency.check_unload("any")
        residency.check_unload("other")


async def test_requests_to_a_step_use_the_ensemble_that_holds_its_memory() -> None:
    async with with_ensemble() as there:
        [residency] = there.residencies
        task = await there.wanted()
        assert residency.is_there("large")
        assert (await residency.want("large", 50)).id == task.id
        status, _, _ = await there.stage.ask("POST", "/v2/models/large/infer", b"{}")
        assert status == 200
        assert [holder.name for holder in residency.holders()] == ["any"]


async def test_a_step_of_a_loaded_ensemble_is_not_measured() -> None:
    async with with_ensemble() as there:
        refused = await there.gateway.admin.post("/models/large/measure", json={})
        assert 'model "any" is in memory' in problem(refused, 409, "model-in-use")["detail"]
        assert (await there.wanted()).state is TaskState.RUNNING


async def test_an_ensemble_is_in_use_while_one_of_its_steps_is() -> None:
    async with with_ensemble() as there:
        draining = Draining(there.gateway.world, there.lanes, Policy())
        assert draining.in_use() == ModelsInUse(frozenset())
        turn = there.lanes.enter(b"large", Identity("me", "default", (), 50), NO_WISH)
        both = frozenset({"any", "large"})
        assert draining.in_use() == ModelsInUse(both, both)
        await there.unload()
        assert draining.drained() == frozenset()
        turn.leave()
        task = await there.wanted()
        assert draining.drained() == {f"{task.id}:{task.fence}"}


async def test_waiting_ensemble_is_entered_anew_for_a_new_size_of_a_step() -> None:
    steps = {"large": ModelRules(Mib(9_000)), "small": ModelRules(Mib(500))}
    async with with_ensemble(loaded=False, **steps) as there:
        [residency] = there.residencies
        task = await there.wanted()
        await residency.follow_settings()
        assert there.of() == task, "the settings have not changed"
        residency.rules = replace(residency.rules, models={**steps, "large": ModelRules(Mib(8_000))})
        await residency.follow_settings()
        await until(lambda: there.of() is None)
        assert (await residency.want("any", 50)).demand.gpu_mb == 8_500
