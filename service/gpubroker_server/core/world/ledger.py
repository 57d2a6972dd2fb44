"""The book of one device: who holds how much, what is pledged, and what is free for whom."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from gpubroker_server.core.domain.device import Device, DeviceSample
from gpubroker_server.core.domain.lease import HOLDERS_ON_SERVERS, Lease, LeaseState, Pledge
from gpubroker_server.core.domain.orders import RunId
from gpubroker_server.core.domain.units import Fence, Instant, Mib, TaskId

NOISE_DIVISOR = 256
"""Of a device's memory, this part may be in use without a process that uses it: contexts and the driver."""


@dataclass(frozen=True, slots=True)
class Holding:
    """One lease with what was measured of its holder, and for whom it is being freed, if it is."""

    lease: Lease
    measured_mb: Mib = Mib(0)
    freeing_for: TaskId | None = None
    stopping: bool = False
    """Its run is under notice."""

    @property
    def takes_mb(self) -> Mib:
        """What it counts for: its lease or its measured use, whichever is more."""
        return max(self.lease.mb, self.measured_mb)

    @property
    def is_leaving(self) -> bool:
        """Its memory is on its way back: its run is over or under notice, and nobody doubts that it goes."""
        state = self.lease.state
        return state is LeaseState.RELEASING or (self.stopping and state is not LeaseState.QUARANTINED)


class LedgerTotals(NamedTuple):
    """Of the holdings of one device."""

    leased_mb: int = 0
    held_mb: int = 0
    """What they count for."""
    begun_mb: int = 0
    """The leases whose runs may use memory."""
    measured_mb: int = 0
    loaded_mb: int = 0
    """The leases of what servers of models have in memory."""

    def with_that_of(self, holding: Holding, sign: int) -> "LedgerTotals":
        lease = holding.lease
        begun_mb = 0 if lease.state is LeaseState.RESERVED else sign * lease.mb
        return LedgerTotals(
            self.leased_mb + sign * lease.mb,
            self.held_mb + sign * holding.takes_mb,
            self.begun_mb + begun_mb,
            self.measured_mb + sign * holding.measured_mb,
            self.loaded_mb + (begun_mb if lease.holder_kind in HOLDERS_ON_SERVERS else 0),
        )


NO_HOLDINGS = LedgerTotals()


