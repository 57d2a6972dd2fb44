"""The queue in front of one model: it decides which request starts now, which is next, and which is refused.

Requests wait only for seconds, so nothing here is stored. Among requests of one priority, tenants take turns.
This is fair queueing by the number of requests (Demers, Keshav, Shenker 1989), because Triton does not tell
how long a request will take. `now` is on any clock that never jumps.
"""

from bisect import bisect_left
from collections import Counter
from math import ceil, inf
from typing import NamedTuple

from gpubroker_server.core.domain.policy import AGEING_SECONDS_PER_POINT, aged_priority
from gpubroker_server.core.domain.units import MonotonicSeconds, Seconds
from gpubroker_server.core.serving.slots import HillClimb

_WEIGHT = 0.125
"""The weight of the newest request in the mean duration."""


class LaneRules(NamedTuple):
    """The rules of all lanes. Its defaults are those of the settings."""

    places: int = 256
    """The number of requests that may wait."""
    tenant_share: float = 0.75
    """The share of the places that one tenant may take while another tenant waits or has a slot, and the
    share of the slots while others wait. A tenant may always take one."""
    ageing_seconds_per_point: float = AGEING_SECONDS_PER_POINT
    """The wait, in seconds, that raises the priority of a request by one point. The default is that of
    tasks."""
    queue_seconds: Seconds = Seconds(30.0)
    """The longest time that a request may wait, unless the request states a shorter one."""


class Place(NamedTuple):
    """The place of a waiting request. Places are ordered by priority, then by arrival; no two are equal."""

    order: int
    """The negative priority, so that the highest priority comes first."""
    arrival: int
    tenant: str
    since: MonotonicSeconds


class QueueEstimate(NamedTuple):
    position: int
    """The place in the queue. At 1 the request is next."""
    eta_seconds: Seconds | None
    """The time until a slot is expected; None if no request has been answered yet."""


class Queued(NamedTuple):
    place: Place
    displaced: Place | None
    """The request that lost its place to this one, because no place was free and this request has a higher
    priority or its tenant is within its share; None if a place was free."""


class LaneFull(NamedTuple):
    estimate: QueueEstimate
    """The estimate for the request if it had got a place."""
    is_share: bool
    """True if the share of the tenant is full and the lane is not."""


