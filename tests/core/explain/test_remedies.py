"""Remedies: each starts the task when it is applied."""

from typing import Any

from gpubroker_server.core.admission.pools import apply_pool
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints
from gpubroker_server.core.domain.policy import CustomLimit, Policy, Pool
from gpubroker_server.core.domain.task import Dependency, Placement, Task, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, TaskId
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.remedy_planner import Remedy
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.find_way import Wait
from gpubroker_server.core.planning.forecasts.forecasts import make_forecasts
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding, key, let_go, submit
from tests.core.expected import starting_in
from tests.core.plans import whole
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories, twin


def advice(
    world: World, task: str = "new", policy: Policy = POLICY, highest: int = 100, **changes: Any
) -> Advice:
    row = replace(world.tasks[TaskId(task)], **changes)
    return advise(diagnose(survey_nodes(Draft(world), row, policy, NOW)), highest)


def forecasts_of(world: World, now: float) -> list[Forecast]:
    *_, made = make_forecasts(world, POLICY, Instant(now))
    return made


def remedies_of(world: World, **options: Any) -> dict[str, Remedy]:
    """By the first field that they change; waiting for an end changes none."""
    return {next(iter(remedy.change), "after"): remedy for remedy in advice(world, **options).remedies}


def settle(world: World, now: float) -> list[Forecast]:
    """Plan until nothing is left to decide; the forecasts that hold then."""
    while True:
        forecasts = forecasts_of(world, now)
        decisions = plan_cycle(world, POLICY, Instant(now), budget=10_000, forecasts=forecasts).decisions
        if not decisions:
            return forecasts
        commit(world, decisions, now)


def starts(world: World, task: Task, now: float, forecasts: list[Forecast]) -> bool:
    """Whether the planner gives it a place, or makes room for it, if it is submitted so."""
    decisions = plan_cycle(world, POLICY, Instant(now), budget=10_000, forecasts=forecasts).decisions
    return any(decision.subject == task.id and decision.why in ("admit", "preempt") for decision in decisions)


def applied(world: World, remedy: Remedy) -> World:
    """The same cluster, in which that has come true."""
    other = twin(world, 1)
    if remedy.after is not None:
        let_go(other, remedy.after.id, requeue=False)
        Story(other).measure()
        return other
    old = other.tasks.pop(remedy.task.id)
    other.queue.remove(old)
    submit(other, replace(remedy.task, version=1))
    return other


@given(clusters(), stories)
@settings(max_examples=60, deadline=None)
def test_every_remedy_starts_the_task_when_it_is_applied(world: World, story: list[Chapter]) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        forecasts = settle(world, tale.now)
        for task in [row for row in world.tasks.values() if row.state is TaskState.PENDING]:
            found = advise(diagnose(survey_nodes(Draft(world), task, POLICY, Instant(tale.now), forecasts)))
            assert found.way.places is None or task.held or task.not_before or task.awaits
            for remedy in found.remedies:
                assert starts(applied(world, remedy), remedy.task, tale.now, forecasts), remedy.message


def changes(world: World, **options: Any) -> list[dict[str, Any]]:
    return [dict(remedy.change) for remedy in advice(world, **options).remedies]


def test_a_task_that_has_room_needs_no_remedy() -> None:
    found = advice(a_world(a_task("new", gpu_mb=10 * GIB)))
    assert found.way.places is not None
    assert (found.remedies, found.start) == (
        (),
        starting_in(0.0),
    )


def test_remedies_of_memory_and_priority_name_the_place_and_the_victims() -> None:
    world = a_world(
        holding(a_task("low", priority=60, gpu_mb=60 * GIB), "gpu0"), a_task("new", gpu_mb=40 * GIB)
    )
    found = remedies_of(world)
    assert found["gpu_mb"].message == "with gpu_mb at most 20480 (20.0 GiB), it starts now on n1/gpu0"
    assert found["priority"].change == {"priority": 61}
    assert [run.id for run in found["priority"].victims] == ["low"]
    assert found["priority"].message == (
        "with priority 61 or above, it preempts 1 run and starts on n1 within 30 s"
    )
    assert set(remedies_of(world, highest=60)) == {"gpu_mb"}


