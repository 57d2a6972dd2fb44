"""Memory in quarantine: the proof that ends each quarantine, and an operator's statement in its place."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import AuditNote, Decision, Request
from gpubroker_server.core.domain.lease import HOLDERS_WITH_RUNS, HolderKind, Lease, Proof, release
from gpubroker_server.core.domain.task import model_of
from gpubroker_server.core.domain.units import Fence, Instant, MonotonicSeconds, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.external_leases import pid_of
from gpubroker_server.core.world.world import World


class Quarantined(Struct, frozen=True):
    """A run or other holder that is not confirmed gone, so that its memory counts as used."""

    kind: HolderKind
    holder: str
    tenant: str
    attempt: Fence
    rank: int
    node: NodeName
    since: Instant
    leases: tuple[Lease, ...]
    awaits: tuple[Proof, ...]
    """The proofs of which any ends the quarantine; the likeliest is first."""
    message: str


def quarantined(world: World, holder: str | None = None) -> list[Quarantined]:
    """Return the runs in quarantine, of one holder or of all, the longest in quarantine first."""
    by_holder = world.unconfirmed.quarantined
    leases = by_holder.values() if holder is None else [by_holder.get(holder, {})]
    runs = [run for of_holder in leases for run in _runs(world, of_holder.values())]
    return sorted(runs, key=lambda run: (run.since, run.holder, run.attempt, run.rank))


def _runs(world: World, leases: Iterable[Lease]) -> Iterator[Quarantined]:
    for (attempt, rank), group in groupby(sorted(leases, key=_place), key=lambda ls: (ls.fence, ls.rank)):
        held = tuple(group)
        first = held[0]
        device = world.ledgers[first.device].device
        awaits, message = _awaited(world, first, device.node)
        yield Quarantined(
            first.holder_kind,
            first.holder,
            first.tenant,
            attempt,
            rank,
            device.node,
            since=min(lease.quarantined_at or lease.since for lease in held),
            leases=held,
            awaits=awaits,
            message=message,
        )


def _place(lease: Lease) -> tuple[int, int, str]:
    return lease.fence, lease.rank, lease.device


def _awaited(world: World, lease: Lease, node: NodeName) -> tuple[tuple[Proof, ...], str]:
    always = (Proof.DEVICE_REMOVED, Proof.STATEMENT)
    if lease.holder_kind is HolderKind.EXTERNAL:
        pid = _outside_pid(world, lease)
        if pid is None:
            condition = f"its holder says that the memory is free, or {node} is rebooted"
            return (Proof.HOLDER, Proof.BOOT_CHANGED, *always), f"waits until {condition}"
        condition = f"the agent of {node} finds process {pid} gone, or its holder releases it"
        return (Proof.PROCESS_ABSENT, Proof.HOLDER, Proof.BOOT_CHANGED, *always), f"waits until {condition}"
    if lease.holder_kind not in HOLDERS_WITH_RUNS:
        condition = "the index of its server says that it is not there"
        if not _server_process(world, lease):
            return (Proof.UNLOADED, *always), f"waits until {condition}"
        condition = f"{condition}, or the process of its server is gone"
        return (Proof.UNLOADED, Proof.PROCESS_ABSENT, *always), f"waits until {condition}"
    if answers(world, node):
        condition = f"the agent of {node}, which keeps killing its process, finds no trace of it"
        return (Proof.PROCESS_ABSENT, Proof.BOOT_CHANGED, *always), f"waits until {condition}"
    condition = (
        f"an agent answers on {node} and finds no trace of its process, or finds a reboot of the machine"
    )
    proofs = (Proof.AGENT_RESTARTED, Proof.PROCESS_ABSENT, Proof.BOOT_CHANGED)
    return (*proofs, *always), f"{node} does not answer: waits until {condition}"


def answers(world: World, node: NodeName) -> bool:
    """Return True if the node's agent has answered this term and is not given up."""
    return node in world.nodes and world.nodes[node].ready


def is_watched(world: World, lease: Lease) -> bool:
    """Return True if the node's agent can tell by a process whether the holder is gone."""
    return lease.holder_kind in HOLDERS_WITH_RUNS or _outside_pid(world, lease) is not None


def _outside_pid(world: World, lease: Lease) -> int | None:
    """Return the process of an external holder, if it named one."""
    return pid_of(world.holder(lease.holder, lease.fence))


def _server_process(world: World, lease: Lease) -> str:
    """Return the process of the server of a model; empty if it cannot be seen."""
    return model_of(world.tasks[TaskId(lease.holder)]).process


