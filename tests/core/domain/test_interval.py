from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.units import Instant, Seconds


def test_work_is_due_at_first_and_then_once_per_interval() -> None:
    pace = Interval(Seconds(5.0))
    assert pace.is_due(Instant(100.0))
    pace.done(Instant(100.0))
    assert [pace.is_due(Instant(at)) for at in (100.0, 104.9, 105.0)] == [False, False, True]


def test_a_clock_that_was_set_back_stops_nothing() -> None:
    pace = Interval(Seconds(5.0))
    pace.done(Instant(100.0))
    assert pace.is_due(Instant(50.0))