def test_priority_remedy_is_high_enough_for_runs_with_turn_protection() -> None:
    since = Instant(NOW - 30.0)
    run = a_task("run", priority=50, gpus=1, submitted_at=Instant(NOW - 400.0))
    just_begun = holding(run, "gpu0", mb=80 * GIB, admitted_at=since, started_at=since)
    world = a_world(just_begun, a_task("new", gpu_mb=40 * GIB))
    assert remedies_of(world)["priority"].change == {"priority": 57}


def test_what_comes_on_top_of_a_size_is_not_offered_as_part_of_it() -> None:
    device = a_device(context_mb=1 * GIB)
    world = a_world(
        device, holding(a_task("a", priority=95, gpu_mb=60 * GIB), "gpu0"), a_task("new", gpu_mb=40 * GIB)
    )
    assert remedies_of(world)["gpu_mb"].change == {"gpu_mb": 19 * GIB}


def test_less_than_a_tenth_of_the_demand_is_no_remedy() -> None:
    world = a_world(
        holding(a_task("a", priority=100, gpu_mb=78 * GIB), "gpu0"), a_task("new", gpu_mb=40 * GIB)
    )
    assert changes(world) == []


def test_a_size_is_a_remedy_for_a_whole_or_a_shared_gpu() -> None:
    busy = holding(a_task("a", priority=100, gpu_mb=30 * GIB), "gpu0")
    whole = a_world(busy, a_task("new", gpus=1, exclusive=True))
    assert changes(whole) == [{"gpu_mb": 50 * GIB, "exclusive": False}]
    share = a_world(busy, a_task("new", gpu_fraction=0.75))
    assert changes(share) == [{"gpu_mb": 50 * GIB, "gpu_fraction": None}]


def test_fewer_gpus_are_as_many_as_one_node_has() -> None:
    devices = [a_device(f"gpu{n}") for n in range(5)]
    busy = [holding(a_task(f"a{n}", priority=100, gpu_mb=80 * GIB), f"gpu{n}") for n in range(2)]
    assert {"gpus": 3} in changes(a_world(*devices, *busy, a_task("new", gpus=5)))
    all_busy = [holding(a_task(f"a{n}", priority=100, gpu_mb=80 * GIB), f"gpu{n}") for n in range(5)]
    assert changes(a_world(*devices, *all_busy, a_task("new", gpus=5))) == []


def test_wider_kinds_and_wider_nodes_are_separate_remedies() -> None:
    busy = holding(a_task("a", priority=100, gpu_mb=80 * GIB), "n1/gpu0")
    parts = (a_device("gpu0", "n1"), a_device("gpu0", "n2", kind="A100"), busy)
    where = PlacementConstraints(kinds=("H100",), min_power=0, min_device_mb=Mib(1))
    by_kind = a_world(*parts, a_task("new", gpu_mb=40 * GIB, where=where))
    assert changes(by_kind) == [{"kinds": [], "min_device_mb": 0}]
    by_node = a_world(
        *parts, a_task("new", gpu_mb=40 * GIB, where=PlacementConstraints(nodes=(("node", ("n1",)),)))
    )
    assert changes(by_node) == [{"nodes": {}}]
    both = PlacementConstraints(kinds=("H100",), nodes=(("node", ("n1",)),))
    assert changes(a_world(*parts, a_task("new", gpu_mb=40 * GIB, where=both))) == [
        {"kinds": [], "nodes": {}}
    ]


LAB = Pool("lab", kinds=("H100",), nodes={"node": ("n1",)}, gpus=1)
POOLED = Policy(pools=(LAB,), custom_limits=(CustomLimit("pool:lab:gpus", 1.0),))


def pooled(**fields: Any) -> Task:
    demand = apply_pool(a_task("x", **fields).demand, "lab", "default", {}, POOLED, whole)
    assert isinstance(demand, Demand)
    return a_task("new", demand=demand)


