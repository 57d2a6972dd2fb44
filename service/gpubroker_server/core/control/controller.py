"""A PID controller of the share of background work, which keeps a measured value near a set point.

It follows Åström and Hägglund, "Advanced PID Control" (2006), chapter 3: a filtered derivative, anti-windup
by back-calculation, and a bumpless start.
"""

from math import exp
from typing import Annotated

from gpubroker.wire.bounds import Amount
from msgspec import Meta, Struct

from gpubroker_server.core.domain.setting_marks import NonNegativeSeconds
from gpubroker_server.core.domain.units import Seconds


class Gains(Struct, frozen=True):
    proportional: Amount = 0.1
    integral: Amount = 0.01
    """The gain of the integral term, per second."""
    derivative: Amount = 0.05
    """The gain of the derivative term, in seconds."""
    smoothing_seconds: NonNegativeSeconds = Seconds(60.0)
    """Time constant with which the measured value is smoothed; 0 for no smoothing."""
    filter_seconds: NonNegativeSeconds = Seconds(20.0)
    """Time constant of the derivative's filter; 0 for no filter."""
    most_step: Annotated[float, Meta(gt=0, le=1)] = 0.05
    """The most that the share changes in one step."""


class Control(Struct, frozen=True):
    """The state of a controller after a step. Values and shares are from 0 to 1."""

    share: float
    """The share of the controlled work that may run."""
    value: float
    """The smoothed measured value."""
    integral: float
    slope: float
    """The filtered change of the error, per second."""


def switch_on(share: float, value: float, set_point: float, gains: Gains) -> Control:
    """Return the state of a controller that begins with the share in effect, so that the share does not
    jump."""
    return Control(share, value, share - gains.proportional * (set_point - value), 0.0)


def step(before: Control, value: float, set_point: float, seconds: Seconds, gains: Gains) -> Control:
    """Return the state after one step. `value` was measured now, `seconds` (more than 0) after the last
    step."""
    smooth = before.value + _weight(seconds, gains.smoothing_seconds) * (value - before.value)
    error = set_point - smooth
    raw_slope = (before.value - smooth) / seconds
    slope = before.slope + _weight(seconds, gains.filter_seconds) * (raw_slope - before.slope)
    integral = before.integral + gains.integral * error * seconds
    wanted = gains.proportional * error + integral + gains.derivative * slope
    least, most = max(0.0, before.share - gains.most_step), min(1.0, before.share + gains.most_step)
    share = min(most, max(least, wanted))
    # The part of the wanted share that is not given is taken off the integral, which would otherwise grow
    # without an effect.
    return Control(share, smooth, integral + share - wanted, slope)


def _weight(seconds: Seconds, time_constant: Seconds) -> float:
    """Return the weight of the newest value in an exponential average."""
    return 1.0 - exp(-seconds / time_constant) if time_constant else 1.0
