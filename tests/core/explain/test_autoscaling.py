"""What an autoscaler reads: what waiting tasks lack, what all together need, and what could be given back."""

from typing import Any

import pytest
from gpubroker.wire.fleet import Capacity, UnmetGroup
from gpubroker_server.core.domain.decisions import Decision, QueuePause
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, Seconds
from gpubroker_server.core.explain.autoscaling import (
    MAX_BUNDLES,
    NOTHING,
    AutoscalingDemand,
    DemandScope,
    autoscaling_demand,
    room_for_all,
)
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_demand, a_device, a_node, a_pledge, a_task, a_world, commit, holding
from tests.core.elastic import BIG, elastic, on_one_node
from tests.core.gangs import bundles

POLICY = Policy()


def waiting(id: str, seconds: float = 0.0, *, tenant: str = "default", **demand: Any) -> Task:
    return a_task(id, demand=a_demand(**demand), submitted_at=Instant(NOW - seconds), tenant=tenant)


def a_full_world(*parts: Any) -> World:
    """One node with one GPU of 80 GiB, all of it held."""
    run = holding(a_task("run", cpu=2.0, gpu_mb=70 * GIB), "gpu0", mb=80 * GIB)
    return a_world(a_node(cpu=8.0), a_device(), run, *parts)


def demand_of(world: World, policy: Policy = POLICY, **scope: Any) -> AutoscalingDemand:
    return autoscaling_demand(world, policy, NOW, DemandScope(**scope))


def only_group(found: AutoscalingDemand) -> UnmetGroup:
    [group] = found.unmet
    return group


def test_nothing_waits() -> None:
    found = demand_of(a_full_world())
    assert (found.unmet, found.tasks, found.limited_tasks, found.spare) == ((), 0, 0, ())
    assert found.used == Capacity(1, 80 * GIB, 2.0, 0)
    assert found.bundles == {(1.0, 2.0, 0): 1}


def test_parts_of_gpus_fill_whole_ones_and_the_longest_wait_counts() -> None:
    tasks = [waiting(f"t{n}", 10.0 * n, gpus=1, gpu_mb=40 * GIB, cpu=1.0, memory_mb=GIB) for n in range(3)]
    found = demand_of(a_full_world(*tasks))
    assert only_group(found) == UnmetGroup(2, 120 * GIB, 3.0, 3 * GIB, 3, 20.0, "", ())
    assert found.bundles == {(1.0, 2.0, 0): 1, (0.5, 1.0, GIB): 3}


def test_only_tasks_that_have_waited_long_enough_count() -> None:
    tasks = [waiting(f"t{n}", 10.0 * n, gpus=1) for n in range(3)]
    assert only_group(demand_of(a_full_world(*tasks), waited_seconds=Seconds(10.0))).tasks == 2
    assert demand_of(a_full_world(*tasks), waited_seconds=Seconds(30.0)).unmet == ()


def test_tasks_of_pools_and_kinds_are_told_apart_and_asked_for_alone() -> None:
    h100 = PlacementConstraints(kinds=("H100",))
    world = a_full_world(
        waiting("any", gpus=1),
        waiting("cpu", cpu=4.0),
        waiting("h100", gpus=2, where=h100, pool="lab"),
    )
    policy = Policy(pools=(Pool("lab", kinds=("H100",)),))
    found = demand_of(world, policy)
    assert [(group.pool, group.kinds, group.gpus) for group in found.unmet] == [
        ("", (), 1), ("lab", ("H100",), 2),
    ]  # fmt: skip
    assert found.lacking.cpu == pytest.approx(4.0 + 2 * a_demand().cpu)
    assert only_group(demand_of(world, policy, pool="lab")).tasks == 1
    assert [group.pool for group in demand_of(world, policy, kind="A100").unmet] == [""]
    assert len(demand_of(world, policy, kind="H100").unmet) == 2


def test_a_gang_counts_by_rank_and_kind() -> None:
    found = demand_of(a_full_world(waiting("gang", bundles=bundles(3, gpu_mb=60 * GIB))))
    assert (only_group(found).tasks, only_group(found).gpus) == (1, 3)


