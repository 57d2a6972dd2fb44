"""A model's slots divided among gateways, so that all together ask it no more at once than it has.

Each gateway claims what it uses: it writes that down before it uses more, and uses less before it writes
that. The leader tells each what it may claim; it gives nobody what another one may still be using. `now` and
`at` are by the clock of the database.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpubroker_server.core.domain.units import Instant, Seconds

FRESH_SECONDS: Final = Seconds(3.0)
"""A word of the leader that is older is not acted upon."""

HOLD_SECONDS: Final = Seconds(30.0)
"""So long after a gateway has last written it down its claim holds: then it is down to one slot by itself."""

AWAY_SECONDS: Final = Seconds(5.0)
"""A gateway that has written nothing for so long gets nothing more."""

_REMEMBERED_SECONDS: Final = 2 * FRESH_SECONDS
"""What was told so long ago nobody acts upon any more."""

Shares = Mapping[str, int]
"""By gateway."""


class Claim(NamedTuple):
    """What a gateway says of itself."""

    gateway: str
    at: Instant
    holds: Mapping[str, int]
    """By model: so many requests at once it may be sending."""
    wants: Mapping[str, int]
    """By model: so many it has, those that wait included."""


class SlotShares:
    """Of one leader. What older leaders have told nobody acts upon by the time that it gives its first."""

    def __init__(self, slots: Mapping[str, int], began_at: Instant) -> None:
        """`slots`: by model."""
        self._slots = slots
        self._began_at = began_at
        self._told: list[tuple[Instant, Mapping[str, Shares]]] = []
        """With the time until which each was the newest; shares by model."""

    def told(self, claims: Sequence[Claim], now: Instant) -> Mapping[str, Shares]:
        """By model what each gateway may claim from now on."""
        if self._told:
            self._told[-1] = now, self._told[-1][1]
        self._told = [(at, told) for at, told in self._told if at > now - _REMEMBERED_SECONDS]
        held = [claim for claim in claims if claim.at > now - HOLD_SECONDS]
        shares = {model: self._divided(model, slots, held, now) for model, slots in self._slots.items()}
        self._told.append((now, shares))
        return shares

    def _divided(self, model: str, slots: int, held: Sequence[Claim], now: Instant) -> Shares:
        used = {claim.gateway: self._used(model, claim) for claim in held}
        there = [claim for claim in held if claim.at > now - AWAY_SECONDS]
        aims = aimed(slots, {claim.gateway: claim.wants.get(model, 0) for claim in there})
        may_give = now >= self._began_at + _REMEMBERED_SECONDS
        free = max(0, slots - sum(used.values())) if may_give else 0
        shares: dict[str, int] = {}
        for gateway, aim in sorted(aims.items(), key=lambda one: (one[1] - used[one[0]], one[0])):
            more = min(max(0, aim - used[gateway]), free)
            free -= more
            shares[gateway] = min(aim, used[gateway] + more)
        return shares

    def _used(self, model: str, claim: Claim) -> int:
        """At most: what it claims, and what it may claim of what it was told. One always."""
        told = (shares.get(model, {}).get(claim.gateway, 1) for _, shares in self._told)
        return max(1, claim.holds.get(model, 1), *told)


def aimed(slots: int, wants: Mapping[str, int]) -> Shares:
    """One for each, the rest by what each wants beyond that, and what nobody wants evenly."""
    left = max(0, slots - len(wants))
    lacks = {gateway: max(0, wanted - 1) for gateway, wanted in wants.items()}
    lacked = min(left, sum(lacks.values()))
    by_lack, evenly = _split(lacked, lacks), _split(left - lacked, dict.fromkeys(wants, 1))
    return {gateway: 1 + by_lack[gateway] + evenly[gateway] for gateway in wants}


def _split(amount: int, weights: Mapping[str, int]) -> Shares:
    """By largest remainders; all of it, if anybody has a weight."""
    total = max(1, sum(weights.values()))
    shares = {gateway: amount * weight // total for gateway, weight in weights.items()}
    left = amount - sum(shares.values())
    for gateway in sorted(weights, key=lambda name: (-(amount * weights[name] % total), name))[:left]:
        shares[gateway] += 1
    return shares
