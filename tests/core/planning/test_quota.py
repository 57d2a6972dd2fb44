"""What tenants may hold, and what they may borrow."""

from typing import Any

import pytest
from gpubroker_server.core.admission.feasibility import check_quota
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import members_of
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.explain.blockers import is_short
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants import quota
from gpubroker_server.core.planning.tenants.quota import (
    Allowance,
    QuotaNeeds,
    Quotas,
    cohort_holdings,
)
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_node,
    a_pledge,
    a_task,
    a_world,
    commit,
    holding,
    let_go,
)
from tests.core.gangs import a_gang, bundles

POLICY = Policy(
    tenants=(
        TenantPolicy("acme", "lab", Mib(20)),
        TenantPolicy("beta", "lab", Mib(30), borrow_mb=Mib(10)),
        TenantPolicy("solo", guaranteed_mb=Mib(25)),
        TenantPolicy("*", "lab", Mib(0)),
        TenantPolicy("free"),
    )
)


def a_cluster(*parts: Any) -> World:
    return a_world(a_node(), a_device("gpu0", mb=100), a_device("gpu1", mb=100), *parts)


def started(world: World) -> list[str]:
    return sorted(
        d.subject for d in plan_cycle(world, POLICY, NOW, budget=10_000).decisions if d.why == "admit"
    )


def of(tenant: str, count: int, mb: int = 10) -> list[Any]:
    return [a_task(f"{tenant}{n}", tenant=tenant, gpu_mb=mb) for n in range(count)]


def test_a_tenant_takes_what_it_is_guaranteed_and_no_more() -> None:
    assert started(a_cluster(*of("solo", 5))) == ["solo0", "solo1"]


def test_in_a_cohort_a_tenant_borrows_what_others_leave() -> None:
    assert started(a_cluster(*of("acme", 9))) == [f"acme{n}" for n in range(5)]


def test_a_tenant_borrows_no_more_than_its_limit() -> None:
    assert started(a_cluster(*of("beta", 9))) == [f"beta{n}" for n in range(4)]


def test_who_is_guaranteed_nothing_lives_on_what_is_left() -> None:
    world = a_cluster(holding(a_task("run", tenant="acme", gpu_mb=40), "gpu0"), *of("guest", 5))
    assert started(world) == ["guest0"]


def test_a_guarantee_is_granted_though_others_have_borrowed_it() -> None:
    world = a_cluster(holding(a_task("run", tenant="acme", gpu_mb=50), "gpu0"), *of("beta", 5))
    assert started(world) == ["beta0", "beta1", "beta2"]


def test_who_has_no_quota_is_not_limited() -> None:
    assert len(started(a_cluster(*of("free", 20)))) == 20


def test_what_is_not_confirmed_to_be_free_still_counts() -> None:
    world = a_cluster(holding(a_task("run", tenant="solo", gpu_mb=20), "gpu0"), *of("solo", 1))
    assert started(world) == []
    let_go(world, "run", requeue=False)
    assert started(world) == ["solo0"]


def test_what_is_being_freed_for_a_tenants_task_counts_for_its_others() -> None:
    waits = a_task("waits", tenant="solo", gpu_mb=20, priority=60)
    world = a_cluster(waits, a_pledge(waits, "gpu0", 20), *of("solo", 1))
    quotas = Quotas(Draft(world), POLICY)
    assert quotas.of("solo", 50) == Allowance(20, 25, 5)
    assert quotas.of("solo", 60, waits.id) == Allowance(0, 25, 25)
    assert quotas.of("solo", 61) == Allowance(0, 25, 25)


def test_a_task_with_pledges_waits_while_its_tenant_has_no_quota_left() -> None:
    waits = a_task("waits", tenant="solo", gpu_mb=20)
    run = holding(a_task("run", tenant="solo", gpu_mb=20), "gpu1")
    world = a_cluster(waits, a_pledge(waits, "gpu0", 20), run)
    assert started(world) == []
    let_go(world, "run", requeue=False)
    assert started(world) == ["waits"]


def test_a_task_without_gpus_needs_no_quota() -> None:
    world = a_cluster(
        holding(a_task("run", tenant="solo", gpu_mb=25), "gpu0"), a_task("cpu", tenant="solo", cpu=1.0)
    )
    assert started(world) == ["cpu"]


def test_a_task_counts_what_it_takes_on_the_largest_device_it_may_use() -> None:
    world = a_world(a_device("gpu0", mb=80, kind="big"), a_device("gpu1", mb=40, kind="small", context_mb=2))
    needs = QuotaNeeds()
    assert needs.of(world, a_demand(gpus=1)) == 80
    assert needs.of(world, a_demand(gpus=2, gpu_mb=10)) == 24
    assert needs.of(world, a_demand(gpu_mb=100)) == 0
    world.add_device(a_device("gpu2", mb=160, kind="huge"))
    assert needs.of(world, a_demand(gpus=1)) == 160


