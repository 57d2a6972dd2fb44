"""What keeping a model in memory is worth: how long loading it again takes, and how likely that is needed.

Each use of a model counts, and counts less the longer ago it was: not by one half-life, which either forgets
what is used each day or takes a day to notice that something is no longer used, but by several, whose rates
are added up. A model that was used just now ranks high for minutes, one that is used daily for days.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import exp, log

from gpubroker_server.core.domain.units import Instant, Seconds

HALF_LIVES_SECONDS = (60.0, 900.0, 14_400.0, 216_000.0)
"""A minute, a quarter of an hour, four hours, sixty hours: about fifteen times more each."""

WEIGHTS = (1, 2, 3, 5)
"""Of the rates at these half-lives. What was counted for longer is less due to chance."""

HORIZON_SECONDS = Seconds(600.0)
"""A use within it counts as a loss if the model is gone; a later one is any other day's."""

_PER_SECOND = tuple(
    weight / sum(WEIGHTS) * log(2) / half_life
    for weight, half_life in zip(WEIGHTS, HALF_LIVES_SECONDS, strict=True)
)


@dataclass(frozen=True, slots=True)
class Usage:
    """How often a model was used: its uses, each worth half as much after each half-life. A value of five
    numbers; `used` makes the next one."""

    at: Instant = Instant(0.0)
    """The moment they hold for: that of its last use."""
    counts: tuple[float, ...] = (0.0,) * len(HALF_LIVES_SECONDS)
    """In the order of HALF_LIVES_SECONDS."""

    def used(self, now: Instant) -> "Usage":
        """With one more use. One that follows at once counts half: somebody who tries and tries again says
        less about tomorrow than two who come in different hours."""
        faded = self._faded(now)
        use = 1 - 0.5 * self._left(now, HALF_LIVES_SECONDS[0]) if any(self.counts) else 1.0
        return Usage(max(now, self.at), tuple(count + use for count in faded))

    def chance(self, now: Instant, within_seconds: Seconds = HORIZON_SECONDS) -> float:
        """How likely (0 to 1) it is used within so long from now on, its uses being independent."""
        per_second = sum(rate * count for rate, count in zip(_PER_SECOND, self._faded(now), strict=True))
        return 1 - exp(-per_second * within_seconds)

    def _faded(self, now: Instant) -> tuple[float, ...]:
        return tuple(
            count * self._left(now, half_life)
            for count, half_life in zip(self.counts, HALF_LIVES_SECONDS, strict=True)
        )

    def _left(self, now: Instant, half_life: float) -> float:
        """The share of a use at `self.at` that is left. A clock that was set back does not make it more."""
        return float(0.5 ** (max(0.0, now - self.at) / half_life))


NEVER_USED = Usage()


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory, as far as it matters for whether it stays there."""

    name: str
    load_seconds: Seconds
    """How long loading it again is expected to take."""
    usage: Usage = NEVER_USED
    since: Instant = Instant(0.0)
    """When it was loaded."""
    in_flight: int = 0
    """Requests that it is working on."""
    pinned: bool = False
    """Somebody said that it stays."""


@dataclass(frozen=True, slots=True)
class StayRules:
    """What keeps a model in memory whatever it is worth."""

    min_resident_seconds: Seconds = Seconds(10.0)
    churn_factor: float = 2.0
    """So many times its load time it stays at least: else models that do not fit together would spend more
    time on being loaded than on being used."""


def guarded_until(model: Resident, rules: StayRules) -> Instant:
    """Until then it has only just come."""
    return Instant(model.since + guarded_seconds(model.load_seconds, rules))


def guarded_seconds(load_seconds: Seconds, rules: StayRules) -> Seconds:
    return Seconds(max(rules.min_resident_seconds, rules.churn_factor * load_seconds))


def may_be_evicted(model: Resident, rules: StayRules, now: Instant) -> bool:
    """Idle, not pinned, and not only just loaded."""
    return not (model.pinned or model.in_flight) and now >= guarded_until(model, rules)


def worth_keeping(model: Resident, now: Instant) -> Seconds:
    """Seconds of loading that its eviction is expected to cost."""
    return expected_seconds(model.load_seconds, model.usage, now)


def expected_seconds(load_seconds: Seconds, usage: Usage, now: Instant) -> Seconds:
    """Of loading, if it were evicted."""
    return Seconds(load_seconds * usage.chance(now))


def least_worth_first(models: Iterable[Resident], rules: StayRules, now: Instant) -> list[Resident]:
    """Those that may be evicted, in the order in which they go:

    1. fewer seconds of loading to be expected
    2. longer unused
    3. smaller name
    """
    leavers = (model for model in models if may_be_evicted(model, rules, now))
    return sorted(leavers, key=lambda model: (worth_keeping(model, now), model.usage.at, model.name))