def test_tasks_for_which_memory_is_being_freed_lack_nothing() -> None:
    preemptor = waiting("preemptor", gpus=1, gpu_mb=40 * GIB)
    world = a_full_world(
        preemptor, a_pledge(preemptor, "gpu0", 40 * GIB), waiting("next", gpus=1, gpu_mb=40 * GIB)
    )
    assert only_group(demand_of(world)).tasks == 1


def test_what_a_limit_or_a_quota_keeps_back_no_node_would_help() -> None:
    limited = [waiting(f"l{n}", gpus=1, custom=(("licences", 1.0),)) for n in range(3)]
    policy = Policy(custom_limits=(CustomLimit("licences", 2.0),))
    found = demand_of(a_full_world(*limited), policy)
    assert (only_group(found).tasks, found.limited_tasks) == (2, 1)

    others = [waiting(f"q{n}", gpus=1, gpu_mb=30 * GIB, tenant="small") for n in range(3)]
    policy = Policy(tenants=(TenantPolicy("small", guaranteed_mb=Mib(40 * GIB)),))
    found = demand_of(a_full_world(*others), policy)
    assert (only_group(found).tasks, found.limited_tasks) == (1, 2)
    none = Policy(tenants=(TenantPolicy("small", guaranteed_mb=Mib(GIB)),))
    assert demand_of(a_full_world(*others), none) == demand_of(a_full_world(), none).__class__(
        (), 0, 3, Capacity(1, 80 * GIB, 2.0, 0), (), {(1.0, 2.0, 0): 1}
    )


def test_autoscaler_is_asked_for_a_bundle_per_run_and_per_waiting_task() -> None:
    part: dict[str, Any] = {"gpus": 1, "gpu_mb": 40 * GIB, "cpu": 1.0, "memory_mb": GIB}
    tasks = [waiting("a", **part), waiting("b", **part), waiting("none", cpu=0.0)]
    tasks.append(waiting("parts", gpus=3, gpu_mb=30 * GIB, cpu=0.0))
    assert room_for_all(demand_of(a_full_world(*tasks))) == [
        {"GPU": 0.5, "CPU": 1.0, "memory": 2.0**30},
        {"GPU": 1.0, "CPU": 2.0},
        {"GPU": 2.0},
        {"GPU": 0.5, "CPU": 1.0, "memory": 2.0**30},
    ]


def test_an_autoscaler_is_not_asked_for_more_bundles_than_it_can_plan_for() -> None:
    tasks = [waiting(f"t{n}", cpu=1.0) for n in range(MAX_BUNDLES + 10)]
    tasks.append(waiting("large", gpus=8, cpu=0.0))
    asked = room_for_all(demand_of(a_full_world(*tasks)))
    assert len(asked) == MAX_BUNDLES
    assert asked[:4] == [{"CPU": 1.0}, {"GPU": 1.0, "CPU": 2.0}, {"GPU": 8.0}, {"CPU": 1.0}]


def test_inferences_need_no_node() -> None:
    assert demand_of(a_full_world(waiting("ask", answered_by="llm"))).unmet == ()


def test_a_demand_of_no_known_device_counts_as_stated() -> None:
    world = a_world(a_node(), waiting("big", gpus=2, gpu_mb=100 * GIB))
    group = only_group(demand_of(world))
    assert (group.gpus, group.gpu_mb) == (2, 200 * GIB)


