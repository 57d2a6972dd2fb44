"""What rows say of a node, held against what its agent says."""

from typing import Any

import pytest
from gpubroker.wire.policy import GpuKind
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.orders import ForgetOrder, NodeReport, ReportedDevice, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.reconcile import (
    InventoryRules,
    NodeRules,
    never_joined,
    reconcile,
    take_over,
)
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
)

Claim = tuple[str, int]
N1 = NodeName("n1")


def hear(world: World, *runs: Claim, uuids: tuple[str, ...] = ("gpu0",), **node: Any) -> list[Decision]:
    """The agent of n1 answers that it knows these runs; what follows is made true."""
    devices = tuple(ReportedDevice(uuid, "H100", i, Mib(80 * GIB), True) for i, uuid in enumerate(uuids))
    known = tuple((TaskId(task), Fence(fence), 0) for task, fence in runs)
    seen = NodeReport(a_node(**node), devices, known, NOW)
    decisions = reconcile(world, seen, NOW, Policy(), InventoryRules("test"))
    commit(world, decisions)
    return decisions


def an_open_world(*parts: Any) -> World:
    """n1 has answered this term."""
    return a_world(a_device(), *parts)


def a_waiting_world(*parts: Any) -> World:
    """n1 has not yet answered this term, so nothing was ordered there since."""
    return a_world(a_device(), a_node(ready=False), *parts)


def a_run(state: TaskState = TaskState.RUNNING, **fields: Any) -> Holding:
    task_fields = {k: fields.pop(k) for k in ("max_retries",) if k in fields}
    reserved = LeaseState.RESERVED if state is TaskState.ADMITTED else LeaseState.HELD
    task = a_task("run", gpu_mb=8 * GIB, **task_fields)
    return holding(task, "gpu0", state=state, **{"lease_state": reserved, **fields})


def a_stopping_run(reason: StopReason, **fields: Any) -> Holding:
    facts = {"stop_reason": reason, "stop_deadline_at": Instant(NOW + 9.0), **fields}
    return a_run(TaskState.STOPPING, **facts)


def the(world: World, task: str = "run") -> Task:
    return world.tasks[TaskId(task)]


def held_mb(world: World) -> int:
    return sum(ledger.held_mb() for ledger in world.ledgers.values())


def orders(decisions: list[Decision]) -> list[Any]:
    return [order for decision in decisions for order in decision.orders]


def test_a_new_node_is_added_with_its_devices() -> None:
    world = World()
    hear(world, uuids=("gpu0", "gpu1"))
    assert world.nodes[N1] == a_node()
    assert [world.ledgers[k].device for k in world.by_node[N1]] == [
        a_device("gpu0", simulated=True),
        a_device("gpu1", simulated=True),
    ]


def test_an_answer_that_says_nothing_new_writes_nothing() -> None:
    assert hear(an_open_world()) == []


def test_an_answer_makes_the_node_ready_and_keeps_it_cordoned_and_drained() -> None:
    closed: dict[str, Any] = {
        "cordoned": True,
        "cordon_reason": "a fan",
        "draining_since": NOW,
        "drain_deadline_at": NOW + 9,
    }
    world = a_world(a_device(), a_node(ready=False, version=4, **closed))
    hear(world)
    assert world.nodes[N1] == a_node(ready=True, version=5, **closed)


def the_device(world: World, **rules: Any) -> Device:
    """A device of 1000 MiB as it is entered under these rules."""
    seen = NodeReport(a_node(), (ReportedDevice("gpu0", "H100", 0, Mib(1000), False),), (), NOW)
    commit(world, reconcile(world, seen, NOW, Policy(), InventoryRules("test", **rules)))
    return world.ledgers[key("gpu0")].device


def test_a_changed_device_is_written() -> None:
    world = a_world(a_device(mb=40 * GIB, version=2))
    hear(world)
    device = world.ledgers[key("gpu0")].device
    assert (device.physical_mb, device.version) == (80 * GIB, 3)


def test_the_reserve_is_kept_from_every_device() -> None:
    assert the_device(World(), reserve_mb=100).allocatable_mb == 900


