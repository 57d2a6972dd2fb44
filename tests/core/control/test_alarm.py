"""An alarm goes on after a while above its threshold, and off after a while below a lower one."""

from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.domain.units import Instant, Seconds
from hypothesis import given
from hypothesis import strategies as st

THRESHOLD = Threshold(high=10.0, low=8.0, seconds=Seconds(5.0))


def follow(*values: tuple[float, float | None], threshold: Threshold = THRESHOLD) -> list[bool]:
    """Whether it is on after each (time, value)."""
    alarm, found = Alarm(), []
    for at, value in values:
        alarm = alarm.follow(value, threshold, Instant(at))
        found.append(alarm.is_on)
    return found


def test_alarm_turns_on_after_its_time_above_and_off_after_its_time_below() -> None:
    assert follow((0, 10), (4.9, 11), (5, 10)) == [False, False, True]
    assert follow((0, 10), (5, 10), (6, 7.9), (10.9, 7), (11, 0)) == [False, True, True, True, False]


def test_between_the_thresholds_it_stays_what_it_is() -> None:
    assert follow((0, 9), (9, 9.9)) == [False, False]
    assert follow((0, 10), (5, 10), (6, 8), (99, 9)) == [False, True, True, True]


def test_a_moment_on_the_other_side_begins_the_wait_anew() -> None:
    assert follow((0, 10), (4, 9), (5, 10), (9, 10), (10, 10)) == [False, False, False, False, True]


def test_an_unknown_value_changes_nothing_and_counts_as_neither() -> None:
    assert follow((0, 10), (4, None), (6, 10), (11, 10)) == [False, False, False, True]
    assert follow((0, 10), (5, 10), (6, None), (99, None))[-1]


def test_without_a_duration_it_changes_at_once() -> None:
    assert follow((0, 10), (0, 7), threshold=Threshold(10.0, 8.0)) == [True, False]


def test_it_says_since_when() -> None:
    alarm = Alarm().follow(10.0, THRESHOLD, Instant(1.0)).follow(10.0, THRESHOLD, Instant(6.0))
    assert alarm == Alarm(is_on=True, since=Instant(6.0))


def test_a_clock_that_is_set_back_begins_the_wait_anew() -> None:
    assert follow((100, 10), (50, 10), (54, 10), (55, 10)) == [False, False, False, True]


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 20)), max_size=40))
def test_it_never_changes_sooner_than_its_duration_after_the_last_change(
    steps: list[tuple[float, float]],
) -> None:
    alarm, now, changed_at = Alarm(), 0.0, None
    for seconds, value in steps:
        now += seconds
        after = alarm.follow(value, THRESHOLD, Instant(now))
        if after.is_on is not alarm.is_on:
            assert changed_at is None or now - changed_at >= THRESHOLD.seconds
            assert after.since == now
            changed_at = now
        alarm = after
