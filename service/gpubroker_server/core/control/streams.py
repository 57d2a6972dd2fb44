"""Weights of work streams: the weight in the queue now, and the chance to be drawn."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Set
from itertools import accumulate
from math import exp
from typing import NamedTuple

from gpubroker.wire.streams import Factors

from gpubroker_server.core.domain.decisions import StreamState, known_streams
from gpubroker_server.core.domain.policy import Policy, StreamRules
from gpubroker_server.core.domain.units import Instant

STEADY_WITHIN = 0.05
"""The share of a weight by which the stream's own must differ before the weight in the queue changes: each
change puts the queue in another order."""


class Draw(NamedTuple):
    name: str
    probability: float
    factors: Factors


def factors_of(stream: StreamState, now: Instant, rules: StreamRules) -> Factors:
    """A stream that has told nothing of something has the factor 1 for it; one that tells no more progress
    comes back to it."""
    faded = exp(-max(0.0, now - stream.progress_at) / rules.velocity_seconds)
    velocity = 1.0 + rules.velocity_gain * stream.velocity_per_hour * faded
    age_seconds = 0.0 if stream.data_at is None else max(0.0, now - stream.data_at)
    return Factors(
        curriculum=1.0 if stream.curriculum is None else stream.curriculum,
        velocity=min(rules.most_velocity_factor, max(rules.least_velocity_factor, velocity)),
        staleness=min(rules.most_staleness_factor, 1.0 + age_seconds / rules.stale_seconds),
        quality=rules.least_quality_factor + (1.0 - rules.least_quality_factor) * stream.quality,
    )


def steady_weights(
    before: Mapping[str, float], streams: Mapping[str, StreamState], policy: Policy, now: Instant
) -> dict[str, float]:
    """The weight of each stream in the queue; `before`: what they were when this was last asked."""
    weights = {}
    for name, stream in sorted(known_streams(policy.streams, streams).items()):
        weight = factors_of(stream, now, policy.stream_rules).weight
        was = before.get(name, weight)
        weights[name] = was if abs(weight - was) <= STEADY_WITHIN * was else weight
    return weights


def draws(
    streams: Mapping[str, StreamState], now: Instant, rules: StreamRules, paused: Set[str] = frozenset()
) -> list[Draw]:
    """Return each stream's chance, in name order. A paused stream has none; the sum of the others is 1, and
    none of them is less than `least_share` over their number."""
    factors = {name: factors_of(streams[name], now, rules) for name in sorted(streams)}
    weights = [factor.weight for name, factor in factors.items() if name not in paused]

    def chance(weight: float) -> float:
        return rules.least_share / len(weights) + (1.0 - rules.least_share) * weight / sum(weights)

    return [
        Draw(name, 0.0 if name in paused else chance(factor.weight), factor)
        for name, factor in factors.items()
    ]


def drawn(chances: Iterable[Draw], at: float) -> Draw | None:
    """`at`: a random number from 0 to below 1. Equal chances and numbers give equal draws. None: there is
    nothing to draw."""
    able = [draw for draw in chances if draw.probability]
    sums = list(accumulate(draw.probability for draw in able))
    return able[min(bisect_right(sums, at * sums[-1]), len(able) - 1)] if able else None
