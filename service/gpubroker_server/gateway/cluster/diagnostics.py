"""The route that lists what is wrong with the fleet, with a remedy for each finding."""

import asyncio
from collections.abc import Callable, Iterator

from fastapi import Response
from gpubroker.wire.answered import Overview, Time
from gpubroker.wire.fleet import Finding as ShownFinding

from gpubroker_server.core.admission.feasibility import new_nodes_could_take
from gpubroker_server.core.control.finding_dates import known_dates
from gpubroker_server.core.control.findings.closed import QuotaLock
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, first_of_each_kind, remember
from gpubroker_server.core.control.findings.parts import ServerWay
from gpubroker_server.core.control.findings.work import FREE_SHARE, StuckTask
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.possible import check_demand, check_task
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.queue import Member
from gpubroker_server.core.world.server_places import place_fault
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.routing import Caller, Resource, answer

resource = Resource("cluster")

WAITED_SECONDS = Seconds(600.0)
"""A task is judged only after it has waited for this time, because some causes end by themselves before."""
MAX_JUDGED = 50
"""The largest number of demands of which one task is judged. Each takes some milliseconds with a thousand
devices."""


@resource.route(
    "GET /diagnostics", "diagnostics_list", Scope.CLUSTER_READ, Overview[ShownFinding], "too-many-requests"
)
async def list_diagnostics(caller: Caller, parts: Parts) -> Response:
    """Look for what is wrong with the fleet: cause, evidence and remedy of each finding.

    The route also answers while the database cannot be reached. Without the scope `admin`, findings about
    tasks are limited to your tenant. A finding that applies to more than 20 subjects is listed for the first
    20.
    """
    async with parts.diagnoses.slot():
        may_see = caller.may_see
        findings = await _diagnose(parts, may_see)
        visible = first_of_each_kind(
            finding for finding in findings if not finding.tenant or may_see(finding.tenant)
        )
        return answer(Overview(**parts.freshness.last_moment(), items=tuple(map(_shown, visible))))


async def _diagnose(parts: Parts, may_see: Callable[[str], bool]) -> list[Finding]:
    """Return all findings, and remember when each was first seen. `may_see` returns True for the tenants
    whose tasks are judged."""
    stuck = []
    for task in longest_waiting(parts.world, parts.clock.now(), may_see):
        if (stuck_finding := stuck_task(task, parts.world, parts.policy)) is not None:
            stuck.append(stuck_finding)
        await asyncio.sleep(0)
    leader, now, world = parts.leadership.leader(), parts.clock.now(), parts.world
    last, paused = parts.leadership.last_fleet() or FleetSeen(), parts.leadership.paused()
    facts = FleetKnown(
        parts.leadership.executor_status(),
        leader is not None,
        FleetSeen() if leader is None or leader.fleet is None else leader.fleet,
        [*_servers_down(parts, now)],
        [*_servers_refusing(parts)],
        stuck,
        parts.freshness.last_moment()["age_seconds"],
        parts.freshness.is_stale,
        parts.disk_full(),
        {} if leader is None else leader.silent,
        paused,
        None if paused is None else paused.since,
        quota_locks(world, parts.policy),
        parts.database_log.seen,
        last.at,
        _servers_misplaced(parts),
    )
    findings = list(diagnose_fleet(world, parts.policy, facts, now))
    # The leader's dates come first, so that a finding has one age at all gateways and under the next leader.
    before = {**parts.findings_seen, **known_dates(last.dates)}
    dated, first_seen = remember(before, findings, now)
    parts.findings_seen.clear()
    parts.findings_seen.update(first_seen)
    return dated


def _servers_down(parts: Parts, now: Instant) -> Iterator[ServerWay]:
    for server in parts.servers:
        for way in server.endpoints:
            if way.breaker.is_open:
                since = Instant(now - way.open_seconds)
                yield ServerWay(server.name, way.protocol, way.breaker.fault, not server.is_up, since)


def _servers_misplaced(parts: Parts) -> dict[str, str]:
    """Return what is wrong with the node or the GPUs of servers, once any node has joined."""
    residencies = parts.residencies if parts.world.nodes else None
    faults = {each.rules.name: place_fault(parts.world, each.rules) for each in residencies or ()}
    return {server: fault for server, fault in faults.items() if fault}


