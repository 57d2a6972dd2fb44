"""Leases and pledges: which holder has, or will have, how many MiB of which device."""

from enum import StrEnum
from typing import Any, assert_never

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.errors import IllegalTransition
from gpubroker_server.core.domain.holders import External, Gang, Holder, Inference, Model, Run, WorkerSeat
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, TaskId, mark_of


class HolderKind(StrEnum):
    RUN = "run"
    GANG_MEMBER = "gang_member"
    MODEL = "model"
    WORKER = "worker"
    SERVER = "server"
    """The base cost of a model server."""
    EXTERNAL = "external"


HOLDERS_WITH_RUNS = frozenset({HolderKind.RUN, HolderKind.GANG_MEMBER})
"""Holders whose processes node agents start and stop."""

HOLDERS_OF_TASKS = HOLDERS_WITH_RUNS | {HolderKind.EXTERNAL, HolderKind.MODEL, HolderKind.SERVER}
"""Holders whose id is a task id."""

HOLDERS_ON_SERVERS = frozenset({HolderKind.MODEL, HolderKind.SERVER})
"""Holders in the process of a model server, which no agent knows."""


def holder_kind_of(holder: Holder) -> HolderKind:
    """Return the kind of the leases that a task has. Raises ValueError for an inference, which has none."""
    match holder:
        case Run() | WorkerSeat():
            return HolderKind.RUN
        case Gang():
            return HolderKind.GANG_MEMBER
        case Model(model=name):
            return HolderKind.MODEL if name else HolderKind.SERVER
        case External():
            return HolderKind.EXTERNAL
        case Inference():
            raise ValueError("an inference holds no memory; its model does")
        case _:
            assert_never(holder)


class LeaseState(StrEnum):
    RESERVED = "reserved"
    """The memory is promised by a committed decision; no process is confirmed yet. The agent's report moves
    the lease on. After a crash the agent says whether the start ever arrived; no timeout releases the
    lease."""
    HELD = "held"
    """The agent, or the model server's index, confirmed the run or the model that occupies the memory. The
    end of the run moves the lease on; a crash leaves it as it is."""
    RELEASING = "releasing"
    """The run ended; its process is not confirmed gone. The agent's proof moves it on, or its deadline does
    (to quarantined). A new leader restarts the deadline."""
    RELEASED = "released"
    """The holder is confirmed gone, by proof or by a named operator. The end."""
    QUARANTINED = "quarantined"
    """The holder should be gone, and no agent has confirmed that. The memory counts as used. Only a proof or
    an operator's statement moves the lease on; time and crashes do not."""


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
"""State -> possible next states. A lease only goes forward and may skip steps: a short run ends before its
start is reported."""


class Proof(StrEnum):
    PROCESS_ABSENT = "process_absent"
    """The node agent found no trace of the holder's process."""
    BOOT_CHANGED = "boot_changed"
    """The machine was rebooted after the holder had started."""
    NEVER_STARTED = "never_started"
    """The start of the holder never reached a process."""
    SHARED_PROCESS = "shared_process"
    """The holder ran in a process of others and had no memory of its own."""
    NOT_YOUR_PROCESS = "not_your_process"
    """The process that an external lease named belongs to another holder, which has a lease of its own."""
    AGENT_RESTARTED = "agent_restarted"
    """A later agent of the machine found neither the holder's mark nor GPU memory of its process."""
    DEVICE_REMOVED = "device_removed"
    """The device is no longer in the machine."""
    UNLOADED = "unloaded"
    """The server's index no longer lists the model."""
    HELD_ANEW = "held_anew"
    """Another lease of the same device covers the memory that the model still occupies."""
    HOLDER = "released"
    """The holder of an external lease said so."""
    STATEMENT = "statement"
    """A named operator said so and gave a reason."""


