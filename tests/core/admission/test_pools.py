"""Pools that tasks name, and limits of how many run at once."""

from typing import Any

import pytest
from gpubroker_server.core.admission.feasibility import check
from gpubroker_server.core.admission.pools import apply_pool, largest_share, reapply_pool, without_pool
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool
from gpubroker_server.core.domain.reasons import Reason, Refusal
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import plan_cycle

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_task, a_world, commit, let_go

LAB = Pool("lab", kinds=("A100", "H100"), nodes={"zone": ("a", "b")}, fractions=False, gpus=4, cpu=8.0)
SHARE = Pool("share", gpu_mb=20 * GIB)
SCRATCH = Pool("scratch", custom={"storage_gb": 500.0})
POLICY = Policy(
    custom_limits=(
        CustomLimit("label:run=*", 1.0),
        CustomLimit("label:team=vision", 2.0),
        CustomLimit("pool:scratch:custom/storage_gb", 500.0),
        CustomLimit("pool:share:gpu_mb", 20.0 * GIB),
        CustomLimit("storage_gb", 2000.0),
        CustomLimit("tenant:*", 2.0),
        CustomLimit("tenant:acme", 1.0),
    ),
    pools=(LAB, SCRATCH, SHARE),
)


def share(demand: Demand) -> float:
    return largest_share(demand, (a_device("gpu0", mb=80 * GIB), a_device("gpu1", mb=40 * GIB)))


def settle(pool: str = "", tenant: str = "acme", labels: Any = (), **demand: Any) -> Demand:
    found = apply_pool(a_demand(**demand), pool, tenant, dict(labels), POLICY, share)
    assert isinstance(found, Demand), found
    return found


def refused(pool: str, **demand: Any) -> Refusal:
    found = apply_pool(a_demand(**demand), pool, "acme", {}, POLICY, share)
    assert isinstance(found, Refusal)
    return found


def test_a_task_counts_against_the_limits_that_there_are_for_it() -> None:
    labels = {"run": "7", "team": "vision", "other": "x"}
    assert settle(labels=labels, cpu=1.0).slots == (
        ("label:run=7", 1.0),
        ("label:team=vision", 1.0),
        ("tenant:acme", 1.0),
    )
    assert settle(tenant="b", cpu=1.0).slots == (("tenant:b", 1.0),)
    assert apply_pool(a_demand(cpu=1.0), "", "acme", {}, Policy(), share) == a_demand(cpu=1.0)


def test_a_pool_has_amounts_of_custom_resources_too() -> None:
    demand = settle("scratch", tenant="b", cpu=1.0, custom=(("fpga", 1.0), ("storage_gb", 300.0)))
    assert demand.slots == (("pool:scratch:custom/storage_gb", 300.0), ("tenant:b", 1.0))
    too_much = settle("scratch", tenant="b", cpu=1.0, custom=(("storage_gb", 600.0),))
    refusal = check(too_much, [a_device()], [a_node()], POLICY)
    assert refusal is not None
    assert "600 of the pool's storage_gb (pool scratch) exceed the limit of 500" in refusal.message


def test_what_a_task_says_and_what_its_pool_says_must_both_hold() -> None:
    demand = settle(
        "lab", gpus=2, cpu=3.0, where=PlacementConstraints(nodes=(("disk", ("ssd",)), ("zone", ("b", "c"))))
    )
    assert demand.where == PlacementConstraints(kinds=LAB.kinds, nodes=(("disk", ("ssd",)), ("zone", ("b",))))
    assert demand.pool == "lab"
    assert demand.slots == (("pool:lab:cpu", 3.0), ("pool:lab:gpus", 2.0), ("tenant:acme", 1.0))
    assert settle("lab", gpus=1, where=PlacementConstraints(kinds=("H100",))).where.kinds == ("H100",)
    assert settle("share", gpus=2, gpu_mb=GIB).slots[0] == ("pool:share:gpu_mb", 2.0 * GIB)


@pytest.mark.parametrize(
    ("pool", "demand", "field", "said"),
    [
        ("nowhere", {"cpu": 1.0}, "pool", "there is no pool 'nowhere'; configured are: lab, scratch, share"),
        (
            "lab",
            {"gpus": 1, "where": PlacementConstraints(kinds=("L4",))},
            "kinds",
            "has no L4; its kinds are A100, H100",
        ),
        (
            "lab",
            {"cpu": 1.0, "where": PlacementConstraints(nodes=(("zone", ("c",)),))},
            "nodes",
            "its nodes are zone=a or b",
        ),
        ("lab", {"gpu_mb": GIB}, "gpu_mb", "whole GPUs only"),
        ("lab", {"gpu_fraction": 0.5}, "gpu_fraction", "whole GPUs only"),
        ("share", {"gpus": 1}, "gpu_mb", "state the size with gpu_mb"),
    ],
)
def test_a_pool_refuses_what_it_does_not_give(
    pool: str, demand: dict[str, Any], field: str, said: str
) -> None:
    refusal = refused(pool, **demand)
    assert (refusal.code, refusal.field) == ("pool-mismatch", field)
    assert said in refusal.message