def removed(world: World) -> list[Decision]:
    """Return the decisions that end quarantine on removed devices, where nothing can be held."""
    decisions = []
    for holder, leases in sorted(world.unconfirmed.quarantined.items()):
        removed_leases = [
            leases[key] for key in sorted(leases) if not world.ledgers[leases[key].device].device.present
        ]
        if removed_leases:
            left = tuple(release(lease, Proof.DEVICE_REMOVED) for lease in removed_leases)
            decisions.append(Decision(holder, "device_removed", leases=left))
    return decisions


def seen_in_use(world: World, lease: Lease, now: Instant, period_seconds: Seconds) -> int:
    """Return the MiB that the lease's processes were recently measured to use. No statement makes them free.
    A measurement from before an agent fell silent says nothing about the time since."""
    ledger = world.ledgers[lease.device]
    if ledger.sample is None or ledger.is_stale(now, period_seconds):
        return 0
    if ledger.sample.at < (lease.quarantined_at or lease.since) and not world.nodes[ledger.device.node].ready:
        return 0
    return ledger.holdings[lease.key].measured_mb


def attest(world: World, request: Request, now: Instant, period_seconds: Seconds, done: Decision) -> Decision:
    """Return the decision after an operator's statement that the holder of these leases is gone. Leases that
    are still in quarantine and not measured to be in use are released. The audit log records who made the
    statement, and why."""
    wanted = frozenset(request.fields["leases"])
    leases = world.unconfirmed.quarantined.get(request.task, {})
    left = tuple(
        release(leases[key], Proof.STATEMENT)
        for key in sorted(wanted & leases.keys())
        if not seen_in_use(world, leases[key], now, period_seconds)
    )
    if not left:
        return done
    entry = str(request.fields["by"]), "quarantine.release", ", ".join(lease.key for lease in left)
    note = AuditNote(now, request.tenant, *entry, str(request.fields["reason"]))
    return replace(done, leases=left, audit=(note,))


PROBE_SECONDS = Seconds(60.0)
"""The time between two questions to one node. It is long, because an agent that finds a process gone reports
it by itself, and each question costs the agent a look at its machine and delays orders to it."""


class QuarantineProbe:
    """Chooses the nodes to ask again about leases in quarantine, since the report that ends a quarantine may
    have been lost. The probe lives in the memory of one leader. `at` is in seconds by a monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[NodeName, MonotonicSeconds] = {}
        """Maps a node to the time at which quarantined leases were first noticed on it, or it was last
        asked."""

    def due(self, world: World, at: MonotonicSeconds) -> list[NodeName]:
        """Return the nodes with answering agents that are to be asked now. Other nodes are reconciled when an
        agent answers again."""
        self._since = {node: self._since.get(node, at) for node in _in_doubt(world)}
        due = sorted(node for node, since in self._since.items() if at - since >= PROBE_SECONDS)
        self._since |= dict.fromkeys(due, at)
        return due


def _in_doubt(world: World) -> set[NodeName]:
    holders = world.unconfirmed.quarantined.values()
    quarantined = [lease for leases in holders for lease in leases.values()]
    nodes = {world.ledgers[lease.device].device.node for lease in quarantined if is_watched(world, lease)}
    return {node for node in nodes if answers(world, node)}


AGAIN_SECONDS = Seconds(0.05)
"""The time after which a node is asked again for the first time."""


class _Wait(NamedTuple):
    since: MonotonicSeconds
    again_at: float


class SampleRequests:
    """Chooses the nodes that are to measure their devices at once, because memory was released there that
    must be seen free. It lives in the memory of one leader. `at` is in seconds by a monotonic clock.

    A sample may be slightly too old, because the clocks of the database and of the node are compared over a
    network. The node is then asked again, each time after twice the time. Periodic samples come anyway.
    """

    def __init__(self) -> None:
        self._waits: dict[NodeName, _Wait] = {}

    def due(self, world: World, at: MonotonicSeconds) -> list[NodeName]:
        nodes = {world.ledgers[key].device.node for key in world.unseen_releases}
        self._waits = {node: self._waits.get(node, _Wait(at, at)) for node in nodes}
        due = sorted(node for node, wait in self._waits.items() if at >= wait.again_at)
        for node in due:
            since = self._waits[node].since
            self._waits[node] = _Wait(since, at + max(AGAIN_SECONDS, at - since))
        return due
