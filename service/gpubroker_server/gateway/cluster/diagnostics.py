"""What is wrong with the fleet, and what to do about it."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Response
from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, remember
from gpubroker_server.core.control.findings.parts import ServerWay
from gpubroker_server.core.control.findings.work import StuckTask
from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain_pending
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.queue import Member
from gpubroker_server.gateway.cluster.parts import Parts
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.http.times import AsOf, Time, rfc3339

resource = Resource("cluster")

WAITED_SECONDS = Seconds(600.0)
"""What keeps a task waiting may be mended before."""
MOST_EXPLAINED = 3
"""Demands of which one task is explained; each takes tens of milliseconds with a thousand devices."""
_FOR_EVER = frozenset(
    {Reason.EXCEEDS_CAPACITY, Reason.NO_MATCHING_DEVICE, Reason.NODE_CORDONED, Reason.DISK_FULL}
)


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
        found = diagnose_now(parts)
        view: Diagnostics = {
            **parts.freshness.last_seen(),
            "items": [_view(one) for one in found if not one.tenant or call.identity.may_see(one.tenant)],
        }
        return answer(view)


def diagnose_now(parts: Parts) -> list[Finding]:
    """Also remembers when each finding was first seen."""
    leader, now, world = parts.leadership.leader(), parts.clock.now(), parts.world
    known = FleetKnown(
        parts.leadership.executor_status(),
        leader is not None,
        FleetSeen() if leader is None or leader.fleet is None else leader.fleet,
        [*_servers_down(parts)],
        [*_stuck(parts, now)],
        parts.freshness.last_seen()["age_seconds"],
        parts.freshness.is_stale,
        parts.disk_full(),
    )
    found = list(diagnose_fleet(world, parts.policy, known, now))
    dated, first_seen = remember(parts.first_seen, found, now)
    parts.first_seen.clear()
    parts.first_seen.update(first_seen)
    return dated


def _servers_down(parts: Parts) -> Iterator[ServerWay]:
    for server in parts.servers:
        for way in server.endpoints:
            if way.breaker.is_open:
                yield ServerWay(server.name, way.protocol, way.breaker.fault, not server.is_up)


def _stuck(parts: Parts, now: Instant) -> Iterator[StuckTask]:
    """Of the demands that have waited longest, those of which no task can start as things are."""
    forecasts = parts.leadership.forecasts()
    for task in _longest_waiting(parts, now):
        diagnosis = diagnose(survey_nodes(Draft(parts.world), task, parts.policy, now, forecasts))
        found = explain_pending(diagnosis)
        if found.reason in _FOR_EVER:
            remedies = advise(diagnosis).remedies
            would_start = remedies[0].message if remedies else ""
            yield StuckTask(task, found.reason.value, found.message, would_start)


def _longest_waiting(parts: Parts, now: Instant) -> list[Task]:
    first: dict[Demand, Member] = {}
    for group in parts.world.queue.groups.values():
        oldest = group.member(0)
        if now - oldest[0] >= WAITED_SECONDS:
            first[group.demand] = min(oldest, first.get(group.demand, oldest))
    tasks = parts.world.tasks
    return [tasks[task] for _, task in sorted(first.values())[:MOST_EXPLAINED]]


def _view(one: Finding) -> FindingView:
    assert one.first_seen is not None, "it has been remembered"
    return {
        "kind": one.kind,
        "subject": one.subject,
        "severity": one.severity.value,
        "cause": one.cause,
        "evidence": dict(one.evidence),
        "remedy": one.remedy,
        "first_seen_at": rfc3339(one.first_seen),
    }
