"""Which gangs a submit refuses, and why a gang waits."""

from typing import Any

import pytest
from gpubroker.wire.policy import TaskMaximum
from gpubroker_server.core.admission.pools import apply_pool
from gpubroker_server.core.domain.decisions import Decision, QueuePause
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.reasons import Reason, Refusal
from gpubroker_server.core.domain.units import Instant, Mib, TaskId
from gpubroker_server.core.explain.explain import Explanation, explain
from gpubroker_server.core.explain.possible import check_demand
from gpubroker_server.core.world.background import BackgroundRoom
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_node,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    submit,
)
from tests.core.elastic import on_one_node, plan
from tests.core.gangs import Agents, a_cluster, a_gang, admit_all, bundles
from tests.core.plans import whole

BIG = 60 * GIB


def refused(world: World, *parts: Demand, policy: Policy | None = None, **fields: Any) -> Refusal | None:
    demand = Demand(bundles=parts, **fields)
    devices = [ledger.device for ledger in world.ledgers.values()]
    return check_demand(demand, devices, world.nodes.values(), policy or Policy())


def why(refusal: Refusal | None) -> str:
    assert refusal is not None
    assert refusal.field == "bundles"
    return refusal.message


def test_a_gang_that_fits_an_empty_cluster_is_let_in() -> None:
    assert refused(a_cluster(), *bundles(4, gpus=1)) is None


def test_a_plain_demand_is_judged_as_it_is() -> None:
    world = a_cluster()
    devices = [ledger.device for ledger in world.ledgers.values()]
    refusal = check_demand(Demand(gpus=3), devices, world.nodes.values(), Policy())
    assert refusal is not None
    assert refusal.field == "gpus"


def test_the_rank_that_could_never_run_is_named() -> None:
    world = a_cluster()
    large = (*bundles(1, gpus=1), *bundles(1, gpu_mb=90 * GIB))
    assert why(refused(world, *large)).startswith("rank 1: 90.0 GiB")
    assert why(refused(world, *bundles(2, gpus=3), *bundles(1, gpus=1))).startswith("ranks 0 to 1: 3 GPUs")
    apart = (*bundles(1, gpus=3), *bundles(1, gpus=1), *bundles(1, gpus=3))
    assert why(refused(world, *apart)).startswith("2 ranks from rank 0 on: 3 GPUs")


def test_ranks_that_never_fit_at_once_are_counted() -> None:
    message = why(refused(a_cluster(), *bundles(6, gpus=1)))
    assert "6 ranks never fit at once: even when empty the cluster has room for 4" in message
    assert "none for rank 4" in message


def test_of_an_elastic_gang_only_those_must_fit_that_it_needs() -> None:
    assert refused(a_cluster(), *bundles(6, gpus=1), min_ranks=4) is None
    message = why(refused(a_cluster(), *bundles(6, gpus=1), min_ranks=5))
    assert message.startswith("the 5 ranks it needs at least never fit at once")


@pytest.mark.parametrize(
    ("strategy", "says"),
    [("strict_pack", "on one node (strict_pack)"), ("strict_spread", "each on a node of its own")],
)
def test_a_strategy_that_can_never_be_kept_is_named(strategy: str, says: str) -> None:
    message = why(refused(a_cluster(), *bundles(3, gpus=1), strategy=strategy))
    assert f"3 ranks never fit {says}" in message
    assert "room for 2" in message


def test_the_most_that_a_task_may_have_is_for_all_ranks_together() -> None:
    policy = Policy(maximum=TaskMaximum(gpus=3))
    message = why(refused(a_cluster(), *bundles(4, gpus=1), policy=policy))
    assert message.startswith("all ranks together: gpus 4")


def test_while_no_node_is_known_every_number_of_ranks_passes() -> None:
    assert check_demand(Demand(bundles=bundles(100, gpus=1)), (), (), Policy()) is None


def test_a_pool_holds_for_every_rank_and_counts_their_sum() -> None:
    lab = Pool("lab", kinds=("H100",), gpus=4)
    policy = Policy(pools=(lab,), custom_limits=(CustomLimit("pool:lab:gpus", 4.0),))
    demand = apply_pool(
        Demand(bundles=(*bundles(2, gpus=1), *bundles(1, cpu=1.0))), "lab", "t", {}, policy, whole
    )
    assert isinstance(demand, Demand)
    assert demand.slots == (("pool:lab:gpus", 2.0),)
    assert [bundle.where.kinds for bundle in demand.bundles] == [("H100",), ("H100",), ()]
    strange = bundles(1, gpus=1, where=PlacementConstraints(kinds=("A100",)))
    wrong = apply_pool(Demand(bundles=strange), "lab", "t", {}, policy, whole)
    assert isinstance(wrong, Refusal)
    assert wrong.field == "bundles"


