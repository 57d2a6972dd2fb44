"""Runs that are moved, so that a task fits for which enough is free in sum but not in one piece."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, Request, write_move
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.orders import StopOrder
from gpubroker_server.core.domain.policy import CustomLimit, Policy, TenantPolicy
from gpubroker_server.core.domain.task import Move, Placement, StopReason, TaskState
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due, extend_window
from gpubroker_server.core.lifecycle.stopping import after_stop
from gpubroker_server.core.planning import consolidation
from gpubroker_server.core.planning.consolidation import Consolidation, consolidate
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import (
    NOW,
    Holding,
    a_device,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    key,
    let_go,
    orders_of_kind,
    submit,
)
from tests.core.naive import Naive
from tests.core.planning.test_plan_properties import check_pledges, foreseen, step_of, whole_plan
from tests.core.scenarios import POLICY as STORIED
from tests.core.scenarios import Chapter, Story, clusters, stories

POLICY = Policy(consolidation=10)


def a_run(
    name: str, device: str = "gpu0", mb: int = 40, *, saved: float | None = 10.0, **fields: Any
) -> Holding:
    """It began 100 s ago, and saved a checkpoint so many seconds ago."""
    at = {} if saved is None else {"checkpoint_at": Instant(NOW - saved)}
    states = ("started_at", "state", "preemptions", "deadline_at", "checkpoint_at")
    of_run = {**at, **{name: fields.pop(name) for name in list(fields) if name in states}}
    return holding(a_task(name, gpu_mb=mb, **fields), device, **of_run)


def two_halves(*parts: Any, **large: Any) -> World:
    """Two GPUs of 80 MiB on one node, and a task that wants 80."""
    facts = {"gpu_mb": 80, **large}
    return a_world(a_device(mb=80), a_device("gpu1", mb=80), *parts, a_task("large", **facts))


def moved(decision: Decision | None) -> list[str]:
    return [] if decision is None else [write.task.id for write in decision.tasks]


def next_move(world: World, **arguments: Any) -> Decision | None:
    assert not plan_cycle(world, POLICY, NOW).decisions, "the planner has no way of its own"
    return consolidate(world, POLICY, NOW, **arguments)


def found(*parts: Any, **large: Any) -> list[str]:
    return moved(next_move(two_halves(*parts, **large)))


def test_the_run_with_the_least_lost_work_goes_where_room_is_kept_for_it() -> None:
    world = two_halves(a_run("old", saved=30.0), a_run("fresh", "gpu1", saved=5.0))
    decision = next_move(world)
    assert decision is not None
    (run,) = (write.task for write in decision.tasks)
    assert (run.id, run.stop_reason, run.freeing_for) == ("fresh", StopReason.MOVE, "large")
    assert run.stop_deadline_at == NOW + run.grace_seconds
    kept = {(w.pledge.preemptor, w.pledge.device, w.pledge.mb) for w in decision.pledges}
    assert kept == {("large", key("gpu1"), 80), ("fresh", key("gpu0"), 40)}
    assert [order.reason for order in orders_of_kind(decision, StopOrder)] == [StopReason.MOVE]


def test_both_begin_in_the_cycle_that_hears_of_the_end() -> None:
    world = two_halves(a_run("old", saved=30.0), a_run("fresh", "gpu1"))
    commit(world, next_move(world) or [])
    late = Instant(NOW + 5.0)
    submit(world, a_task("guest", gpu_mb=10))
    assert plan_cycle(world, POLICY, late).decisions == (), "what is kept for both is kept from others"
    let_go(world, "fresh")
    commit(world, plan_cycle(world, POLICY, late).decisions)
    assert {lease.device for lease in world.leases_of(world.tasks[TaskId("fresh")])} == {key("gpu0")}
    assert {lease.device for lease in world.leases_of(world.tasks[TaskId("large")])} == {key("gpu1")}
    assert world.pledges == {}
    assert world.tasks[TaskId("fresh")].stop_reason is None


def test_a_run_of_higher_priority_goes_to_its_own_place_and_not_back() -> None:
    world = two_halves(
        a_run("old", saved=30.0, priority=60), a_run("fresh", "gpu1", priority=60), priority=50
    )
    commit(world, next_move(world) or [])
    let_go(world, "fresh")
    commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0)).decisions)
    assert world.tasks[TaskId("large")].state is TaskState.ADMITTED
    assert {lease.device for lease in world.leases_of(world.tasks[TaskId("fresh")])} == {key("gpu0")}


def test_who_was_moved_waits_while_its_place_cannot_be_used() -> None:
    world = two_halves(a_run("old", saved=30.0), a_run("fresh", "gpu1", custom={"licence": 1.0}))
    policy = replace(POLICY, custom_limits=(CustomLimit("licence", 1.0),))
    commit(world, consolidate(world, policy, NOW) or [])
    let_go(world, "fresh")
    unmeasured = Instant(NOW + 60.0)
    assert plan_cycle(world, policy, unmeasured).decisions == ()
    away = replace(policy, custom_limits=())
    assert "fresh" not in [d.subject for d in plan_cycle(world, away, NOW).decisions]


def test_several_runs_are_moved_if_one_is_not_enough() -> None:
    parts: list[Any] = [a_node("n1"), a_node("n2"), a_device(mb=80), a_device("gpu0", "n2", mb=80)]
    runs = [a_run("a", mb=20), a_run("b", mb=20), a_run("c", "n2/gpu0", mb=30, saved=None)]
    world = a_world(*parts, *runs, a_task("large", gpu_mb=80))
    decision = next_move(world)
    assert moved(decision) == ["a", "b"]
    assert next_move(world, most=1) is None


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"saved": None}, "it has saved nothing"),
        ({"saved": 200.0}, "it has saved nothing since it began"),
        ({"state": TaskState.ADMITTED}, "it has not begun"),
        ({"priority": 70}, "it is of a higher band"),
        ({"deadline_at": Instant(NOW + 900.0)}, "it has a deadline to meet"),
        ({"preemptions": 1}, "it was stopped less than an hour ago"),
    ],
)
def test_a_run_is_not_moved_if(fields: dict[str, Any], why: str) -> None:
    stays = {**fields} if fields.get("state") is None else {**fields, "saved": None}
    assert found(a_run("r0", **stays), a_run("r1", "gpu1", **stays)) == [], why


def test_who_was_stopped_before_may_be_moved_after_an_hour() -> None:
    long_ago: dict[str, Any] = {"started_at": Instant(NOW - 3600.0), "preemptions": 1}
    assert found(a_run("r0", **long_ago), a_run("r1", "gpu1", **long_ago)) == ["r0"]


def test_run_that_has_hardly_begun_is_not_moved_even_for_a_critical_task() -> None:
    world = two_halves(a_run("r0", priority=95), a_run("r1", "gpu1", priority=95), priority=95)
    young = replace(POLICY, min_run_seconds=Seconds(200.0))
    assert consolidate(world, young, NOW) is None
    assert consolidate(world, POLICY, NOW) is not None


def test_no_run_is_moved_without_a_place_to_go_to() -> None:
    assert found(a_run("r0", mb=50), a_run("r1", "gpu1", mb=50)) == []
    world = two_halves(a_run("r0"), a_run("r1", "gpu1"), a_task("next", gpu_mb=40, submitted_at=NOW + 1))
    waits = a_task("first", gpu_mb=40)
    world.add_task(replace(waits, held=True))
    world.add_pledge(a_pledge(waits, "gpu0", 40))
    world.add_pledge(a_pledge(waits, "gpu1", 40))
    assert consolidate(world, POLICY, NOW) is None, "what is pledged to others is no place"


def test_two_runs_are_not_sent_to_the_same_place() -> None:
    parts: list[Any] = [a_node("n1"), a_node("n2"), a_device(mb=80), a_device("gpu0", "n2", mb=70)]
    runs = [a_run("a", mb=40), a_run("b", mb=40), a_run("c", "n2/gpu0", mb=20, saved=None)]
    world = a_world(*parts, *runs, a_task("large", gpu_mb=80))
    world.add_device(a_device("gpu1", "n2", mb=20))
    assert next_move(world) is None


def test_runs_that_do_not_all_fit_elsewhere_at_once_are_not_moved() -> None:
    """Each of them alone has a place."""
    devices = [a_device("gpu0", node, mb=80) for node in ("n1", "n2", "n3")]
    stay = [a_run(f"on-{node}", f"{node}/gpu0", mb=mb, saved=None) for node, mb in (("n2", 35), ("n3", 45))]
    runs = [a_run("a", "n1/gpu0", mb=40), a_run("b", "n1/gpu0", mb=40)]
    assert next_move(a_world(*devices, *stay, *runs, a_task("large", gpu_mb=80))) is None
    one = a_run("a", "n1/gpu0", mb=40)
    assert moved(next_move(a_world(*devices, *stay, one, a_task("large", gpu_mb=80)))) == ["a"]


def test_no_run_is_moved_for_a_task_with_room_or_with_room_coming() -> None:
    assert moved(consolidate(two_halves(a_run("r0"), gpu_mb=40), POLICY, NOW)) == []
    leaving: dict[str, Any] = {"state": TaskState.STOPPING, "stop_reason": StopReason.CANCEL}
    gone = holding(a_task("gone", gpu_mb=40), "gpu1", stop_deadline_at=Instant(NOW + 9.0), **leaving)
    assert found(a_run("r0"), gone) == []


def test_no_run_is_moved_for_a_task_without_gpus_or_beyond_a_limit() -> None:
    runs = a_run("r0"), a_run("r1", "gpu1")
    world = a_world(a_device(mb=80), a_device("gpu1", mb=80), *runs, a_task("large", cpu=100.0))
    assert next_move(world) is None
    assert found(*runs, custom={"licence": 1.0}) == []
    assert found(*runs, where=PlacementConstraints(min_power=9)) == []


def test_what_a_forecast_ahead_keeps_is_left_alone() -> None:
    world = two_halves(a_run("r0"), a_run("r1", "gpu1"), submitted_at=NOW)
    world.add_task(a_task("ahead", gpus=3, gpu_mb=80, submitted_at=NOW - 5))
    times = Instant(NOW + 50.0), Instant(NOW + 60.0), Instant(NOW + 99.0)
    there = Placement(NodeName("n1"), ())
    mine = Forecast(TaskId("large"), (there,), *times, 0, Basis.STATED, True)
    assert moved(consolidate(world, POLICY, NOW, [mine])) == ["r0"]
    assert consolidate(world, POLICY, NOW, [replace(mine, task=TaskId("ahead")), mine]) is None


def test_moves_are_searched_once_for_equal_tasks() -> None:
    runs = a_run("r0", saved=None), a_run("r1", "gpu1", saved=None)
    assert next_move(two_halves(*runs, a_task("alike", gpu_mb=80))) is None


def test_a_search_that_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidation, "MAX_PROBES", 1)
    assert found(a_run("r0"), a_run("r1", "gpu1")) == []


def test_consolidation_looks_once_a_second_within_its_hourly_limit() -> None:
    """A limit of zero switches consolidation off."""
    world = two_halves(a_run("r0"), a_run("r1", "gpu1"))
    moves = Consolidation()
    assert moves.next_move(world, Policy(), NOW) is None
    decision = moves.next_move(world, replace(POLICY, consolidation=1), NOW)
    assert decision is not None
    assert moves.next_move(world, POLICY, Instant(NOW + 0.5)) is None, "too soon"
    assert moves.next_move(world, replace(POLICY, consolidation=1), Instant(NOW + 1.0)) is not None
    moves.count(decision, NOW)
    assert moves.next_move(world, replace(POLICY, consolidation=1), Instant(NOW + 2.0)) is None
    assert moves.next_move(world, replace(POLICY, consolidation=2), Instant(NOW + 3.0)) is not None


def test_room_is_no_longer_kept_for_a_move_that_was_cancelled() -> None:
    world = two_halves(a_run("old", saved=30.0), a_run("fresh", "gpu1"))
    commit(world, next_move(world) or [])
    run = world.tasks[TaskId("fresh")]
    commit(
        world,
        Decision(run.id, "cancel", tasks=(write_move(run, Move.CHANGED, stop_reason=StopReason.CANCEL),)),
    )
    (decision,) = plan_cycle(world, POLICY, NOW).decisions
    assert (decision.subject, decision.why) == ("fresh", "withdraw")


def test_a_move_uses_up_no_retry_and_counts_as_a_preemption() -> None:
    run = a_run("r0", state=TaskState.STOPPING).task
    what, changes = after_stop(replace(run, stop_reason=StopReason.MOVE), NOW, POLICY)
    assert (what, changes["preemptions"], changes["stop_reason"]) == (Move.REQUEUED, 1, StopReason.MOVE)


# Whatever the cluster


@st.composite
def scattered_clusters(draw: st.DrawFn) -> World:
    """Nodes with one or two GPUs, each with a run or two, and a task that fits nowhere."""
    parts: list[Any] = []
    for number in range(draw(st.integers(2, 3))):
        parts.append(a_node(f"n{number}", cpu=draw(st.sampled_from((2.0, 8.0)))))
        for index in range(draw(st.integers(1, 2))):
            device, left = a_device(f"gpu{index}", f"n{number}", mb=80), 80
            parts.append(device)
            for _ in range(draw(st.integers(0, 2))):
                mb = draw(st.sampled_from((10, 20, 30, 40)))
                if mb <= left:
                    left -= mb
                    facts = {
                        "priority": draw(st.sampled_from((40, 50, 60, 80))),
                        "cpu": draw(st.sampled_from((0.0, 1.0))),
                    }
                    saved = draw(st.sampled_from((None, 1.0, 20.0, 50.0)))
                    parts.append(a_run(f"r{len(parts)}", device.key, mb, saved=saved, **facts))
    wants: dict[str, Any] = draw(
        st.sampled_from(
            ({"gpu_mb": 60}, {"gpu_mb": 80}, {"gpu_mb": 80, "gpus": 2}, {"gpu_mb": 70, "cpu": 2.0})
        )
    )
    return a_world(*parts, a_task("large", priority=draw(st.sampled_from((30, 50, 69))), **wants))


@given(scattered_clusters())
@settings(max_examples=200, deadline=None)
def test_moved_runs_run_again_and_the_task_for_which_they_moved_starts(world: World) -> None:
    policy = replace(POLICY, preemption=False)
    commit(world, plan_cycle(world, policy, NOW).decisions)
    decision = consolidate(world, policy, NOW)
    if decision is None:
        return
    assert 0 < len(decision.tasks) <= 4
    commit(world, decision)
    check_ledger(world)
    check_pledges(world)
    for write in decision.tasks:
        let_go(world, write.task.id)
        steps = Naive(world, policy, NOW).plan()
        plan = plan_cycle(world, policy, NOW)
        assert [step_of(made) for made in plan.decisions] == steps
        commit(world, plan.decisions)
        check_ledger(world)
        assert world.tasks[write.task.id].state is TaskState.ADMITTED
    assert world.tasks[TaskId("large")].state is TaskState.ADMITTED
    assert not world.pledges


@given(clusters(), stories)
@settings(max_examples=100, deadline=None)
def test_plans_stay_the_naive_twins_while_runs_are_moved(world: World, story: list[Chapter]) -> None:
    tale, moves = Story(world), Consolidation()
    forecasts: list[Forecast] = []
    policy = replace(STORIED, consolidation=100, min_run_seconds=Seconds(0.0))
    for chapter in story:
        for _ in tale.happens(chapter):
            check_ledger(world)
            check_pledges(world)
        expected = Naive(world, policy, tale.now, forecasts).plan()
        plan = whole_plan(world, tale.now, policy, forecasts)
        assert [step_of(decision) for decision in plan.decisions] == expected
        commit(world, plan.decisions, tale.now)
        decision = moves.next_move(world, policy, Instant(tale.now), forecasts)
        tale.now += 1.0
        if decision is not None:
            commit(world, decision, tale.now)
            check_ledger(world)
            check_pledges(world)
        forecasts = foreseen(world, tale.now, forecasts)


def moving_apart(**policy: Any) -> World:
    """`fresh` is on its way to the first GPU, for `large`."""
    world = two_halves(
        a_run("old", saved=30.0, priority=60), a_run("fresh", "gpu1", priority=60), priority=50
    )
    assert not plan_cycle(world, POLICY, NOW).decisions
    commit(world, consolidate(world, replace(POLICY, **policy), NOW) or [])
    return world


def both_began(world: World, at: Instant) -> bool:
    commit(world, plan_cycle(world, POLICY, at).decisions)
    devices = {lease.device for lease in world.leases_of(world.tasks[TaskId("fresh")])}
    return devices == {key("gpu0")} and world.tasks[TaskId("large")].state is TaskState.ADMITTED


def test_only_a_higher_band_takes_the_place_of_a_moving_run() -> None:
    world = moving_apart()
    submit(world, a_task("guest", gpu_mb=30, priority=65))
    commit(world, plan_cycle(world, POLICY, Instant(NOW + 1.0)).decisions)
    let_go(world, "fresh")
    assert both_began(world, Instant(NOW + 2.0))
    other = moving_apart()
    submit(other, a_task("guest", gpu_mb=30, priority=75))
    (decision,) = plan_cycle(other, POLICY, Instant(NOW + 1.0)).decisions
    assert decision.subject == "guest"


def test_who_is_moving_keeps_its_place_when_its_priority_falls() -> None:
    world = moving_apart()
    lower = Request("r", TaskId("fresh"), "default", "change", {"priority": 45}, NOW)
    commit(world, [carry_out(world, lower, NOW, Policy())])
    let_go(world, "fresh")
    assert both_began(world, Instant(NOW + 1.0))


@pytest.mark.parametrize("patience", [5.0, 10.0, 30.0])
def test_a_run_not_confirmed_gone_keeps_the_place_to_which_it_moves(patience: float) -> None:
    policy = replace(POLICY, kill_patience_seconds=Seconds(patience))
    world = moving_apart(kill_patience_seconds=Seconds(patience))
    watch = ObservationWindow(NOW, NOW)
    for second in range(1, 100):
        now = Instant(NOW + second)
        commit(world, due(world, now, policy, watch), now)
        watch = extend_window(watch, now)
        if world.tasks[TaskId("fresh")].state is TaskState.PENDING:
            break
    assert list(world.pledges) == ["large", "fresh"]
    world.measure([a_sample(device, now) for device in world.ledgers])
    commit(world, plan_cycle(world, policy, now).decisions, now)
    assert world.tasks[TaskId("fresh")].state is TaskState.ADMITTED


def test_limits_and_quotas_count_a_moving_run_once() -> None:
    limits = (CustomLimit("label:team=a", 2.0),)
    tenants = (TenantPolicy("default", guaranteed_mb=Mib(240)),)
    policy = replace(POLICY, custom_limits=limits, tenants=tenants)
    slots: dict[str, Any] = {"slots": (("label:team=a", 1.0),)}
    here = PlacementConstraints(nodes=(("node", ("n1",)),))
    world = two_halves(a_run("old", saved=30.0), a_run("fresh", "gpu1", **slots), where=here)
    commit(world, consolidate(world, policy, NOW) or [])
    world.add_node(a_node("n2"))
    world.add_device(a_device("gpu2", "n2", mb=80))
    world.measure([a_sample("n2/gpu2", NOW)])
    submit(world, a_task("next", gpu_mb=80, **slots))
    assert [d.subject for d in plan_cycle(world, policy, NOW).decisions] == ["next"]
