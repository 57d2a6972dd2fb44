"""What would help a gang that waits, and when it is expected to start."""

from typing import Any

from gpubroker_server.core.admission.pools import apply_pool
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool, TenantPolicy
from gpubroker_server.core.domain.units import Mib, TaskId
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_demand, a_device, a_task, a_world, holding
from tests.core.expected import starting_in
from tests.core.gangs import a_cluster, a_gang, bundles
from tests.core.plans import whole

BIG = 60 * GIB
STATED = 100.0
"""Seconds for which runs of the builders have run."""


def advice(world: World, policy: Policy | None = None) -> Advice:
    gang = world.tasks[TaskId("new")]
    return advise(diagnose(survey_nodes(Draft(world), gang, policy or Policy(), NOW)))


def remedies_of(world: World, policy: Policy | None = None) -> dict[str, dict[str, Any]]:
    return {remedy.message: dict(remedy.change) for remedy in advice(world, policy).remedies}


def run(name: str, device: str, left: float | None = None, **fields: Any) -> Any:
    stated = None if left is None else STATED + left
    task = a_task(name, **{"gpu_mb": BIG, "priority": 95, "expected_seconds": stated, **fields})
    return holding(task, device)


def test_fewer_and_smaller_ranks_are_remedies_with_their_places() -> None:
    world = a_cluster(run("r", "n2/gpu1"), a_gang("new", *bundles(4, gpu_mb=BIG)))
    assert remedies_of(world) == {
        "with min_ranks at most 3, it starts now on n1/gpu0,1 and n2/gpu0": {"min_ranks": 3},
        "with gpu_mb at most 40320 (39.4 GiB) in each rank, it starts now on n1/gpu0,1": {
            "bundles": {"gpu_mb": 40320}
        },
        "with priority 96 or above, it preempts 1 run and starts on n1 and n2 within 30 s": {"priority": 96},
    }


def test_fewer_ranks_need_less_of_a_custom_resource() -> None:
    policy = Policy(custom_limits=(CustomLimit("licence", 3.0),))
    licence = (("licence", 1.0),)
    other = run("r", "n2/gpu1", priority=100, custom=licence)
    gang = a_gang("new", *bundles(3, gpu_mb=BIG, custom=licence), custom=(("licence", 3.0),))
    found = advice(a_cluster(other, gang), policy).remedies
    [fewer] = [remedy for remedy in found if dict(remedy.change) == {"min_ranks": 2}]
    assert fewer.task.demand.custom == (("licence", 2.0),)


def test_a_strategy_that_is_not_strict_is_a_remedy() -> None:
    pair = bundles(2, gpu_mb=BIG)
    runs = run("a", "n1/gpu1", priority=100), run("b", "n2/gpu1", priority=100)
    packed = a_cluster(*runs, a_gang("new", *pair, strategy="strict_pack"))
    assert {"strategy": "pack"} in remedies_of(packed).values()
    one = a_world(a_device("gpu0"), a_device("gpu1"), a_gang("new", *pair, strategy="strict_spread"))
    assert {"strategy": "spread"} in remedies_of(one).values()
    assert {"strategy": "pack"} not in remedies_of(
        a_cluster(*runs, a_gang("new", *bundles(3, gpu_mb=BIG)))
    ).values()


def test_wider_kinds_and_nodes_of_all_ranks_are_a_remedy() -> None:
    here = PlacementConstraints(kinds=("H100",), nodes=(("node", ("n1",)),))
    gang = a_gang("new", *bundles(2, gpu_mb=BIG, where=here), a_demand(cpu=1.0))
    devices = a_device("gpu0", "n1"), *(a_device(f"gpu{at}", "n2", kind="A100") for at in (0, 1))
    other = a_world(*devices, run("a", "n1/gpu0", priority=100), gang)
    assert {"bundles": {"kinds": [], "nodes": {}}} in remedies_of(other).values()


