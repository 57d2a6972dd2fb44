"""The slots of a model, which are the requests that it is sent at once: their number, and their division
among gateways.

Each gateway claims the slots that it uses. It writes a larger claim before it uses more slots, and uses fewer
before it writes a smaller claim. The leader tells each gateway how many slots it may claim, and gives no
gateway a slot that another may still be using. `now` and `at` are by the clock of the database.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpubroker_server.core.domain.units import Instant, MonotonicSeconds, Seconds

FRESH_SECONDS: Final = Seconds(3.0)
"""The time after which gateways ignore the shares that the leader gave."""

HOLD_SECONDS: Final = Seconds(30.0)
"""The time for which a claim holds after it was written. By then, a gateway that cannot write has gone down
to one slot by itself."""

AWAY_SECONDS: Final = Seconds(5.0)
"""The time after its last claim after which a gateway gets no share."""

_REMEMBERED_SECONDS: Final = 2 * FRESH_SECONDS
"""The time after which no gateway acts on the shares that were given."""

Shares = Mapping[str, int]
"""Gateway -> the number of its slots."""


class Claim(NamedTuple):
    """The slots that a gateway says it has and wants."""

    gateway: str
    at: Instant
    holds: Mapping[str, int]
    """Model -> the number of requests that the gateway may be sending at once."""
    wants: Mapping[str, int]
    """Model -> the number of requests that the gateway has, including queued ones."""


class SlotShares:
    """The shares that one leader gives. When the leader gives its first shares, no gateway acts any longer on
    the shares of earlier leaders."""

    def __init__(self, slots: Mapping[str, int], began_at: Instant) -> None:
        """`slots` maps a model to the number of its slots at all gateways together."""
        self._slots = slots
        self._began_at = began_at
        self._given: list[tuple[Instant, Mapping[str, Shares]]] = []
        """(time until which the shares were the newest, shares by model), the newest last."""

    def give(self, claims: Sequence[Claim], now: Instant) -> Mapping[str, Shares]:
        """Return, by model, the number of slots that each gateway may claim from now on."""
        if self._given:
            self._given[-1] = now, self._given[-1][1]
        self._given = [
            (given_at, given) for given_at, given in self._given if given_at > now - _REMEMBERED_SECONDS
        ]
        valid_claims = [claim for claim in claims if claim.at > now - HOLD_SECONDS]
        shares = {
            model: self._divided(model, slots, valid_claims, now) for model, slots in self._slots.items()
        }
        self._given.append((now, shares))
        return shares

    def _divided(self, model: str, slots: int, valid_claims: Sequence[Claim], now: Instant) -> Shares:
        used = {claim.gateway: self._used(model, claim) for claim in valid_claims}
        present = [claim for claim in valid_claims if claim.at > now - AWAY_SECONDS]
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
        """Return the most slots that the gateway may be using: the maximum of its claim, of the shares on
        which it may still act, and of one."""
        shares_given = (shares.get(model, {}).get(claim.gateway, 1) for _, shares in self._given)
        return max(1, claim.holds.get(model, 1), *shares_given)


def goal_shares(slots: int, wants: Mapping[str, int]) -> Shares:
    """Return the shares to aim for. Each gateway gets one slot; the rest is divided by the number that each
    wants beyond that, and slots that none wants are divided evenly."""
    remaining = max(0, slots - len(wants))
    shortages = {gateway: max(0, wanted - 1) for gateway, wanted in wants.items()}
    lacked = min(remaining, sum(shortages.values()))
    by_lack, evenly = _split(lacked, shortages), _split(remaining - lacked, dict.fromkeys(wants, 1))
    return {gateway: 1 + by_lack[gateway] + evenly[gateway] for gateway in wants}


def _split(amount: int, weights: Mapping[str, int]) -> Shares:
    """Divide the amount by largest remainders. The whole amount is divided if any weight is above 0."""
    total = max(1, sum(weights.values()))
    shares = {gateway: amount * weight // total for gateway, weight in weights.items()}
    remaining = amount - sum(shares.values())
    for gateway in sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))[:remaining]:
        shares[gateway] += 1
    return shares


# The number of requests that a model is sent at once, if the settings do not state it.

FIRST_LIMIT: Final = 4
MOST: Final = 256
WORTH: Final = 0.2
"""The share of the possible gain in answers per second that more requests at once must bring. A doubled limit
is kept if it brings a fifth more answers."""

_FEWEST_ANSWERS: Final = 16
_ROUNDS: Final = 2
"""The number of answers for each slot over which a rate is measured."""


class _Tried(NamedTuple):
    limit: int
    rate: float


class HillClimb:
    """Finds the number of slots by trying. More slots are kept if they bring more answers per second. A limit
    is judged only while requests are queued throughout, because otherwise the limit holds nothing up.

    The method follows the hill climbing of .NET's thread pool (Hellerstein, Morrison, Eilebrecht: Optimizing
    Concurrency Levels in the .NET ThreadPool, 2008). The latency of answers, by which TCP Vegas judges, says
    little about models: a batch takes longer than one request and is worth it, and long texts take longer
    than short ones.
    """

    __slots__ = ("_answers", "_before", "_is_fast", "_is_upwards", "_since", "limit")

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self._answers = 0
        """The number of answers since the measurement of the rate began. It is negative while answers come to
        requests that were sent under another limit."""
        self._since = MonotonicSeconds(0.0)
        self._before: _Tried | None = None
        """The attempt with which the present limit is compared."""
        self._is_upwards = True
        self._is_fast = True
        """True while no limit has been too high yet. Until then the limit doubles at each step."""

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

    def _judge(self, attempt: _Tried) -> None:
        before = self._before
        if before is not None and _better(before, attempt) is before:
            self.limit = before.limit
            self._before = None  # the limit is measured again, because conditions may have changed
            self._is_upwards = not self._is_upwards
            self._is_fast = False
            return
        self._before = attempt
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