class ModelLane:
    """The waiting requests and the slots of one model. Lanes compare by identity."""

    __slots__ = ("_arrivals", "_climb", "_held", "_mean_seconds", "_queues", "_rules", "_slots", "_turn",
                 "_turns", "_waits", "idle_since", "in_flight", "waiting")  # fmt: skip

    def __init__(self, rules: LaneRules, slots: int | None = None) -> None:
        """`slots` is the number of requests that run at once; None to find it by trying."""
        self.in_flight = 0
        self.waiting = 0
        self.idle_since = -inf
        """The time at which the last request with a slot ended; infinitely long ago before the first."""
        self._rules = rules
        self._slots = slots
        self._climb = HillClimb()
        self._held: Counter[str] = Counter()
        """Tenant -> the number of its requests in flight."""
        self._waits: Counter[str] = Counter()
        """Tenant -> the number of its waiting requests."""
        self._queues: dict[tuple[str, int], list[Place]] = {}
        """(tenant, order) -> places by arrival. No list is empty."""
        self._turn = 0
        """The turn of the last started request, of those that had waited."""
        self._turns: dict[str, int] = {}
        """Tenant -> its next turn, for tenants with requests whose turn is still to come."""
        self._arrivals = 0
        self._mean_seconds: float | None = None

    @property
    def slots(self) -> int:
        return self._climb.limit if self._slots is None else self._slots

    @property
    def is_limited(self) -> bool:
        """True if the number of slots was given, not found by trying."""
        return self._slots is not None

    def limit(self, slots: int) -> None:
        """Set the number of slots from now on. Requests in flight go on."""
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

    def enqueue(self, tenant: str, priority: int, now: MonotonicSeconds) -> Queued | LaneFull:
        place = Place(-priority, self._arrivals, tenant, now)
        is_full = self.waiting >= self._rules.places
        is_share = self._waits[tenant] >= self._places_each and not self._is_alone(tenant)
        displaced: Place | None = None
        if is_full or is_share:
            displaced = self._displaced_by(place, is_share=is_share)
            if displaced is None:
                return LaneFull(self.estimate(place), is_share and not is_full)
            self.withdraw(displaced)
        self._arrivals += 1
        self.waiting += 1
        self._waits[tenant] += 1
        self._queues.setdefault((tenant, -priority), []).append(place)
        return Queued(place, displaced)

    def _displaced_by(self, place: Place, *, is_share: bool) -> Place | None:
        """Return the place that a request takes over; None if there is none.

        1. If its tenant has used up its share: the last place of the tenant, if that has a lower priority.
        2. If its tenant is below its share and others are above theirs: the last place of those tenants.
        3. Otherwise: the last of all places, if that has a lower priority.
        """
        lasts = [queue[-1] for queue in self._queues.values()]
        if is_share:
            lasts = [last for last in lasts if last.tenant == place.tenant]
        elif self._waits[place.tenant] < self._places_each:
            over_share = [last for last in lasts if self._waits[last.tenant] > self._places_each]
            if over_share:
                return max(over_share)
        last = max(lasts)
        return None if last.order <= place.order else last

    @property
    def _places_each(self) -> int:
        return self._share_of(self._rules.places)

    def _is_alone(self, tenant: str) -> bool:
        """Return True if no other tenant waits or has a slot."""
        return self.waiting + self.in_flight == self._waits[tenant] + self._held[tenant]

    def withdraw(self, place: Place) -> None:
        """Remove a request that no longer waits."""
        queue = self._queues[place.tenant, place.order]
        del queue[bisect_left(queue, place)]
        if not queue:
            del self._queues[place.tenant, place.order]
        self.waiting -= 1
        self._waits[place.tenant] -= 1
        self._forget_if_gone(place.tenant)

    def start_next(self, now: MonotonicSeconds) -> Place | None:
        """Give a free slot to the next request, and return its place; None if no slot is free or no request
        waits. The next request is chosen by:

        1. a tenant that holds less than its share of the slots
        2. the highest priority, with ageing
        3. the tenant whose turn it is
        4. the earliest arrival
        """
        if not self.waiting or self.in_flight >= self.slots:
            return None
        limit = self._share_of(self.slots)
        heads = (queue[0] for queue in self._queues.values())
        place = min(heads, key=lambda head: (self._held[head.tenant] >= limit, *self._rank(head, now)))
        self._turn = self._turn_of(place.tenant)
        self._turns[place.tenant] = self._turn + 1
        self.in_flight += 1
        self._held[place.tenant] += 1
        self.withdraw(place)
        return place

    def _rank(self, head: Place, now: MonotonicSeconds) -> tuple[int, int, int]:
        waited = now - head.since
        aged = aged_priority(-head.order, waited, self._rules.ageing_seconds_per_point)
        return -aged, self._turn_of(head.tenant), head.arrival

    def _turn_of(self, tenant: str) -> int:
        return max(self._turn, self._turns.get(tenant, 0))

    def _forget_if_gone(self, tenant: str) -> None:
        for counts in (self._held, self._waits):
            if not counts[tenant]:
                del counts[tenant]
        if tenant not in self._held and tenant not in self._waits:
            self._turns.pop(tenant, None)

    def finish(self, tenant: str, held_seconds: float, now: MonotonicSeconds) -> None:
        """Free the slot of one of the tenant's requests, which has ended."""
        self.in_flight -= 1
        self.idle_since = now
        self._held[tenant] -= 1
        self._forget_if_gone(tenant)
        mean = self._mean_seconds
        self._mean_seconds = held_seconds if mean is None else mean + _WEIGHT * (held_seconds - mean)
        if self._slots is None:
            self._climb.answered(now, is_queued=self.waiting > 0)

    def estimate(self, place: Place) -> QueueEstimate:
        """Estimate the wait of a request with this place, by priority and arrival. Turns of tenants are
        ignored."""
        position = 1 + sum(bisect_left(queue, place) for queue in self._queues.values())
        mean = self._mean_seconds
        return QueueEstimate(position, None if mean is None else Seconds(position * mean / self.slots))

    def _share_of(self, amount: int) -> int:
        return max(1, ceil(amount * self._rules.tenant_share))
