"""Leases: GPU memory for programs that the broker does not start."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypedDict

from gpubroker.errors import BrokerError
from gpubroker.tasks.task import Failure, Pending, TaskDevice
from gpubroker.transport.decoding import Answered, KnownState

_LONGEST_INTERVAL_SECONDS = 30.0


class LeaseState(KnownState):
    PENDING = "pending"
    HELD = "held"
    STOPPING = "stopping"
    """The holder is asked to leave."""
    QUARANTINED = "quarantined"
    """It has ended without a release: its memory still counts as used."""
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Notice(Answered):
    """Free the memory and then release the lease, before the deadline."""

    reason: str
    """preempt, deadline (it was not renewed), cancel or overuse; `ended` if the lease has ended, `refused` if
    the service does not let this program renew it (see `HeldLease.fault`)."""
    deadline_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Lease(Answered):
    """A lease as the service answers it."""

    id: str
    holder: str
    state: LeaseState
    tenant: str = ""
    priority: int = 0
    band: str = ""
    gpus: int = 0
    gpu_mb: int | None = None
    pid: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    node: str | None = None
    devices: tuple[TaskDevice, ...] = ()
    ttl_seconds: float = 0.0
    grace_seconds: float = 0.0
    requested_at: datetime | None = None
    held_at: datetime | None = None
    deadline_at: datetime | None = None
    """Renew it before then."""
    ended_at: datetime | None = None
    notice: Notice | None = None
    pending: Pending | None = None
    error: Failure | None = None

    @property
    def device_uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.devices)

    @property
    def interval_seconds(self) -> float:
        """How often to renew it."""
        return min(self.ttl_seconds / 3, _LONGEST_INTERVAL_SECONDS)


AnyLease = Lease | str
"""A lease, or its id."""


class LeaseOptions(TypedDict, total=False):
    """What `lease` and `ask_lease` take by name."""

    holder: str
    """Shown to people. Default: this program, user, machine and process."""
    gpu_mb: int
    """MiB of each GPU; without it, whole GPUs."""
    gpus: int
    priority: int | str
    ttl_seconds: float
    grace_seconds: float
    pid: int
    """A process on the lease's node; what it and its children use counts as the lease's."""
    node: str
    devices: Sequence[str]
    kinds: Sequence[str]
    labels: Mapping[str, str]
    idempotency_key: str


class LeaseEnded(BrokerError):
    """The lease was not given in time, or ended while it was waited for."""

    def __init__(self, lease_id: str, detail: str) -> None:
        super().__init__(detail, code="lease-ended")
        self.lease_id = lease_id


class LeaseStatus:
    """What is known of a held lease: written by what renews it, read by the holder."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_over = False
        """The holder has left its block, so nothing renews the lease any more."""
        self.is_unreachable = False
        """The last renewal got no answer. The memory is not given away meanwhile."""
        self.notice: Notice | None = None
        self.fault: BrokerError | None = None
        """Why the service refused a renewal."""
        self._has_notice = threading.Event()

    def update(self, lease: Lease) -> None:
        self.lease = lease
        self.is_unreachable = False
        if lease.state is not LeaseState.HELD:
            self.give_notice(lease.notice or Notice("ended"))

    def refuse(self, fault: BrokerError) -> None:
        self.fault = fault
        self.give_notice(Notice("refused"))

    def give_notice(self, notice: Notice) -> None:
        """Only the first notice counts."""
        if self.notice is None:
            self.notice = notice
            self._has_notice.set()

    def wait_for_notice(self, timeout_seconds: float | None) -> bool:
        return self._has_notice.wait(timeout_seconds)
