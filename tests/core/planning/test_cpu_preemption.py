"""What a critical task that lacks CPU, host memory or a custom resource, and no GPU memory, may stop."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.lease import PledgeEnd
from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Move
from gpubroker_server.core.domain.units import Instant, NodeName, TaskId, node_key
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.blockers import room_blockers
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    Holding,
    a_device,
    a_node,
    a_task,
    a_world,
    commit,
    holding,
    let_go,
    submit,
)
from tests.core.gangs import a_gang, bundles, where
from tests.core.planning.test_cycle import cycle, ends, started, stopped

LICENCES = Policy(
    custom_limits=(CustomLimit("licence", 2.0), CustomLimit("seat", 1.0, priority_threshold=99))
)


def a_run(name: str, node: str = "n1", priority: int = 10, **demand: Any) -> Holding:
    return holding(a_task(name, priority=priority, **demand), node=node)


def two_runs(*others: Any, **demand: Any) -> World:
    """A node of 8 CPUs, without GPUs, that two runs fill."""
    node = a_node("n1", cpu=8.0, memory_mb=8 * GIB)
    each = {"cpu": 4.0, "memory_mb": 4 * GIB, **demand}
    return a_world(node, a_run("low0", **each), a_run("low1", priority=20, **each), *others)


@pytest.mark.parametrize("lacks", [{"cpu": 8.0}, {"cpu": 0.0, "memory_mb": 8 * GIB}])
def test_critical_task_without_gpus_starts_once_all_its_victims_have_left(lacks: dict[str, Any]) -> None:
    world = two_runs(a_task("high", priority=95, **lacks))
    assert stopped(cycle(world)) == ["low0", "low1"]
    one = {"cpu": 1.0, "memory_mb": GIB}
    submit(world, a_task("small", priority=94, **one), a_task("late", priority=89, **one))
    let_go(world, "low0", requeue=False)
    assert cycle(world, now=NOW + 1.0) == [], "what is left by one victim is kept for the preemptor"
    let_go(world, "low1", requeue=False)
    decisions = cycle(world, now=NOW + 2.0)
    assert (started(decisions)[0], ends(decisions)) == ("high", [("high", PledgeEnd.CONSUMED)])


def test_the_victim_is_the_cheapest_of_all_nodes() -> None:
    small = a_run("low2", node="n2", priority=10, cpu=2.0)
    world = two_runs(a_node("n2", cpu=2.0), small, a_task("high", priority=95, cpu=2.0))
    low0 = world.tasks[TaskId("low0")]
    commit(world, Decision(low0.id, "saved", tasks=(write_move(low0, Move.CHANGED, checkpoint_at=NOW),)))
    assert stopped(cycle(world)) == ["low0"]


@pytest.mark.parametrize("priority", [20, 89])
def test_only_a_critical_task_stops_runs_for_cpu(priority: int) -> None:
    assert cycle(two_runs(a_task("high", priority=priority, cpu=8.0))) == []


def test_idle_work_makes_room_for_every_task_that_lacks_cpu() -> None:
    idle = a_run("idle", "n2", priority=3, cpu=4.0)
    world = two_runs(a_node("n2", cpu=4.0), idle, a_task("same", priority=9, cpu=2.0))
    assert cycle(world) == []
    submit(world, a_task("other", priority=10, cpu=2.0))
    assert stopped(cycle(world)) == ["idle"]
    let_go(world, "idle")
    assert started(cycle(world, now=NOW + 1.0)) == ["other", "same"]
    submit(world, a_task("wide", priority=50, cpu=8.0))
    assert cycle(world, now=NOW + 2.0) == [], "it has no way where the others run"


def test_no_run_is_stopped_for_cpu_if_preemption_is_off_or_does_not_help() -> None:
    assert cycle(two_runs(a_task("high", priority=95, cpu=8.0)), policy=Policy(preemption=False)) == []
    assert cycle(two_runs(a_task("high", priority=95, cpu=9.0))) == []
    world = two_runs(a_run("peer", priority=95, cpu=0.0, memory_mb=0), a_task("high", priority=95, cpu=8.0))
    assert stopped(cycle(world)) == ["low0", "low1"]


def test_a_critical_gang_without_gpus_makes_room_on_several_nodes() -> None:
    nodes = [a_node(name, cpu=4.0) for name in ("n1", "n2")]
    runs = [a_run("low0", "n1", cpu=4.0), a_run("low1", "n2", cpu=4.0)]
    world = a_world(*nodes, *runs, a_gang("gang", *bundles(2, cpu=4.0), priority=95))
    assert stopped(cycle(world)) == ["low0", "low1"]
    submit(world, a_task("small", priority=94, cpu=1.0))
    let_go(world, "low0", requeue=False)
    assert cycle(world, now=NOW + 1.0) == []
    let_go(world, "low1", requeue=False)
    cycle(world, now=NOW + 2.0)
    assert where(world) == ["n1", "n2"]


@pytest.mark.parametrize("placement", ["stranded", "fgd", "best_fit", "spread"])
def test_gpu_task_without_cpu_starts_where_all_cpus_are_pledged(placement: Any) -> None:
    world = two_runs(a_device("gpu0", "n1"), a_task("high", priority=95, cpu=8.0))
    policy = Policy(placement=placement)
    assert stopped(cycle(world, policy=policy)) == ["low0", "low1"]
    submit(world, a_task("gpu", priority=50, gpu_mb=GIB))
    assert started(cycle(world, now=NOW + 1.0, policy=policy)) == ["gpu"]


def test_node_room_kept_for_a_preemptor_ends_with_it_or_with_the_node() -> None:
    world = two_runs(a_task("high", priority=95, cpu=8.0))
    cycle(world)
    assert list(world.pledges[TaskId("high")]) == [node_key(NodeName("n1"))]
    high = world.tasks[TaskId("high")]
    commit(world, Decision(high.id, "cancel", tasks=(write_move(high, Move.CANCELLED, finished_at=NOW),)))
    assert ends(cycle(world, now=NOW + 1.0)) == [("high", PledgeEnd.WITHDRAWN)]

    world = two_runs(a_task("high", priority=95, cpu=8.0))
    cycle(world)
    lost = apply_reports(
        world, [NodeLost(NodeName("n1"), "n1-1", NOW, "no heartbeat")], Instant(NOW + 1.0), Policy()
    )
    assert ("high", PledgeEnd.DISSOLVED) in ends(list(lost))


def test_a_waiting_task_says_which_node_is_being_cleared_for_it() -> None:
    world = two_runs(a_task("high", priority=95, cpu=8.0))
    cycle(world)
    draft, high = Draft(world), world.tasks[TaskId("high")]
    [blocker] = room_blockers(survey_nodes(draft, high, Policy(), NOW))
    assert blocker.reason is Reason.WAITING_FOR_PREEMPTION
    assert blocker.message.startswith(
        "CPU and host memory of n1 are pledged to it; it waits for low0, low1 to stop"
    )


def test_a_task_that_is_not_critical_is_told_what_priority_would_start_it() -> None:
    world = two_runs(a_task("high", priority=50, cpu=8.0))
    found = diagnose(survey_nodes(Draft(world), world.tasks[TaskId("high")], Policy(), NOW))
    changes = [remedy.change for remedy in advise(found, 100).remedies]
    assert [change for change in changes if "priority" in change] == [{"priority": 90}]


# A custom resource of the whole cluster


def licensed(*others: Any, gpu_mb: int = 0) -> World:
    """Each of two nodes has a run that uses one of two licences."""
    demand: dict[str, Any] = {"custom": {"licence": 1.0}, **({"gpu_mb": gpu_mb} if gpu_mb else {"cpu": 1.0})}
    runs = [
        holding(
            a_task(f"low{n}", priority=10 * n + 10, **demand),
            *([f"n{n}/gpu{n}"] if gpu_mb else []),
            node=f"n{n}",
        )
        for n in range(2)
    ]
    parts = (
        [a_device(f"gpu{n}", f"n{n}") for n in range(2)] if gpu_mb else [a_node(f"n{n}") for n in range(2)]
    )
    return a_world(*parts, *runs, *others)


@pytest.mark.parametrize("gpu_mb", [0, GIB])
def test_critical_task_takes_a_used_up_custom_resource_wherever_it_is_used(gpu_mb: int) -> None:
    demand: dict[str, Any] = {"custom": {"licence": 2.0}, **({"gpu_mb": gpu_mb} if gpu_mb else {"cpu": 1.0})}
    world = licensed(a_task("high", priority=95, **demand), gpu_mb=gpu_mb)
    assert stopped(cycle(world, policy=LICENCES)) == ["low0", "low1"]
    submit(world, a_task("next", priority=94, cpu=1.0, custom={"licence": 1.0}))
    let_go(world, "low0")
    assert cycle(world, now=NOW + 1.0, policy=LICENCES) == []
    let_go(world, "low1")
    assert started(cycle(world, now=NOW + 2.0, policy=LICENCES)) == ["high"]


def test_the_run_of_which_least_is_lost_gives_the_licence_back() -> None:
    world = licensed(a_task("high", priority=95, cpu=1.0, custom={"licence": 1.0}))
    assert stopped(cycle(world, policy=LICENCES)) == ["low0"]
    submit(world, a_task("higher", priority=96, cpu=1.0, custom={"licence": 1.0}))
    assert cycle(world, now=NOW + 1.0, policy=LICENCES) == [], "the licence that comes back is its own"


@pytest.mark.parametrize(
    "task",
    [
        {"priority": 80, "custom": {"licence": 1.0}},
        {"priority": 95, "custom": {"licence": 1.0, "seat": 1.0}},
        {"priority": 95, "custom": {"licence": 3.0}},
        {"priority": 95, "custom": {"licence": 1.0}, "slots": (("tenant:*", 1.0),)},
    ],
    ids=["not critical", "seats are kept for others", "more than there is", "a limit of running tasks"],
)
def test_no_run_is_stopped_for_a_custom_resource_that_it_would_not_get(task: dict[str, Any]) -> None:
    policy = Policy(custom_limits=(*LICENCES.custom_limits, CustomLimit("tenant:*", 0.0)))
    assert cycle(licensed(a_task("high", cpu=1.0, **task)), policy=policy) == []


@pytest.mark.parametrize("slots", ["pool:lab:cpu", "pool:lab:gpus"])
def test_a_critical_task_takes_what_its_pool_has_used_up(slots: str) -> None:
    policy = Policy(custom_limits=(CustomLimit(slots, 4.0),))
    demand: dict[str, Any] = {"gpus": 1, "cpu": 0.0, "slots": ((slots, 4.0),)}
    low = holding(a_task("low", priority=10, **demand), "n1/gpu0", mb=80 * GIB)
    other = a_run("other", node="n1", cpu=1.0)
    world = a_world(a_node("n1"), a_device("gpu0"), a_device("gpu1"), low, other)
    submit(world, a_task("mid", priority=89, **demand))
    assert cycle(world, policy=policy) == [], "of the others, none stops a run for it"
    submit(world, a_task("high", priority=95, **demand))
    assert stopped(cycle(world, policy=policy)) == ["low"]
    let_go(world, "low", requeue=False)
    assert started(cycle(world, now=NOW + 1.0, policy=policy)) == ["high"]


def test_what_a_run_uses_of_another_resource_does_not_count() -> None:
    fpga = a_run("other", "n0", custom={"fpga": 9.0})
    policy = Policy(custom_limits=(*LICENCES.custom_limits, CustomLimit("fpga", 9.0)))
    world = licensed(fpga, a_task("high", priority=95, cpu=1.0, custom={"licence": 1.0}))
    assert stopped(cycle(world, policy=policy)) == ["low0"]
