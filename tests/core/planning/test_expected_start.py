"""What a task that waits is told of its start."""

from gpubroker_server.core.domain.task import Placement
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId
from gpubroker_server.core.planning.forecasts.forecast_rounds import ExpectedStart, expected_start
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast

from tests.builders import GIB, NOW, a_pledge, a_task, a_world


def test_who_waits_is_told_of_its_pledge_else_of_its_forecast_else_nothing() -> None:
    waiting = a_task("next", gpu_mb=GIB)
    times = Instant(NOW - 5), Instant(NOW + 60), Instant(NOW + 90)
    forecast = Forecast(TaskId("next"), (Placement(NodeName("n1"), ()),), *times, 7, Basis.LEARNED)
    other = Forecast(TaskId("other"), (Placement(NodeName("n1"), ()),), *times, 7, Basis.LEARNED)
    world = a_world(waiting)
    assert expected_start(world, waiting, [other, forecast], NOW) == ExpectedStart(
        NOW, times[1], 7, Basis.LEARNED
    )
    assert expected_start(world, waiting, [other], NOW) is None
    pledged = a_world(waiting, a_pledge(waiting, "gpu0", GIB))
    due = Instant(NOW + 30.0)
    assert expected_start(pledged, waiting, [forecast], NOW) == ExpectedStart(due, due, 0, Basis.STATED)
