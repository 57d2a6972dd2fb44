"""What starts nothing or keeps others out is found, as old as it is."""

from typing import Any

import pytest
from gpubroker_server.core.control.finding_dates import MAX_DATED, dates_of, known_dates
from gpubroker_server.core.control.findings.closed import QuotaLock
from gpubroker_server.core.control.findings.diagnose import FleetKnown, diagnose_fleet
from gpubroker_server.core.control.findings.finding import Finding, Severity
from gpubroker_server.core.control.log_growth import LogGrowth, LogWatch
from gpubroker_server.core.domain.decisions import Decision, QueuePause
from gpubroker_server.core.domain.lease import quarantine
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.world.world import World

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding

LATER = Instant(NOW + 1_000.0)
WELL = FleetKnown({"state": "connected", "address": "h:6379", "message": ""}, has_leader=True)
N1 = NodeName("n1")


def findings(world: World, policy: Policy | None = None, **known: Any) -> list[Finding]:
    return list(diagnose_fleet(world, policy or Policy(), WELL._replace(**known), LATER))


def test_a_node_that_does_not_answer_is_found_unless_it_was_drained() -> None:
    gone = a_node("n2", ready=False, cordoned=True, draining_since=NOW)
    world = a_world(a_node("n1", ready=False), gone, a_device())
    silent, _closed = findings(world)
    assert (silent.kind, silent.subject, silent.first_seen) == ("node-silent", "n1", None)


def test_node_with_late_heartbeats_is_as_silent_as_its_last_one_is_old() -> None:
    heard_at = Instant(LATER - 20.0)
    [found] = findings(a_world(a_node("n1"), a_device()), late={N1: heard_at, NodeName("n9"): heard_at})
    assert (found.kind, found.subject, found.first_seen) == ("node-silent", "n1", heard_at)


def test_nodes_that_are_held_back_are_critical() -> None:
    paused = PausedDetection("3 of 4 nodes fell silent at once", ("n1", "n2"), 4, 5, NOW)
    [found] = findings(a_world(a_device()), held_back=paused, held_back_since=paused.since)
    assert (found.kind, found.subject, found.severity) == ("nodes-held-back", "n1, n2", Severity.CRITICAL)
    assert (found.first_seen, "gpubroker resume" in found.remedy) == (NOW, True)


@pytest.mark.parametrize(
    ("closed", "cause"),
    [
        (
            {"cordoned_at": NOW, "cordoned_by": "olga", "cordon_reason": "a fan"},
            "is cordoned by olga (a fan)",
        ),
        ({"draining_since": NOW, "cordoned_by": "olga", "cordoned_at": LATER}, "is being drained by olga"),
        ({"draining_since": NOW}, "is being drained"),
    ],
)
def test_a_closed_node_says_by_whom_and_since_when(closed: dict[str, Any], cause: str) -> None:
    world = a_world(
        a_node("n1", cordoned=True, **closed), a_device(), holding(a_task("run", gpu_mb=GIB), "gpu0")
    )
    [found] = findings(world)
    assert (found.kind, found.severity, found.first_seen) == ("node-closed", Severity.NOTE, NOW)
    assert found.cause == f"n1 {cause}: nothing new starts there."
    assert found.remedy.startswith("gpubroker uncordon n1")
    world.add_task(a_task("waits", gpu_mb=GIB))
    assert [one.severity for one in findings(world)] == [Severity.WARNING]


def test_a_drained_node_may_be_taken_away_and_is_not_being_drained() -> None:
    world = a_world(a_node("n1", cordoned=True, draining_since=NOW, cordoned_by="olga"), a_device())
    [found] = findings(world)
    assert found.cause == "n1 is drained by olga: nothing is left there, and nothing new starts."
    assert found.remedy.startswith("take the machine away, or: gpubroker uncordon n1")


def test_a_node_that_the_disk_guard_has_closed_is_found() -> None:
    world = a_world(a_node("n1"), a_device())
    world.full_disks[N1] = "/data (99% used, 98% allowed)"
    [found] = findings(world)
    assert (found.kind, found.subject) == ("node-closed-by-disk", "n1")
    assert "/data" in found.cause