class Book:
    """Mutable account of one device; owned by one World, or copied into one Draft.

    free = physical - reserve - foreign - unexplained - sum of max(lease, measured) - pledged and freed

    A pledge is a claim: of its MiB, what its own victims still hold has yet to come, and the rest is kept
    from everybody of the same or lower priority, as far as it is there.
    """

    __slots__ = ("_leaving", "_since", "_sums", "_unheld_mb", "device", "holdings", "pledges", "sample")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.holdings: dict[str, Holding] = {}
        """To be read; `_enter` alone changes them."""
        self.pledges: dict[TaskId, Pledge] = {}
        self.sample: DeviceSample | None = None
        """The newest one; None until the node's agent has sent one."""
        self._since = Instant(-inf)
        """What was measured before is no longer believed."""
        self._unheld_mb: int | None = None
        self._sums = NO_HOLDINGS
        self._leaving: dict[str, Holding] = {}

    def copy(self) -> "Book":
        twin = Book(self.device)
        twin.holdings = dict(self.holdings)
        twin._sums, twin._leaving = self._sums, dict(self._leaving)
        twin.pledges = dict(self.pledges)
        twin.sample = self.sample
        return twin

    @property
    def sampled_at(self) -> Instant | None:
        return None if self.sample is None else self.sample.at

    @property
    def foreign_mb(self) -> Mib:
        """What processes of no lease use: as measured, and at least as the operator declared."""
        measured_mb = 0 if self.sample is None else self.sample.foreign_mb or 0
        return Mib(max(measured_mb - self.served_mb, self.device.declared_foreign_mb))

    @property
    def served_mb(self) -> int:
        """What of the measured use of processes without a lease is that of servers of models: up to what is
        leased to what they have in memory (ADR 111)."""
        measured_mb = 0 if self.sample is None else self.sample.foreign_mb or 0
        return min(measured_mb, self._sums.loaded_mb)

    @property
    def unexplained_mb(self) -> Mib:
        """What is in use though nobody is known to use it: by a dying process, or from another container.

        Where use cannot be attributed, that is all beyond what was declared and what is leased to runs that
        have begun. The reserve covers it first, and a little of it is noise of the driver; see ADR 20.
        """
        sample, device = self.sample, self.device
        if sample is None:
            return Mib(0)
        # Whose lease was released explains nothing: until the next sample, what it used counts as taken. Nor
        # does a run that is not known to have begun.
        is_listed = sample.foreign_mb is not None
        known = self._sums.measured_mb + self.served_mb if is_listed else self._sums.begun_mb
        beyond = sample.used_mb - self.foreign_mb - known - device.reserve_mb
        return Mib(beyond if beyond > device.physical_mb // NOISE_DIVISOR else 0)

    def register(self, device: Device) -> None:
        """Take over a new row of the same device."""
        self.device = device
        self._unheld_mb = None

    def put(self, lease: Lease, freeing_for: TaskId | None = None, *, stopping: bool = False) -> None:
        """Enter or update a lease; a released one leaves the book."""
        if lease.state is LeaseState.RELEASED:
            self._enter(lease.key, None)
        else:
            self._enter(lease.key, Holding(lease, self._measured_mb(lease), freeing_for, stopping))

    def vacate(self, lease: str) -> None:
        """As if the holder had left, and had been measured to be gone."""
        holding = self.holdings[lease]
        self._enter(lease, None)
        if self.sample is not None:
            mb, foreign_mb = holding.lease.mb, self.sample.foreign_mb
            began = holding.lease.state is not LeaseState.RESERVED
            unlisted_mb = mb if foreign_mb is None and began else 0
            if foreign_mb is not None and began and holding.lease.holder_kind in HOLDERS_ON_SERVERS:
                unlisted_mb = min(mb, foreign_mb)
                foreign_mb = Mib(foreign_mb - unlisted_mb)
            used_mb = self.sample.used_mb - (holding.measured_mb or unlisted_mb)
            self.sample = replace(self.sample, used_mb=Mib(max(0, used_mb)), foreign_mb=foreign_mb)

    def measure(self, sample: DeviceSample) -> None:
        """Take over a sample: foreign memory, and what each holder really uses."""
        self._unheld_mb = None
        self.sample = sample
        for key, holding in self.holdings.items():
            measured = self._measured_mb(holding.lease)
            if measured != holding.measured_mb:
                self._enter(key, replace(holding, measured_mb=measured))

    def takes(self, sample: DeviceSample) -> bool:
        """Whether it is news."""
        return sample.at > self._since and (self.sample is None or sample.at >= self.sample.at)

    def measure_anew(self, since: Instant) -> None:
        """Nothing more is taken here before somebody has looked at what is in use after this instant."""
        self._since, self._unheld_mb = since, None
        if self.sample is not None and self.sample.at <= since:
            self.sample = None

    def leased_mb(self) -> int:
        return self._sums.leased_mb

    def held_mb(self) -> int:
        return self._sums.held_mb

    def taken(self) -> tuple[int, list[Mib]]:
        """What plans see of its samples: (MiB that nobody has, MiB of each holding)."""
        return self.unheld_mb(), [holding.takes_mb for holding in self.holdings.values()]

    def unheld_mb(self) -> int:
        """What nobody holds or uses, pledged or not; negative if over-used."""
        if self._unheld_mb is None:
            device = self.device
            usable = device.physical_mb - device.reserve_mb if device.offers else 0
            self._unheld_mb = usable - self.foreign_mb - self.unexplained_mb - self.held_mb()
        return self._unheld_mb

    def yet_to_come_mb(self, preemptor: TaskId) -> int:
        """What the runs being stopped for this preemptor still hold here, and will give back."""
        return sum(holding.takes_mb for holding in self.leaving() if holding.freeing_for == preemptor)

    def claim_mb(self, pledge: Pledge) -> int:
        """What others must leave for this preemptor: its pledge without what its victims will bring."""
        return max(0, pledge.mb - self.yet_to_come_mb(pledge.preemptor))

    def kept_free_mb(self, pledge: Pledge) -> int:
        """The part of a claim that is there and waits for its preemptor; higher priorities come first."""
        left = max(0, self.unheld_mb())
        for other in self.pledges.values():
            if (-other.priority, other.preemptor) < (-pledge.priority, pledge.preemptor):
                left -= self.claim_mb(other)
        return max(0, min(left, self.claim_mb(pledge)))

    def free_mb(self, *, task: TaskId | None = None, priority: int = -1) -> int:
        """MiB that a task of this id and priority could take now; negative if over-used or over-claimed.

        Its own pledge counts as free, and so do pledges of strictly lower priority.
        """
        free = self.unheld_mb()
        for pledge in self.pledges.values():
            if pledge.preemptor != task and pledge.priority >= priority:
                free -= self.claim_mb(pledge)
        return free

    def leaving(self) -> Iterator[Holding]:
        return iter(self._leaving.values())

    def soon_mb(self, *, task: TaskId | None = None, priority: int = -1) -> int:
        """The same as `free_mb` once everybody who is leaving has left; negative if too much is pledged."""
        soon = self.unheld_mb() + sum(holding.takes_mb for holding in self.leaving())
        for pledge in self.pledges.values():
            if pledge.preemptor != task and pledge.priority >= priority:
                soon -= pledge.mb
        return soon

    def is_stale(self, now: Instant, period_seconds: float) -> bool:
        """Its last sample is older than three periods, or there is none: it takes nothing new."""
        return self.sample is None or now - self.sample.at > 3 * period_seconds

    def _enter(self, key: str, after: Holding | None) -> None:
        """Put a holding in the place of the one with this key, or take that one out. The sums go along:
        thousands may hold something of one device, and each of their changes asks for them."""
        self._unheld_mb = None
        before = self.holdings.get(key)
        if before is not None:
            self._sums = self._sums.with_that_of(before, -1)
        if after is None:
            self.holdings.pop(key, None)
        else:
            self.holdings[key] = after
            self._sums = self._sums.with_that_of(after, +1)
        if after is not None and after.is_leaving:
            self._leaving[key] = after
        else:
            self._leaving.pop(key, None)

    def _measured_mb(self, lease: Lease) -> Mib:
        if self.sample is None:
            return Mib(0)
        return self.sample.by_holder.get(lease.mark, Mib(0))


class UnconfirmedHolders:
    """Kept by the World beside its leases."""

    def __init__(self) -> None:
        self.releasing: dict[RunId, Instant] = {}
        """Each run with when its end was heard of; rows tell only that it was. It gives all back together."""
        self.quarantined: dict[str, dict[str, Lease]] = {}
        """By holder, the leases in quarantine of all its attempts, by key."""

    def note(self, lease: Lease, at: Instant) -> None:
        run = (TaskId(lease.holder), lease.fence, lease.rank)
        if lease.state is LeaseState.RELEASING:
            self.releasing.setdefault(run, at)
        else:
            self.releasing.pop(run, None)
        if lease.state is LeaseState.QUARANTINED:
            self.quarantined.setdefault(lease.holder, {})[lease.key] = lease
        elif (of_holder := self.quarantined.get(lease.holder)) is not None:
            of_holder.pop(lease.key, None)
            if not of_holder:
                del self.quarantined[lease.holder]

    def claims_of(self, holder: TaskId) -> set[Fence]:
        """Those of its claims that are over, or given up, and hold something still."""
        ending = {fence for name, fence, _ in self.releasing if name == holder}
        return ending | {lease.fence for lease in self.quarantined.get(holder, {}).values()}
