"""Seconds since this machine was booted, its sleep included: what durations on one machine are counted in."""

import time

from gpubroker_server.core.domain.units import Ticks

# Linux stops CLOCK_MONOTONIC while the machine sleeps, and has another one that it does not stop. macOS has
# no such other one and needs none: there CLOCK_MONOTONIC goes on.
_TICKING: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> Ticks:
    """The same for all processes of one machine; it never jumps."""
    return Ticks(time.clock_gettime(_TICKING))