def test_a_gang_may_do_without_its_pool() -> None:
    lab = Pool("lab", kinds=("H100",), gpus=2)
    policy = Policy(pools=(lab,), custom_limits=(CustomLimit("pool:lab:gpus", 2.0),))
    demand = apply_pool(a_demand(bundles=bundles(2, gpu_mb=BIG)), "lab", "default", {}, policy, whole)
    other = run("a", "n1/gpu0", priority=100, slots=(("pool:lab:gpus", 1.0),))
    world = a_cluster(other, a_task("new", demand=demand))
    found = remedies_of(world, policy)
    assert {"pool": "", "bundles": {"kinds": []}} in found.values()
    assert {"min_ranks": 1} in found.values(), "the ranks that it needs count against the pool"
    gone = remedies_of(world, replace(policy, pools=())).values()
    assert {"pool": ""} in gone
    assert {"min_ranks": 1} not in gone


def test_a_gang_starts_when_as_many_runs_have_ended_as_it_needs() -> None:
    runs = run("a", "n1/gpu0", 30.0), run("b", "n1/gpu1", 50.0), run("c", "n2/gpu0", 90.0)
    world = a_cluster(*runs, run("d", "n2/gpu1"), a_gang("new", *bundles(2, gpu_mb=BIG)))
    found = advice(world)
    assert found.start == starting_in(50.0)
    assert not any(remedy.after for remedy in found.remedies), "no end alone would do"
    assert sorted(end.p50_seconds for end in found.free_in.values()) == [30.0, 50.0, 90.0]
    never = a_cluster(*runs, run("d", "n2/gpu1"), a_gang("new", *bundles(4, gpu_mb=BIG)))
    assert advice(never).start is None
    one_more = a_cluster(runs[0], run("d", "n2/gpu1"), a_gang("new", *bundles(3, gpu_mb=BIG)))
    assert [remedy.after.id for remedy in advice(one_more).remedies if remedy.after] == ["a"]


def quota(mb: int) -> Policy:
    return Policy(
        tenants=(TenantPolicy("default", guaranteed_mb=Mib(mb)), TenantPolicy("other", "lab", Mib(GIB)))
    )


def test_remedies_for_a_used_up_quota_are_its_rest_and_the_next_run_to_end() -> None:
    mine = run("mine", "n1/gpu0", 40.0)
    world = a_cluster(mine, a_task("new", gpu_mb=BIG))
    found = advice(world, quota(100 * GIB))
    assert found.start == starting_in(40.0)
    assert [(dict(r.change), r.after.id if r.after else "") for r in found.remedies] == [
        ({}, "mine"),
        ({"gpu_mb": 40 * GIB}, ""),
        ({"priority": 96}, ""),
    ]
    assert found.remedies[0].places is not None
    assert found.remedies[0].places[0].node in ("n1", "n2")


def test_a_task_ahead_takes_what_comes_back_of_a_shared_quota() -> None:
    parts = run("mine", "n1/gpu0", 40.0), a_task("new", gpu_mb=BIG)
    first, stranger = (
        a_task("first", gpu_mb=BIG, priority=60),
        a_task("first", gpu_mb=90 * GIB, tenant="other"),
    )
    assert not any(remedy.after for remedy in advice(a_cluster(*parts, first), quota(100 * GIB)).remedies)
    assert any(remedy.after for remedy in advice(a_cluster(*parts, stranger), quota(100 * GIB)).remedies)


def test_a_kind_that_counts_less_is_a_remedy_for_a_short_quota() -> None:
    parts = (
        a_device("gpu0", "n1"),
        a_device("gpu0", "n2", mb=40 * GIB, kind="A100"),
        a_device("gpu0", "n3", mb=20 * GIB, kind="T4"),
    )
    world = a_world(*parts, a_task("new", gpus=1))
    assert {"kinds": ["A100"]} in remedies_of(world, quota(50 * GIB)).values()
    gang = a_world(*parts, a_gang("new", *bundles(2, gpus=1), min_ranks=1))
    assert {"bundles": {"kinds": ["A100"]}} in remedies_of(gang, quota(50 * GIB)).values()
    assert {"kinds": ["T4"]} not in remedies_of(world, quota(10 * GIB)).values()
    large = a_world(*parts, a_task("new", gpu_mb=30 * GIB))
    assert not any("kinds" in change for change in remedies_of(large, quota(20 * GIB)).values())
