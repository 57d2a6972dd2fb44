"""The ledger of one device (its leases, measured use, pledges and free memory), and the index of holders that
are not confirmed gone."""

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.device import Device, DeviceSample
from gpubroker_server.core.domain.lease import HOLDERS_ON_SERVERS, Lease, LeaseState, Pledge
from gpubroker_server.core.domain.orders import RunId
from gpubroker_server.core.domain.units import Fence, Instant, Mib, TaskId

NOISE_DIVISOR = 256
"""Up to 1/NOISE_DIVISOR of a device's memory may be used by contexts and the driver without any process."""


class Holding(Struct, frozen=True):
    """A lease, its holder's measured use, and the preemptor that it is freed for."""

    lease: Lease
    measured_mb: Mib = Mib(0)
    freeing_for: TaskId | None = None
    stopping: bool = False

    @property
    def occupied_mb(self) -> Mib:
        return max(self.lease.mb, self.measured_mb)

    @property
    def is_leaving(self) -> bool:
        """True if the memory is being freed: the run has ended or is asked to stop, and is not in
        quarantine."""
        state = self.lease.state
        return state is LeaseState.RELEASING or (self.stopping and state is not LeaseState.QUARANTINED)

    @property
    def unlisted_mb(self) -> int:
        """The memory that an ended run may still use: its process leaves the list before its memory is
        free."""
        is_ending = self.lease.state is LeaseState.RELEASING
        return self.occupied_mb - self.measured_mb if is_ending and not self.is_on_server else 0

    @property
    def is_on_server(self) -> bool:
        return self.lease.holder_kind in HOLDERS_ON_SERVERS


class LedgerTotals(NamedTuple):
    leased_mb: int = 0
    held_mb: int = 0
    """The sum of `occupied_mb`."""
    begun_mb: int = 0
    """The MiB of the leases of runs that may use memory."""
    measured_mb: int = 0
    loaded_mb: int = 0
    """The MiB of the leases of models and servers that are loaded."""
    unlisted_mb: int = 0

    def with_that_of(self, holding: Holding, sign: int) -> "LedgerTotals":
        lease = holding.lease
        begun_mb = 0 if lease.state is LeaseState.RESERVED else sign * lease.mb
        return LedgerTotals(
            self.leased_mb + sign * lease.mb,
            self.held_mb + sign * holding.occupied_mb,
            self.begun_mb + begun_mb,
            self.measured_mb + sign * holding.measured_mb,
            self.loaded_mb + (begun_mb if holding.is_on_server else 0),
            self.unlisted_mb + sign * holding.unlisted_mb,
        )


NO_HOLDINGS = LedgerTotals()