def test_a_task_may_do_without_its_pool_and_what_the_pool_added() -> None:
    other = a_task("a", priority=100, gpu_mb=80 * GIB, slots=(("pool:lab:gpus", 1.0),))
    parts = (a_device("gpu0", "n1"), a_device("gpu0", "n2", kind="A100"), holding(other, "n1/gpu0"))
    world = a_world(*parts, pooled(gpu_mb=40 * GIB))
    assert changes(world, policy=POOLED) == [{"pool": "", "kinds": [], "nodes": {}}]
    gone = replace(POOLED, pools=())
    assert changes(world, policy=gone) == []


def test_what_the_pool_would_refuse_is_no_remedy() -> None:
    whole = Pool("lab", gpus=4, fractions=False)
    policy = Policy(pools=(whole,), custom_limits=(CustomLimit("pool:lab:gpus", 4.0),))
    task = a_task("new", gpus=1, pool="lab", slots=(("pool:lab:gpus", 1.0), ("tenant:default", 1.0)))
    world = a_world(holding(a_task("a", priority=100, gpu_mb=30 * GIB), "gpu0"), task)
    assert changes(world, policy=policy) == []


def test_less_of_the_node_is_what_is_left_where_its_devices_have_room() -> None:
    busy = holding(a_task("a", cpu=60.0, memory_mb=200 * GIB), node="n1")
    world = a_world(busy, a_task("new", gpu_mb=8 * GIB, cpu=8.0, memory_mb=64 * GIB))
    assert changes(world, highest=50) == [{"cpu": 4.0, "memory_mb": 56 * GIB}]
    only_cpu = a_world(busy, a_task("new", cpu=8.0))
    assert changes(only_cpu, highest=89) == [{"cpu": 4.0}]
    assert remedies_of(only_cpu)["cpu"].message == "with cpu at most 4, it starts now on n1"
    full = a_world(holding(a_task("a", cpu=64.0), node="n1"), a_task("new", cpu=8.0))
    assert changes(full, highest=89) == []


def test_the_remedy_is_what_the_node_with_the_most_cpu_has_left() -> None:
    parts = [holding(a_task(f"a{n}", cpu=cpu), node=f"n{n}") for n, cpu in ((1, 60.0), (2, 50.0), (3, 62.0))]
    world = a_world(*(a_node(f"n{n}") for n in (1, 2, 3)), *parts, a_task("new", cpu=20.0))
    assert changes(world, highest=89) == [{"cpu": 14.0}]


def test_releasing_a_held_task_is_a_remedy() -> None:
    world = a_world(a_task("new", gpu_mb=8 * GIB, held=True))
    found = advice(world)
    assert [(dict(r.change), r.message) for r in found.remedies] == [
        ({"held": False}, "if released, it starts now on n1/gpu0")
    ]
    assert found.start is None
    full = a_world(
        holding(a_task("a", priority=90, gpu_mb=80 * GIB), "gpu0"), a_task("new", gpus=1, held=True)
    )
    assert changes(full) == []


def test_dropping_not_before_is_a_remedy() -> None:
    late = Instant(NOW + 60.0)
    found = advice(a_world(a_task("new", gpu_mb=8 * GIB, not_before=late)))
    assert [dict(r.change) for r in found.remedies] == [{"not_before": None}]
    assert found.start == starting_in(60.0)


def test_a_task_that_runs_after_others_is_not_helped_by_room() -> None:
    after = (Dependency(TaskId("first")),)
    world = a_world(
        a_task("first", gpus=1), a_task("new", gpu_mb=8 * GIB, held=True, after=after, awaits=True)
    )
    assert (changes(world), advice(world).start) == ([], None)


def test_the_end_that_helps_is_the_first_one_that_no_task_ahead_takes() -> None:
    sized = {"priority": 100, "expected_seconds": 150.0}
    parts = (
        a_device("gpu0"),
        a_device("gpu1"),
        holding(a_task("early", gpu_mb=30 * GIB, **sized), "gpu0"),
        holding(a_task("rest", gpu_mb=50 * GIB, priority=100), "gpu0"),
        holding(a_task("late", gpu_mb=80 * GIB, **{**sized, "expected_seconds": 200.0}), "gpu1"),
    )
    alone = a_world(*parts, a_task("new", gpu_mb=25 * GIB))
    found = remedies_of(alone)["after"]
    assert found.message == "when early ends (expected within 50 s), it starts on n1/gpu0"
    assert found.places == (Placement(NodeName("n1"), ((key("gpu0"), Mib(25 * GIB)),)),)
    behind = a_world(*parts, a_task("first", gpu_mb=28 * GIB, priority=60), a_task("new", gpu_mb=25 * GIB))
    assert "after" not in remedies_of(behind)
    ahead = a_world(*parts, a_task("last", gpu_mb=28 * GIB, priority=40), a_task("new", gpu_mb=25 * GIB))
    assert remedies_of(ahead)["after"].after is not None


