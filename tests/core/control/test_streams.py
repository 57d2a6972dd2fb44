"""Work streams: factors from what clients tell, and draws in which none starves."""

from dataclasses import replace

import pytest
from gpubroker_server.core.control.streams import (
    Factors,
    Signal,
    StreamRules,
    StreamState,
    drawn,
    draws,
    factors_of,
    with_signal,
)
from gpubroker_server.core.domain.units import Instant, Seconds
from hypothesis import given
from hypothesis import strategies as st

RULES = StreamRules()
NEW = StreamState("ladder")
HOUR = 3600.0


def told(*signals: tuple[float, Signal], rules: StreamRules = RULES) -> StreamState:
    """The stream after each (hour, signal)."""
    stream = NEW
    for hour, signal in signals:
        stream = with_signal(stream, signal, Instant(hour * HOUR), rules)
    return stream


def test_a_stream_of_which_nothing_is_told_counts_its_curriculum_weight() -> None:
    assert factors_of(replace(NEW, curriculum=3.0), Instant(0.0), RULES) == Factors(3.0, 1.0, 1.0, 1.0)


def test_progress_raises_the_weight_and_a_loss_lowers_it_within_bounds() -> None:
    rising = told((0, Signal(progress=1000.0)), (1, Signal(progress=1080.0)))
    assert rising.velocity_per_hour == pytest.approx(80 * (1 - 2.718281828**-1), rel=1e-6)
    assert factors_of(rising, Instant(HOUR), RULES).velocity == pytest.approx(1.5057, rel=1e-4)
    fast = told((0, Signal(progress=0.0)), (1, Signal(progress=10_000.0)))
    falling = told((0, Signal(progress=0.0)), (1, Signal(progress=-10_000.0)))
    assert factors_of(fast, Instant(HOUR), RULES).velocity == RULES.most_velocity_factor
    assert factors_of(falling, Instant(HOUR), RULES).velocity == RULES.least_velocity_factor


def test_progress_told_twice_within_an_instant_replaces_itself() -> None:
    stream = told((1, Signal(progress=5.0)), (1, Signal(progress=9.0)))
    assert (stream.progress, stream.velocity_per_hour) == (9.0, 0.0)


def test_old_data_raise_the_weight_up_to_a_bound() -> None:
    stream = told((0, Signal(data_age_seconds=Seconds(1800.0))))
    assert factors_of(stream, Instant(0.0), RULES).staleness == 1.5
    assert factors_of(stream, Instant(HOUR), RULES).staleness == 2.5
    assert factors_of(stream, Instant(99 * HOUR), RULES).staleness == 3.0
    assert factors_of(stream, Instant(-HOUR), RULES).staleness == 1.0


def test_quality_scales_the_weight_but_never_to_nothing() -> None:
    assert factors_of(told((0, Signal(quality=0.0))), Instant(0.0), RULES).quality == 0.1
    assert factors_of(told((0, Signal(quality=1.0))), Instant(0.0), RULES).quality == 1.0


STREAMS = st.builds(
    StreamState,
    name=st.sampled_from("abcdef"),
    curriculum=st.floats(0.01, 100),
    velocity_per_hour=st.floats(-1e6, 1e6),
    data_at=st.none() | st.floats(0, 1e6).map(Instant),
    quality=st.floats(0, 1),
)


@given(st.lists(STREAMS, min_size=1, max_size=6, unique_by=lambda one: one.name), st.floats(0, 2e6))
def test_no_stream_starves_and_the_chances_add_up(streams: list[StreamState], now: float) -> None:
    chances = draws({one.name: one for one in streams}, Instant(now), RULES)
    assert [one.name for one in chances] == sorted(one.name for one in streams)
    assert sum(one.probability for one in chances) == pytest.approx(1.0)
    assert min(one.probability for one in chances) >= RULES.least_share / len(streams) * (1 - 1e-9)


def test_equal_numbers_give_equal_draws_and_all_are_drawn_as_often_as_they_count() -> None:
    streams = {"a": replace(NEW, name="a", curriculum=3.0), "b": replace(NEW, name="b")}
    chances = draws(streams, Instant(0.0), RULES)
    assert [round(one.probability, 3) for one in chances] == [0.725, 0.275]
    names = [drawn(chances, at / 1000).name for at in range(1000)]
    assert 724 <= names.count("a") <= 726
    assert names == sorted(names)
    assert drawn(chances, 1.0 - 2**-53).name == "b"


def test_no_streams_no_draws() -> None:
    assert draws({}, Instant(0.0), RULES) == []
