"""Weights of work streams: their present weights in the queue, and their chances to be drawn."""

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
"""The relative difference up to which the weight in the queue stays as it is although the stream's weight has
changed. The limit exists because each change reorders the queue."""


class Draw(NamedTuple):
    name: str
    probability: float
    factors: Factors


def factors_of(stream: StreamState, now: Instant, rules: StreamRules) -> Factors:
    """Return the factors of a stream's weight. A signal that was never reported has the factor 1. The factor
    for progress returns to 1 when no more progress is reported."""
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
    """Return the weight of each stream in the queue. `before` has the weights of the last call."""
    weights = {}
    for name, stream in sorted(known_streams(policy.streams, streams).items()):
        weight = factors_of(stream, now, policy.stream_rules).weight
        weight_before = before.get(name, weight)
        weights[name] = (
            weight_before if abs(weight - weight_before) <= STEADY_WITHIN * weight_before else weight
        )
    return weights


def draws(
    streams: Mapping[str, StreamState], now: Instant, rules: StreamRules, paused: Set[str] = frozenset()
) -> list[Draw]:
    """Return the chance of each stream to be drawn, in name order. A paused stream has none. The chances of
    the others add up to 1, and each is at least `least_share` divided by their number."""
    factors = {name: factors_of(streams[name], now, rules) for name in sorted(streams)}
    weights = [factor.weight for name, factor in factors.items() if name not in paused]

    def chance(weight: float) -> float:
        return rules.least_share / len(weights) + (1.0 - rules.least_share) * weight / sum(weights)

    return [
        Draw(name, 0.0 if name in paused else chance(factor.weight), factor)
        for name, factor in factors.items()
    ]


def drawn(chances: Iterable[Draw], at: float) -> Draw | None:
    """Return the stream that is drawn by `at`, a random number from 0 to below 1; None if there is nothing to
    draw. Equal chances and numbers give equal draws."""
    able = [draw for draw in chances if draw.probability]
    sums = list(accumulate(draw.probability for draw in able))
    return able[min(bisect_right(sums, at * sums[-1]), len(able) - 1)] if able else None
