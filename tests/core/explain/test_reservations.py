"""Room that forecasts reserve: how a task behind it is explained, and what helps."""

from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.units import Mib, Seconds, TaskId
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.explain.fit import Component
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.find_way import Wait
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_task, a_world, holding, submit
from tests.core.expected import starting_in
from tests.core.gangs import a_gang, bundles
from tests.core.plans import planned

POLICY = Policy(ageing_seconds_per_point=Seconds(1e9))


def a_queue(*others: Any, **fields: Any) -> World:
    """`wide` needs both GPUs in 600 s, when a run on one of them ends; the other is kept for it."""
    running = a_task("run", gpus=1, gpu_mb=80 * GIB, expected_seconds=Seconds(700.0))
    wide = a_task("wide", **{"gpus": 2, "gpu_mb": 80 * GIB, "submitted_at": NOW - 10, **fields})
    return a_world(a_device("gpu0"), a_device("gpu1"), holding(running, "gpu0"), wide, *others)


def forecasts_of(world: World) -> list[Forecast]:
    *_, made = make_forecasts(world, POLICY, NOW)
    return made


def advice(world: World, task: str = "new", policy: Policy = POLICY) -> Advice:
    return advise(
        diagnose(survey_nodes(Draft(world), world.tasks[TaskId(task)], policy, NOW, forecasts_of(world)))
    )


def test_reserved_room_is_no_place_and_the_blocker_names_its_task() -> None:
    world = a_queue(a_task("new", gpu_mb=10 * GIB))
    assert advice(world).way.places is None
    found = explain(world, TaskId("new"), POLICY, NOW, forecasts_of(world))
    assert found.reason is Reason.BEHIND_HIGHER_PRIORITY
    assert found.message == (
        "it has room, which is reserved for wide, expected to start on n1 in 10 min; "
        "this task is not known to end by then"
    )
    assert explain(world, TaskId("new"), POLICY, NOW).reason is Reason.PENDING_EVALUATION


def test_a_reservation_of_another_tenant_is_not_named() -> None:
    world = a_queue(a_task("new", gpu_mb=10 * GIB), tenant="rivals")
    found = explain(world, TaskId("new"), POLICY, NOW, forecasts_of(world))
    assert "reserved for a task of another tenant" in found.message
    assert "wide" not in found.message


def test_a_run_time_that_ends_before_the_reservation_is_a_remedy() -> None:
    world = a_queue(a_task("new", gpu_mb=10 * GIB))
    first = advice(world).remedies[0]
    assert (first.change, first.task.expected_seconds) == ({"expected_seconds": 600.0}, 600.0)
    assert first.message == "with expected_seconds at most 600, it starts now on n1/gpu1"


def test_short_task_beyond_the_backfill_depth_is_promised_no_reserved_node() -> None:
    """The planner tries no more tasks there in this cycle than the depth."""
    ahead = [a_task(f"ahead{n}", gpu_mb=10 * GIB, submitted_at=NOW - 5 + n) for n in range(2)]
    world = a_queue(*ahead, a_task("new", gpu_mb=10 * GIB, expected_seconds=Seconds(60.0)))
    assert [one.node for one in advice(world).way.places or ()] == ["n1"]
    shallow = replace(POLICY, backfill_depth=2)
    assert advice(world, policy=shallow).way.places is None
    assert [one.change for one in advice(world, policy=shallow).remedies] == [{"priority": 51}]
    found = explain(world, TaskId("new"), shallow, NOW, forecasts_of(world))
    assert found.reason is Reason.BEHIND_HIGHER_PRIORITY
    unknown = a_queue(*ahead, a_task("new", gpu_mb=10 * GIB))
    assert [one.change for one in advice(unknown, policy=shallow).remedies] == [{"priority": 51}]


def test_a_run_time_that_would_not_do_is_not_advised() -> None:
    stopping = a_queue(a_task("new", gpu_mb=10 * GIB))
    forecasts = [replace(one, start_at=NOW) for one in forecasts_of(stopping)]
    seen = diagnose(survey_nodes(Draft(stopping), stopping.tasks[TaskId("new")], POLICY, NOW, forecasts))
    assert not any("expected_seconds" in remedy.change for remedy in advise(seen).remedies)


