"""What is wrong with the fleet, and what to do about it."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, first_of_each_kind, remember
from gpubroker_server.core.control.findings.parts import ServerWay
from gpubroker_server.core.control.findings.work import StuckTask
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.admission import check_demand, check_task
from gpubroker_server.core.world.queue import Member
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer, view_of
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339
from gpubroker_server.gateway.parts import Parts

resource = Resource("cluster")

WAITED_SECONDS = Seconds(600.0)
"""What keeps a task waiting may be mended before."""
MOST_JUDGED = 50
"""Demands of which one task is judged; each takes some milliseconds with a thousand devices."""


class FindingView(TypedDict):
    kind: Annotated[str, Field(description="A stable token; clients must expect new ones.")]
    subject: Annotated[str, Field(description="The device, node, task, model or part that it is about.")]
    severity: Annotated[str, Field(description="`critical`, `warning` or `note`.")]
    cause: Annotated[str, Field(description="A sentence.")]
    evidence: Annotated[dict[str, str | float], Field(description="What was measured.")]
    remedy: Annotated[str, Field(description="A command, or what to do where none helps.")]
    first_seen_at: Annotated[
        Time, Field(description="Since when it is so; if that is not known, since this process noticed.")
    ]


class Diagnostics(AsOf):
    items: Annotated[list[FindingView], Field(description="The worst first.")]


@resource.route("GET /diagnostics", "diagnostics_list", Scope.CLUSTER_READ, Diagnostics, "too-many-requests")
async def list_diagnostics(call: Call, parts: Parts) -> Response:
    """Look for what is wrong with the fleet: cause, evidence and remedy of each finding.

    It also answers while the database cannot be reached. Findings about tasks are of your tenant alone,
    without the scope `admin`. What is wrong in more than 20 places is listed for the first 20.
    """
    async with parts.diagnoses.slot():
        may_see = call.identity.may_see
        found = await _diagnose(parts, may_see)
        seen = first_of_each_kind(one for one in found if not one.tenant or may_see(one.tenant))
        view: Diagnostics = {**parts.freshness.last_seen(), "items": [_view(one) for one in seen]}
        return answer(view)


async def _diagnose(parts: Parts, may_see: Callable[[str], bool]) -> list[Finding]:
    """Also remembers when each finding was first seen. `may_see`: of which tenants tasks are judged."""
    stuck = []
    for task in longest_waiting(parts.world, parts.clock.now(), may_see):
        if (found := stuck_task(task, parts.world, parts.policy)) is not None:
            stuck.append(found)
        await asyncio.sleep(0)
    leader, now, world = parts.leadership.leader(), parts.clock.now(), parts.world
    known = FleetKnown(
        parts.leadership.executor_status(),
        leader is not None,
        FleetSeen() if leader is None or leader.fleet is None else leader.fleet,
        [*_servers_down(parts)],
        stuck,
        parts.freshness.last_seen()["age_seconds"],
        parts.freshness.is_stale,
        parts.disk_full(),
    )
    findings = list(diagnose_fleet(world, parts.policy, known, now))
    dated, first_seen = remember(parts.findings_seen, findings, now)
    parts.findings_seen.clear()
    parts.findings_seen.update(first_seen)
    return dated


def _servers_down(parts: Parts) -> Iterator[ServerWay]:
    for server in parts.servers:
        for way in server.endpoints:
            if way.breaker.is_open:
                yield ServerWay(server.name, way.protocol, way.breaker.fault, not server.is_up)


def stuck_task(task: Task, world: World, policy: Policy) -> StuckTask | None:
    """If nothing but a change will start it on the open nodes."""
    nodes = [node for node in world.nodes.values() if not _why_closed(world, node)]
    devices = [world.ledgers[key].device for node in nodes for key in world.by_node.get(node.name, ())]
    refusal = check_demand(task.demand, devices, nodes, policy)
    if nodes and refusal is None:
        return None
    if len(nodes) < len(world.nodes):
        refusal = check_task(task, world, policy)
    if refusal is not None:
        return StuckTask(task, refusal.message, f"gpubroker explain {task.id}")
    return _closed_out(world, task, policy)


def _closed_out(world: World, task: Task, policy: Policy) -> StuckTask:
    """Only nodes that are not open could run it."""
    for node in sorted(world.nodes.values(), key=lambda node: node.name):
        devices = [world.ledgers[key].device for key in world.by_node.get(node.name, ())]
        why = _why_closed(world, node)
        if why and check_demand(task.demand, devices, [node], policy) is None:
            remedy = f"gpubroker uncordon {node.name}" if node.cordoned else f"gpubroker explain {task.id}"
            return StuckTask(task, f"it fits on {node.name}, which {why}", remedy)
    return StuckTask(task, "some of the nodes that it needs take no work", f"gpubroker explain {task.id}")


def _why_closed(world: World, node: Node) -> str:
    """Empty if it takes work."""
    if node.cordoned:
        return f"is cordoned ({node.cordon_reason})" if node.cordon_reason else "is cordoned"
    if node.name in world.full_disks:
        return f"has a full disk ({world.full_disks[node.name]})"
    return "" if node.ready else "does not answer"


def longest_waiting(world: World, now: Instant, may_see: Callable[[str], bool]) -> list[Task]:
    """One of each demand; of the tenants that the caller may see."""
    first: dict[Demand, Member] = {}
    for group in world.queue.groups.values():
        oldest = group.member(0)
        if now - oldest[0] >= WAITED_SECONDS and may_see(group.tenant):
            first[group.demand] = min(oldest, first.get(group.demand, oldest))
    return [world.tasks[task] for _, task in sorted(first.values())[:MOST_JUDGED]]


def _view(one: Finding) -> FindingView:
    assert one.first_seen is not None, "it has been remembered"
    first_seen_at = rfc3339(one.first_seen)
    return view_of(FindingView, one, evidence=dict(one.evidence), first_seen_at=first_seen_at)