@pytest.mark.parametrize(("waits", "severity"), [(True, Severity.WARNING), (False, Severity.NOTE)])
def test_a_paused_queue_says_by_whom_and_how_many_wait(waits: bool, severity: Severity) -> None:
    world = a_world(a_device())
    pause = QueuePause("tenant:acme", NOW, "ada", "moving")
    commit(world, Decision("queue", "pause", paused=(pause,)))
    if waits:
        world.add_task(a_task("waits", gpu_mb=GIB, tenant="acme"))
    [found] = findings(world)
    assert (found.kind, found.subject, found.severity) == ("queue-paused", "tenant:acme", severity)
    assert (found.first_seen, found.tenant) == (NOW, "acme")
    assert found.cause == f"The queue of tenant acme is paused by ada (moving): {int(waits)} tasks wait."
    assert found.remedy == "gpubroker resume --tenant acme"


def test_memory_in_quarantine_is_counted_by_node() -> None:
    world = a_world(a_device())
    for at, name in enumerate(("a", "b")):
        run = holding(a_task(name, gpu_mb=8 * GIB), "gpu0", mb=8 * GIB)
        world.add_task(run.task)
        for lease in run.leases:
            world.add_lease(quarantine(lease, Instant(NOW + 5.0 - at)))
    [found] = findings(world)
    assert (found.kind, found.subject, found.first_seen) == ("memory-quarantined", "n1", NOW + 4.0)
    assert found.evidence == {"mb": 16 * GIB, "holders": 2}
    assert (found.remedy.startswith("gpubroker quarantine"), found.tenant) == (True, "")


@pytest.mark.parametrize(
    ("quota", "cause", "remedy"),
    [
        ({}, "it gets no more than its guarantee, 20.0 GiB", "give it a cohort"),
        ({"cohort": "lab"}, "its cohort lab gets no more than its members are guaranteed", "cohort lab"),
        ({"cohort": "lab", "borrow_mb": Mib(GIB)}, "it may borrow 1.0 GiB of that", "borrow_mb"),
    ],
)
def test_a_guarantee_that_keeps_free_memory_from_its_tenant_is_found(
    quota: dict[str, Any], cause: str, remedy: str
) -> None:
    policy = Policy(tenants=(TenantPolicy("acme", guaranteed_mb=Mib(20 * GIB), **quota),))
    [found] = findings(a_world(a_device()), policy, quota_locks=[QuotaLock("acme", 3, 60 * GIB, NOW)])
    assert (found.kind, found.tenant, found.first_seen) == ("guarantee-locks-capacity", "acme", NOW)
    assert cause in found.cause
    assert remedy in found.remedy
    assert found.evidence == {"tasks": 3, "free_mb": 60 * GIB, "guaranteed_mb": 20 * GIB}


def test_the_oldest_dates_are_handed_on() -> None:
    known = {("kind", f"n{number}"): Instant(NOW + number) for number in range(MAX_DATED + 1)}
    handed_on = known_dates(dates_of(known))
    assert len(handed_on) == MAX_DATED
    assert ("kind", f"n{MAX_DATED}") not in handed_on
    assert handed_on["kind", "n0"] == NOW


def test_a_log_of_the_database_that_is_large_or_only_grows_is_found() -> None:
    mib, watch = 2**20, LogWatch()
    watch.look(300 * mib, NOW)
    [found] = findings(a_world(a_device()), database_log=watch.seen)
    assert (found.kind, found.first_seen) == ("database-log-grows", NOW)
    watch.look(10 * mib, NOW)  # it was shortened
    watch.look(80 * mib, LATER)
    assert watch.seen == LogGrowth(80 * mib, 70 * mib, NOW)
    assert [one.kind for one in findings(a_world(a_device()), database_log=watch.seen)] == [found.kind]
    watch.look(60 * mib, LATER)
    watch.look(60 * mib, LATER)
    assert watch.seen == LogGrowth(60 * mib, 0, LATER)
    assert findings(a_world(a_device()), database_log=watch.seen) == []
