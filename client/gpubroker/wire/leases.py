"""External leases: memory for processes that the broker does not start."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered, KnownState, Time
from gpubroker.wire.tasks import Failure, Pending, TaskDevice

_LONGEST_INTERVAL_SECONDS = 30.0


class LeaseState(KnownState):
    PENDING = "pending"
    HELD = "held"
    STOPPING = "stopping"
    """The holder has been asked to leave."""
    QUARANTINED = "quarantined"
    """The lease has ended without a release: its memory still counts as used."""
    ENDED = "ended"
    UNKNOWN = "unknown"


class Notice(Answered, frozen=True):
    """The reason and the deadline for the holder to free its memory and release the lease."""

    reason: Annotated[
        str, Meta(description="One of preempt, deadline (it was not renewed), cancel and overuse.")
    ]
    deadline_at: Time
    cause: Annotated[
        str | None,
        Meta(description="What the notice was given for, such as a drain; null if `reason` says it."),
    ] = None


class LeaseUrls(Answered, frozen=True):
    self: str
    renew: str
    wait: str
    events: str
    explain: str


class Lease(Answered, frozen=True):
    """The present state of a lease. It is also a task, which is never started: see `/tasks/{id}`."""

    id: str
    holder: str
    tenant: str
    state: LeaseState
    priority: int
    band: str
    gpus: int
    gpu_mb: int | None
    kinds: tuple[str, ...]
    pid: int | None
    labels: Mapping[str, str]
    node: str | None
    devices: Annotated[tuple[TaskDevice, ...], Meta(description="The devices that it holds now.")]
    ttl_seconds: float
    grace_seconds: float
    requested_at: Time
    held_at: Time | None
    deadline_at: Annotated[Time | None, Meta(description="The time before which it must be renewed.")]
    ended_at: Time | None
    notice: Notice | None
    pending: Pending | None
    error: Annotated[Failure | None, Meta(description="The reason why it ended without a release.")]
    urls: LeaseUrls

    @property
    def device_uuids(self) -> tuple[str, ...]:
        return tuple(device.uuid for device in self.devices)

    @property
    def interval_seconds(self) -> float:
        """The seconds after which to renew the lease."""
        return min(self.ttl_seconds / 3, _LONGEST_INTERVAL_SECONDS)
