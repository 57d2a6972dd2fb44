"""Backpressure: decide when the service stops taking work that can wait, and when it takes such work
again."""

from collections.abc import Mapping
from typing import NamedTuple

from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.domain.policy import BANDS
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.background import BACKGROUND_TOP
from gpubroker_server.core.world.world import World

BANDS_AT_FIRST = 2
"""The number of bands, idle and background, that are refused at once. Higher bands follow one by one."""
NEVER_REFUSED = 1
"""The number of bands that are never refused: the highest one, critical."""


class Pressure(NamedTuple):
    """One reason for which the service refuses work."""

    name: str
    """`queue_length`, `admission_seconds`, `store_seconds`, `disk`, `host_memory`, or `queue:TENANT`."""
    since: Instant
    value: float | None
    high: float
    closed_below: int
    """The priority below which tasks are refused."""
    retry_after_seconds: Seconds
    """The time after which the clients of refused tasks are asked to try again."""

    @property
    def tenant(self) -> str:
        return tenant_of(self.name)


def follow(
    before: Mapping[str, Alarm],
    values: Mapping[str, float | None],
    thresholds: Mapping[str, Threshold],
    now: Instant,
) -> dict[str, Alarm]:
    """Return the alarms by name after these values. `thresholds` maps the name of a value to its threshold;
    `queue:*` holds for the queue of each tenant. A value without a threshold is not watched."""
    after = {}
    for name, value in values.items():
        if (watched := threshold_name(name, thresholds)) in thresholds:
            after[name] = before.get(name, Alarm()).follow(value, thresholds[watched], now)
    return after


def threshold_name(name: str, thresholds: Mapping[str, Threshold]) -> str:
    """Return the name of the threshold of a value: the value's own name if it has a threshold, otherwise the
    name for all values of its kind, such as `queue:*`."""
    return name if name in thresholds else f"{name.partition(':')[0]}:*"


def tenant_of(name: str) -> str:
    """Return the tenant that an alarm is about; empty if it is about all tenants."""
    return name.removeprefix("queue:") if name.startswith("queue:") else ""


def closed_below(alarm: Alarm, now: Instant, next_band_seconds: Seconds) -> int:
    """Return the priority below which tasks are refused. Background and idle work is refused at once; while
    the alarm stays on, one more band is refused after each `next_band_seconds`. Critical work is never
    refused."""
    more_bands = int(max(0.0, now - alarm.since) / next_band_seconds) if next_band_seconds else len(BANDS)
    closed = min(len(BANDS) - NEVER_REFUSED, BANDS_AT_FIRST + more_bands)
    return BANDS[-closed - 1][1]


def longest_wait_seconds(world: World, now: Instant) -> Seconds:
    """Return how long the oldest task above background has waited only for its turn. Tasks that were held,
    had to wait for a time or for other tasks, or have run do not count, because the time since which they
    wait only for their turn is unknown."""
    since = now
    for group in world.queue.groups.values():
        if group.priority > BACKGROUND_TOP:
            rows = (world.tasks[task] for _, task in group)
            turns = (row.submitted_at for row in rows if row.version == 1 and row.not_before is None)
            since = min(since, next(turns, now))
    return Seconds(now - since)
