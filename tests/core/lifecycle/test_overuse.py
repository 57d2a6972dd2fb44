"""A run that uses more than it leased is reported once, and stopped if the policy says so."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.orders import Ended, Ending, Gone, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.lifecycle.stopping import overuse_decisions
from gpubroker_server.core.world.events import events_of
from gpubroker_server.core.world.world import World
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_sample,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    key,
)

STOPS = Policy(overuse="stop")


def a_run(*devices: str, **fields: Any) -> Holding:
    """Of 10 GiB on each device."""
    return holding(a_task("run", gpu_mb=10 * GIB), *(devices or ("gpu0",)), **fields)


def measured(world: World, gib: float, device: str = "gpu0") -> None:
    mb = int(gib * GIB)
    world.measure([a_sample(device, used_mb=mb, by_holder={"run:1": mb})])


def over(world: World, policy: Policy = Policy()) -> list[Decision]:  # noqa: B008  # frozen
    decisions = overuse_decisions(world, NOW, policy)
    commit(world, decisions)
    return decisions


def test_a_run_above_its_lease_is_marked_once_with_what_it_used() -> None:
    world = a_world(a_run())
    measured(world, 12)
    [decision] = over(world)
    [event] = events_of(decision)
    assert (event.kind, event.key) == ("lease.overused", f"run:run:1:0:{key('gpu0')}")
    assert event.fields == {"state": "held", "overused_mb": 12 * GIB, "mb": 10 * GIB}
    assert world.leases_of(world.tasks[TaskId("run")])[0].overused_mb == 12 * GIB
    measured(world, 14)
    assert over(world) == []


def test_the_mark_changes_nothing_else_of_the_lease_or_the_ledger() -> None:
    world = a_world(a_run())
    measured(world, 12)
    before = world.ledgers[key("gpu0")].free_mb()
    over(world)
    [held] = world.ledgers[key("gpu0")].holdings.values()
    assert (held.lease.state, held.measured_mb, held.lease.version) == (LeaseState.HELD, 12 * GIB, 3)
    assert world.ledgers[key("gpu0")].free_mb() == before
    check_ledger(world)


@pytest.mark.parametrize("gib", [0.0, 10.0, 10.5])
def test_a_run_within_its_lease_and_the_tolerance_is_left_alone(gib: float) -> None:
    world = a_world(a_run())
    measured(world, gib)
    assert over(world, STOPS) == []


def test_the_tolerance_is_the_operators_choice() -> None:
    world = a_world(a_run())
    measured(world, 10.2)
    assert over(world, Policy(overuse_tolerance=0.03)) == []
    assert len(over(world, Policy(overuse_tolerance=0.0))) == 1


def test_overuse_that_has_ended_before_the_check_is_not_reported() -> None:
    world = a_world(a_run())
    measured(world, 12)
    measured(world, 8)
    assert over(world) == []


@pytest.mark.parametrize("state", [TaskState.ADMITTED, TaskState.STOPPING])
def test_a_run_that_has_not_begun_or_is_under_notice_is_left_alone(state: TaskState) -> None:
    fields = {"stop_reason": StopReason.CANCEL, "stop_deadline_at": Instant(NOW + 30)}
    world = a_world(a_run(state=state, **(fields if state is TaskState.STOPPING else {})))
    measured(world, 12)
    assert over(world, STOPS) == []


def test_overuse_by_an_ended_claim_is_ignored() -> None:
    world = a_world(a_run())
    measured(world, 12)
    commit(world, apply_reports(world, [Ended(TaskId("run"), Fence(1), NOW, Ending.SUCCEEDED)], NOW, STOPS))
    assert over(world, STOPS) == []
    commit(
        world,
        apply_reports(world, [Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)], NOW, STOPS),
    )
    assert world.learned.above == {}


def test_by_policy_the_run_is_stopped_and_fails() -> None:
    world = a_world(a_run())
    measured(world, 12)
    [decision] = over(world, STOPS)
    [order] = decision.orders
    assert isinstance(order, StopOrder)
    assert (order.reason, order.grace_seconds) == (StopReason.OVERUSE, 30.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "over_use"
    assert world.tasks[TaskId("run")].state is TaskState.STOPPING
    assert over(world, STOPS) == []
    gone = apply_reports(world, [Gone(TaskId("run"), Fence(1), NOW, Proof.PROCESS_ABSENT)], NOW, STOPS)
    assert gone[0].tasks[0].task.state is TaskState.FAILED


def test_a_run_stopped_for_overuse_fails_for_it_whatever_it_reports() -> None:
    world = a_world(a_run())
    measured(world, 12)
    over(world, STOPS)
    [ended] = apply_reports(world, [Ended(TaskId("run"), Fence(1), NOW, Ending.STOPPED)], NOW, STOPS)
    assert ended.outcome is not None
    assert ended.outcome.failure is not None
    assert ended.outcome.failure.message == (
        "the run used 12.0 GiB of a GPU of which it leased 10.0 GiB; "
        "ask for more gpu_mb, or for gpu_mb: learned"
    )


def test_a_result_that_arrives_before_the_end_is_accepted() -> None:
    world = a_world(a_run())
    measured(world, 12)
    over(world, STOPS)
    [ended] = apply_reports(world, [Ended(TaskId("run"), Fence(1), NOW, Ending.SUCCEEDED)], NOW, STOPS)
    assert ended.tasks[0].task.state is TaskState.SUCCEEDED


def test_a_run_that_was_only_reported_is_stopped_once_the_policy_says_so() -> None:
    world = a_world(a_run())
    measured(world, 12)
    over(world)
    [decision] = over(world, STOPS)
    assert decision.leases == ()
    assert decision.outcome is not None
    assert "12.0 GiB" in str(decision.outcome.failure)


def test_the_failure_names_each_device() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), a_run("gpu0", "gpu1"))
    measured(world, 12)
    measured(world, 13, "gpu1")
    [decision] = over(world)
    assert [lease.overused_mb for lease in decision.leases] == [12 * GIB, 13 * GIB]


def test_explain_says_what_a_run_used() -> None:
    world = a_world(a_run())
    measured(world, 12)
    over(world)
    message = explain(world, TaskId("run"), Policy(), NOW).message
    assert message == "running on n1 for 100 s; it used 12.0 GiB of n1/gpu0, of which it leased 10.0 GiB"


@given(st.lists(st.floats(0, 40), max_size=20), st.floats(0, 2))
def test_a_lease_is_marked_at_most_once_whatever_is_measured(gibs: list[float], tolerance: float) -> None:
    world = a_world(a_run())
    marks = 0
    for gib in gibs:
        measured(world, gib)
        marks += len(over(world, Policy(overuse_tolerance=tolerance)))
    assert marks == any(int(gib * GIB) > 10 * GIB * (1 + tolerance) for gib in gibs)