def explained(world: World, policy: Policy | None = None) -> Explanation:
    return explain(world, TaskId("gang"), policy or Policy(), NOW)


def test_the_first_rank_without_room_is_named_and_what_it_lacks() -> None:
    run = holding(a_task("run", gpu_mb=BIG, priority=90), "n2/gpu1")
    found = explained(a_cluster(run, a_gang("gang", *bundles(4, gpu_mb=BIG))))
    assert found.reason is Reason.FRAGMENTED
    assert "room for 3 of the 4 ranks that must start together; rank 3: needs 60.0 GiB" in found.message
    assert {str(device.finding.verdict) for device in found.devices} == {"no_room"}


def test_each_rank_has_a_place_or_a_blocker() -> None:
    run = holding(a_task("run", gpu_mb=BIG, priority=90), "n2/gpu1")
    parts = (*bundles(3, gpu_mb=BIG), *bundles(2, gpu_mb=70 * GIB), *bundles(2, cpu=65.0))
    world = a_cluster(run, a_gang("gang", *parts[:5], min_ranks=4))
    ranks = explained(world).ranks
    assert [one.place.node if one.place else None for one in ranks] == ["n1", "n1", "n2", None, None]
    assert ranks[3].blocker is not None
    assert ranks[3].blocker.message.startswith("needs 70.0 GiB on one GPU")
    assert ranks[4].blocker is None, "it can start without this one"
    fits = explained(a_cluster(a_gang("gang", *bundles(6, gpu_mb=BIG), min_ranks=2)))
    assert [one.place is not None for one in fits.ranks] == [True] * 4 + [False] * 2


def test_at_most_eight_distinct_ranks_without_room_are_evaluated() -> None:
    runs = [holding(a_task(f"r{at}", gpu_mb=70 * GIB), f"n{at // 2 + 1}/gpu{at % 2}") for at in range(4)]
    parts = [bundles(1, gpu_mb=(9 + at) * GIB)[0] for at in range(12)]
    ranks = explained(a_cluster(*runs, a_gang("gang", *parts, a_demand(gpu_mb=9 * GIB)))).ranks
    assert [one.place is not None for one in ranks] == [True] * 2 + [False] * 10 + [False]
    said = [one.blocker.message for one in ranks if one.blocker is not None]
    assert sum(message.startswith("needs") for message in said) == 8
    assert said[-1] == "not evaluated: ranks before it have no room"


def test_a_later_rank_is_judged_by_itself() -> None:
    runs = [holding(a_task(f"r{at}", gpu_mb=70 * GIB), f"n{at // 2 + 1}/gpu{at % 2}") for at in range(4)]
    parts = (a_demand(gpu_mb=20 * GIB), a_demand(cpu=1.0), a_demand(gpu_mb=20 * GIB), a_demand(gpu_mb=GIB))
    ranks = explained(a_cluster(*runs, a_gang("gang", *parts))).ranks
    assert [one.place is not None for one in ranks] == [False, True, False, True]
    strict = explained(a_cluster(*runs, a_gang("gang", *parts[:2], strategy="strict_spread"))).ranks
    assert [one.place is not None for one in strict] == [False] * 2


def test_a_gang_without_room_for_any_rank_says_so() -> None:
    runs = [holding(a_task(name, gpu_mb=BIG), device) for name, device in (("a", "gpu0"), ("b", "gpu1"))]
    world = a_world(a_device("gpu0"), a_device("gpu1"), *runs, a_gang("gang", *bundles(2, gpu_mb=BIG)))
    assert explained(world).message.startswith("there is room for none of the 2 ranks")


def test_a_gang_that_waits_because_of_its_strategy_says_so() -> None:
    run = holding(a_task("run", gpu_mb=BIG), "n2/gpu1")
    gang = a_gang("gang", *bundles(2, gpu_mb=BIG), strategy="strict_pack")
    world = a_cluster(run, holding(a_task("other", gpu_mb=BIG), "n1/gpu1"), gang)
    found = explained(world)
    assert found.reason is Reason.FRAGMENTED
    assert "rank 1: no place beside the others on one node (strict_pack)" in found.message


def test_a_gang_with_room_waits_for_the_next_cycle() -> None:
    assert explained(a_cluster(a_gang("gang", *bundles(2, gpu_mb=BIG)))).reason is Reason.PENDING_EVALUATION


