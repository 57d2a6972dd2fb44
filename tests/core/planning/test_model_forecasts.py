"""Forecasts of what waits for the memory of a model: they use what is stored about it, and guess nothing."""

import pytest
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.model_orders import ModelsInUse
from gpubroker_server.core.domain.models import ModelUsage, turn_seconds
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.lifecycle.model_turns import turns
from gpubroker_server.core.planning.forecasts.forecast_rounds import expected_ready_at
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, a_sample, a_task, a_world, submit
from tests.core.served import LLM, POLICY, WANTED, a_model, ask, at, loaded, plan, the

TURN = turn_seconds(Seconds(1.0))


def forecast(world: World, seconds: float) -> Forecast | None:
    """Of the only task that waits."""
    world.measure([a_sample(device, at(seconds)) for device in world.ledgers])
    *_, made = make_forecasts(world, POLICY, at(seconds))
    return made[0] if made else None


def a_run(priority: int = 10) -> Task:
    return a_task("run", priority=priority, gpu_mb=60 * GIB)


@pytest.mark.parametrize("seconds", [2.0, 20.0, 39.0])
def test_a_task_starts_when_the_model_makes_room_for_tasks(seconds: float) -> None:
    world = loaded(a_model(terms={"usage": ModelUsage(at(10.0))}))
    submit(world, a_run())
    found = forecast(world, seconds)
    assert found is not None
    assert (found.start_at, found.p90_at, found.basis) == (at(40.0), at(40.0), Basis.STATED)


@pytest.mark.parametrize("seconds", [60.0, 200.0, WANTED - 1.0])
def test_a_model_in_use_is_there_as_long_as_it_is_wanted(seconds: float) -> None:
    world = loaded(a_model(terms={"usage": ModelUsage(at(10.0))}))
    submit(world, a_run())
    found = forecast(world, seconds)
    assert found is not None
    assert (found.start_at, found.basis) == (at(WANTED), Basis.GUESS), "each request makes it longer"


def test_nothing_is_forecast_where_a_pinned_model_is_in_the_way() -> None:
    world = loaded()
    ask(world, "pin", 2.0, pinned=True)
    submit(world, a_run())
    assert forecast(world, 20.0) is None


def test_a_lower_model_is_loaded_after_the_minimum_residency_of_the_other() -> None:
    world = loaded()
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    found = forecast(world, 2.0)
    assert found is not None
    assert (found.start_at, found.basis) == (at(6.0), Basis.STATED)


@pytest.mark.parametrize("rival", [a_model("run"), a_run(50)])
def test_an_equal_has_its_turn_when_that_of_the_model_is_over(rival: Task) -> None:
    world = loaded()
    submit(world, rival)
    found = forecast(world, 2.0)
    assert found is not None
    assert found.start_at == at(1.0 + TURN)


def test_a_model_that_makes_room_is_gone_after_its_notice() -> None:
    world = loaded()
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    for decision in turns(world, ModelsInUse(frozenset()), at(6.0), POLICY):
        world.tasks[LLM] = decision.tasks[0].task
    found = forecast(world, 6.0)
    assert found is not None
    assert found.start_at <= at(6.0 + the(world).grace_seconds)


def test_a_model_whose_load_failed_is_not_ready_before_its_next_try() -> None:
    world = a_world()
    model = a_model(terms={"load_seconds": Seconds(5.0)}, not_before=at(60.0))
    submit(world, model)
    found = expected_ready_at(world, the(world), (), at(10.0))
    assert found is not None
    assert found.p50_at == at(65.0)


@pytest.mark.parametrize("is_renewed", [False, True])
def test_a_lease_is_expected_to_run_out_unless_it_was_renewed(is_renewed: bool) -> None:
    world = a_world()
    lease = a_task("lease", gpu_mb=60 * GIB, holder=External(Seconds(90.0)), grace_seconds=Seconds(0.0))
    submit(world, lease)
    plan(world)
    deadline_at = at(120.0) if is_renewed else at(90.0)
    world.tasks[lease.id] = replace(world.tasks[lease.id], deadline_at=deadline_at)
    submit(world, a_run())
    found = forecast(world, 80.0)
    assert found is not None
    assert (found.start_at > deadline_at) if is_renewed else (found.start_at == deadline_at)


def test_explain_offers_to_unpin_the_model_in_the_way() -> None:
    world = loaded()
    ask(world, "pin", 2.0, pinned=True)
    submit(world, a_run())
    world.measure([a_sample(device, at(20.0)) for device in world.ledgers])
    told = advise(diagnose(survey_nodes(Draft(world), the(world, "run"), POLICY, at(20.0))))
    assert told.start is None
    [remedy] = [remedy for remedy in told.remedies if remedy.after is not None]
    says = "when the pinned model llm is unpinned (`gpubroker pin llm --off`), it starts on n1/gpu0"
    assert remedy.message == says


def test_nothing_is_offered_where_unpinning_does_not_help() -> None:
    world = loaded()
    ask(world, "pin", 2.0, pinned=True)
    submit(world, a_task("large", gpu_mb=60 * GIB, custom=(("tape", 1.0),)))
    world.measure([a_sample(device, at(20.0)) for device in world.ledgers])
    told = advise(diagnose(survey_nodes(Draft(world), the(world, "large"), POLICY, at(20.0))))
    assert [remedy for remedy in told.remedies if remedy.after is not None] == []


def test_loading_model_is_expected_to_stay_as_long_as_it_is_wanted() -> None:
    world = a_world()
    submit(world, a_model(), a_run())
    plan(world)
    found = forecast(world, 2.0)
    assert found is not None
    assert found.start_at == at(WANTED)
