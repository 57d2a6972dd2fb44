"""The book of one device: who holds how much, what is pledged, and what is free for whom."""

from collections.abc import Iterator
from dataclasses import dataclass

from service.core.device import Device, DeviceSample
from service.core.lease import Lease, LeaseState, Pledge
from service.core.units import Instant, Mib, TaskId


@dataclass(frozen=True, slots=True)
class Holding:
    """One lease with what was measured of its holder, and for whom it is being freed, if it is."""

    lease: Lease
    measured_mb: Mib = Mib(0)
    freeing_for: TaskId | None = None

    @property
    def takes_mb(self) -> Mib:
        """What it counts for: its lease or its measured use, whichever is more."""
        return max(self.lease.mb, self.measured_mb)


class Book:
    """Mutable account of one device; owned by one World, or copied into one Draft.

    free = allocatable - foreign - sum of max(lease, measured) - pledged bytes already freed
    """

    __slots__ = ("device", "foreign_mb", "holdings", "pledges", "sampled_at", "used_mb", "utilization")

    def __init__(self, device: Device) -> None:
        self.device = device
        self.holdings: dict[str, Holding] = {}
        self.pledges: dict[TaskId, Pledge] = {}
        self.foreign_mb: Mib = device.declared_foreign_mb
        self.sampled_at: Instant | None = None
        self.used_mb: Mib | None = None
        self.utilization: float | None = None

    def copy(self) -> "Book":
        twin = Book.__new__(Book)
        twin.device = self.device
        twin.holdings = dict(self.holdings)
        twin.pledges = dict(self.pledges)
        twin.foreign_mb = self.foreign_mb
        twin.sampled_at = self.sampled_at
        twin.used_mb = self.used_mb
        twin.utilization = self.utilization
        return twin

    def put(self, lease: Lease, freeing_for: TaskId | None = None) -> None:
        """Enter or update a lease; a released one leaves the book."""
        if lease.state is LeaseState.RELEASED:
            self.holdings.pop(lease.key, None)
            return
        known = self.holdings.get(lease.key)
        measured = known.measured_mb if known else Mib(0)
        self.holdings[lease.key] = Holding(lease, measured, freeing_for)

    def measure(self, sample: DeviceSample) -> None:
        """Take over a sample: foreign memory, and what each holder really uses."""
        self.sampled_at = sample.at
        self.used_mb = sample.used_mb
        self.utilization = sample.utilization
        self.foreign_mb = max(sample.foreign_mb, self.device.declared_foreign_mb)
        for key, holding in self.holdings.items():
            lease = holding.lease
            measured = sample.by_holder.get(f"{lease.holder}:{lease.fence}", Mib(0))
            if measured != holding.measured_mb:
                self.holdings[key] = Holding(lease, measured, holding.freeing_for)

    def held_mb(self) -> int:
        return sum(holding.takes_mb for holding in self.holdings.values())

    def yet_to_come_mb(self, preemptor: TaskId) -> int:
        """What the runs being stopped for this preemptor still hold here."""
        return sum(h.takes_mb for h in self.holdings.values() if h.freeing_for == preemptor)

    def kept_free_mb(self, pledge: Pledge) -> int:
        """The part of a pledge that has already been freed and waits for its preemptor."""
        return max(0, pledge.mb - self.yet_to_come_mb(pledge.preemptor))

    def free_mb(self, *, task: TaskId | None = None, priority: int = -1) -> int:
        """MiB that a task of this id and priority could take now; negative if over-used.

        Its own pledge counts as free, and so do pledges of strictly lower priority.
        """
        free = self.device.allocatable_mb - self.foreign_mb - self.held_mb()
        for pledge in self.pledges.values():
            if pledge.preemptor != task and pledge.priority >= priority:
                free -= self.kept_free_mb(pledge)
        return free

    def overtaken(self, *, task: TaskId) -> Iterator[Pledge]:
        """Pledges, lowest priority first, that no longer fit once the room they kept was used by `task`."""
        free = self.free_mb(task=task)
        for pledge in sorted(self.pledges.values(), key=lambda p: (p.priority, p.preemptor)):
            if free >= 0:
                return
            if pledge.preemptor != task:
                free += self.kept_free_mb(pledge)
                yield pledge

    def is_empty(self) -> bool:
        """Nobody holds, keeps or uses anything: a whole-device demand may have it."""
        return not self.holdings and not self.pledges and self.foreign_mb == 0

    def is_stale(self, now: Instant, period_seconds: float) -> bool:
        """Its last sample is older than three periods, or there is none: it takes nothing new."""
        return self.sampled_at is None or now - self.sampled_at > 3 * period_seconds