class Lease(Struct, frozen=True):
    """A holder's right to `mb` MiB of one device. A lease is identified by (holder_kind, holder, fence, rank,
    device). `priority` and `tenant` are copied from the holder, so that a device's ledger need not look up
    the holder."""

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
    overused_mb: Mib = Mib(0)
    """The use in MiB that was measured when the lease was first exceeded; 0 if it never was."""
    quarantined_at: Instant | None = None
    proof: str = ""
    """The `Proof` that released the lease. Only the event log has it; no row keeps it."""

    @property
    def key(self) -> str:
        return f"{self.holder_kind}:{self.holder}:{self.fence}:{self.rank}:{self.device}"

    @property
    def mark(self) -> str:
        return mark_of(self.holder, self.fence, self.rank)


def move_lease(lease: Lease, state: LeaseState, **changes: Any) -> Lease:
    """Return the lease in its next state, with version + 1 and the changes. Raises IllegalTransition, also
    for RELEASED: use `release`, which takes a proof."""
    if state is LeaseState.RELEASED:
        raise IllegalTransition(f"lease {lease.key} cannot be released without a proof")
    return moved_lease(lease, state, **changes)


def moved_lease(lease: Lease, state: LeaseState, **changes: Any) -> Lease:
    """Return the lease in its next state, with version + 1 and the changes, and accept RELEASED without a
    proof: the change was committed already, perhaps by another release of the software. Raises
    IllegalTransition."""
    if state not in NEXT_STATES[lease.state]:
        raise IllegalTransition(f"lease {lease.key} is {lease.state}; it cannot become {state}")
    return replace(lease, state=state, version=lease.version + 1, **changes)


def quarantine(lease: Lease, now: Instant) -> Lease:
    """Return the lease in quarantine, because its holder was not confirmed gone in time. Raises
    IllegalTransition."""
    return move_lease(lease, LeaseState.QUARANTINED, quarantined_at=now)


def release(lease: Lease, proof: Proof) -> Lease:
    """Return the lease as released, with the proof that its holder is gone. Raises IllegalTransition."""
    return moved_lease(lease, LeaseState.RELEASED, proof=proof)


def mark_overused(lease: Lease, measured_mb: Mib) -> Lease:
    return replace(lease, overused_mb=measured_mb, version=lease.version + 1)


class PledgeEnd(StrEnum):
    CONSUMED = "consumed"
    """The preemptor was admitted onto the pledged memory."""
    WITHDRAWN = "withdrawn"
    """The preemptor is no longer pending, or found memory elsewhere."""
    TAKEN = "taken"
    """A task of strictly higher priority took the memory."""
    DISSOLVED = "dissolved"
    """A victim was not confirmed gone in time, and the preemptor goes elsewhere or has waited longer than
    `pledge_patience_seconds`."""


class Pledge(Struct, frozen=True):
    """MiB of one device that are being freed for one waiting preemptor. A pledge is identified by (preemptor,
    device).

    CPU, host memory, a run slot and custom resources of the node are kept with the pledge. A preemptor
    without GPUs has a pledge of 0 MiB of the node itself (`node_key`).

    The runs that are stopped for the pledge carry `freeing_for == preemptor`. The part of `mb` that these
    runs still hold is not free yet; the rest is kept free for the preemptor and counts as taken for other
    tasks.
    """

    preemptor: TaskId
    device: DeviceKey
    mb: Mib
    priority: int
    """The priority above which another task may take the pledged memory: the preemptor's own priority; for a
    guarantee or a move, the top of a band."""
    tenant: str
    made_at: Instant
    deadline_at: Instant
    """The latest stop deadline of the pledge's victims, or the limit of a move."""
    ranks: tuple[int, ...] = ()
    """The ranks of a gang that will use the memory; their CPU and host memory are kept for them as well."""

    @property
    def key(self) -> str:
        return f"{self.preemptor}:{self.device}"


STATEMENTS = frozenset({Proof.HOLDER, Proof.STATEMENT})
"""Proofs that are a person's word, without a measurement."""


def is_unproven(lease: Lease) -> bool:
    """Return True if a new sample must show the memory of a released lease as free before it is used again.
    That is so after a person's word about memory in quarantine, and on model servers, which may keep memory
    after an unload."""
    if lease.quarantined_at is not None and lease.proof in STATEMENTS:
        return True
    return lease.state is LeaseState.RELEASED and lease.holder_kind in HOLDERS_ON_SERVERS
