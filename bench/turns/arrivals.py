"""Requests for models: at random, or in bursts of one model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from random import Random
from typing import NamedTuple

BURST_REQUESTS = 20
"""The mean number of requests of one burst."""
BURST_SECONDS = 0.05
"""The mean seconds between two requests of a burst."""


class Ask(NamedTuple):
    at: float
    model: str


def at_random(models: Sequence[str], per_second: float, chance: Random) -> Iterator[Ask]:
    """Yield independent requests, each for any of the models, without end."""
    now = 0.0
    while True:
        now += chance.expovariate(per_second)
        yield Ask(now, chance.choice(models))


def in_bursts(models: Sequence[str], per_second: float, chance: Random) -> Iterator[Ask]:
    """Yield requests at the same mean rate in bursts that do not overlap, without end."""
    pause_seconds = BURST_REQUESTS / per_second - BURST_REQUESTS * BURST_SECONDS
    now = 0.0
    while True:
        now += chance.expovariate(1 / pause_seconds)
        model = chance.choice(models)
        for _ in range(1 + int(chance.expovariate(1 / BURST_REQUESTS))):
            now += chance.expovariate(1 / BURST_SECONDS)
            yield Ask(now, model)


Arrivals = Callable[[Sequence[str], float, Random], Iterator[Ask]]

ARRIVALS: Mapping[str, Arrivals] = {"random": at_random, "bursty": in_bursts}


def asks_of(arrivals: str, models: Sequence[str], per_second: float, seconds: float, seed: int) -> list[Ask]:
    """Return the requests of the first `seconds`."""
    endless = ARRIVALS[arrivals](models, per_second, Random(seed))
    return list(takewhile(lambda ask: ask.at < seconds, endless))
