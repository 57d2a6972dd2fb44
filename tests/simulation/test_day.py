"""Days of a small cluster on which everything breaks: what holds at every step, and that it is watched."""

from collections.abc import Callable

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import DeviceKey, Fence, Mib
from msgspec.structs import replace

from tests.simulation.__main__ import text_of
from tests.simulation.auditor import Violation
from tests.simulation.day import replay


def test_hours_of_faults_break_no_rule_and_every_task_ends() -> None:
    report = replay(1, hours=3.0)
    ends = [report.counts[f"task.{end}"] for end in ("succeeded", "failed", "cancelled", "expired")]
    assert sum(ends) == report.submitted
    assert min(ends) > 0


def test_the_same_seed_is_the_same_day() -> None:
    first, again, other = replay(5, hours=0.5), replay(5, hours=0.5), replay(6, hours=0.5)
    assert first == again
    assert first.digest != other.digest
    assert "every rule held at every step" in text_of(first, seconds=1.0)


@pytest.mark.evidence
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_whole_day_of_faults_breaks_no_rule_and_every_task_ends(seed: int) -> None:
    report = replay(seed, hours=24.0)
    wanted = (
        "task.requeued",
        "lease.quarantined",
        "pledge.consumed",
        "pledge.withdrawn",
        "pledge.taken",
        "pledge.dissolved",
    )
    assert all(report.counts[kind] > 0 for kind in wanted)
    assert report.terms > 1


def released_at_the_end_of_code(decision: Decision) -> Decision:
    """Memory comes back with the result, as if a process were gone once it has answered."""
    return _with_leases(decision, LeaseState.RELEASING, LeaseState.RELEASED)


def released_on_suspicion(decision: Decision) -> Decision:
    return _with_leases(decision, LeaseState.QUARANTINED, LeaseState.RELEASED)


def leased_where_it_is_not(decision: Decision) -> Decision:
    """The row names another device than the order: what is measured no longer meets its lease."""
    leases = (
        replace(lease, device=DeviceKey(lease.device.replace("gpu0", "gpu1")), mb=Mib(1))
        for lease in decision.leases
    )
    return replace(decision, leases=tuple(leases))


def claimed_under_an_old_fence(decision: Decision) -> Decision:
    writes = (
        replace(write, task=replace(write.task, fence=Fence(1))) if write.what is Move.ADMITTED else write
        for write in decision.tasks
    )
    return replace(decision, tasks=tuple(writes))


def _with_leases(decision: Decision, old: LeaseState, new: LeaseState) -> Decision:
    """A release claims a proof."""
    proof = Proof.PROCESS_ABSENT if new is LeaseState.RELEASED else ""
    leases = (
        replace(lease, state=new, proof=proof) if lease.state is old else lease for lease in decision.leases
    )
    return replace(decision, leases=tuple(leases))


@pytest.mark.parametrize(
    ("tamper", "rule"),
    [
        (released_at_the_end_of_code, "memory comes back only when its process is gone"),
        (released_on_suspicion, "memory comes back only when its process is gone"),
        (leased_where_it_is_not, "processes fit on their device"),
        (claimed_under_an_old_fence, "each claim has the next fence"),
    ],
)
def test_a_broken_rule_is_detected(tamper: Callable[[Decision], Decision], rule: str) -> None:
    with pytest.raises(Violation, match=rule):
        replay(1, 3.0, tamper)
