"""Leases and pledges: who holds, or will hold, how many MiB of which device."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, TaskId, mark_of
from gpubroker_server.core.domain.values import changed, value


class HolderKind(StrEnum):
    RUN = "run"
    GANG_MEMBER = "gang_member"
    MODEL = "model"
    WORKER = "worker"
    SERVER = "server"
    """The base cost of a model server."""
    EXTERNAL = "external"


HOLDERS_WITH_RUNS = frozenset({HolderKind.RUN, HolderKind.GANG_MEMBER})
"""Node agents know of them."""

HOLDERS_OF_TASKS = HOLDERS_WITH_RUNS | {HolderKind.EXTERNAL, HolderKind.MODEL, HolderKind.SERVER}
"""Their id is a task's."""

HOLDERS_ON_SERVERS = frozenset({HolderKind.MODEL, HolderKind.SERVER})
"""A server of models holds it, whose process no agent knows."""


class LeaseState(StrEnum):
    RESERVED = "reserved"
    """Promised in a committed decision; nobody has confirmed a process yet. No timeout releases it."""
    HELD = "held"
    """The agent confirmed the process that occupies it."""
    RELEASING = "releasing"
    """The holder ended; its process is not yet confirmed gone. Its agent's proof moves it on; `deadlines`
    does if that does not come in time."""
    RELEASED = "released"
    """Confirmed gone. The lease is history."""
    QUARANTINED = "quarantined"
    """The holder should be gone and nobody can confirm it. Counts as used until there is proof."""


NEXT_STATES = {
    LeaseState.RESERVED: {
        LeaseState.HELD,
        LeaseState.RELEASING,
        LeaseState.RELEASED,
        LeaseState.QUARANTINED,
    },
    LeaseState.HELD: {LeaseState.RELEASING, LeaseState.RELEASED, LeaseState.QUARANTINED},
    LeaseState.RELEASING: {LeaseState.RELEASED, LeaseState.QUARANTINED},
    LeaseState.QUARANTINED: {LeaseState.RELEASED},
    LeaseState.RELEASED: set(),
}
"""state -> where it may go in one step. A lease goes forward only and may skip steps: a short run is over
before anybody has heard of its start."""


@value
class Lease:
    """A holder's right to `mb` MiB of one device. Identity: (holder_kind, holder, fence, rank, device).

    `holder` is the id of a task, model, worker, server or external lease. `priority` and `tenant` are the
    holder's, so that a device can be judged without looking the holder up.
    """

    holder_kind: HolderKind
    holder: str
    fence: Fence
    device: DeviceKey
    mb: Mib
    tenant: str
    priority: int
    since: Instant
    state: LeaseState = LeaseState.RESERVED
    version: int = 1
    rank: int = 0
    context_mb: Mib = Mib(0)
    """How much of `mb` is what a process costs there, beyond what was asked for."""
    overused_mb: Mib = Mib(0)
    """What its holder was measured to use when that was first found to be too much; 0 if it never was."""
    quarantined_at: Instant | None = None
    """Since when nobody can confirm that its holder has gone."""
    proof: str = ""
    """What ended its quarantine, a `Proof`; on its way to the log, and kept by no row."""

    @property
    def key(self) -> str:
        return f"{self.holder_kind}:{self.holder}:{self.fence}:{self.rank}:{self.device}"

    @property
    def mark(self) -> str:
        """Its holder's name in samples."""
        return mark_of(self.holder, self.fence, self.rank)


def move_lease(lease: Lease, state: LeaseState, **changes: Any) -> Lease:
    """The lease in its next state, version + 1, and the given fields changed. Raises IllegalTransition; the
    lease is unchanged."""
    if state not in NEXT_STATES[lease.state]:
        raise IllegalTransition(f"lease {lease.key} is {lease.state}; it cannot become {state}")
    return changed(lease, state=state, version=lease.version + 1, **changes)


def quarantine(lease: Lease, now: Instant) -> Lease:
    """Nobody waits any longer for its holder to go. Raises IllegalTransition."""
    return move_lease(lease, LeaseState.QUARANTINED, quarantined_at=now)


def release(lease: Lease, proof: str) -> Lease:
    """Its holder is gone. The proof is noted of one that waited for it. Raises IllegalTransition."""
    was_waiting = lease.state is LeaseState.QUARANTINED
    return move_lease(lease, LeaseState.RELEASED, proof=proof if was_waiting else "")


def mark_overused(lease: Lease, measured_mb: Mib) -> Lease:
    return changed(lease, overused_mb=measured_mb, version=lease.version + 1)


class PledgeEnd(StrEnum):
    """The four ends of a pledge; it comes to exactly one of them."""

    CONSUMED = "consumed"
    """Its task was admitted onto the pledged memory."""
    WITHDRAWN = "withdrawn"
    """Its task is no longer pending, or found room elsewhere."""
    TAKEN = "taken"
    """A task of strictly higher priority took the memory."""
    DISSOLVED = "dissolved"
    """A victim was not confirmed gone in time; the task is planned again."""


@dataclass(frozen=True, slots=True)
class Pledge:
    """MiB of one device that are being freed for one waiting preemptor. Identity: (preemptor, device).

    The runs being stopped for it carry `freeing_for == preemptor`. Of `mb`, what those runs still hold on
    the device has yet to come; the rest is kept free for the preemptor and counts as taken for others.
    """

    preemptor: TaskId
    device: DeviceKey
    mb: Mib
    priority: int
    """Up to this one nobody else takes it: its preemptor's, or for a guarantee or a move the highest of a
    band."""
    tenant: str
    made_at: Instant
    deadline_at: Instant
    """The latest stop deadline of its victims, or when a run that moves there is given up; 10 s later an
    unconfirmed pledge is dissolved."""
    ranks: tuple[int, ...] = ()
    """The ranks of a gang that will have it; their CPU and host memory are kept for them as well."""

    @property
    def key(self) -> str:
        return f"{self.preemptor}:{self.device}"


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


STATEMENTS = frozenset({Proof.HOLDER, Proof.STATEMENT})
"""Somebody says so, and nobody has looked."""


def is_unproven(lease: Lease) -> bool:
    """It is released, and what it freed is to be seen: a server that has unloaded a model need not have given
    all of its memory back."""
    if lease.proof in STATEMENTS:
        return True
    return lease.state is LeaseState.RELEASED and lease.holder_kind in HOLDERS_ON_SERVERS