@pytest.mark.parametrize(
    ("reserved", "mb"),
    [({}, 100), ({"*": 7}, 7), ({"0": 5, "*": 7}, 5), ({"gpu0": 0, "0": 5}, 0), ({"1": 5}, 100)],
)
def test_a_node_may_reserve_another_amount_of_each_device(reserved: dict[str, Mib], mb: int) -> None:
    device = the_device(World(), reserve_mb=100, nodes={"n1": NodeRules(reserve_mb=reserved)})
    assert device.reserve_mb == mb


def the_node(rules: NodeRules, **agents: Any) -> Node:
    """As it is entered under these rules."""
    world = World()
    seen = NodeReport(a_node(cpu=64.0, memory_mb=1000, **agents), (), (), NOW)
    commit(world, reconcile(world, seen, NOW, Policy(), InventoryRules("test", nodes={"n1": rules})))
    return world.nodes[N1]


def test_a_node_offers_what_its_own_rules_say_less_what_they_keep_free() -> None:
    own = the_node(
        NodeRules(cpu=8.0, memory_mb=Mib(500), max_runs=3, reserve_cpu=1.5, reserve_memory_mb=Mib(100))
    )
    assert (own.cpu, own.memory_mb, own.max_runs) == (6.5, 400, 3)
    agents = the_node(NodeRules(reserve_cpu=4.0, reserve_memory_mb=Mib(5000)), max_runs=2)
    assert (agents.cpu, agents.memory_mb, agents.max_runs) == (60.0, 0, 2)


def test_an_agent_that_takes_nothing_takes_nothing_by_any_rules() -> None:
    assert the_node(NodeRules(max_runs=3), max_runs=0).max_runs == 0


def test_names_in_the_rules_that_no_node_has_are_found() -> None:
    rules = InventoryRules("test", nodes={"n1": NodeRules(), "n9": NodeRules(), "m": NodeRules()})
    assert never_joined(a_world(a_node("n1")), rules) == ["m", "n9"]


@pytest.mark.parametrize(
    ("declared", "mb"), [({"H100": 50}, 50), ({"n1": 70}, 70), ({"H100": 50, "n1": 0}, 0), ({"T4": 9}, 0)]
)
def test_foreign_memory_declared_for_a_node_wins_over_that_of_its_kind(
    declared: dict[str, int], mb: int
) -> None:
    assert the_device(World(), declared_foreign_mb=declared).declared_foreign_mb == mb


def test_a_new_declaration_replaces_the_old_one() -> None:
    world = World()
    the_device(world, declared_foreign_mb={"H100": 50})
    assert the_device(world) == replace(the_device(World()), version=2)


def test_a_device_that_left_its_machine_is_forgotten() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    hear(world)
    assert list(world.ledgers) == [key("gpu0")]
    assert world.by_node[N1] == [key("gpu0")]
    assert hear(world) == [], "it is said once"


def test_a_device_that_came_back_counts_again() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    hear(world)
    hear(world, uuids=("gpu0", "gpu1"))
    assert world.ledgers[key("gpu1")].device.present


def test_a_device_that_came_back_takes_nothing_before_it_is_measured_again() -> None:
    task = a_task("run", gpus=2, gpu_mb=8 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(task, "gpu0", "gpu1"))
    world.measure([a_sample("gpu0"), a_sample("gpu1")])
    hear(world, ("run", 1))
    hear(world, ("run", 1), uuids=("gpu0", "gpu1"))
    assert [world.ledgers[key(gpu)].is_stale(NOW, 2.0) for gpu in ("gpu0", "gpu1")] == [False, True]
    world.measure([a_sample("gpu1", at=NOW + 1.0)])
    assert not world.ledgers[key("gpu1")].is_stale(NOW, 2.0)


def test_a_device_is_removed_only_if_the_agent_knows_all_of_its_gpus() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    there = (ReportedDevice("gpu0", "H100", 0, Mib(80 * GIB), True),)
    unknown = NodeReport(a_node(), there, (), NOW, faults=(("GPU 1", "no answer"),), complete=False)
    for seen, present in ((unknown, True), (replace(unknown, complete=True), False)):
        decisions = reconcile(world, seen, NOW, Policy(), InventoryRules("test"))
        commit(world, decisions)
        assert (key("gpu1") in world.ledgers) is present


def test_leases_on_a_removed_device_stay_until_their_holder_is_gone() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"), holding(a_task("run", gpu_mb=8 * GIB), "gpu1"))
    hear(world, ("run", 1))
    ledger = world.ledgers[key("gpu1")]
    assert (ledger.device.present, ledger.device.allocatable_mb, ledger.leased_mb()) == (False, 0, 8 * GIB)
    assert ledger.free_mb() < 0

    hear(world)
    assert list(world.ledgers) == [key("gpu0")], "nothing on it is leased any more"


