"""A model's slots, the requests that it is sent at once: how many it has, and their division among gateways.

Division: each gateway claims what it uses. It writes a larger claim before it uses more, and uses less
before it writes a smaller one. The leader tells each gateway what it may claim, and gives none what another
may still be using. `now` and `at` are by the clock of the database.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds

FRESH_SECONDS: Final = Seconds(3.0)
"""Gateways ignore shares that the leader gave longer ago."""

HOLD_SECONDS: Final = Seconds(30.0)
"""The time for which a claim holds after it was written: by then its gateway is down to one slot by
itself."""

AWAY_SECONDS: Final = Seconds(5.0)
"""The time after which a gateway that has written nothing gets nothing more."""

_REMEMBERED_SECONDS: Final = 2 * FRESH_SECONDS
"""No gateway acts upon shares that were given longer ago."""

Shares = Mapping[str, int]
"""Gateway -> slots."""


class Claim(NamedTuple):
    """The slots that a gateway says it has and wants."""

    gateway: str
    at: Instant
    holds: Mapping[str, int]
    """Model -> number of requests that the gateway may be sending at once."""
    wants: Mapping[str, int]
    """Model -> number of requests that the gateway has, queued ones included."""


class SlotShares:
    """The shares that one leader gives. When the leader gives its first shares, no gateway acts upon those of
    older leaders any more."""

    def __init__(self, slots: Mapping[str, int], began_at: Instant) -> None:
        """`slots`: model -> slots of all gateways together."""
        self._slots = slots
        self._began_at = began_at
        self._given: list[tuple[Instant, Mapping[str, Shares]]] = []
        """Shares by model, with the time until which they were the newest."""

    def give(self, claims: Sequence[Claim], now: Instant) -> Mapping[str, Shares]:
        """Return what each gateway may claim from now on, by model."""
        if self._given:
            self._given[-1] = now, self._given[-1][1]
        self._given = [
            (given_at, given) for given_at, given in self._given if given_at > now - _REMEMBERED_SECONDS
        ]
        held = [claim for claim in claims if claim.at > now - HOLD_SECONDS]
        shares = {model: self._divided(model, slots, held, now) for model, slots in self._slots.items()}
        self._given.append((now, shares))
        return shares

    def _divided(self, model: str, slots: int, held: Sequence[Claim], now: Instant) -> Shares:
        used = {claim.gateway: self._used(model, claim) for claim in held}
        present = [claim for claim in held if claim.at > now - AWAY_SECONDS]
        goals = goal_shares(slots, {claim.gateway: claim.wants.get(model, 0) for claim in present})
        may_give = now >= self._began_at + _REMEMBERED_SECONDS
        free = max(0, slots - sum(used.values())) if may_give else 0
        shares: dict[str, int] = {}
        for gateway, goal in sorted(goals.items(), key=lambda item: (item[1] - used[item[0]], item[0])):
            more = min(max(0, goal - used[gateway]), free)
            free -= more
            shares[gateway] = min(goal, used[gateway] + more)
        return shares

    def _used(self, model: str, claim: Claim) -> int:
        """Return the most that the gateway may use: its claim, the shares that it may still act upon, and
        always one."""
        given = (shares.get(model, {}).get(claim.gateway, 1) for _, shares in self._given)
        return max(1, claim.holds.get(model, 1), *given)


def goal_shares(slots: int, wants: Mapping[str, int]) -> Shares:
    """Give one slot to each gateway, the rest by what each wants beyond that, and what none wants evenly."""
    left = max(0, slots - len(wants))
    shortages = {gateway: max(0, wanted - 1) for gateway, wanted in wants.items()}
    lacked = min(left, sum(shortages.values()))
    by_lack, evenly = _split(lacked, shortages), _split(left - lacked, dict.fromkeys(wants, 1))
    return {gateway: 1 + by_lack[gateway] + evenly[gateway] for gateway in wants}


def _split(amount: int, weights: Mapping[str, int]) -> Shares:
    """Divide the amount by largest remainders; all of it, if there is a weight."""
    total = max(1, sum(weights.values()))
    shares = {gateway: amount * weight // total for gateway, weight in weights.items()}
    left = amount - sum(shares.values())
    for gateway in sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))[:left]:
        shares[gateway] += 1
    return shares


# How many requests a model is sent at once, where the settings do not say.

FIRST_LIMIT: Final = 4
MOST: Final = 256
WORTH: Final = 0.2
"""The share of the possible gain that more requests at once must bring in answers per second: twice as many
are kept for a fifth more answers."""

_FEWEST_ANSWERS: Final = 16
_ROUNDS: Final = 2
"""Number of answers for each slot over which a rate is taken."""


class _Tried(NamedTuple):
    limit: int
    rate: float


class HillClimb:
    """Finds the number of slots by trying: more, if that brings more answers per second. It judges only while
    requests are queued throughout: otherwise the limit is not what holds anything up.

    After the hill climbing of .NET's thread pool (Hellerstein, Morrison, Eilebrecht: Optimizing Concurrency
    Levels in the .NET ThreadPool, 2008). The latency of an answer, by which TCP Vegas judges, says little of
    models: batches take longer than one request and are worth it, long texts take longer than short ones.
    """

    __slots__ = ("_answers", "_before", "_is_fast", "_is_upwards", "_since", "limit")

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self._answers = 0
        """Number of answers since the rate is taken; negative while answers of requests come that were sent
        under another limit."""
        self._since = MonotonicSeconds(0.0)
        self._before: _Tried | None = None
        """The attempt that the present limit is compared with."""
        self._is_upwards = True
        self._is_fast = True
        """Nothing has been too much yet: the limit doubles."""

    def answered(self, now: MonotonicSeconds, *, is_queued: bool) -> None:
        if not is_queued:
            self._answers = -self.limit
            return
        if self._answers <= 0:
            self._since = now
        answers = self._answers
        self._answers += 1
        if answers >= max(_FEWEST_ANSWERS, _ROUNDS * self.limit) and now > self._since:
            self._judge(_Tried(self.limit, answers / (now - self._since)))
            self._answers = -self.limit

    def _judge(self, found: _Tried) -> None:
        before = self._before
        if before is not None and _better(before, found) is before:
            self.limit = before.limit
            self._before = None  # it is measured again: conditions may have changed
            self._is_upwards = not self._is_upwards
            self._is_fast = False
            return
        self._before = found
        self.limit = self._stepped()

    def _stepped(self) -> int:
        step = self.limit if self._is_fast else max(1, self.limit // 4)
        if self._is_upwards and self.limit == MOST:
            self._is_upwards = self._is_fast = False
            step = MOST // 4
        elif self.limit == 1:
            self._is_upwards = True
        return min(MOST, self.limit + step) if self._is_upwards else self.limit - step


def _better(left: _Tried, right: _Tried) -> _Tried:
    low, high = sorted((left, right))
    return high if high.rate >= low.rate * (1 + WORTH * (high.limit / low.limit - 1)) else low