def test_task_ahead_too_large_for_what_comes_back_does_not_take_it() -> None:
    early = holding(a_task("early", gpu_mb=30 * GIB, priority=100, expected_seconds=150.0), "gpu0")
    parts = early, holding(a_task("rest", gpu_mb=50 * GIB, priority=100), "gpu0")
    large = a_world(*parts, a_task("first", gpu_mb=40 * GIB, priority=60), a_task("new", gpu_mb=25 * GIB))
    assert remedies_of(large, policy=Policy())["after"].after == early.task
    small = a_world(*parts, a_task("first", gpu_mb=28 * GIB, priority=60), a_task("new", gpu_mb=25 * GIB))
    assert "after" not in remedies_of(small, policy=Policy())


def test_a_task_ahead_takes_what_comes_back_of_a_shared_limit() -> None:
    licence = {"custom": {"licence": 3.0}}
    run = holding(a_task("run", gpu_mb=8 * GIB, expected_seconds=150.0, priority=100, **licence), "gpu0")
    rival = a_task("rival", gpu_mb=8 * GIB, priority=60, custom={"licence": 1.0})
    alone = a_world(run, a_task("new", gpu_mb=8 * GIB, custom={"licence": 1.0}))
    assert remedies_of(alone)["after"].after == run.task
    contested = a_world(run, rival, a_task("new", gpu_mb=8 * GIB, custom={"licence": 1.0}))
    assert changes(contested) == []


def test_only_four_helpful_ends_are_checked_for_tasks_ahead() -> None:
    runs = [
        holding(a_task(f"a{n}", gpu_mb=10 * GIB, priority=100, expected_seconds=150.0 + n), "gpu0")
        for n in range(8)
    ]
    rival = a_task("rival", gpu_mb=8 * GIB, priority=60)
    assert changes(a_world(*runs, rival, a_task("new", gpu_mb=10 * GIB))) == []


def test_a_priority_that_a_resource_asks_for_is_part_of_the_remedy() -> None:
    policy = Policy(custom_limits=(CustomLimit("seat", 2.0, priority_threshold=70),))
    world = a_world(a_task("new", gpu_mb=8 * GIB, custom={"seat": 1.0}))
    assert changes(world, policy=policy) == [{"priority": 70}]
    other = holding(a_task("other", gpu_mb=GIB, priority=60), "gpu0")
    world = a_world(other, a_task("new", gpu_mb=8 * GIB, custom={"seat": 1.0}))
    assert changes(world, policy=policy) == [{"priority": 70}], "61 is too little"


def test_no_priority_helps_where_room_is_coming() -> None:
    leaving: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 10.0)}
    world = a_world(holding(a_task("a", gpu_mb=60 * GIB), "gpu0", **leaving), a_task("new", gpu_mb=40 * GIB))
    found = advice(world)
    assert isinstance(found.way, Wait)
    assert found.way.coming_on == ("n1",)
    assert [next(iter(r.change), "after") for r in found.remedies] == ["after", "gpu_mb"]
    assert found.remedies[0].message == "when a ends (expected within 10 s), it starts on n1/gpu0"
    assert found.start == starting_in(10.0)


def test_where_only_host_memory_is_short_less_of_it_is_the_remedy() -> None:
    busy = holding(a_task("a", memory_mb=200 * GIB), node="n1")
    world = a_world(busy, a_task("new", gpu_mb=8 * GIB, cpu=8.0, memory_mb=64 * GIB))
    assert changes(world, highest=50) == [{"memory_mb": 56 * GIB}]
