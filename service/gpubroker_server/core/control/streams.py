"""How much a work stream counts now: its weight in the queue, and its chance to be drawn."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp
from typing import NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds

HOUR_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class StreamRules:
    velocity_gain: float = 0.01
    """How much a stream's weight rises with each point of progress per hour."""
    least_velocity_factor: float = 0.5
    most_velocity_factor: float = 2.0
    velocity_seconds: Seconds = Seconds(3600.0)
    """Time constant with which the velocity forgets."""
    stale_seconds: Seconds = Seconds(3600.0)
    """For each such span that its data are old, a stream counts once more."""
    most_staleness_factor: float = 3.0
    least_quality_factor: float = 0.1
    """Of a stream whose quality is 0."""
    least_share: float = 0.1
    """This share of all draws is given out evenly, so that no stream starves."""


@dataclass(frozen=True, slots=True)
class StreamState:
    """What clients have said of a stream."""

    name: str
    curriculum: float = 1.0
    """The weight that its owner gives it."""
    progress: float | None = None
    progress_at: Instant = Instant(0.0)
    velocity_per_hour: float = 0.0
    data_at: Instant | None = None
    """How new its newest data are."""
    quality: float = 1.0


class Signal(NamedTuple):
    """What a client tells; None: nothing new."""

    progress: float | None = None
    """Elo, score or the like: more is better."""
    data_age_seconds: Seconds | None = None
    quality: float | None = None
    """0 to 1."""


class Factors(NamedTuple):
    """The weight is their product."""

    curriculum: float
    velocity: float
    staleness: float
    quality: float

    @property
    def weight(self) -> float:
        return self.curriculum * self.velocity * self.staleness * self.quality


class Draw(NamedTuple):
    name: str
    probability: float
    factors: Factors


def with_signal(stream: StreamState, signal: Signal, now: Instant, rules: StreamRules) -> StreamState:
    """The stream once a client has told this. Progress told twice within one instant replaces itself."""
    if signal.progress is not None:
        velocity, since = stream.velocity_per_hour, now - stream.progress_at
        if stream.progress is not None and since > 0:
            newest = (signal.progress - stream.progress) / since * HOUR_SECONDS
            velocity += (1.0 - exp(-since / rules.velocity_seconds)) * (newest - velocity)
        stream = replace(stream, progress=signal.progress, progress_at=now, velocity_per_hour=velocity)
    if signal.data_age_seconds is not None:
        stream = replace(stream, data_at=Instant(now - signal.data_age_seconds))
    return stream if signal.quality is None else replace(stream, quality=signal.quality)


def factors_of(stream: StreamState, now: Instant, rules: StreamRules) -> Factors:
    """A stream that has told nothing of something has the factor 1 for it."""
    velocity = 1.0 + rules.velocity_gain * stream.velocity_per_hour
    age_seconds = 0.0 if stream.data_at is None else max(0.0, now - stream.data_at)
    return Factors(
        curriculum=stream.curriculum,
        velocity=min(rules.most_velocity_factor, max(rules.least_velocity_factor, velocity)),
        staleness=min(rules.most_staleness_factor, 1.0 + age_seconds / rules.stale_seconds),
        quality=rules.least_quality_factor + (1.0 - rules.least_quality_factor) * stream.quality,
    )


def draws(streams: Mapping[str, StreamState], now: Instant, rules: StreamRules) -> list[Draw]:
    """Each stream's chance, in name order. Their sum is 1; none is less than `least_share` over the number
    of streams."""
    factors = {name: factors_of(streams[name], now, rules) for name in sorted(streams)}
    total = sum(one.weight for one in factors.values())
    evenly = rules.least_share / max(1, len(factors))
    return [
        Draw(name, evenly + (1.0 - rules.least_share) * one.weight / total, one)
        for name, one in factors.items()
    ]


def drawn(chances: list[Draw], at: float) -> Draw:
    """`at`: a random number from 0 to below 1. Equal chances and numbers give equal draws."""
    sums = list(accumulate(chance.probability for chance in chances))
    return chances[min(bisect_right(sums, at * sums[-1]), len(chances) - 1)]
