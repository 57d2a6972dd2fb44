"""What evicting a model is expected to cost, and how long a model that was just loaded stays."""

import json

from gpubroker_server.core.domain.models import (
    HALF_LIVES_SECONDS,
    HORIZON_SECONDS,
    ModelUsage,
    expected_seconds,
    min_residency_seconds,
    turn_seconds,
)
from gpubroker_server.core.domain.units import Instant, Seconds
from hypothesis import given
from hypothesis import strategies as st

HOUR, DAY = 3600.0, 86_400.0

moments = st.lists(st.floats(0, 10 * DAY), min_size=1, max_size=30).map(sorted)


def used(*moments: float) -> ModelUsage:
    usage = ModelUsage()
    for moment in moments:
        usage = usage.used(Instant(moment))
    return usage


def cost(now: float, usage: ModelUsage, *, load_seconds: float = 20.0) -> float:
    return expected_seconds(Seconds(load_seconds), usage, Instant(now))


def test_a_model_used_every_minute_costs_more_than_one_used_once_just_now() -> None:
    steady = used(*(60.0 * minute for minute in range(240)))
    newcomer = used(4 * HOUR)
    assert cost(4 * HOUR + 90, newcomer) < cost(4 * HOUR + 90, steady)


def test_model_used_every_morning_costs_more_than_one_used_once_since() -> None:
    daily = used(*(DAY * day for day in range(10)))
    once = used(9 * DAY + HOUR)
    assert cost(9 * DAY + 10 * HOUR, once) < cost(9 * DAY + 10 * HOUR, daily)


def test_a_model_used_much_long_ago_costs_less_than_one_that_is_used_now() -> None:
    formerly = used(*(10.0 * n for n in range(300)))
    now = 6 * DAY
    currently = used(now - 600, now - 300, now - 60)
    assert cost(now, formerly) < cost(now, currently)


def test_of_two_models_with_equal_use_the_one_that_loads_faster_costs_less() -> None:
    usage = used(100.0, 500.0)
    assert cost(600.0, usage, load_seconds=2) < cost(600.0, usage, load_seconds=40)


def test_model_that_loads_slowly_costs_more_than_one_used_more_often() -> None:
    seldom, often = used(0.0, 4000.0), used(0.0, 2000.0, 4000.0)
    assert cost(5000.0, often, load_seconds=2) < cost(5000.0, seldom, load_seconds=100)


def test_a_use_right_after_another_counts_less_than_one_an_hour_later() -> None:
    at_once, later = used(HOUR - 1, HOUR), used(0, HOUR)
    assert later.chance(Instant(DAY)) > at_once.chance(Instant(DAY)) > used(HOUR).chance(Instant(DAY))


def test_evicting_a_model_that_was_never_used_costs_nothing() -> None:
    assert cost(9 * DAY, ModelUsage()) == 0


def test_model_stays_for_the_least_time_or_twice_its_load_time_if_longer() -> None:
    assert min_residency_seconds(Seconds(1.0), Seconds(5.0)) == 5
    assert min_residency_seconds(Seconds(30.0), Seconds(5.0)) == 60
    assert min_residency_seconds(Seconds(30.0), Seconds(0.0)) == 0


def test_a_turn_lasts_ten_seconds_or_four_load_times_whichever_is_longer() -> None:
    assert turn_seconds(Seconds(1.0)) == 10
    assert turn_seconds(Seconds(30.0)) == 120


@given(moments, st.floats(0, DAY))
def test_a_usage_that_was_stored_as_json_gives_the_same_chance(uses: list[float], later: float) -> None:
    usage, now = used(*uses), Instant(uses[-1] + later)
    at, *counts = json.loads(json.dumps([usage.at, *usage.counts]))
    stored = ModelUsage(at, tuple(counts))
    assert stored == usage
    assert stored.chance(now) == usage.chance(now)


@given(moments, st.floats(0, 30 * DAY), st.floats(0, 30 * DAY))
def test_a_chance_is_between_0_and_1_and_falls_while_there_is_no_use(
    uses: list[float], sooner: float, later: float
) -> None:
    usage = used(*uses)
    soon, late = sorted((Instant(uses[-1] + sooner), Instant(uses[-1] + later)))
    assert 0 <= usage.chance(late) <= usage.chance(soon) <= 1


@given(moments, st.floats(0, DAY))
def test_a_use_never_lowers_the_chance_of_the_next_one(uses: list[float], later: float) -> None:
    usage, now = used(*uses), Instant(uses[-1] + later)
    assert usage.used(now).chance(now) >= usage.chance(now)


def test_a_clock_that_was_set_back_does_not_change_the_counts() -> None:
    usage = used(1000.0)
    assert usage.chance(Instant(10.0)) == usage.chance(Instant(1000.0))
    assert usage.used(Instant(10.0)).at == 1000.0


def test_model_in_steady_use_costs_its_load_time_times_the_chance_of_a_use() -> None:
    """It is used every 20 minutes for four weeks: about every second horizon of ten minutes sees a use."""
    every = 2 * HORIZON_SECONDS
    usage = used(*(every * n for n in range(int(28 * DAY / every))))
    now = Instant(usage.at + every / 2)
    assert 0.3 < usage.chance(now) < 0.5
    assert cost(now, usage, load_seconds=20) == 20 * usage.chance(now)


def test_a_usage_is_five_numbers_however_many_uses_there_were() -> None:
    assert len(used(*range(1000)).counts) == len(HALF_LIVES_SECONDS) == 4
