"""The controller of background work: it settles inside the target, does not swing, and starts without a
bump."""

from dataclasses import replace

import pytest
from gpubroker_server.core.control.controller import Control, Gains, step, switch_on
from gpubroker_server.core.domain.units import Seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.core.control.fleet_model import Load, overshoot, settled_after, simulate, swings

GAINS = Gains()


def falling(at: float) -> float:
    return 0.7 if at < 3600 else 0.2


def rising(at: float) -> float:
    return 0.1 if at < 3600 else 0.5


def ramp(at: float) -> float:
    return 0.1 + 0.4 * min(1.0, max(0.0, (at - 1800) / 3600))


def steady(_at: float) -> float:
    return 0.3


def nothing(_at: float) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("load", "since", "noise", "settle_seconds"),
    [(nothing, 0.0, 0.0, 130), (falling, 3600.0, 0.0, 180), (rising, 3600.0, 0.0, 220), (ramp, 900.0, 0.0, 0),
     (steady, 900.0, 0.1, 0)],
)  # fmt: skip
def test_it_settles_inside_the_target_and_does_not_swing(
    load: Load, since: float, noise: float, settle_seconds: float
) -> None:
    moments = simulate(load, gains=GAINS, hours=3, noise=noise)
    assert settled_after(moments, since) <= settle_seconds
    assert swings(moments, since) <= 1


def test_it_does_not_overshoot_when_higher_bands_leave() -> None:
    assert overshoot(simulate(falling, gains=GAINS, hours=3), 3600.0) == 0.0


def test_without_the_filter_of_the_derivative_it_swings_for_ever() -> None:
    """With a derivative that is strong enough to matter, on values that are not smoothed."""
    strong = replace(GAINS, derivative=5.0, smoothing_seconds=Seconds(0.0))
    filtered = simulate(falling, gains=strong, hours=2)
    twin = simulate(falling, gains=replace(strong, filter_seconds=Seconds(0.0)), hours=2)
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
