"""Find devices and nodes that have done next to nothing for a while."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds


class IdleRules(NamedTuple):
    below: float = 0.05
    """The utilization, 0 to 1, below which a device counts as unused."""
    grace_seconds: Seconds = Seconds(300.0)
    """The time after which an unused device counts as idle."""


class Reading(NamedTuple):
    """The use of one device or node."""

    name: str
    utilization: float | None
    """The utilization, 0 to 1; None if it was not measured lately."""
    fills_itself: bool = False
    """True if the device or node runs nothing but the work of idle templates, which does not make it busy."""


class Idle(NamedTuple):
    """A device or node that is below the threshold."""

    name: str
    utilization: float
    since: Instant


def follow(
    before: Mapping[str, Idle], readings: Iterable[Reading], now: Instant, rules: IdleRules
) -> dict[str, Idle]:
    """Return the devices and nodes that are below the threshold now, by name, each with the time since which
    it is. A device or node that is not measured keeps its state, because a driver that does not answer for a
    moment says nothing about the work."""
    after: dict[str, Idle] = {}
    for reading in readings:
        idle_before = before.get(reading.name)
        if reading.utilization is None:
            if idle_before is not None:
                after[reading.name] = idle_before
        elif reading.fills_itself or reading.utilization < rules.below:
            since = now if idle_before is None else min(idle_before.since, now)
            utilization = 0.0 if reading.fills_itself else reading.utilization
            after[reading.name] = Idle(reading.name, utilization, since)
    return after


def idle(quiet: Mapping[str, Idle], now: Instant, rules: IdleRules) -> list[Idle]:
    """Return the devices and nodes that have been quiet for the whole grace period, in name order."""
    return [quiet[name] for name in sorted(quiet) if now - quiet[name].since >= rules.grace_seconds]