def quota_locks(world: World, policy: Policy) -> list[QuotaLock]:
    """Return the tenants with tasks that wait for their quota while there is GPU memory for them."""
    if not policy.has_quotas:
        return []
    open_nodes = [node.name for node in world.nodes.values() if not _why_closed(world, node)]
    ledgers = [world.ledgers[key] for name in open_nodes for key in world.by_node.get(name, ())]
    free_mb = sum(max(0, ledger.free_mb()) for ledger in ledgers)
    if free_mb <= FREE_SHARE * sum(ledger.device.allocatable_mb for ledger in ledgers):
        return []
    quotas, locked = Quotas(Draft(world), policy), dict[str, QuotaLock]()
    for group in world.queue.groups.values():
        since, first = group.member(0)
        task = world.tasks[first]
        if quotas.is_short(task) and quotas.need_mb(task.demand) <= free_mb:
            lock = locked.get(task.tenant, QuotaLock(task.tenant, 0, free_mb, Instant(since)))
            tasks, since = lock.tasks + len(group), min(lock.since, since)
            locked[task.tenant] = lock._replace(tasks=tasks, since=Instant(since))
    return [locked[tenant] for tenant in sorted(locked)]


def _servers_refusing(parts: Parts) -> Iterator[ServerWay]:
    for server in parts.servers:
        for way in server.endpoints:
            if way.refusal:
                yield ServerWay(server.name, way.protocol, way.refusal, is_only_way=True)


def stuck_task(task: Task, world: World, policy: Policy) -> StuckTask | None:
    """Return why the task cannot start on the open nodes unless something is changed; None if it may start,
    or if an autoscaler may add a node for it."""
    nodes = [node for node in world.nodes.values() if not _why_closed(world, node)]
    devices = [world.ledgers[key].device for node in nodes for key in world.by_node.get(node.name, ())]
    refusal = check_demand(task.demand, devices, nodes, policy)
    if nodes and refusal is None:
        return None
    if len(nodes) < len(world.nodes):
        refusal = check_task(task, world, policy)
    if refusal is not None:
        if new_nodes_could_take(task.demand, policy):
            return None  # An autoscaler is told of it as unmet demand.
        return StuckTask(task, refusal.message, f"gpubroker explain {task.id}")
    return _closed_out(world, task, policy)


def _closed_out(world: World, task: Task, policy: Policy) -> StuckTask:
    """Return a finding that names a node which could run the task if it were open."""
    for node in sorted(world.nodes.values(), key=lambda node: node.name):
        devices = [world.ledgers[key].device for key in world.by_node.get(node.name, ())]
        reason = _why_closed(world, node)
        if reason and check_demand(task.demand, devices, [node], policy) is None:
            remedy = f"gpubroker uncordon {node.name}" if node.cordoned else f"gpubroker explain {task.id}"
            return StuckTask(task, f"it fits on {node.name}, which {reason}", remedy)
    return StuckTask(task, "some of the nodes that it needs take no work", f"gpubroker explain {task.id}")


def _why_closed(world: World, node: Node) -> str:
    """Return a text that says why the node takes no work; empty if it takes work."""
    if node.cordoned:
        return f"is cordoned ({node.cordon_reason})" if node.cordon_reason else "is cordoned"
    if node.name in world.full_disks:
        return f"has a full disk ({world.full_disks[node.name]})"
    return "" if node.ready else "does not answer"


def longest_waiting(world: World, now: Instant, may_see: Callable[[str], bool]) -> list[Task]:
    """Return the longest waiting task of each demand, of the tenants that the caller may see, but at most
    `MAX_JUDGED` tasks."""
    first: dict[Demand, Member] = {}
    for group in world.queue.groups.values():
        oldest = group.member(0)
        if now - oldest[0] >= WAITED_SECONDS and may_see(group.tenant):
            first[group.demand] = min(oldest, first.get(group.demand, oldest))
    return [world.tasks[task] for _, task in sorted(first.values())[:MAX_JUDGED]]


def _shown(finding: Finding) -> ShownFinding:
    assert finding.first_seen is not None, "it has been remembered"
    first_seen_at = Time.at(finding.first_seen)
    return ShownFinding(
        finding.kind,
        finding.subject,
        finding.severity,
        finding.cause,
        dict(finding.evidence),
        finding.remedy,
        first_seen_at,
    )