def test_more_than_a_pool_has_is_refused() -> None:
    demand = settle("share", gpus=3, gpu_mb=10 * GIB)
    refusal = check(demand, [a_device(f"gpu{i}") for i in range(3)], [a_node()], POLICY)
    assert refusal is not None
    assert "of the pool's gpu_mb (pool share) exceed the limit" in refusal.message


def test_no_more_tasks_run_at_once_than_the_limit_says() -> None:
    demand = settle(cpu=1.0)
    other = settle(tenant="b", cpu=1.0)
    tasks = [a_task(f"a{i}", tenant="acme", demand=demand) for i in range(2)]
    tasks += [a_task(f"b{i}", tenant="b", demand=other) for i in range(3)]
    world = a_world(a_node(), *tasks)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    running = sorted(task.id for task in world.tasks.values() if task.state is TaskState.ADMITTED)
    assert running == ["a0", "b0", "b1"]
    told = explain(world, TaskId("a1"), POLICY, NOW)
    assert told.reason is Reason.CONCURRENCY_LIMITED
    assert told.message == "the limit of 1 for the running tasks of tenant acme is reached"


def test_the_next_one_starts_when_one_has_left() -> None:
    tasks = [a_task(f"a{i}", tenant="acme", demand=settle(cpu=1.0)) for i in range(2)]
    world = a_world(a_node(), *tasks)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    let_go(world, "a0", requeue=False)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert world.tasks[TaskId("a1")].state is TaskState.ADMITTED


def test_a_limit_that_is_gone_limits_nothing() -> None:
    tasks = [a_task(f"a{i}", tenant="acme", demand=settle(cpu=1.0)) for i in range(2)]
    world = a_world(a_node(), *tasks)
    assert len(plan_cycle(world, Policy(), NOW).decisions) == 2


PARTS = Pool("parts", gpus=1)
PARTS_POLICY = Policy(pools=(PARTS,), custom_limits=(CustomLimit("pool:parts:gpus", 1.0),))


@pytest.mark.parametrize(
    ("demand", "counts"),
    [
        ({"gpus": 2}, 2.0),
        ({"gpu_mb": 10 * GIB, "exclusive": True}, 1.0),
        ({"gpu_fraction": 0.25}, 0.25),
        ({"gpu_fraction": 0.25, "gpus": 2}, 0.5),
        ({"gpu_mb": 10 * GIB}, 0.25),
        ({"gpu_mb": 60 * GIB}, 0.75),
        ({"gpu_mb": 10 * GIB, "where": PlacementConstraints(min_device_mb=Mib(80 * GIB))}, 0.125),
        ({"gpu_mb": 200 * GIB}, 1.0),
    ],
)
def test_a_pools_gpus_count_shares_of_the_smallest_gpu_that_a_task_may_use(
    demand: dict[str, Any], counts: float
) -> None:
    found = apply_pool(a_demand(**demand), "parts", "acme", {}, PARTS_POLICY, share)
    assert isinstance(found, Demand)
    assert found.slots == (("pool:parts:gpus", counts),)
    again = reapply_pool(found, PARTS_POLICY, share)
    assert again == found


def test_as_many_tasks_run_in_a_pool_as_their_shares_fill_its_gpus() -> None:
    fleet = [a_device(f"gpu{index}", mb=40 * GIB) for index in range(4)]
    demand = apply_pool(a_demand(gpu_mb=10 * GIB), "parts", "acme", {}, PARTS_POLICY, share)
    assert isinstance(demand, Demand)
    world = a_world(*fleet, *(a_task(f"t{n}", demand=demand) for n in range(6)))
    commit(world, plan_cycle(world, PARTS_POLICY, NOW, budget=10_000).decisions)
    assert len(world.active) == 4


def test_a_gang_counts_what_each_rank_takes_of_its_pool() -> None:
    one, two = a_demand(gpus=1, cpu=1.0), a_demand(gpu_mb=10 * GIB, cpu=2.0)
    gang = Demand(bundles=(one, two, two), min_ranks=2)
    found = apply_pool(gang, "lab2", "acme", {}, GANGS, share)
    assert isinstance(found, Demand)
    assert found.slots == (("pool:lab2:cpu", 3.0), ("pool:lab2:gpus", 1.25))
    assert found.bundles[0].slots == (("pool:lab2:cpu", 1.0), ("pool:lab2:gpus", 1.0))
    assert found.bundles[2].slots == (("pool:lab2:cpu", 2.0), ("pool:lab2:gpus", 0.25))
    outside, change = without_pool(found, GANGS)
    assert (outside, change) == (gang, {})


GANGS = Policy(pools=(Pool("lab2", cpu=9.0, gpus=4),))