def test_a_shorter_run_time_is_no_remedy_for_a_task_without_room() -> None:
    world = a_queue(a_task("new", gpus=2, gpu_mb=10 * GIB, priority=50))
    assert not any("expected_seconds" in remedy.change for remedy in advice(world).remedies)


def test_a_task_that_ends_before_the_forecast_begins_may_use_its_place() -> None:
    world = a_queue(a_task("new", gpu_mb=10 * GIB, expected_seconds=Seconds(300.0)))
    assert advice(world).way.places is not None


def test_unreserved_place_is_taken_before_one_a_task_behind_waits_for() -> None:
    def placed_on(world: World) -> list[str]:
        kept = forecasts_of(world)
        submit(world, a_task("new", gpu_mb=10 * GIB, priority=60))
        seen = diagnose(survey_nodes(Draft(world), world.tasks[TaskId("new")], POLICY, NOW, kept))
        return [place.node for place in advise(seen).way.places or ()]

    assert placed_on(a_queue()) == ["n1"], "it stands ahead, and there is no other place"
    assert placed_on(a_queue(a_device("gpu0", "n2"))) == ["n2"]


def test_a_task_behind_a_reservation_preempts_on_a_node_without_one() -> None:
    low = holding(a_task("low", gpu_mb=80 * GIB, priority=20), "n2/gpu0")
    world = a_queue(a_device("gpu0", "n2"), low, a_task("new", gpu_mb=10 * GIB))
    found = advice(world).way
    assert found.places is None
    assert found.eviction is not None
    assert found.eviction.node == "n2"


def test_no_run_is_preempted_on_the_node_of_a_forecast() -> None:
    low = holding(a_task("low", gpu_mb=70 * GIB, priority=20, expected_seconds=Seconds(700.0)), "gpu1")
    world = a_queue(low, a_task("new", gpu_mb=20 * GIB))
    assert [place.node for forecast in forecasts_of(world) for place in forecast.places] == ["n1"]
    assert advice(world).way.eviction is None


def test_a_gang_respects_reservations_and_finds_other_nodes() -> None:
    world = a_queue(a_gang("new", *bundles(1, gpus=1, gpu_mb=10 * GIB)))
    assert advice(world).way.places is None
    found = explain(world, TaskId("new"), POLICY, NOW, forecasts_of(world))
    assert found.reason is Reason.BEHIND_HIGHER_PRIORITY
    other = a_queue(a_device("gpu0", "n2"), a_gang("new", *bundles(1, gpus=1, gpu_mb=10 * GIB)))
    places = advice(other).way.places or ()
    assert [one.node for one in places] == ["n2"]


def test_advice_shows_the_start_of_a_forecast() -> None:
    world = a_queue()
    assert advice(world, "wide").start == starting_in(600.0)


def test_a_fleet_plan_does_not_use_reserved_room() -> None:
    world = a_queue()
    component = Component("service", 1, Demand(cpu=1.0, gpus=1, gpu_mb=Mib(10 * GIB)), 50)
    assert planned(world, component).fits
    assert not planned(world, component, forecasts=forecasts_of(world)).fits


def test_a_gang_preempts_no_run_on_the_node_of_a_forecast() -> None:
    low = holding(a_task("low", gpu_mb=70 * GIB, priority=20, expected_seconds=Seconds(700.0)), "gpu1")
    world = a_queue(low, a_gang("new", *bundles(1, gpus=1, gpu_mb=20 * GIB)))
    row = world.tasks[TaskId("new")]
    assert advise(diagnose(survey_nodes(Draft(world), row, POLICY, NOW))).way.eviction is not None
    assert isinstance(advice(world).way, Wait)


def test_a_forecast_that_keeps_nothing_from_a_task_is_no_blocker() -> None:
    world = a_queue(a_task("new", gpu_mb=10 * GIB, expected_seconds=Seconds(60.0)))
    found = explain(world, TaskId("new"), POLICY, NOW, forecasts_of(world))
    assert found.reason is Reason.PENDING_EVALUATION
