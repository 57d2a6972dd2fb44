"""Which of several models makes room for another, and what keeps one where it is."""

import json

import pytest
from gpubroker_server.core.domain.models.residency import (
    HALF_LIVES_SECONDS,
    HORIZON_SECONDS,
    Resident,
    StayRules,
    Usage,
    guarded_until,
    least_worth_first,
    may_be_evicted,
    worth_keeping,
)
from gpubroker_server.core.domain.units import Instant, Seconds
from hypothesis import given
from hypothesis import strategies as st

RULES = StayRules(min_resident_seconds=Seconds(10.0), churn_factor=2.0)
HOUR, DAY = 3600.0, 86_400.0

moments = st.lists(st.floats(0, 10 * DAY), min_size=1, max_size=30).map(sorted)


def used(*moments: float) -> Usage:
    usage = Usage()
    for moment in moments:
        usage = usage.used(Instant(moment))
    return usage


def a_model(
    name: str = "m",
    usage: Usage | None = None,
    *,
    load_seconds: float = 20.0,
    since: float = 0.0,
    in_flight: int = 0,
    pinned: bool = False,
) -> Resident:
    known = Usage() if usage is None else usage
    return Resident(name, Seconds(load_seconds), known, Instant(since), in_flight, pinned)


def order_at(now: float, *models: Resident) -> list[str]:
    return [model.name for model in least_worth_first(models, RULES, Instant(now))]


def test_a_model_that_is_used_each_minute_outlives_one_that_was_used_once_just_now():
    steady = used(*(60.0 * minute for minute in range(240)))
    newcomer = used(4 * HOUR)
    assert order_at(4 * HOUR + 90, a_model("steady", steady), a_model("new", newcomer)) == ["new", "steady"]


def test_a_model_that_is_used_each_morning_outlives_one_that_was_used_once_an_hour_later():
    daily = used(*(DAY * day for day in range(10)))
    once = used(9 * DAY + HOUR)
    assert order_at(9 * DAY + 10 * HOUR, a_model("daily", daily), a_model("once", once)) == ["once", "daily"]


def test_a_model_that_was_used_much_long_ago_goes_before_one_that_is_used_now():
    once_loved = used(*(10.0 * n for n in range(300)))
    now = 6 * DAY
    current = used(now - 600, now - 300, now - 60)
    assert order_at(now, a_model("now", current), a_model("then", once_loved)) == ["then", "now"]


def test_of_two_that_are_used_alike_the_one_that_loads_faster_goes_first():
    usage = used(100.0, 500.0)
    slow, fast = a_model("a-slow", usage, load_seconds=40), a_model("b-fast", usage, load_seconds=2)
    assert order_at(600.0, slow, fast) == ["b-fast", "a-slow"]


def test_a_model_that_loads_slowly_stays_before_one_that_is_used_more_often():
    seldom, often = used(0.0, 4000.0), used(0.0, 2000.0, 4000.0)
    models = a_model("seldom", seldom, load_seconds=100), a_model("often", often, load_seconds=2)
    assert order_at(5000.0, *models) == ["often", "seldom"]


def test_a_use_that_follows_at_once_counts_less_than_one_an_hour_later():
    at_once, later = used(HOUR - 1, HOUR), used(0, HOUR)
    assert later.chance(Instant(DAY)) > at_once.chance(Instant(DAY)) > used(HOUR).chance(Instant(DAY))


def test_models_that_nobody_ever_used_go_first_in_order_of_their_names():
    assert order_at(9 * DAY, a_model("c", used(1.0)), a_model("b"), a_model("a")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "model",
    [a_model(pinned=True), a_model(in_flight=1), a_model(since=99.0), a_model(load_seconds=60.0)],
    ids=["pinned", "busy", "only just loaded", "loads slowly"],
)
def test_nobody_is_evicted_who_is(model: Resident):
    now = Instant(100.0)
    assert not may_be_evicted(model, RULES, now)
    assert least_worth_first([model], RULES, now) == []


def test_a_model_stays_for_the_least_time_or_twice_its_load_time_whichever_is_longer():
    quick, slow = a_model(load_seconds=1, since=50), a_model(load_seconds=30, since=50)
    assert guarded_until(quick, RULES) == 60
    assert guarded_until(slow, RULES) == 110
    assert not may_be_evicted(slow, RULES, Instant(109.9))
    assert may_be_evicted(slow, RULES, Instant(110.0))


@given(moments, moments, st.floats(0, DAY))
def test_decisions_are_the_same_from_numbers_that_were_stored(
    ones: list[float], others: list[float], later: float
):
    now = Instant(max(*ones, *others) + later)
    models = [a_model("one", used(*ones)), a_model("other", used(*others))]
    rules = StayRules(Seconds(0.0), 0.0)
    stored = [json.dumps([model.usage.at, *model.usage.counts]) for model in models]
    again = []
    for model, row in zip(models, stored, strict=True):
        at, *counts = json.loads(row)
        again.append(a_model(model.name, Usage(at, tuple(counts))))
    assert again == models
    assert least_worth_first(again, rules, now) == least_worth_first(models, rules, now)


@given(moments, st.floats(0, 30 * DAY), st.floats(0, 30 * DAY))
def test_a_chance_is_between_nothing_and_certain_and_sinks_while_nobody_comes(
    uses: list[float], sooner: float, later: float
):
    usage = used(*uses)
    soon, late = sorted((Instant(uses[-1] + sooner), Instant(uses[-1] + later)))
    assert 0 <= usage.chance(late) <= usage.chance(soon) <= 1


@given(moments, st.floats(0, DAY))
def test_a_use_makes_the_next_one_no_less_likely(uses: list[float], later: float):
    usage, now = used(*uses), Instant(uses[-1] + later)
    assert usage.used(now).chance(now) >= usage.chance(now)


def test_a_clock_that_was_set_back_changes_nothing_of_what_was_counted():
    usage = used(1000.0)
    assert usage.chance(Instant(10.0)) == usage.chance(Instant(1000.0))
    assert usage.used(Instant(10.0)).at == 1000.0


def test_a_model_in_steady_use_is_worth_its_load_time_times_about_the_chance_of_a_use():
    """Every 20 minutes for four weeks: of horizons half as long every second one sees a use."""
    every = 2 * HORIZON_SECONDS
    usage = used(*(every * n for n in range(int(28 * DAY / every))))
    now = Instant(usage.at + every / 2)
    assert 0.3 < usage.chance(now) < 0.5
    assert worth_keeping(a_model(usage=usage, load_seconds=20), now) == 20 * usage.chance(now)


def test_what_is_kept_of_a_model_is_five_numbers_however_often_it_was_used():
    assert len(used(*range(1000)).counts) == len(HALF_LIVES_SECONDS) == 4
