"""Find parts of the fleet that take no tasks: closed and silent nodes, paused queues, memory in quarantine,
and quotas that leave memory unused."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from gpubroker.wire.quarantine import HeldBack
from msgspec.structs import replace

from gpubroker_server.core.control.findings.finding import Finding, critical, note, warning
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName, in_gib
from gpubroker_server.core.world.node_holders import still_on
from gpubroker_server.core.world.world import World


class QuotaLock(NamedTuple):
    """A quota for which tasks of its tenant wait while GPU memory is free that nothing else needs."""

    tenant: str
    tasks: int
    free_mb: int
    since: Instant


def silent_nodes(world: World, late: Mapping[NodeName, Instant]) -> Iterator[Finding]:
    """Yield a finding for each node whose agent is silent. `late` maps nodes that are not given up yet to the
    time at which they were last heard. A draining node is left out, because it may have been removed."""
    for node in world.nodes.values():
        runs = len(world.runs.get(node.name, ()))
        evidence = {"runs": runs}
        if not node.ready and node.draining_since is None:
            cause = f"The agent of {node.name} does not answer: nothing starts there."
            gone = f"if it does not come back, gpubroker drain {node.name}"
            remedy = f"start the node's machine or its Ray again; {gone}"
            yield warning("node-silent", node.name, cause, remedy, evidence)
        elif node.ready and node.name in late:
            cause = f"Nothing is heard of {node.name}: its agent has missed more than two heartbeats."
            remedy = "look at the node's load and network; it is given up when it stays silent"
            finding = warning("node-silent", node.name, cause, remedy, evidence)
            yield replace(finding, first_seen=late[node.name])


def held_back_nodes(paused: HeldBack | None, since: Instant | None) -> Iterator[Finding]:
    if paused is not None:
        cause = f"Silent nodes are not given up, and their tasks do not start elsewhere: {paused.message}."
        remedy = 'gpubroker resume --because "...", once you know that their runs are gone'
        finding = critical("nodes-held-back", ", ".join(paused.nodes), cause, remedy, {"runs": paused.runs})
        yield replace(finding, first_seen=since)


def closed_nodes(world: World) -> Iterator[Finding]:
    """Yield a finding for each node on which nothing may start, by an operator's decision or because a disk
    is too full."""
    make_finding = warning if world.queue.groups else note
    for node in world.nodes.values():
        if node.cordoned:
            keys = world.by_node.get(node.name, ())
            evidence = {"gpus": len(keys), "runs": len(world.runs.get(node.name, ()))}
            is_drained = node.draining_since is not None and not still_on(world, node.name)
            what = "take the machine away, or: " if is_drained else ""
            remedy = f"{what}gpubroker uncordon {node.name}, when tasks may start there again"
            cause = _why_closed(node, is_drained=is_drained)
            finding = make_finding("node-closed", node.name, cause, remedy, evidence)
            yield replace(finding, first_seen=node.draining_since or node.cordoned_at)
    for name, disk in world.full_disks.items():
        cause = f"Nothing starts on {name} until there is room on {disk}."
        yield warning("node-closed-by-disk", name, cause, f"gpubroker disk {name}; gpubroker clean {name}")


def _why_closed(node: Node, *, is_drained: bool) -> str:
    what = "drained" if is_drained else "cordoned" if node.draining_since is None else "being drained"
    by = f" by {node.cordoned_by}" if node.cordoned_by else ""
    because = f" ({node.cordon_reason})" if node.cordon_reason else ""
    effect = "nothing is left there, and nothing new starts" if is_drained else "nothing new starts there"
    return f"{node.name} is {what}{by}{because}: {effect}."


def paused_queues(world: World) -> Iterator[Finding]:
    waiting = Counter(world.queue.pause_of(world.tasks[task]) for task in world.queue.paused)
    for pause in world.queue.pauses.values():
        kind, _, name = pause.queue.partition(":")
        because = f" ({pause.reason})" if pause.reason else ""
        cause = (
            f"The queue of {kind} {name} is paused by {pause.actor}{because}: {waiting[pause]} tasks wait."
        )
        remedy = f"gpubroker resume --{kind} {name}"
        make_finding = warning if waiting[pause] else note
        finding = make_finding("queue-paused", pause.queue, cause, remedy, {"tasks": waiting[pause]})
        yield replace(finding, first_seen=pause.at, tenant=pause.tenant)


def quarantined_memory(world: World) -> Iterator[Finding]:
    """Yield a finding for each node with memory that counts as used because its holder may still have it."""
    by_node: dict[NodeName, list[Lease]] = {}
    for of_holder in world.unconfirmed.quarantined.values():
        for lease in of_holder.values():
            by_node.setdefault(world.ledgers[lease.device].device.node, []).append(lease)
    for node, leases in sorted(by_node.items()):
        mb, holders = sum(lease.mb for lease in leases), len({lease.holder for lease in leases})
        cause = f"{in_gib(mb)} of {node} count as used: it is not confirmed that their holders are gone."
        remedy = "gpubroker quarantine says which proof each waits for, and how to release it"
        finding = warning("memory-quarantined", node, cause, remedy, {"mb": mb, "holders": holders})
        yield replace(finding, first_seen=min(lease.quarantined_at or lease.since for lease in leases))


def quota_locks(locks: Iterable[QuotaLock], policy: Policy) -> Iterator[Finding]:
    for lock in locks:
        rule = policy.tenant(lock.tenant)
        guaranteed_mb = rule.guaranteed_mb or 0
        if rule.cohort:
            together_mb = policy.guaranteed_mb(rule.cohort)
            members = f"its members are guaranteed, {in_gib(together_mb)}"
            most = f"its cohort {rule.cohort} gets no more than {members}"
            if rule.borrow_mb is not None:
                most += f", and it may borrow {in_gib(rule.borrow_mb)} of that"
            remedy = f"raise guaranteed_mb of a tenant of cohort {rule.cohort}"
            remedy += ", or borrow_mb" if rule.borrow_mb is not None else ""
        else:
            most = f"it gets no more than its guarantee, {in_gib(guaranteed_mb)}"
            remedy = f"raise guaranteed_mb of {lock.tenant}, or give it a cohort to borrow from"
        cause = (
            f"{in_gib(lock.free_mb)} of GPU memory are free, and {lock.tenant} waits for its quota: {most}."
        )
        evidence = {"tasks": lock.tasks, "free_mb": lock.free_mb, "guaranteed_mb": guaranteed_mb}
        finding = warning(
            "guarantee-locks-capacity", lock.tenant, cause, f"{remedy} (policy.tenants)", evidence
        )
        yield replace(finding, first_seen=lock.since, tenant=lock.tenant)
