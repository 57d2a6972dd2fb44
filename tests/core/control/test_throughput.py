"""Throughput in the log: a component's items per second, whenever they have changed by enough."""

from gpubroker_server.core.control.throughput import COMPONENTS, ITEMS, Throughput, ThroughputRules
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant, Seconds

from tests.builders import NOW


class Course:
    """Periods of 100 s."""

    def __init__(self) -> None:
        self.throughput = Throughput(ThroughputRules(Seconds(100.0), change=0.5, least_per_second=0.1))
        self.at = Instant(NOW)
        assert list(self.throughput.follow(self.at)) == []

    def period(self, items: int) -> list[tuple[float, float, float]]:
        """Rate, the one told before, and the threshold, of what is told at its end."""
        self.throughput.done[ITEMS] += items
        self.at = Instant(self.at + 100)
        told = list(self.throughput.follow(self.at))
        assert {(one.kind, one.key) for one in told} <= {("fleet.THROUGHPUT", ITEMS)}
        return [tuple(one.fields[it] for it in ("items_per_second", "before", "threshold")) for one in told]


def test_a_rate_is_told_when_it_differs_by_half_of_the_last_one() -> None:
    course = Course()
    assert course.period(1000) == [(10.0, 0.0, 0.1)]
    assert course.period(1400) == []
    assert course.period(600) == []
    assert course.period(1500) == [(15.0, 10.0, 15.0)]
    assert course.period(750) == [(7.5, 15.0, 7.5)]
    assert course.period(0) == [(0.0, 7.5, 3.75)]


def test_a_few_items_are_no_news() -> None:
    course = Course()
    assert course.period(9) == []
    assert course.period(10) == [(0.1, 0.0, 0.1)]
    assert course.period(3) == []


def test_throughput_is_told_once_a_period_and_a_clock_set_back_begins_one() -> None:
    """Nothing is told within a period, and a clock that is set back begins a new one."""
    course = Course()
    course.throughput.done[ITEMS] += 1000
    assert list(course.throughput.follow(Instant(NOW + 99))) == []
    assert list(course.throughput.follow(Instant(NOW - 50))) == []
    assert list(course.throughput.follow(Instant(NOW))) == []
    course.at = Instant(NOW - 50)
    assert course.period(2000) == [(20.0, 0.0, 0.1)]


def test_moves_of_tasks_are_items_of_their_components() -> None:
    throughput = Throughput(ThroughputRules())
    assert tuple(throughput.done) == COMPONENTS
    moves = (Move.SUBMITTED, Move.ADMITTED, Move.STARTED, Move.CHANGED, Move.STOPPING, Move.CANCELLED)
    for move in moves:
        throughput.moved(move, is_inference=False)
    throughput.moved(Move.SUCCEEDED, is_inference=True)
    throughput.moved(Move.STARTED, is_inference=True)
    assert +throughput.done == {
        "submitted": 1, "admitted": 1, "started": 2, "finished": 2, "inferences": 1,
    }  # fmt: skip