def test_pledges_on_a_removed_device_are_dissolved() -> None:
    waiting = a_task("high", priority=90, gpu_mb=8 * GIB)
    world = a_world(a_device("gpu0"), a_device("gpu1"), waiting, a_pledge(waiting, "gpu1", mb=8 * GIB))
    hear(world)
    assert world.pledges == {}
    assert list(world.ledgers) == [key("gpu0")]


@pytest.mark.parametrize("state", [TaskState.ADMITTED, TaskState.RUNNING])
@pytest.mark.parametrize("node", [{}, {"incarnation": "n1-2"}])
def test_a_run_that_both_sides_know_goes_on(state: TaskState, node: dict[str, Any]) -> None:
    world = a_waiting_world(a_run(state))
    before = the(world)
    decisions = hear(world, ("run", 1), **node)
    assert [(d.tasks, d.leases, d.orders) for d in decisions] == [((), (), ())]
    assert the(world) == before


def test_stopping_run_gets_its_notice_again_from_the_current_agent() -> None:
    world = an_open_world(a_stopping_run(StopReason.CANCEL))
    decisions = hear(world, ("run", 1), incarnation="n1-2")
    assert orders(decisions) == [
        StopOrder(TaskId("run"), Fence(1), N1, "n1-2", StopReason.CANCEL, Seconds(9.0))
    ]


def test_a_notice_that_is_repeated_after_its_deadline_is_a_kill() -> None:
    run = a_stopping_run(StopReason.CANCEL, stop_deadline_at=Instant(NOW - 1.0))
    assert [order.grace_seconds for order in orders(hear(an_open_world(run), ("run", 1)))] == [0.0]


def test_start_of_an_older_term_that_never_arrived_is_planned_again() -> None:
    world = a_waiting_world(a_run(TaskState.ADMITTED))
    decisions = hear(world)
    assert (the(world).state, the(world).failures) == (TaskState.PENDING, 0)
    assert the(world).not_before == NOW + 1.0
    assert held_mb(world) == 0
    assert orders(decisions) == []


@pytest.mark.parametrize("node", [{"incarnation": "n1-2"}, {"boot_id": "other", "incarnation": "n1-2"}])
def test_start_ordered_from_an_earlier_agent_is_planned_again(
    node: dict[str, Any],
) -> None:
    world = an_open_world(a_run(TaskState.ADMITTED))
    hear(world, **node)
    assert (the(world).state, the(world).not_before) == (TaskState.PENDING, None)
    assert held_mb(world) == 0


def test_a_start_that_may_still_be_on_its_way_keeps_its_memory() -> None:
    """The agent answers a second time in one term, and the order was sent in between."""
    world = an_open_world(a_run(TaskState.ADMITTED))
    assert hear(world) == []
    assert the(world).state is TaskState.ADMITTED
    assert held_mb(world) == 8 * GIB


def test_a_run_that_its_own_agent_no_longer_knows_is_a_failure() -> None:
    world = an_open_world(a_run(max_retries=1))
    hear(world)
    assert (the(world).state, the(world).failures) == (TaskState.PENDING, 1)
    assert held_mb(world) == 0


@pytest.mark.parametrize("node", [{"incarnation": "n1-2"}, {"boot_id": "other", "incarnation": "n1-2"}])
def test_a_run_that_went_down_with_its_agent_uses_up_no_retry(node: dict[str, Any]) -> None:
    world = an_open_world(a_run())
    hear(world, **node)
    assert (the(world).state, the(world).failures) == (TaskState.PENDING, 0)
    assert held_mb(world) == 0


@pytest.mark.parametrize(
    ("reason", "state"), [(StopReason.PREEMPT, TaskState.PENDING), (StopReason.CANCEL, None)]
)
def test_a_stopping_run_that_is_not_there_has_stopped(reason: StopReason, state: TaskState | None) -> None:
    world = an_open_world(a_stopping_run(reason))
    hear(world)
    task = world.tasks.get(TaskId("run"))
    assert (task.state if task else None) == state
    assert held_mb(world) == 0