def test_nodes_that_nobody_uses_or_waits_for_can_be_given_back() -> None:
    free = a_node("n2", cpu=4.0), a_device("gpu1", "n2", kind="L4", mb=24 * GIB)
    found = demand_of(a_full_world(*free))
    [spare] = found.spare
    assert (spare.name, spare.kinds, spare.gpus, spare.gpu_mb, spare.cpu) == ("n2", ("L4",), 1, 24 * GIB, 4.0)
    assert demand_of(a_full_world(*free), kind="H100").spare == ()
    assert demand_of(a_full_world(*free), kind="L4").used == NOTHING, "the run is on another kind"
    assert demand_of(a_full_world(*free), kind="H100").used == Capacity(1, 80 * GIB, 2.0, 0)

    gang = waiting("gang", bundles=bundles(2, gpu_mb=20 * GIB))
    assert demand_of(a_full_world(*free, gang)).spare == (), "a rank of it could go there"
    assert len(demand_of(a_full_world(*free, waiting("big", gpus=1, gpu_mb=60 * GIB))).spare) == 1
    silent = a_node("n2", ready=False), free[1]
    assert demand_of(a_full_world(*silent)).spare == ()


def test_nodes_of_other_pools_are_not_asked_about() -> None:
    policy = Policy(pools=(Pool("lab", kinds=("L4",)), Pool("zone", nodes={"node": ("n1",)}), Pool("all")))
    free = a_node("n2", cpu=4.0), a_device("gpu1", "n2", kind="L4", mb=24 * GIB)
    world = a_full_world(*free)
    assert [spare.name for spare in demand_of(world, policy, pool="lab").spare] == ["n2"]
    assert demand_of(world, policy, pool="lab").used == NOTHING
    assert demand_of(world, policy, pool="zone").spare == ()
    assert demand_of(world, policy, pool="zone").used.gpus == 1
    assert demand_of(world, policy, pool="all") == demand_of(world, policy)


def test_a_label_without_a_limit_limits_nothing() -> None:
    wants: dict[str, Any] = {"gpu_mb": 70 * GIB, "slots": (("label:team=a", 1.0),)}
    found = demand_of(a_full_world(waiting("one", **wants), waiting("two", **wants)))
    assert (found.tasks, found.limited_tasks) == (2, 0)


def test_missing_ranks_of_an_elastic_gang_count_within_its_quota() -> None:
    """The gang is running."""

    def lacking(policy: Policy = POLICY, **scope: Any) -> AutoscalingDemand:
        return demand_of(gang.world, policy, **scope)

    gang = on_one_node(elastic(5))
    assert only_group(lacking()) == UnmetGroup(3, 3 * BIG, 3.0, 0, 1, 0.0, "", ())
    assert lacking().bundles[1.0, 1.0, 0] == 5
    assert lacking(waited_seconds=Seconds(1.0)).tasks == lacking(pool="lab").tasks == 0
    two = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(4 * BIG)),))
    assert (only_group(lacking(two)).gpus, lacking(two).limited_tasks) == (2, 0)
    none = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(2 * BIG)),))
    assert (lacking(none).unmet, lacking(none).limited_tasks) == ((), 1)
    gang.world.add_node(a_node("n2"))
    gang.world.add_device(a_device("gpu0", "n2"))
    assert lacking().spare == ()
    commit(gang.world, Decision("queue", "pause", paused=(QueuePause("tenant:default", gang.now, "ops"),)))
    assert (lacking().unmet, [node.name for node in lacking().spare]) == ((), ["n2"])


def test_gpu_node_is_spare_while_only_a_cpu_task_too_large_for_it_waits() -> None:
    found = demand_of(a_world(a_node(cpu=8.0), a_device(), waiting("large", cpu=9.0)))
    assert [node.name for node in found.spare] == ["n1"]
    assert (found.tasks, found.unmet[0].cpu) == (1, 9.0)
    assert demand_of(a_world(a_node(cpu=8.0), a_device(), waiting("small", cpu=8.0))).spare == ()


def test_lacking_gpus_are_summed_by_pool() -> None:
    demand = demand_of(a_full_world())
    assert demand.unmet_gpus() == {"": 0.0}
    unmet = tuple(
        UnmetGroup(gpus, 0, 0.0, 0, tasks=1, waiting_seconds=0.0, pool=pool, kinds=kinds)
        for pool, kinds, gpus in (("lab", ("H100",), 2), ("lab", (), 1), ("", (), 4))
    )
    assert replace(demand, unmet=unmet).unmet_gpus() == {"lab": 3.0, "": 4.0}
