"""Work streams: factors from what clients tell, and draws in which none starves."""

import pytest
from gpubroker.wire.streams import Factors
from gpubroker_server.core.control.streams import drawn, draws, factors_of, steady_weights
from gpubroker_server.core.domain.decisions import StreamState
from gpubroker_server.core.domain.policy import Policy, StreamRules, band_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.background import BackgroundRoom
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import NOW, a_task, a_world, submit

RULES = StreamRules()
NEW = StreamState("ladder")
HOUR = 3600.0


def test_a_stream_of_which_nothing_is_told_counts_its_curriculum_weight() -> None:
    assert factors_of(replace(NEW, curriculum=3.0), Instant(0.0), RULES) == Factors(3.0, 1.0, 1.0, 1.0)
    assert factors_of(NEW, Instant(0.0), RULES) == Factors(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("per_hour", "factor"), [(50.0, 1.5), (-20.0, 0.8), (1e4, 2.0), (-1e4, 0.5)])
def test_progress_raises_the_weight_and_a_loss_lowers_it_within_bounds(
    per_hour: float, factor: float
) -> None:
    rising = replace(NEW, velocity_per_hour=per_hour)
    assert factors_of(rising, Instant(0.0), RULES).velocity == pytest.approx(factor)


def test_progress_of_which_nothing_more_is_told_counts_less_and_less() -> None:
    rising = replace(NEW, velocity_per_hour=50.0, progress_at=Instant(0.0))
    faded = [factors_of(rising, Instant(hours * HOUR), RULES).velocity for hours in (-1.0, 0.0, 1.0, 24.0)]
    assert faded == pytest.approx([1.5, 1.5, 1.184, 1.0], abs=1e-3)


@pytest.mark.parametrize(("hours", "factor"), [(0.0, 1.5), (1.0, 2.5), (99.0, 3.0), (-1.0, 1.0)])
def test_old_data_raise_the_weight_up_to_a_bound(hours: float, factor: float) -> None:
    stream = replace(NEW, data_at=Instant(-1800.0))
    assert factors_of(stream, Instant(hours * HOUR), RULES).staleness == factor


def test_quality_scales_the_weight_but_never_to_nothing() -> None:
    assert factors_of(replace(NEW, quality=0.0), Instant(0.0), RULES).quality == 0.1
    assert factors_of(NEW, Instant(0.0), RULES).quality == 1.0


def test_stream_weights_in_the_queue_change_only_by_more_than_a_little() -> None:
    policy = Policy(streams=(("nightly", 0.5),))
    ladder = replace(NEW, curriculum=2.0, data_at=Instant(0.0))
    first = steady_weights({}, {"ladder": ladder}, policy, Instant(0.0))
    assert first == {"ladder": 2.0, "nightly": 0.5}
    assert steady_weights(first, {"ladder": ladder}, policy, Instant(170.0)) == first
    later = steady_weights(first, {"ladder": ladder}, policy, Instant(360.0))
    assert later == {"ladder": pytest.approx(2.2), "nightly": 0.5}
    assert steady_weights(later, {}, policy, Instant(360.0)) == {"nightly": 0.5}


STREAMS = st.builds(
    StreamState,
    name=st.sampled_from("abcdef"),
    curriculum=st.floats(0.01, 100),
    velocity_per_hour=st.floats(-1e6, 1e6),
    data_at=st.none() | st.floats(0, 1e6).map(Instant),
    quality=st.floats(0, 1),
)


@given(st.lists(STREAMS, min_size=1, max_size=6, unique_by=lambda one: one.name), st.floats(0, 2e6))
def test_no_stream_starves_in_draws_and_the_chances_add_up(streams: list[StreamState], now: float) -> None:
    chances = draws({one.name: one for one in streams}, Instant(now), RULES)
    assert [one.name for one in chances] == sorted(one.name for one in streams)
    assert sum(one.probability for one in chances) == pytest.approx(1.0)
    assert min(one.probability for one in chances) >= RULES.least_share / len(streams) * (1 - 1e-9)


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), STREAMS, min_size=1), min_size=1, max_size=12),
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=2), min_size=1, max_size=12),
    st.integers(40, 69),
)
def test_no_stream_starves_in_the_queue(
    told: list[dict[str, StreamState]], arrivals: list[list[str]], priority: int
) -> None:
    """More tasks come than start, and the weights change all the time: a task that waits starts no later than
    all that came before it have started, once it has aged to the top of its band."""
    world, policy, number = a_world(), Policy(), 0
    steps_to_top, weights = band_of(priority)[2] - priority, dict[str, float]()
    came: dict[str, int] = {}
    for step in range(3 * steps_to_top + 10):
        now = Instant(NOW + step * policy.ageing_seconds_per_point)
        for stream in arrivals[step % len(arrivals)]:
            number += 1
            task = a_task(f"t{number:04}", stream=stream, priority=priority, submitted_at=now)
            submit(world, task)
            came[task.id] = step
        weights = steady_weights(weights, told[step % len(told)], policy, now)
        world.control(BackgroundRoom(), {}, weights)
        first = next(world.queue.of_tenant(None, now, policy))
        older = [name for name, at in came.items() if at < came[first]]
        assert all(step - came[name] < steps_to_top for name in older)
        world.queue.remove(world.tasks[first])
        del came[first]


def test_equal_draws_choose_equal_streams_and_each_as_often_as_it_counts() -> None:
    streams = {"a": replace(NEW, name="a", curriculum=3.0), "b": replace(NEW, name="b")}
    chances = draws(streams, Instant(0.0), RULES)
    assert [round(one.probability, 3) for one in chances] == [0.725, 0.275]
    found = [drawn(chances, at) for at in (*(n / 1000 for n in range(1000)), 1.0 - 2**-53)]
    names = [one.name for one in found if one is not None]
    assert 724 <= names.count("a") <= 726
    assert names == sorted(names)
    assert len(names) == 1001


def test_a_paused_stream_is_not_drawn() -> None:
    streams = {name: replace(NEW, name=name) for name in "abc"}
    chances = draws(streams, Instant(0.0), RULES, {"a", "c"})
    assert [(one.name, one.probability) for one in chances] == [("a", 0.0), ("b", 1.0), ("c", 0.0)]
    assert {drawn(chances, at) for at in (0.0, 0.5, 1.0 - 2**-53)} == {chances[1]}
    assert drawn(draws(streams, Instant(0.0), RULES, set("abc")), 0.5) is None


def test_no_streams_no_draws() -> None:
    assert draws({}, Instant(0.0), RULES) == []
    assert drawn([], 0.5) is None