def test_runs_without_an_active_claim_are_killed_and_forgotten() -> None:
    current = a_run(fence=Fence(2))
    waiting = a_task("waiting", fence=Fence(3))
    elsewhere = holding(a_task("elsewhere"), node="n2")
    world = an_open_world(a_device("gpu0", "n2"), current, waiting, elsewhere)
    unwanted = [("run", 1), ("waiting", 3), ("elsewhere", 1), ("unknown", 1)]
    decisions = hear(world, ("run", 2), *unwanted)
    assert orders(decisions) == [
        order
        for task, fence in unwanted
        for order in (
            StopOrder(TaskId(task), Fence(fence), N1, "n1-1", StopReason.CANCEL, Seconds(0.0)),
            ForgetOrder(TaskId(task), Fence(fence), N1, "n1-1"),
        )
    ]
    assert all(decision.is_empty() for decision in decisions)


@pytest.mark.parametrize("state", [LeaseState.RELEASING, LeaseState.QUARANTINED])
@pytest.mark.parametrize("node", [{}, {"incarnation": "n1-2"}])
def test_memory_of_a_claim_that_is_over_returns_if_the_agent_has_no_trace(
    state: LeaseState, node: dict[str, Any]
) -> None:
    waiting = a_task("run", fence=Fence(1))
    world = an_open_world(waiting, a_lease(waiting, "gpu0", 8 * GIB, state=state))
    hear(world, **node)
    assert held_mb(world) == 0
    assert the(world) == waiting


def test_memory_stays_quarantined_while_the_agent_still_knows_the_run() -> None:
    waiting = a_task("run", fence=Fence(1))
    world = an_open_world(waiting, a_lease(waiting, "gpu0", 8 * GIB, state=LeaseState.QUARANTINED))
    hear(world, ("run", 1))
    assert held_mb(world) == 8 * GIB


def test_an_agents_answer_does_not_change_other_nodes() -> None:
    waiting = a_task("run", fence=Fence(1))
    other = a_lease(waiting, "n2/gpu0", 8 * GIB, state=LeaseState.QUARANTINED)
    world = an_open_world(a_device("gpu0", "n2"), waiting, other)
    assert hear(world) == []


def test_a_victim_that_is_not_there_gives_its_bytes_to_the_pledge() -> None:
    high = a_task("high", gpu_mb=8 * GIB)
    pledge = a_pledge(high, "gpu0", 8 * GIB)
    world = an_open_world(a_stopping_run(StopReason.PREEMPT, freeing_for=high.id), high, pledge)
    hear(world)
    assert world.ledgers[key("gpu0")].reserved_free_mb(pledge) == 8 * GIB


def test_a_new_term_waits_for_every_agent() -> None:
    nodes: list[Node] = [a_node("n1"), a_node("n2", ready=False), a_node("n3", version=7)]
    world = a_world(*nodes)
    decision = take_over(world)
    assert decision is not None
    assert decision.nodes == (
        replace(nodes[0], ready=False, version=2),
        replace(nodes[2], ready=False, version=8),
    )
    commit(world, decision)
    assert take_over(world) is None


def test_a_node_is_entered_with_what_each_node_has_for_itself() -> None:
    world = World()
    the_device(world, node_custom=(("fpga", 2.0),))
    assert world.nodes[N1].custom == (("fpga", 2.0),)
    the_device(world, node_custom=(("fpga", 3.0),))
    assert world.nodes[N1] == a_node(custom=(("fpga", 3.0),), version=2)


def test_a_device_is_entered_with_the_rank_and_the_cost_of_its_kind() -> None:
    device = the_device(World(), kinds=(GpuKind("H100", 2000, Mib(500)),))
    assert (device.power, device.context_mb) == (2000, 500)
    assert the_device(World(), kinds=(GpuKind("A100", 624, Mib(500)),)).power == 0


def test_the_operators_labels_win_over_the_agents() -> None:
    world = World()
    agents = a_node(labels=(("disk", "ssd"), ("zone", "a")))
    seen = NodeReport(agents, (), (), NOW)
    nodes = {"n1": NodeRules(labels={"zone": "b"}), "n2": NodeRules(labels={"zone": "c"})}
    rules = InventoryRules("test", nodes=nodes)
    commit(world, reconcile(world, seen, NOW, Policy(), rules))
    assert world.nodes[N1].labels == (("disk", "ssd"), ("zone", "b"))
