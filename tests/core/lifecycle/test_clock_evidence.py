"""When a wall clock is followed, and when the clock since boot contradicts it."""

import pytest
from gpubroker_server.core.domain.units import Instant, MonotonicSeconds
from gpubroker_server.core.lifecycle.clock_evidence import (
    BOUND_SECONDS,
    MAX_DRIFT,
    STEADY_SECONDS,
    ClockEvidence,
    add_reading,
    begin_evidence,
    may_prune,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import NOW

YEAR = 365 * 86_400.0
START = MonotonicSeconds(50.0)
FRESH = begin_evidence(NOW, START)


def read(known: ClockEvidence, after: float, ahead: float = 0.0) -> ClockEvidence:
    """Another reading, so many seconds since START, by a clock that is ahead by `ahead`."""
    return add_reading(known, Instant(NOW + after + ahead), MonotonicSeconds(START + after))


def ahead_of(known: ClockEvidence) -> float:
    """What the time that counts is ahead of the clock's first reading and the time since."""
    return known.offset_seconds - FRESH.offset_seconds


@pytest.mark.parametrize("ahead", [-BOUND_SECONDS, -1.0, 0.0, BOUND_SECONDS])
def test_a_clock_within_the_bound_is_followed(ahead: float) -> None:
    known = read(FRESH, 10.0, ahead)
    assert ahead_of(known) == ahead
    assert known.contradiction is None
    assert known.ahead_seconds() == 0.0


@pytest.mark.parametrize("ahead", [-YEAR, -BOUND_SECONDS - 1.0, BOUND_SECONDS + 1.0, YEAR])
def test_a_clock_beyond_the_bound_is_contradicted_until_it_comes_back(ahead: float) -> None:
    known = read(FRESH, 10.0, ahead)
    assert ahead_of(known) == 0.0
    assert known.ahead_seconds() == ahead
    back = read(known, 20.0)
    assert back.contradiction is None
    assert back.since == START, "it has counted all the time"


def test_many_small_steps_in_one_direction_are_one_large_one() -> None:
    known = FRESH
    for step in range(1, 20):
        known = read(known, 10.0 * step, 30.0 * step)
    assert known.contradiction is not None
    assert ahead_of(known) <= BOUND_SECONDS


def test_a_clock_that_runs_a_little_slower_or_faster_is_followed_for_ever() -> None:
    for rate in (-MAX_DRIFT / 2, MAX_DRIFT / 2):
        known = FRESH
        for after in range(0, int(YEAR), 86_400):
            known = read(known, after, rate * after)
            assert known.contradiction is None
        assert ahead_of(known) == pytest.approx(rate * after)


def test_a_clock_set_ahead_counts_once_it_has_stayed_there() -> None:
    known = read(FRESH, 10.0, YEAR)
    known = read(known, 9.0 + STEADY_SECONDS, YEAR)
    assert known.contradiction is not None
    known = read(known, 10.0 + STEADY_SECONDS, YEAR)
    assert known.contradiction is None
    assert ahead_of(known) == YEAR


def test_a_clock_that_goes_on_jumping_never_counts() -> None:
    known = FRESH
    for turn in range(1, 100):
        known = read(known, turn * STEADY_SECONDS / 2, YEAR * (turn % 3 + 1))
        assert ahead_of(known) == 0.0


def test_a_clock_set_back_does_not_count_however_long_it_stays() -> None:
    known = read(read(FRESH, 10.0, -YEAR), 10.0 + 2 * STEADY_SECONDS, -YEAR)
    assert known.contradiction is not None
    assert ahead_of(known) == 0.0


def test_nothing_is_pruned_before_a_clock_has_counted_for_long_enough() -> None:
    def may(known: ClockEvidence, after: float) -> bool:
        return may_prune(known, MonotonicSeconds(START + after))

    assert not may(FRESH, STEADY_SECONDS - 1.0)
    assert may(FRESH, STEADY_SECONDS)
    jumped = read(FRESH, STEADY_SECONDS, YEAR)
    assert not may(jumped, STEADY_SECONDS)
    assert may(read(jumped, STEADY_SECONDS + 10.0), STEADY_SECONDS + 10.0)
    counts = read(jumped, 2 * STEADY_SECONDS, YEAR)
    assert not may(counts, 3 * STEADY_SECONDS - 1.0)
    assert may(counts, 3 * STEADY_SECONDS)


@given(st.lists(st.tuples(st.floats(0.1, 100.0), st.floats(-YEAR, YEAR)), max_size=30))
def test_before_a_clock_jump_has_stayed_the_error_is_within_the_bound(
    readings: list[tuple[float, float]],
) -> None:
    known, after = FRESH, 0.0
    for pause, ahead in readings:
        after += pause
        known = read(known, after, ahead)
        if after < STEADY_SECONDS:
            assert abs(ahead_of(known)) <= BOUND_SECONDS + MAX_DRIFT * after + 1e-3
