"""Leases: GPU memory for programs that the broker does not start."""

import threading
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from gpubroker.errors import BrokerError
from gpubroker.wire.answered import Time
from gpubroker.wire.leases import Lease, LeaseState, Notice

AnyLease = Lease | str
"""A lease, or its id."""


def over(reason: str) -> Notice:
    """Return a notice that the SDK itself gives: `ended` if the lease has ended, `refused` if the service
    does not let this program renew it. It has no deadline."""
    return Notice(reason, cast(Time, None))


class LeaseOptions(TypedDict, total=False):
    """The keyword arguments of `lease` and `ask_lease`."""

    holder: str
    """The name that people see. Default: this program, user, machine and process."""
    gpu_mb: int
    """The MiB of each GPU. Default: whole GPUs."""
    gpus: int
    priority: int | str
    ttl_seconds: float
    grace_seconds: float
    pid: int
    """The id of a process on the lease's node. Memory that it and its children use counts as the lease's."""
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
    """The state of a held lease. The code that renews the lease writes it, and the holder reads it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.is_over = False
        """True once the holder has left its block, so that nothing renews the lease any more."""
        self.is_unreachable = False
        """True if the last renewal got no answer. The memory is not given away meanwhile."""
        self.notice: Notice | None = None
        self.fault: BrokerError | None = None
        """The error with which the service refused a renewal."""
        self._has_notice = threading.Event()

    def update(self, lease: Lease) -> None:
        self.lease = lease
        self.is_unreachable = False
        if lease.state is not LeaseState.HELD:
            self.give_notice(lease.notice or over("ended"))

    def refuse(self, fault: BrokerError) -> None:
        self.fault = fault
        self.give_notice(over("refused"))

    def give_notice(self, notice: Notice) -> None:
        """Give the notice to the holder. Only the first notice counts."""
        if self.notice is None:
            self.notice = notice
            self._has_notice.set()

    def wait_for_notice(self, timeout_seconds: float | None) -> bool:
        return self._has_notice.wait(timeout_seconds)
