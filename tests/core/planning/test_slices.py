"""Slices of a cycle that end in the middle, and what is known of a node while it changes."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import Move, Placement
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.budget import PROBES_AT_A_TIME
from gpubroker_server.core.planning.cycle import Slice, plan_cycle
from gpubroker_server.core.planning.decisions import admit
from gpubroker_server.core.planning.forecasts.forecast_rounds import ForecastRounds
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds, FutureCapacity
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.node_room import NodeRooms
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.revisions import RevisionLog

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding, key, let_go, submit
from tests.collector import garbage
from tests.core.plans import eviction_for

POLICY = Policy()


def test_task_refused_in_the_middle_of_a_slice_is_refused_in_the_next_too() -> None:
    likes = [a_task(f"of-{tenant}", tenant=tenant, gpu_mb=60 * GIB) for tenant in "abcd"]
    world, cache = a_world(a_device(), *likes), PlanCache()
    started, cursor = [], None
    for _ in range(50):
        plan = plan_cycle(world, POLICY, NOW, cursor, budget=0, cache=cache)
        commit(world, plan.decisions)
        started += [decision.subject for decision in plan.decisions]
        cursor = plan.cursor
        if cursor is None:
            break
    assert cursor is None
    assert started == ["of-a"]


@pytest.mark.parametrize(("gone", "left"), [("a", "b"), ("b", "a")])
def test_task_that_leaves_the_queue_around_its_turn_is_not_waited_for(gone: str, left: str) -> None:
    """It leaves before or after its demand is admitted."""
    world, cache = a_world(a_node(), a_task("a", cpu=1.0), a_task("b", cpu=2.0)), PlanCache()
    cursor = plan_cycle(world, POLICY, NOW, budget=0, cache=cache).cursor
    cancelled = write_move(world.tasks[TaskId(gone)], Move.CANCELLED, finished_at=NOW)
    commit(world, Decision(gone, "cancel", tasks=(cancelled,)))
    plan = plan_cycle(world, POLICY, NOW, cursor, cache=cache)
    assert [decision.subject for decision in plan.decisions] == [left]
    assert plan.cursor is None


def test_who_waits_for_room_that_is_coming_is_left_alone_until_it_has_come() -> None:
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0")
    world = a_world(a_node(), a_device(), low, a_task("first", priority=80, gpu_mb=30 * GIB))
    submit(world, *(a_task(f"second-{at}", priority=at, gpu_mb=40 * GIB) for at in (80, 50)))
    cache = PlanCache()
    plan = plan_cycle(world, POLICY, NOW, cache=cache)
    commit(world, plan.decisions)
    assert [(decision.subject, decision.why) for decision in plan.decisions] == [("first", "preempt")]
    assert plan_cycle(world, POLICY, NOW, cache=cache).decisions == ()
    let_go(world, "low")
    plan = plan_cycle(world, POLICY, NOW, cache=cache)
    assert [decision.subject for decision in plan.decisions] == ["first", "second-80"]


def test_equals_of_a_refused_urgent_task_in_lower_bands_are_not_searched() -> None:
    busy = holding(a_task("busy", priority=95, gpu_mb=80 * GIB), "gpu0")
    likes = [a_task(f"at-{priority}", priority=priority, gpu_mb=30 * GIB) for priority in (80, 50)]
    world, cache = a_world(a_node(), a_device(), busy, *likes), PlanCache()
    for _ in range(2):
        assert plan_cycle(world, POLICY, NOW, cache=cache).decisions == ()


def test_who_had_nothing_is_not_asked_again_when_too_little_is_given_back() -> None:
    busy = holding(a_task("busy", priority=95, gpu_mb=50 * GIB), "gpu0")
    low = holding(a_task("low", priority=10, gpu_mb=20 * GIB), "gpu0")
    wide = [a_task(f"of-{tenant}", tenant=tenant, priority=80, gpu_mb=60 * GIB) for tenant in "ab"]
    small = a_task("small", priority=75, gpu_mb=25 * GIB)
    plan = plan_cycle(a_world(a_node(), a_device(), busy, low, *wide, small), POLICY, NOW, cache=PlanCache())
    assert [(decision.subject, decision.why) for decision in plan.decisions] == [("small", "preempt")]


def test_task_that_comes_between_two_slices_is_planned_in_the_next_cycle() -> None:
    world, cache = a_world(a_node(), a_task("a", cpu=1.0), a_task("b", cpu=2.0)), PlanCache()
    cursor, started = plan_cycle(world, POLICY, NOW, budget=0, cache=cache).cursor, []
    submit(world, a_task("late", priority=80, cpu=3.0))
    for _ in range(2):
        while True:
            plan = plan_cycle(world, POLICY, NOW, cursor, cache=cache)
            commit(world, plan.decisions)
            started += [decision.subject for decision in plan.decisions]
            cursor = plan.cursor
            if cursor is None:
                break
    assert started == ["a", "b", "late"]


def test_abandoned_cycle_leaves_no_order_to_the_next_at_the_same_moment() -> None:
    world, cache = a_world(a_node(), a_task("a", cpu=1.0), a_task("b", cpu=2.0)), PlanCache()
    assert plan_cycle(world, POLICY, NOW, budget=0, cache=cache).cursor is not None
    submit(world, a_task("late", priority=80, cpu=3.0))
    plan = plan_cycle(world, POLICY, NOW, cache=cache)
    assert [decision.subject for decision in plan.decisions] == ["late", "a", "b"]


def test_place_search_stops_at_the_end_of_a_turn_and_resumes_in_the_next() -> None:
    nodes = [f"n{number}" for number in range(24)]
    world = a_world(*(a_node(node) for node in nodes), *(a_device("gpu0", node) for node in nodes))
    submit(world, a_task("wide", gpu_mb=60 * GIB), a_task("next", gpu_mb=30 * GIB))
    part, turns = Slice(world, POLICY, NOW, cache=PlanCache()), 0
    while not part.is_last:
        part.take_turn(2)
        turns += part.is_searching
    assert turns > len(nodes) // PROBES_AT_A_TIME
    writes = [write for decision in part.plan().decisions for write in decision.tasks]
    assert [write.task.node for write in writes] == ["n0", "n1"]


def test_a_search_under_way_is_finished_before_its_slice_ends() -> None:
    world = a_world(a_node(), a_device(), a_task("waits", gpu_mb=60 * GIB))
    part = Slice(world, POLICY, NOW, cache=PlanCache())
    while not part.is_searching:
        part.take_turn(0)
    assert [decision.subject for decision in part.plan().decisions] == ["waits"]


def test_a_place_that_was_given_is_taken_from_what_is_known_of_its_node() -> None:
    low = holding(a_task("low", priority=10, gpu_mb=30 * GIB), "gpu0")
    new = a_task("new", gpu_mb=20 * GIB, cpu=1.0)
    draft = Draft(a_world(a_node(), a_device(), low, new), RevisionLog())
    node, place = NodeName("n1"), Placement(NodeName("n1"), ((key("gpu0"), Mib(20 * GIB)),))
    known = NodeRooms(draft, POLICY, NOW, NOW, {})
    before = known.most(node, 80, 80), known.now(node, 80)
    since = draft.changes.at(node)
    admit(draft, new, (place,), NOW)
    known.took(node, since, new, place)
    fresh = NodeRooms(draft, POLICY, NOW, NOW, {})
    assert (known.most(node, 80, 80), known.now(node, 80)) == (fresh.most(node, 80, 80), fresh.now(node, 80))
    assert (known.most(node, 80, 80), known.now(node, 80)) != before
    known.took(node, since, new, place)
    assert known.most(node, 80, 80) == fresh.most(node, 80, 80)


@pytest.mark.parametrize("lasts", [5.0, 500.0])
def test_placement_reduces_future_capacity_unless_it_ends_by_then(
    lasts: float,
) -> None:
    long = holding(a_task("long", gpu_mb=30 * GIB, expected_seconds=Seconds(900.0)), "gpu0")
    short = holding(a_task("short", gpu_mb=10 * GIB, expected_seconds=Seconds(9.0)), "gpu0")
    new = a_task("new", gpu_mb=20 * GIB, cpu=1.0, expected_seconds=Seconds(lasts))
    wide = a_task("wide", gpu_mb=50 * GIB)
    draft = Draft(a_world(a_node(), a_device(), long, short, new, wide), RevisionLog())
    node, place, at = NodeName("n1"), Placement(NodeName("n1"), ((key("gpu0"), Mib(20 * GIB)),)), NOW + 60.0
    capacity = FutureCapacity(ExpectedEnds(draft, POLICY, NOW), for_plans=False)
    later, unasked = capacity.capacity_at(node, wide, at), capacity.capacity_at(node, wide, at + 1.0)
    before = later.room(), later.mb(key("gpu0"))
    since = draft.changes.at(node)
    run = admit(draft, new, (place,), NOW).tasks[0].task
    capacity.on_placement(node, since, run, place)
    fresh = FutureCapacity(ExpectedEnds(draft, POLICY, NOW), for_plans=False).capacity_at(node, wide, at)
    assert capacity.capacity_at(node, wide, at) is later
    assert (later.room(), later.mb(key("gpu0"))) == (fresh.room(), fresh.mb(key("gpu0")))
    assert ((later.room(), later.mb(key("gpu0"))) == before) == (lasts < 60.0)
    assert (unasked.room(), unasked.mb(key("gpu0"))) == (fresh.room(), fresh.mb(key("gpu0")))
    draft.changes.mark(node)
    assert capacity.capacity_at(node, wide, at) is not later
    capacity.on_placement(node, since, run, place)
    assert (later.room(), later.mb(key("gpu0"))) == (fresh.room(), fresh.mb(key("gpu0")))


def test_a_device_that_is_heard_of_no_more_will_have_nothing() -> None:
    long_after = Instant(NOW + 1000.0)
    wide = a_task("wide", gpu_mb=50 * GIB)
    draft = Draft(a_world(a_node(), a_device(), holding(a_task("run", gpu_mb=30 * GIB), "gpu0"), wide))
    later = FutureCapacity(ExpectedEnds(draft, POLICY, long_after), for_plans=False).capacity_at(
        NodeName("n1"), wide, long_after + 60.0
    )
    assert later.mb(key("gpu0")) == 0
    assert not later.has_mb(key("gpu0"), 1)


def test_a_node_that_costs_more_than_it_seemed_gives_way_to_the_next() -> None:
    began = {"n1a": 100.0, "n1b": 1.0, "n1c": 2.0, "n2": 50.0}
    sizes = {"n1a": 60, "n1b": 10, "n1c": 10, "n2": 80}
    parts: list[Any] = [a_node("n1"), a_device("gpu0", "n1"), a_node("n2"), a_device("gpu0", "n2")]
    for name, seconds in began.items():
        run = a_task(name, priority=10, gpu_mb=sizes[name] * GIB)
        parts.append(holding(run, key("gpu0", name[:2]), started_at=Instant(NOW - seconds)))
    high = a_task("high", priority=80, gpu_mb=70 * GIB)
    eviction = eviction_for(Draft(a_world(*parts)), high)
    assert eviction is not None
    assert [victim.id for victim in eviction.victims] == ["n2"]


def test_slices_and_explanations_leave_no_cycles_to_the_garbage_collector() -> None:
    """Full collections come rarely: see `make_full_collections_rare`."""
    run = holding(a_task("run", priority=10, gpu_mb=60 * GIB), key("gpu0", "n1"))
    waits = a_task("waits", priority=80, gpu_mb=60 * GIB)
    likes = [a_task(f"of-{tenant}", tenant=tenant, gpu_mb=70 * GIB) for tenant in "abc"]
    world, cache = a_world(a_node("n1"), a_device("gpu0", "n1"), run, waits, *likes), PlanCache()
    with garbage() as left:
        explained = advise(diagnose(survey_nodes(Draft(world), waits, POLICY, NOW)))
        plan = plan_cycle(world, POLICY, NOW, cache=cache)
    assert explained.way.eviction is not None
    assert [decision.why for decision in plan.decisions] == ["preempt"]
    assert left.objects == 0


def test_forecasts_leave_no_cycles_to_the_garbage_collector() -> None:
    run = holding(a_task("run", gpu_mb=60 * GIB, expected_seconds=100.0), key("gpu0"))
    waits, small = a_task("waits", gpu_mb=70 * GIB), a_task("small", gpu_mb=5 * GIB, priority=20)
    world, rounds = a_world(a_device("gpu0"), run, waits, small), ForecastRounds()
    with garbage() as left:
        while rounds.step(world, POLICY, NOW):
            pass
        plan = plan_cycle(world, POLICY, NOW, cache=PlanCache(), forecasts=rounds.forecasts)
    assert rounds.forecasts[0].task == "waits"
    assert [decision.subject for decision in plan.decisions] == ["small"]
    assert left.objects == 0


def test_demand_whose_limit_is_used_up_is_admitted_at_no_priority() -> None:
    """Tasks of every priority are refused."""
    taker = a_task("taker", gpu_mb=10, priority=65, custom={"licence": 1.0})
    late = [a_task(f"late{at}", gpu_mb=20, priority=at, custom={"licence": 1.0}) for at in (60, 50)]
    policy = Policy(custom_limits=(CustomLimit("licence", 1.0),))
    world = a_world(a_device(mb=80), taker, *late)
    assert [d.subject for d in plan_cycle(world, policy, NOW, cache=PlanCache()).decisions] == ["taker"]
