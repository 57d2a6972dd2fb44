"""The queue in front of one model: which request starts now, which one is next, which one is refused.

Requests wait for seconds, so nothing here is stored, and priorities do not age: a request that has waited as
long as it may is refused instead. `now` is on any clock that never jumps.
"""

from bisect import bisect_left, insort
from collections import Counter
from math import ceil
from typing import NamedTuple

from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.slots import HillClimb

_WEIGHT = 0.125
"""Of the newest request in the mean duration."""


class LaneRules(NamedTuple):
    places: int = 256
    """How many requests may wait."""
    tenant_share: float = 0.75
    """The part of the places that one tenant may have, and of the slots while others wait; one always."""


class Place(NamedTuple):
    """Of a waiting request. The smallest is next; no two are equal."""

    order: int
    """The priority, negative: the highest is first."""
    arrival: int
    tenant: str


class QueueEstimate(NamedTuple):
    position: int
    """1: it is next."""
    eta_seconds: Seconds | None
    """None: no request has been answered yet."""


class Queued(NamedTuple):
    place: Place
    displaced: Place | None
    """All places were taken: this one lost its place to the higher priority."""


class LaneFull(NamedTuple):
    estimate: QueueEstimate
    """As if there had been a place."""
    is_share: bool
    """The tenant's share is full, and the lane is not."""


class ModelLane:
    """Compares by identity."""

    __slots__ = ("_arrivals", "_climb", "_held", "_mean_seconds", "_queues", "_rules", "_slots", "in_flight",
                 "waiting")  # fmt: skip

    def __init__(self, rules: LaneRules, slots: int | None = None) -> None:
        """`slots`: how many requests at once; None: as many as prove useful."""
        self.in_flight = 0
        self.waiting = 0
        self._rules = rules
        self._slots = slots
        self._climb = HillClimb()
        self._held: Counter[str] = Counter()
        """In flight, by tenant."""
        self._queues: dict[str, list[Place]] = {}
        """By tenant, each in order and none empty."""
        self._arrivals = 0
        self._mean_seconds: float | None = None

    @property
    def slots(self) -> int:
        return self._climb.limit if self._slots is None else self._slots

    @property
    def is_limited(self) -> bool:
        """The number of slots is given, not found by trying."""
        return self._slots is not None

    def limit(self, slots: int) -> None:
        """From now on; requests in flight go on."""
        self._slots = slots

    @property
    def is_idle(self) -> bool:
        return not self.in_flight and not self.waiting

    def try_start(self, tenant: str) -> bool:
        """Take a slot, if one is free and no request waits for it."""
        if self.waiting or self.in_flight >= self.slots:
            return False
        self.in_flight += 1
        self._held[tenant] += 1
        return True

    def enqueue(self, tenant: str, priority: int) -> Queued | LaneFull:
        place = Place(-priority, self._arrivals, tenant)
        queue = self._queues.get(tenant, [])
        displaced: Place | None = None
        is_share = len(queue) >= self._share_of(self._rules.places)
        is_full = self.waiting >= self._rules.places
        if is_share or is_full:
            last = queue[-1] if is_share else max(queue[-1] for queue in self._queues.values())
            if last.order <= place.order:
                return LaneFull(self.estimate(place), is_share and not is_full)
            displaced = last
            self.withdraw(last)
        self._arrivals += 1
        self.waiting += 1
        insort(self._queues.setdefault(tenant, []), place)
        return Queued(place, displaced)

    def withdraw(self, place: Place) -> None:
        """It waits no longer."""
        queue = self._queues[place.tenant]
        del queue[bisect_left(queue, place)]
        if not queue:
            del self._queues[place.tenant]
        self.waiting -= 1

    def start_next(self) -> Place | None:
        """Give a free slot to the next request. While several tenants wait, one that holds its share of the
        slots comes after the others."""
        if not self.waiting or self.in_flight >= self.slots:
            return None
        most = self._share_of(self.slots)
        heads = (queue[0] for queue in self._queues.values())
        place = min(heads, key=lambda head: (self._held[head.tenant] >= most, head))
        self.withdraw(place)
        self.in_flight += 1
        self._held[place.tenant] += 1
        return place

    def finish(self, tenant: str, held_seconds: float, now: MonotonicSeconds) -> None:
        """One of the tenant's requests is over, and its slot is free."""
        self.in_flight -= 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        mean = self._mean_seconds
        self._mean_seconds = held_seconds if mean is None else mean + _WEIGHT * (held_seconds - mean)
        if self._slots is None:
            self._climb.answered(now, is_queued=self.waiting > 0)

    def estimate(self, place: Place) -> QueueEstimate:
        """Of a request that waits, or would."""
        position = 1 + sum(bisect_left(queue, place) for queue in self._queues.values())
        mean = self._mean_seconds
        return QueueEstimate(position, None if mean is None else Seconds(position * mean / self.slots))

    def _share_of(self, amount: int) -> int:
        return max(1, ceil(amount * self._rules.tenant_share))
