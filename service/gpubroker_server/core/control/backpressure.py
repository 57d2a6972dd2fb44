"""Backpressure: the times at which the service takes no more of the work that can wait, and takes it
again."""

from collections.abc import Mapping
from typing import NamedTuple

from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.domain.policy import BANDS
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.world.background import BACKGROUND_TOP
from gpubroker_server.core.world.world import World

BANDS_AT_FIRST = 2
"""The lowest bands, idle and background, are refused at once; each higher one a while later."""
NEVER_REFUSED = 1
"""The highest band, critical."""


class Pressure(NamedTuple):
    """One of the reasons to take no more."""

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
    """`thresholds`: name of a value -> its threshold; `queue:*` is for each tenant by itself. A value without
    a threshold is not watched."""
    after = {}
    for name, value in values.items():
        if (watched := threshold_name(name, thresholds)) in thresholds:
            after[name] = before.get(name, Alarm()).follow(value, thresholds[watched], now)
    return after


def threshold_name(name: str, thresholds: Mapping[str, Threshold]) -> str:
    """Return the name of the measure's own threshold if there is one, else of the threshold of all of its
    kind."""
    return name if name in thresholds else f"{name.partition(':')[0]}:*"


def tenant_of(name: str) -> str:
    """Return the tenant that an alarm is about; empty if it is about all."""
    return name.removeprefix("queue:") if name.startswith("queue:") else ""


def closed_below(alarm: Alarm, now: Instant, next_band_seconds: Seconds) -> int:
    """Background and idle work is refused at once; while that is not enough, one band more each
    `next_band_seconds`; critical work never is."""
    longer = int(max(0.0, now - alarm.since) / next_band_seconds) if next_band_seconds else len(BANDS)
    closed = min(len(BANDS) - NEVER_REFUSED, BANDS_AT_FIRST + longer)
    return BANDS[-closed - 1][1]


def longest_wait_seconds(world: World, now: Instant) -> Seconds:
    """Return how long the oldest task above background has waited for nothing but its turn. Tasks that were
    held, that had a time or other tasks to wait for, or that have run do not count: nothing says since when
    they wait for their turn only."""
    since = now
    for group in world.queue.groups.values():
        if group.priority > BACKGROUND_TOP:
            rows = (world.tasks[task] for _, task in group)
            turns = (row.submitted_at for row in rows if row.version == 1 and row.not_before is None)
            since = min(since, next(turns, now))
    return Seconds(now - since)
