"""How true forecasts come, and when they are made anew."""

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.estimates import Sketch, What
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.forecast_rounds import (
    ForecastRounds,
    accuracy_topic,
    forecast_accuracies,
)
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast

from tests.builders import GIB, NOW, a_device, a_node, a_sample, a_sketch, a_task, a_world, commit, submit


def a_forecast(start: float, p90: float, basis: Basis = Basis.LEARNED) -> Forecast:
    times = Instant(NOW + start), Instant(NOW + p90), Instant(NOW + 9000)
    return Forecast(TaskId("next"), (Placement(NodeName("n1"), ()),), *times, 7, basis)


def test_each_start_tells_how_true_the_first_word_about_it_was() -> None:
    world, rounds = a_world(a_task("next", gpu_mb=GIB)), ForecastRounds()
    rounds.take([a_forecast(100.0, 400.0)], world, NOW)
    rounds.take([a_forecast(300.0, 500.0)], world, Instant(NOW + 50))
    now = Instant(NOW + 3)
    decisions = rounds.compare(world, plan_cycle(world, Policy(), now).decisions, now)
    commit(world, decisions, now)
    errors = world.learned.sketch(accuracy_topic(Basis.LEARNED, What.START_ERROR))
    shares = world.learned.sketch(accuracy_topic(Basis.LEARNED, What.START_SHARE))
    assert (errors.n, shares.n) == (1, 1)
    assert abs((errors.quantile(0.5) or 0.0) - 97) < 2
    assert shares.share_until(1.0) == 1.0


def test_task_with_no_forecast_or_an_immediate_start_adds_no_error() -> None:
    world, rounds = a_world(a_task("next", gpu_mb=GIB), a_task("other", gpu_mb=GIB)), ForecastRounds()
    rounds.take([a_forecast(0.5, 0.5)], world, NOW)
    decisions = plan_cycle(world, Policy(), NOW).decisions
    assert rounds.compare(world, decisions, NOW) == list(decisions)


def test_the_first_forecast_of_a_task_that_left_the_queue_is_dropped() -> None:
    world, rounds = a_world(a_task("other", gpu_mb=GIB)), ForecastRounds()
    rounds.take([a_forecast(100.0, 400.0)], world, NOW)
    submit(world, a_task("next", gpu_mb=GIB))
    decisions = plan_cycle(world, Policy(), NOW).decisions
    assert rounds.compare(world, decisions, NOW) == list(decisions)


def test_forecasts_are_recomputed_once_a_second_while_tasks_wait() -> None:
    world, rounds = a_world(), ForecastRounds()
    assert not rounds.is_due(world, NOW)
    submit(world, a_task("next", gpu_mb=GIB))
    assert rounds.is_due(world, NOW)
    rounds.take([a_forecast(100.0, 400.0)], world, NOW)
    assert not rounds.is_due(world, Instant(NOW + 0.9))
    assert rounds.is_due(world, Instant(NOW + 1.0))
    assert rounds.is_due(a_world(), Instant(NOW + 1.0)), "the last ones are taken back"


def test_forecasts_are_worked_out_in_steps_and_hold_once_all_are_there() -> None:
    devices = [a_device("gpu0", f"n{number}") for number in range(9)]
    world, rounds = a_world(*devices, a_task("next", gpu_mb=GIB)), ForecastRounds()
    *_, whole = make_forecasts(world, Policy(), NOW)
    steps = 0
    while rounds.step(world, Policy(), NOW):
        steps += 1
        assert rounds.forecasts == ()
    assert (steps > 2, list(rounds.forecasts)) == (True, whole)
    assert not rounds.step(world, Policy(), Instant(NOW + 0.9)), "they are not due"


def test_a_round_of_forecasts_that_meets_another_inventory_begins_again() -> None:
    """Of a device that is gone, nothing more can be read."""
    devices = [a_device("gpu0", f"n{number}") for number in range(9)]
    world, rounds = a_world(*devices, a_task("next", gpu_mb=100 * GIB)), ForecastRounds()
    assert rounds.step(world, Policy(), NOW)
    commit(world, [Decision("n8", "node_seen", devices=(a_device("gpu1", "n8", mb=Mib(120 * GIB)),))], NOW)
    world.measure([a_sample("n8/gpu1")])
    while rounds.step(world, Policy(), NOW):
        pass
    assert [place.node for forecast in rounds.forecasts for place in forecast.places] == ["n8"]


def test_forecasts_are_outdated_before_the_first_round_and_by_new_nodes() -> None:
    world, rounds = a_world(a_device()), ForecastRounds()
    assert not rounds.is_outdated(world), "no task waits"
    submit(world, a_task("next", gpu_mb=GIB))
    assert rounds.is_outdated(world)
    rounds.take([], world, NOW)
    assert not rounds.is_outdated(world)
    world.add_node(a_node("n2"))
    assert rounds.is_outdated(world)
    assert rounds.is_due(world, NOW)


def test_a_sketch_tells_which_share_is_no_more_than_a_value() -> None:
    assert Sketch().share_until(1.0) is None
    assert a_sketch([0.2, 0.5, 1.0, 3.0]).share_until(1.0) == 0.75


def test_the_accuracy_of_each_basis_is_told_once_it_is_known() -> None:
    world = a_world()
    world.learned.put(accuracy_topic(Basis.LEARNED, What.START_ERROR), a_sketch([10.0, 10.0, 90.0]))
    world.learned.put(accuracy_topic(Basis.LEARNED, What.START_SHARE), a_sketch([0.5, 0.5, 2.0]))
    world.learned.put(accuracy_topic(Basis.STATED, What.START_ERROR), a_sketch([10.0]))
    [known] = forecast_accuracies(world)
    assert (known.basis, known.n) == (Basis.LEARNED, 3)
    assert (round(known.median_error_seconds), round(known.within_p90, 2)) == (10, 0.67)