def test_a_gang_that_can_no_longer_run_says_why() -> None:
    assert explained(a_world(a_gang("gang", *bundles(2, gpu_mb=BIG)))).reason is Reason.EXCEEDS_CAPACITY
    strange = a_gang("gang", *bundles(1, gpus=1, where=PlacementConstraints(kinds=("A100",))))
    assert explained(a_world(strange)).reason is Reason.NO_MATCHING_DEVICE


def test_a_gang_waits_for_the_quota_of_all_the_ranks_it_needs() -> None:
    policy = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(200 * GIB)),))
    run = holding(a_task("run", gpu_mb=40 * GIB), "n1/gpu0")
    found = explained(a_cluster(run, a_gang("gang", *bundles(3, gpu_mb=BIG), min_ranks=3)), policy)
    assert found.reason is Reason.QUOTA_EXHAUSTED
    assert found.quota is not None
    assert (found.quota.counts_mb, found.quota.left_mb) == (180 * GIB, 160 * GIB)
    assert "counts 180.0 GiB" in found.message
    assert [one.place is not None for one in found.ranks] == [True] * 3


def test_a_limit_over_all_ranks_is_a_blocker_of_its_own() -> None:
    policy = Policy(custom_limits=(CustomLimit("licence", 3.0),))
    run = holding(a_task("run", custom={"licence": 2.0}), node="n1")
    gang = a_gang("gang", *bundles(2, gpu_mb=BIG, custom={"licence": 1.0}), custom=(("licence", 2.0),))
    found = explained(a_cluster(run, gang), policy)
    assert found.reason is Reason.CONCURRENCY_LIMITED
    assert "licence" in found.message


def test_a_gang_that_waits_for_its_victims_names_them() -> None:
    runs = [holding(a_task(f"r{at}", gpu_mb=BIG, priority=10), f"{node}/gpu{at}") for node, at in
            (("n1", 0), ("n1", 1), ("n2", 0))]  # fmt: skip
    world = a_cluster(*runs)
    submit(world, a_gang("gang", *bundles(3, gpu_mb=BIG), priority=80))
    admit_all(world, now=Instant(NOW + 1.0))
    found = explained(world)
    assert found.reason is Reason.WAITING_FOR_PREEMPTION
    assert "are pledged to it; it waits for" in found.message


def test_an_active_gang_says_where_it_is_and_how_far() -> None:
    devices = [a_device("gpu0", f"n{at}") for at in range(1, 6)]
    world = a_world(*devices, a_node("n9"), a_gang("gang", *bundles(5, gpu_mb=BIG)))
    admit_all(world)
    gang = Agents(world)
    gang.tell(gang.ready(1))
    assert explained(world).message == "admitted to n1, n2, n3 and 2 more, 1 of its 5 ranks ready"
    gang.tell(*(gang.ready(rank) for rank in (0, 2, 3, 4)))
    assert explained(world).message == "running on n1, n2, n3 and 2 more, 5 ranks for 0 s"


def test_running_elastic_gang_says_why_ranks_are_missing_and_what_helps() -> None:
    gang = on_one_node()
    lack = "2 of its 4 ranks are missing and join when there is room that no waiting task can use"

    def told(policy: Policy | None = None) -> str:
        gang.world.measure(a_sample(device, gang.now) for device in gang.world.ledgers)
        return explain(gang.world, gang.id, policy or Policy(), gang.now).message.partition("; ")[2]

    assert (
        told() == f"{lack}; bundle 2: needs 60.0 GiB on one GPU; the largest free block is 20.0 GiB (n1/gpu1)"
    )
    poor = Policy(tenants=(TenantPolicy("default", guaranteed_mb=Mib(2 * BIG)),))
    assert told(poor).startswith(f"{lack}; bundle 2 counts 60.0 GiB against the quota of default")
    gang.world.add_node(a_node("n2"))
    gang.world.add_device(a_device("gpu0", "n2"))
    assert told().startswith(f"{lack}; there is some now")
    gang.world.control(BackgroundRoom({"all": 0}, dict.fromkeys(gang.world.nodes, ("all",))), {})
    assert "background and idle work may take no more GPU memory now on n1, n2" in told()
    assert plan(gang) == []
    gang.world.control(BackgroundRoom(), {})
    rest = QueuePause("tenant:default", gang.now, "ops", "a rest")
    commit(gang.world, Decision("queue", "pause", paused=(rest,)))
    assert told() == f"{lack}; tenant default was paused 0 s ago (a rest); it starts nothing until resumed"
    gang.tell(gang.ended(1))
    assert told() == ""
