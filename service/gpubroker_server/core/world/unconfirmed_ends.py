"""Runs that are over, or given up, and whose devices are not given back yet: their end takes proof."""

from enum import StrEnum

from gpubroker_server.core.domain.lease import OF_SERVERS, Lease, LeaseState
from gpubroker_server.core.domain.orders import RunId
from gpubroker_server.core.domain.units import Fence, Instant, TaskId


class Proof(StrEnum):
    """What a holder is known to be gone by."""

    PROCESS_ABSENT = "process_absent"
    """Its node's agent looked for its process and found nothing of it."""
    BOOT_CHANGED = "boot_changed"
    """Its machine has been booted since."""
    AGENT_RESTARTED = "agent_restarted"
    """A later agent of its machine found neither its mark nor memory of its process."""
    DEVICE_REMOVED = "device_removed"
    """The device is no longer in the machine."""
    UNLOADED = "unloaded"
    """Its server's index says that it is not there: of models."""
    HELD_ANEW = "held_anew"
    """Another lease of the same device is for what is still there: of models."""
    HOLDER = "released"
    """Who held it said so: of external leases."""
    STATEMENT = "statement"
    """An operator said so, by name and with a reason."""


WORDS = frozenset({Proof.HOLDER, Proof.STATEMENT})
"""Somebody says so, and nobody has looked."""


def is_unproven(lease: Lease) -> bool:
    """It is released, and what it freed is to be seen: a server that has unloaded a model need not have given
    all of its memory back."""
    if lease.proof in WORDS:
        return True
    return lease.state is LeaseState.RELEASED and lease.holder_kind in OF_SERVERS


class Unconfirmed:
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
