"""External holders: admitted as tasks are, asked to leave, and never killed."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.holders import External
from gpubroker_server.core.domain.lease import HolderKind, LeaseState, Proof
from gpubroker_server.core.domain.orders import (
    ForgetOrder,
    Gone,
    NodeLost,
    NodeReport,
    Order,
    ReportedDevice,
    WatchOrder,
)
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import due, extend_window
from gpubroker_server.core.lifecycle.reconcile import InventoryRules, reconcile
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_sample,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    submit,
)

POLICY = Policy()
RULES = InventoryRules("test")
TTL = 60.0
PID = 4711
LEASE = TaskId("lease")


def at(seconds: float) -> Instant:
    return Instant(NOW + seconds)


def an_asking(id: str = LEASE, *, pid: int | None = None, **fields: Any) -> Task:
    """Who asks for 50 of 80 GiB, for a minute at a time."""
    facts = {"gpu_mb": 50 * GIB, "deadline_at": at(TTL), "grace_seconds": Seconds(10.0), **fields}
    return a_task(id, holder=External(Seconds(TTL), pid), **facts)


def plan(world: World, seconds: float = 0.0) -> list[Decision]:
    world.measure([a_sample(device, at(seconds)) for device in world.ledgers])
    decisions = list(plan_cycle(world, POLICY, at(seconds)).decisions)
    commit(world, decisions)
    check_ledger(world)
    return decisions


def ask(world: World, what: str, seconds: float = 0.0, task: str = LEASE, **fields: Any) -> Decision:
    request = Request("r1", TaskId(task), "default", what, fields, NOW)
    world.add_request(request)
    decision = carry_out(world, request, at(seconds), Policy())
    commit(world, decision)
    return decision


def pass_time(world: World, seconds: float) -> list[Decision]:
    """A leader that has looked since the beginning."""
    watch = replace(extend_window(None, NOW), last=at(seconds - 1.0))
    decisions = due(world, at(seconds), POLICY, watch)
    commit(world, decisions)
    check_ledger(world)
    return decisions


def hear(world: World, *reports: Any, seconds: float = 0.0) -> list[Decision]:
    decisions = apply_reports(world, reports, at(seconds), POLICY)
    commit(world, decisions)
    return decisions


def announce(world: World, *runs: tuple[TaskId, Fence, int], **node: Any) -> list[Order]:
    """What the leader orders when the agent of n1 answers, and everything that this decides is true."""
    seen = NodeReport(a_node(**node), (), runs, at(1.0))
    devices = [ledger.device for ledger in world.ledgers.values()]
    there = tuple(ReportedDevice(d.uuid, d.kind, d.index, d.physical_mb, d.simulated) for d in devices)
    decisions = reconcile(world, replace(seen, devices=there), at(1.0), POLICY, RULES)
    commit(world, decisions)
    orders: list[Any] = [order for decision in decisions for order in decision.orders]
    return orders


def held(*, pid: int | None = None, **fields: Any) -> World:
    """A world in which the lease has been given."""
    world = a_world()
    submit(world, an_asking(pid=pid, **fields))
    plan(world)
    assert the(world).state is TaskState.RUNNING
    return world


def the(world: World, task: str = LEASE) -> Task:
    return world.tasks[TaskId(task)]


def leases(world: World) -> list[tuple[HolderKind, LeaseState]]:
    return [(lease.holder_kind, lease.state) for claim in world.leases.values() for lease in claim.values()]


def test_external_lease_holds_memory_and_counts_time_from_its_admission() -> None:
    world = a_world()
    submit(world, an_asking())
    [decision] = plan(world, 20.0)
    assert decision.orders == ()
    task = the(world)
    assert (task.state, task.node, task.fence) == (TaskState.RUNNING, "n1", 1)
    assert (task.started_at, task.deadline_at) == (at(20), at(20 + TTL))
    assert leases(world) == [(HolderKind.EXTERNAL, LeaseState.HELD)]


def test_the_agent_gets_an_order_to_watch_the_holders_process() -> None:
    world = a_world()
    submit(world, an_asking(pid=PID))
    [decision] = plan(world)
    [device] = world.ledgers
    assert decision.orders == (
        WatchOrder(LEASE, Fence(1), NodeName("n1"), "n1-1", PID, ((device, Mib(50 * GIB)),)),
    )


def test_an_external_lease_waits_in_the_same_queue() -> None:
    world = held()
    submit(world, an_asking("second"))
    assert plan(world) == []
    ask(world, "release", 5.0)
    plan(world, 5.0)
    assert the(world, "second").state is TaskState.RUNNING


def test_a_renewal_extends_the_deadline() -> None:
    world = held()
    ask(world, "renew", 50.0)
    assert the(world).deadline_at == at(50 + TTL)
    ask(world, "renew", 50.0, ttl_seconds=600.0)
    assert the(world).deadline_at == at(650)
    assert pass_time(world, 100.0) == []


def test_a_pending_lease_is_renewed_too_and_expires_otherwise() -> None:
    world = held()
    submit(world, an_asking("second"))
    ask(world, "renew", 40.0, "second")
    ask(world, "renew", 59.0)
    assert pass_time(world, 61.0) == []
    [decision] = pass_time(world, 101.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert "not renewed while it waited" in decision.outcome.failure.message
    assert TaskId("second") not in world.tasks


@pytest.mark.parametrize("pid", [None, PID])
def test_a_release_by_the_holder_frees_its_memory_at_once(pid: int | None) -> None:
    world = held(pid=pid)
    decision = ask(world, "release", 5.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is None
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED
    forget = (ForgetOrder(LEASE, Fence(1), NodeName("n1"), "n1-1"),)
    assert decision.orders == (forget if pid else ())
    assert (world.leases, world.tasks) == ({}, {})


def test_releasing_a_pending_lease_cancels_it() -> None:
    world = held()
    submit(world, an_asking("second"))
    assert ask(world, "release", task="second").tasks[0].task.state is TaskState.CANCELLED


def test_a_release_of_a_task_that_is_started_here_changes_nothing() -> None:
    world = a_world()
    submit(world, a_task("task"))
    assert ask(world, "release", task="task").is_empty() is False
    assert the(world, "task").version == 1
    assert ask(world, "renew", task="task").tasks == ()


def test_external_holder_leaves_for_a_higher_priority_and_makes_room() -> None:
    world = held(priority=20)
    submit(world, a_task("high", priority=80, gpu_mb=60 * GIB))
    [decision] = plan(world, 5.0)
    assert decision.orders == ()
    task = the(world)
    assert (task.state, task.stop_reason, task.stop_deadline_at) == (
        TaskState.STOPPING,
        StopReason.PREEMPT,
        at(15),
    )
    assert ask(world, "renew", 6.0).tasks == ()
    ask(world, "release", 8.0)
    plan(world, 8.0)
    assert the(world, "high").state is TaskState.ADMITTED
    assert LEASE not in world.tasks


def test_a_holder_that_stays_is_quarantined_and_never_requeued() -> None:
    world = held(priority=20)
    submit(world, a_task("high", priority=80, gpu_mb=60 * GIB))
    plan(world, 5.0)
    assert pass_time(world, 16.0) == []
    pass_time(world, 15.0 + POLICY.kill_patience_seconds)
    assert the(world).state is TaskState.EXPIRED
    assert leases(world) == [(HolderKind.EXTERNAL, LeaseState.QUARANTINED)]
    assert [*world.pledges] == ["high"]  # it waits for the proof
    assert plan(world, 60.0) == []


def test_lease_not_renewed_is_asked_to_leave_and_quarantined_until_release() -> None:
    world = held()
    [notice] = pass_time(world, TTL)
    assert (the(world).stop_reason, the(world).stop_deadline_at) == (StopReason.DEADLINE, at(70))
    assert notice.outcome is not None
    assert notice.outcome.failure is not None
    assert notice.outcome.failure.message == "it was not renewed in time"
    [verdict] = pass_time(world, 70.0 + POLICY.kill_patience_seconds)
    assert verdict.outcome is not None
    assert verdict.outcome.failure is not None
    assert verdict.outcome.failure.kind == "not_released"
    assert leases(world) == [(HolderKind.EXTERNAL, LeaseState.QUARANTINED)]
    decision = ask(world, "release", 500.0)
    assert decision.tasks == ()
    assert (world.leases, world.tasks) == ({}, {})


def test_a_cancel_asks_the_holder_to_leave() -> None:
    world = held()
    decision = ask(world, "cancel")
    assert (decision.orders, the(world).stop_reason) == ((), StopReason.CANCEL)
    pass_time(world, 10.0 + POLICY.kill_patience_seconds)
    assert the(world).state is TaskState.CANCELLED


def test_a_lease_ends_with_the_holders_process() -> None:
    world = held(pid=PID)
    [decision] = hear(world, Gone(LEASE, Fence(1), at(3), Proof.PROCESS_ABSENT), seconds=3.0)
    assert decision.tasks[0].task.state is TaskState.FAILED
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.message.startswith(f"its process {PID} no longer exists")
    assert [type(order) for order in decision.orders] == [ForgetOrder]
    assert (world.leases, world.tasks) == ({}, {})


def test_a_holder_whose_process_ends_after_notice_has_succeeded() -> None:
    world = held(pid=PID)
    ask(world, "cancel")
    [decision] = hear(world, Gone(LEASE, Fence(1), at(3), Proof.PROCESS_ABSENT), seconds=3.0)
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED


def test_the_end_of_the_holders_process_ends_its_quarantine() -> None:
    world = held(pid=PID)
    pass_time(world, TTL)
    pass_time(world, 100.0)
    assert leases(world) == [(HolderKind.EXTERNAL, LeaseState.QUARANTINED)]
    [decision] = hear(world, Gone(LEASE, Fence(1), at(101), Proof.PROCESS_ABSENT), seconds=101.0)
    assert decision.tasks == ()
    assert [type(order) for order in decision.orders] == [ForgetOrder]
    assert (world.leases, world.tasks) == ({}, {})


@pytest.mark.parametrize("proof", [Proof.NEVER_STARTED, Proof.AGENT_RESTARTED])
def test_what_an_agent_does_not_know_is_no_proof(proof: Proof) -> None:
    world = held(pid=PID)
    assert hear(world, Gone(LEASE, Fence(1), at(3), proof)) == []
    assert leases(world) == [(HolderKind.EXTERNAL, LeaseState.HELD)]


def test_an_external_lease_survives_the_loss_of_its_node() -> None:
    world = held(pid=PID)
    decisions = hear(world, NodeLost(NodeName("n1"), "n1-1", at(3), "dead"))
    assert [decision.subject for decision in decisions] == ["n1"]
    assert (the(world).state, leases(world)) == (
        TaskState.RUNNING,
        [(HolderKind.EXTERNAL, LeaseState.HELD)],
    )


def test_an_external_lease_on_a_lost_node_does_not_stop_other_deadlines() -> None:
    late = holding(a_task("late", gpu_mb=GIB, timeout_seconds=Seconds(10.0)), "n2/gpu0")
    world = a_world(a_node("n1"), a_device("gpu0", "n1"), a_node("n2"), a_device("gpu0", "n2"), late)
    submit(world, an_asking())
    plan(world)
    where = world.tasks[LEASE].node
    assert where == "n1"
    hear(world, NodeLost(where, world.nodes[where].incarnation, at(5), "its agent is silent"), seconds=5)
    pass_time(world, 1000.0)
    assert world.tasks[TaskId("late")].stop_reason is StopReason.TIMEOUT
    assert world.tasks[LEASE].state is TaskState.STOPPING


def test_a_leader_that_was_away_gives_the_holder_its_whole_time_to_renew() -> None:
    world = a_world(a_device())
    submit(world, an_asking())
    plan(world)
    watch = extend_window(None, at(600))
    assert due(world, at(600 + TTL - 1), POLICY, replace(watch, last=at(600 + TTL - 2))) == []
    [decision] = due(world, at(600 + TTL), POLICY, replace(watch, last=at(600 + TTL - 1)))
    assert decision.tasks[0].task.stop_reason is StopReason.DEADLINE


def test_an_agent_that_does_not_watch_the_process_gets_the_order_again() -> None:
    world = held(pid=PID)
    [watch] = announce(world, incarnation="n1-2")
    assert isinstance(watch, WatchOrder)
    assert (watch.pid, watch.incarnation) == (PID, "n1-2")
    assert announce(world, (LEASE, Fence(1), 0), incarnation="n1-3") == []
    assert the(world).state is TaskState.RUNNING


def test_the_process_is_watched_while_its_lease_is_quarantined() -> None:
    world = held(pid=PID)
    pass_time(world, TTL)
    pass_time(world, 100.0)
    assert [type(order) for order in announce(world, incarnation="n1-2")] == [WatchOrder]
    assert announce(world, (LEASE, Fence(1), 0), incarnation="n1-2") == []


@pytest.mark.parametrize("pid", [None, PID])
def test_a_reboot_ends_external_leases(pid: int | None) -> None:
    world = held(pid=pid)
    announce(world, incarnation="n1-2", boot_id="another")
    assert (world.leases, world.tasks) == ({}, {})


def test_a_holder_without_a_process_is_not_watched() -> None:
    world = held()
    assert announce(world, incarnation="n1-2") == []
    assert the(world).state is TaskState.RUNNING


def test_use_by_the_holders_process_does_not_count_as_foreign() -> None:
    world = held(pid=PID)
    [ledger] = world.ledgers.values()
    before = ledger.free_mb()
    used = a_sample("gpu0", at(2), used_mb=48 * GIB, foreign_mb=0, by_holder={"lease:1": 48 * GIB})
    world.measure([used])
    assert ledger.free_mb() == before


def test_an_external_lease_may_name_its_device() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    demand = Demand(gpus=1, gpu_mb=Mib(50 * GIB), where=PlacementConstraints(devices=("gpu1",)))
    submit(world, an_asking("one", demand=demand), an_asking("two", demand=demand))
    plan(world)
    assert [lease.device for claim in world.leases.values() for lease in claim.values()] == ["test/n1/gpu1"]


def test_a_named_process_that_belongs_to_another_holder_ends_the_lease() -> None:
    world = held(pid=PID)
    [decision] = hear(world, Gone(LEASE, Fence(1), at(1.0), Proof.NOT_YOUR_PROCESS))
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "not_your_process"
    assert f"process {PID} belongs to a run" in decision.outcome.failure.message
    assert leases(world) == []