def test_the_wait_for_quota_is_explained_in_figures() -> None:
    policy = Policy(
        tenants=(TenantPolicy("solo", guaranteed_mb=Mib(25 * GIB)), TenantPolicy("acme", "lab", Mib(GIB)))
    )
    [solo], [acme] = of("solo", 1, mb=6 * GIB), of("acme", 1, mb=2 * GIB)
    world = a_world(holding(a_task("run", tenant="solo", gpu_mb=20 * GIB), "gpu0"), solo, acme)
    told = explain(world, solo.id, policy, NOW)
    assert told.reason is Reason.QUOTA_EXHAUSTED
    assert (
        "counts 6.0 GiB against the quota of solo, which holds 20.0 GiB, is guaranteed 25.0 GiB, and"
        in told.message
    )
    assert "may take 5.0 GiB more" in told.message
    other = explain(world, acme.id, policy, NOW)
    assert "with what cohort lab lends" in other.message
    assert told.quota is not None
    assert other.quota is not None
    assert (told.quota.borrowed_mb, told.quota.lent_mb) == (0, 0)
    assert (other.quota.counts_mb, other.quota.left_mb) == (2 * GIB, GIB)


def test_borrowed_memory_and_memory_that_could_be_borrowed_are_separate() -> None:
    world = a_cluster(holding(a_task("run", tenant="acme", gpu_mb=30), "gpu0"), *of("acme", 1))
    told = explain(world, TaskId("acme0"), POLICY, NOW).quota
    assert told is not None
    assert (told.used_mb, told.guaranteed_mb, told.left_mb) == (30, 20, 20)
    assert (told.borrowed_mb, told.lent_mb, is_short(told)) == (10, 20, False)


@pytest.mark.parametrize(
    ("tenant", "most"), [("acme", 50), ("beta", 40), ("solo", 25), ("guest", 50), ("free", None)]
)
def test_the_most_that_a_tenant_could_ever_have(tenant: str, most: int | None) -> None:
    assert POLICY.most_mb(tenant) == most


def test_what_could_never_be_had_is_refused_with_figures() -> None:
    assert check_quota(a_demand(gpu_mb=25), 25, "solo", POLICY) is None
    assert check_quota(a_demand(gpu_mb=2**20), 2**20, "free", POLICY) is None
    refusal = check_quota(a_demand(gpus=1), 80, "solo", POLICY)
    assert refusal is not None
    assert (refusal.code, refusal.field) == ("exceeds-quota", "gpus")
    assert "counts 0.1 GiB" in refusal.message
    assert "tenant solo may have 0.0 GiB at most" in refusal.message


def test_quota_that_comes_back_is_given_in_the_next_cycle() -> None:
    world = a_cluster(holding(a_task("run", tenant="solo", gpu_mb=20), "gpu0"), *of("solo", 2))
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    let_go(world, "run", requeue=False)
    assert started(world) == ["solo0", "solo1"]


def test_elastic_gang_counts_its_required_ranks_and_grows_within_its_quota() -> None:
    gang = a_gang("gang", *bundles(4, gpu_mb=10), tenant="solo", min_ranks=1)
    world = a_cluster(gang)
    assert QuotaNeeds().of(world, gang.demand) == 10
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert len(members_of(world.tasks[gang.id])) == 2
    assert world.accounts.held_mb("solo") == 20
    free = a_gang("gang", *bundles(4, gpu_mb=10), tenant="free", min_ranks=1)
    world = a_cluster(free)
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert len(members_of(world.tasks[free.id])) == 4


def test_a_gang_that_may_not_have_the_ranks_it_needs_waits() -> None:
    assert started(a_cluster(a_gang("gang", *bundles(4, gpu_mb=10), tenant="solo", min_ranks=3))) == []
    assert started(a_cluster(a_gang("gang", *bundles(3, gpu_mb=10), tenant="solo"))) == []
    assert started(a_cluster(a_gang("gang", *bundles(2, gpu_mb=10), tenant="solo"))) == ["gang"]


def test_what_demands_count_is_forgotten_when_there_are_too_many_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quota, "MAX_NEEDS", 2)
    world, needs = a_world(a_device(mb=80)), QuotaNeeds()
    sizes = (10, 20, 30, 20)
    assert [needs.of(world, a_demand(gpu_mb=size)) for size in sizes] == list(sizes)
    assert len(needs.known) == 2


def test_a_task_that_names_its_gpus_counts_as_much_as_others() -> None:
    world = a_world(a_device("gpu0", mb=80), a_device("gpu1", mb=80), a_device("gpu2", mb=80))
    for uuid in ("gpu0", "gpu1", "gpu2"):
        assert QuotaNeeds().of(world, a_demand(gpu_mb=20, where=PlacementConstraints(devices=(uuid,)))) == 20


OVERDRAWN = Policy(
    tenants=(TenantPolicy("acme", "lab", Mib(20 * GIB)), TenantPolicy("beta", "lab", Mib(30 * GIB))),
)


def test_overdrawn_cohort_is_explained_by_the_tenants_that_borrowed() -> None:
    [lab] = cohort_holdings({"acme": 20 * GIB, "beta": 45 * GIB, "free": 90 * GIB}, OVERDRAWN)
    assert (lab.name, lab.guaranteed_mb, lab.held_mb) == ("lab", 50 * GIB, 65 * GIB)
    assert lab.message is not None
    assert lab.message.startswith("cohort lab holds 15.0 GiB more than the 50.0 GiB that its members")
    assert "beta 15.0 GiB borrowed" in lab.message


@pytest.mark.parametrize("held", [{}, {"acme": 20}, {"acme": 50}, {"beta": 40, "other": 10}])
def test_a_cohort_within_its_guarantees_needs_no_explanation(held: dict[str, int]) -> None:
    [lab] = cohort_holdings(held, POLICY)
    assert (lab.held_mb, lab.message) == (sum(held.values()), None)