class DeviceLedger:
    """The mutable ledger of one device; owned by one World, or copied into one Draft.

    free = physical - reserve - foreign - unexplained - sum of max(lease, measured) - pledged and freed

    A pledge is a claim to memory. One part of it is still held by its victims; the other part, as far as it
    is free, is kept from every task of the pledge's priority or a lower one.
    """

    __slots__ = ("_leaving", "_since", "_sums", "_unheld_mb", "device", "holdings", "pledges", "sample")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.holdings: dict[str, Holding] = {}
        """The holdings by lease. Only `_enter` changes them."""
        self.pledges: dict[TaskId, Pledge] = {}
        self.sample: DeviceSample | None = None
        """The newest sample; None before the first."""
        self._since = Instant(-inf)
        """The instant up to which samples are not used."""
        self._unheld_mb: int | None = None
        self._sums = NO_HOLDINGS
        self._leaving: dict[str, Holding] = {}

    def copy(self) -> "DeviceLedger":
        twin = DeviceLedger(self.device)
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
        """The use by processes without a lease: what is measured, and at least what the operator declared."""
        measured_mb = 0 if self.sample is None else self.sample.foreign_mb or 0
        return Mib(max(measured_mb - self.served_mb, self.device.declared_foreign_mb))

    @property
    def served_mb(self) -> int:
        """The part of the foreign use that belongs to model servers: at most the leases of what they have
        loaded (ADR 111)."""
        measured_mb = 0 if self.sample is None else self.sample.foreign_mb or 0
        return min(measured_mb, self._sums.loaded_mb)

    @property
    def unexplained_mb(self) -> Mib:
        """The use that no known process and no ended run explains, for instance that of a process in another
        container, or of one that hangs in the driver after its lease was released.

        Where use cannot be attributed to processes, all use beyond what was declared and what is leased to
        runs that have begun is unexplained. The reserve covers unexplained use first, and a little of such
        use is ignored as driver noise; see ADR 20.
        """
        unknown_mb, device = self._beyond_known_mb(), self.device
        return Mib(unknown_mb if unknown_mb > device.physical_mb // NOISE_DIVISOR else 0)

    def _beyond_known_mb(self) -> int:
        """Return the use beyond that of the known processes; negative if the processes together are listed
        with more than is in use."""
        sample = self.sample
        if sample is None:
            return 0
        # A holder whose lease was released accounts for no use: what it used counts as taken until the next
        # sample. A run that is not known to have begun accounts for no use either.
        is_listed = sample.foreign_mb is not None
        listed_mb = self._sums.measured_mb + self.served_mb + self._sums.unlisted_mb
        known_mb = listed_mb if is_listed else self._sums.begun_mb
        return sample.used_mb - self.foreign_mb - known_mb - self.device.reserve_mb

    def register(self, device: Device) -> None:
        """Take over a new row of the device. A removed device that comes back takes nothing before it is
        measured again."""
        self.device = device
        self._unheld_mb = None
        if not device.present:
            self.sample = None

    def put(self, lease: Lease, freeing_for: TaskId | None = None, *, stopping: bool = False) -> None:
        """Add or update a lease, or remove it if it is released."""
        if lease.state is LeaseState.RELEASED:
            self._enter(lease.key, None)
        else:
            self._enter(lease.key, Holding(lease, self._measured_mb(lease), freeing_for, stopping))

    def assume_released(self, lease: str) -> None:
        """Remove the lease as if its holder had left and a sample had shown that."""
        holding = self.holdings[lease]
        # An ended run explains use without a listed process only as far as the sample has such use.
        dying_mb = max(0, holding.unlisted_mb + min(0, self._beyond_known_mb()))
        self._enter(lease, None)
        if self.sample is not None:
            mb, foreign_mb = holding.lease.mb, self.sample.foreign_mb
            began = holding.lease.state is not LeaseState.RESERVED
            unlisted_mb = mb if foreign_mb is None and began else 0
            if foreign_mb is not None:
                unlisted_mb = dying_mb
            if foreign_mb is not None and began and holding.is_on_server:
                # What a model uses is measured as foreign: it is memory of its server's process (ADR 111).
                unlisted_mb = min(mb, foreign_mb)
                foreign_mb = Mib(foreign_mb - unlisted_mb)
            used_mb = self.sample.used_mb - holding.measured_mb - unlisted_mb
            self.sample = replace(self.sample, used_mb=Mib(max(0, used_mb)), foreign_mb=foreign_mb)

    def measure(self, sample: DeviceSample) -> None:
        self._unheld_mb = None
        self.sample = sample
        for key, holding in self.holdings.items():
            measured = self._measured_mb(holding.lease)
            if measured != holding.measured_mb:
                self._enter(key, replace(holding, measured_mb=measured))

    def takes(self, sample: DeviceSample) -> bool:
        return sample.at > self._since and (self.sample is None or sample.at >= self.sample.at)

    def require_new_sample(self, since: Instant) -> None:
        """Take nothing new until there is a sample that was taken after this instant."""
        self._since, self._unheld_mb = since, None
        if self.sample is not None and self.sample.at <= since:
            self.sample = None

    def leased_mb(self) -> int:
        return self._sums.leased_mb

    def held_mb(self) -> int:
        return self._sums.held_mb

    def quarantined_mb(self) -> int:
        """Return the MiB of the leases in quarantine, whose holders are not confirmed gone."""
        leases = (holding.lease for holding in self.holdings.values())
        return sum(lease.mb for lease in leases if lease.state is LeaseState.QUARANTINED)

    def taken(self) -> tuple[int, list[Mib]]:
        """Return the part of the samples that plans depend on: (free MiB, MiB of each holding)."""
        return self.unallocated_mb(), [holding.occupied_mb for holding in self.holdings.values()]

    def unallocated_mb(self) -> int:
        """Return the MiB that are neither held nor used, pledged or not; negative if over-used."""
        if self._unheld_mb is None:
            device = self.device
            usable = device.physical_mb - device.reserve_mb if device.offers else 0
            self._unheld_mb = usable - self.foreign_mb - self.unexplained_mb - self.held_mb()
        return self._unheld_mb

    def releasing_mb(self, preemptor: TaskId) -> int:
        """Return the MiB of this device that the runs which stop for this preemptor still hold."""
        return sum(holding.occupied_mb for holding in self.leaving() if holding.freeing_for == preemptor)

    def pledge_claim_mb(self, pledge: Pledge) -> int:
        """Return the MiB that others must leave free for the preemptor: its pledge without what its victims
        still hold."""
        return max(0, pledge.mb - self.releasing_mb(pledge.preemptor))

    def reserved_free_mb(self, pledge: Pledge) -> int:
        """Return the free MiB of a pledge's claim; claims of higher priority come first."""
        left = max(0, self.unallocated_mb())
        for other in self.pledges.values():
            if (-other.priority, other.preemptor) < (-pledge.priority, pledge.preemptor):
                left -= self.pledge_claim_mb(other)
        return max(0, min(left, self.pledge_claim_mb(pledge)))

    def free_mb(self, *, task: TaskId | None = None, priority: int = -1) -> int:
        """Return the MiB that a task of this id and priority could take now; negative if over-used or
        over-pledged.

        The task's own pledge counts as free, and so do pledges of strictly lower priority.
        """
        free = self.unallocated_mb()
        for pledge in self.pledges.values():
            if pledge.preemptor != task and pledge.priority >= priority:
                free -= self.pledge_claim_mb(pledge)
        return free

    def offered_mb(self) -> int:
        """Return the MiB that a task without a pledge could take now: none on a closed device."""
        return 0 if self.device.is_closed else max(0, self.free_mb())

    def leaving(self) -> Iterator[Holding]:
        return iter(self._leaving.values())

    def free_after_releases_mb(self, *, task: TaskId | None = None, priority: int = -1) -> int:
        """Return what `free_mb` will be once every holding that is being freed is gone; negative if too much
        is pledged."""
        free_mb = self.unallocated_mb() + sum(holding.occupied_mb for holding in self.leaving())
        for pledge in self.pledges.values():
            if pledge.preemptor != task and pledge.priority >= priority:
                free_mb -= pledge.mb
        return free_mb

    def is_stale(self, now: Instant, period_seconds: float) -> bool:
        """Return True if the last sample is missing or older than three periods; then the device takes
        nothing new."""
        return self.sample is None or now - self.sample.at > 3 * period_seconds

    def takes_nothing(self, now: Instant, period_seconds: float) -> bool:
        """Return True if nothing new may be placed on the device, whatever is free, because it is closed or
        not measured."""
        # This repeats `is_closed` and `is_stale`, to save their calls: each plan asks it of each device.
        closure, sample = self.device.closure, self.sample
        if closure is not None and not closure.is_waived:
            return True
        return sample is None or now - sample.at > 3 * period_seconds

    def _enter(self, key: str, after: Holding | None) -> None:
        """Replace or remove the holding of this key. The sums are updated, not added up anew, because a
        device may have thousands of holdings and each change asks for the sums."""
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
    """An index over leases with holders that are not confirmed gone."""

    def __init__(self) -> None:
        self.releasing: dict[RunId, Instant] = {}
        """Maps a run to the time at which its end was reported, which its rows do not say. The leases of a
        run are released together."""
        self.quarantined: dict[str, dict[str, Lease]] = {}
        """Maps a holder to the leases in quarantine of all its attempts, by key."""

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
        """Return the holder's claims that have ended, or were given up, and still hold memory."""
        ending = {fence for name, fence, _ in self.releasing if name == holder}
        return ending | {lease.fence for lease in self.quarantined.get(holder, {}).values()}
