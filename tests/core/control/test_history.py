"""An hour of means, one each ten seconds, in bounded memory."""

from gpubroker_server.core.control.history import POINTS, History, Point
from gpubroker_server.core.domain.units import Instant


def test_each_step_has_the_mean_of_its_values() -> None:
    history = History()
    for at, value in ((0, 0.25), (2, 0.75), (12, 0.5)):
        history.add(value, Instant(at))
    assert history.points(Instant(0.0)) == [Point(Instant(0.0), 0.5), Point(Instant(10.0), 0.5)]
    assert history.points(Instant(5.0)) == [Point(Instant(10.0), 0.5)]


def test_steps_without_a_value_are_left_out() -> None:
    history = History()
    assert history.points(Instant(0.0)) == []
    history.add(1.0, Instant(0.0))
    history.add(0.0, Instant(50.0))
    assert [point.at for point in history.points(Instant(0.0))] == [0.0, 50.0]


def test_it_keeps_an_hour_and_no_more() -> None:
    history = History()
    for step in range(2 * POINTS):
        history.add(float(step), Instant(step * 10.0))
    points = history.points(Instant(0.0))
    assert len(points) == POINTS
    assert points[0].value == POINTS
    history.add(7.0, Instant(1e6))
    assert history.points(Instant(0.0)) == [Point(Instant(1e6), 7.0)]


def test_a_value_from_before_the_newest_step_is_dropped() -> None:
    history = History()
    history.add(1.0, Instant(100.0))
    history.add(0.0, Instant(50.0))
    assert history.points(Instant(0.0)) == [Point(Instant(100.0), 1.0)]
