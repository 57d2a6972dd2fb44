"""The controller of background work: it settles inside the target, does not swing, and starts without a
bump."""

import pytest
from gpubroker_server.core.control.controller import Control, Gains, step, switch_on
from gpubroker_server.core.domain.units import Seconds
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.core.control.fleet_model import LOADS, overshoot, settled_after, simulate, swings

GAINS = Gains()
FALLING = LOADS["falling"].higher


@pytest.mark.parametrize(
    ("name", "settle_seconds"), [("none", 130), ("falling", 180), ("rising", 220), ("ramp", 0), ("noisy", 0)]
)
def test_it_settles_inside_the_target_and_does_not_swing(name: str, settle_seconds: float) -> None:
    load = LOADS[name]
    moments = simulate(load.higher, gains=GAINS, hours=3, noise=load.noise)
    assert settled_after(moments, load.since) <= settle_seconds
    assert swings(moments, load.since) <= 1


def test_it_does_not_overshoot_when_higher_bands_leave() -> None:
    assert overshoot(simulate(FALLING, gains=GAINS, hours=3), 3600.0) == 0.0


def test_without_the_filter_of_the_derivative_it_swings_for_ever() -> None:
    """With a derivative that is strong enough to matter, on values that are not smoothed."""
    strong = replace(GAINS, derivative=5.0, smoothing_seconds=Seconds(0.0))
    filtered = simulate(FALLING, gains=strong, hours=2)
    twin = simulate(FALLING, gains=replace(strong, filter_seconds=Seconds(0.0)), hours=2)
    assert (settled_after(filtered, 3600.0) < 300, swings(filtered, 3600.0)) == (True, 0)
    assert settled_after(twin, 3600.0) > 3500
    assert swings(twin, 3600.0) > 100


def test_it_begins_with_the_share_in_effect() -> None:
    begun = switch_on(0.4, 0.9, 0.7, GAINS)
    after = step(begun, 0.9, 0.7, Seconds(2.0), GAINS)
    assert begun.share == 0.4
    assert after.share == pytest.approx(0.4, abs=0.005)


def test_after_an_hour_at_its_limit_it_comes_back_at_once() -> None:
    control = switch_on(1.0, 0.2, 0.7, GAINS)
    for _ in range(1800):
        control = step(control, 0.2, 0.7, Seconds(2.0), GAINS)
    assert control.share == 1.0
    for _ in range(60):
        control = step(control, 1.0, 0.7, Seconds(2.0), GAINS)
    assert control.share < 0.95


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 600)), max_size=60), st.floats(0, 1))
def test_the_share_stays_within_bounds_and_moves_by_one_step_at_most(
    steps: list[tuple[float, float]], share: float
) -> None:
    control = Control(share, 0.5, share, 0.0)
    for value, seconds in steps:
        after = step(control, value, 0.7, Seconds(seconds), GAINS)
        assert 0.0 <= after.share <= 1.0
        assert abs(after.share - control.share) <= GAINS.most_step + 1e-12
        control = after
