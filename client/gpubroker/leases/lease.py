"""GPU memory for programs that the broker does not start: ask, hold, be asked to leave, give back."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TypedDict

from gpubroker.errors import BrokerError
from gpubroker.tasks.task import Failure, Pending, TaskDevice
from gpubroker.transport.decoding import Raw, each, filled, optional

LONGEST_INTERVAL_SECONDS = 30.0
AGAIN_SECONDS = 1.0


class LeaseState(StrEnum):
    PENDING = "pending"
    HELD = "held"
    STOPPING = "stopping"
    """Its holder is asked to leave."""
    QUARANTINED = "quarantined"
    """It is over and was not given back: its memory still counts as used."""
    ENDED = "ended"
    UNKNOWN = "unknown"
    """A state that this version of the SDK does not know; `lease.raw["state"]` names it."""

    @classmethod
    def _missing_(cls, _value: object) -> "LeaseState":
        return cls.UNKNOWN


@dataclass(frozen=True, slots=True)
class Notice:
    """Free the memory, then release the lease, by then."""

    reason: str
    """preempt, deadline (it was not renewed), cancel, overuse; `ended` if nobody waits any more, `refused` if
    the service does not let this program renew it (`fault` of what is held says how)."""
    deadline_at: datetime | None = None
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease as the service told it."""

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
    """To be renewed before then."""
    ended_at: datetime | None = None
    notice: Notice | None = None
    pending: Pending | None = None
    error: Failure | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Lease":
        return filled(
            cls,
            raw,
            state=LeaseState(raw.get("state", "")),
            devices=each(TaskDevice, raw.get("devices")),
            notice=optional(Notice, raw.get("notice")),
            pending=optional(Pending, raw.get("pending")),
            error=optional(Failure, raw.get("error")),
        )

    @property
    def device_uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.devices)

    @property
    def interval_seconds(self) -> float:
        """How often to renew it."""
        return min(self.ttl_seconds / 3, LONGEST_INTERVAL_SECONDS)


AnyLease = Lease | str
"""A lease, or its id."""


class LeaseOptions(TypedDict, total=False):
    """What is asked for. `holder` is for people; left out it names this program, machine and process."""

    holder: str
    gpu_mb: int
    """MiB of each GPU; left out: whole GPUs."""
    gpus: int
    priority: int | str
    ttl_seconds: float
    grace_seconds: float
    pid: int
    """A process on the lease's node whose use, with that of its children, is the lease's."""
    node: str
    devices: Sequence[str]
    kinds: Sequence[str]
    labels: Mapping[str, str]
    idempotency_key: str


class LeaseEnded(BrokerError):
    """There is no such lease to hold: it was not given in time, or ended while it was waited for."""

    def __init__(self, lease_id: str, detail: str) -> None:
        super().__init__(detail, code="lease-ended")
        self.lease_id = lease_id


class Standing:
    """What is known of a lease that is being held; told by whoever renews it, asked by anybody."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_over = False
        """Nobody needs to renew it any longer."""
        self.is_unreachable = False
        """The service could not be asked last time. Its memory is given to nobody else meanwhile."""
        self._told = threading.Event()
        self._notice: Notice | None = None
        self.fault: BrokerError | None = None
        """How the service refused to renew it."""

    @property
    def notice(self) -> Notice | None:
        return self._notice

    def note(self, lease: Lease) -> None:
        self.lease = lease
        self.is_unreachable = False
        if lease.state is not LeaseState.HELD:
            self.give(lease.notice or Notice("ended"))

    def refuse(self, fault: BrokerError) -> None:
        self.fault = fault
        self.give(Notice("refused"))

    def give(self, notice: Notice) -> None:
        if self._notice is None:
            self._notice = notice
            self._told.set()

    def wait(self, timeout_seconds: float | None) -> bool:
        return self._told.wait(timeout_seconds)
