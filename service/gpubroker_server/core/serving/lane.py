"""The queue in front of one model: whose request goes now, whose is next, who is told to come again.

Requests wait for seconds, so nothing here is stored, and nothing ages: who has waited as long as it may is
refused instead. `now` is on any clock that never jumps.
"""

from bisect import bisect_left, insort
from collections import Counter
from math import ceil
from typing import NamedTuple

from gpubroker_server.core.domain.units import Seconds, Ticks
from gpubroker_server.core.serving.adaptive_slots import Climb

_WEIGHT = 0.125
"""Of the newest request in the mean of how long they take."""


class LaneRules(NamedTuple):
    places: int = 256
    """So many may wait."""
    tenant_share: float = 0.75
    """Of the places one tenant has so much at most, and of the slots while others wait; one always."""


class Place(NamedTuple):
    """Of one request that waits. Smallest first, never equal to another's."""

    order: int
    """The priority, negative: the highest goes first."""
    arrival: int
    tenant: str


class Outlook(NamedTuple):
    position: int
    """The next one to go is 1."""
    eta_seconds: Seconds | None
    """None: nobody knows how long requests take here."""


class Queued(NamedTuple):
    place: Place
    displaced: Place | None
    """All places were taken: it lost its own to a higher priority."""


class Full(NamedTuple):
    outlook: Outlook
    """If there had been a place."""
    is_share: bool
    """It is the tenant's share that is full; the lane is not."""


class Lane:
    """Compares by identity."""

    __slots__ = ("_arrivals", "_climb", "_held", "_mean_seconds", "_queues", "_rules", "_slots", "in_flight",
                 "waiting")  # fmt: skip

    def __init__(self, rules: LaneRules, slots: int | None = None) -> None:
        """`slots`: so many requests at once; None: as many as prove to be of use."""
        self.in_flight = 0
        self.waiting = 0
        self._rules = rules
        self._slots = slots
        self._climb = Climb()
        self._held: Counter[str] = Counter()
        """In flight, by tenant."""
        self._queues: dict[str, list[Place]] = {}
        """Those who wait, by tenant, each list in order and none empty."""
        self._arrivals = 0
        self._mean_seconds: float | None = None

    @property
    def slots(self) -> int:
        return self._climb.limit if self._slots is None else self._slots

    @property
    def is_limited(self) -> bool:
        """Somebody has said how many requests at once."""
        return self._slots is not None

    def limit(self, slots: int) -> None:
        """So many at once from now on; those that are under way go on."""
        self._slots = slots

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.waiting

    def goes_now(self, tenant: str) -> bool:
        """A slot is free and nobody waits for it: it is taken."""
        if self.waiting or self.in_flight >= self.slots:
            return False
        self.in_flight += 1
        self._held[tenant] += 1
        return True

    def wait(self, tenant: str, priority: int) -> Queued | Full:
        place = Place(-priority, self._arrivals, tenant)
        queue = self._queues.get(tenant, [])
        displaced: Place | None = None
        is_share = len(queue) >= self._share_of(self._rules.places)
        is_full = self.waiting >= self._rules.places
        if is_share or is_full:
            last = queue[-1] if is_share else max(queue[-1] for queue in self._queues.values())
            if last.order <= place.order:
                return Full(self.outlook(place), is_share and not is_full)
            displaced = last
            self.leave(last)
        self._arrivals += 1
        self.waiting += 1
        insort(self._queues.setdefault(tenant, []), place)
        return Queued(place, displaced)

    def leave(self, place: Place) -> None:
        """Without having gone."""
        queue = self._queues[place.tenant]
        del queue[bisect_left(queue, place)]
        if not queue:
            del self._queues[place.tenant]
        self.waiting -= 1

    def next(self) -> Place | None:
        """Who goes now, and has a slot from now on. While several tenants wait, one that holds its share of
        the slots comes after the others."""
        if not self.waiting or self.in_flight >= self.slots:
            return None
        most = self._share_of(self.slots)
        heads = (queue[0] for queue in self._queues.values())
        place = min(heads, key=lambda head: (self._held[head.tenant] >= most, head))
        self.leave(place)
        self.in_flight += 1
        self._held[place.tenant] += 1
        return place

    def end(self, tenant: str, held_seconds: float, now: Ticks) -> None:
        """One of the tenant's requests is over, and its slot free."""
        self.in_flight -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        mean = self._mean_seconds
        self._mean_seconds = held_seconds if mean is None else mean + _WEIGHT * (held_seconds - mean)
        if self._slots is None:
            self._climb.answered(now, somebody_waits=self.waiting > 0)

    def outlook(self, place: Place) -> Outlook:
        """Of one that waits, or would."""
        position = 1 + sum(bisect_left(queue, place) for queue in self._queues.values())
        mean = self._mean_seconds
        return Outlook(position, None if mean is None else Seconds(position * mean / self.slots))

    def _share_of(self, amount: int) -> int:
        return max(1, ceil(amount * self._rules.tenant_share))
