"""One cycle after another: who starts, who is stopped, and what is kept for whom."""

from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import HolderKind, Lease, LeaseState, PledgeEnd
from gpubroker_server.core.domain.orders import StartOrder, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.cycle import has_nothing_to_plan, plan_cycle
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_pledge,
    a_task,
    a_world,
    check_ledger,
    commit,
    holding,
    key,
    let_go,
    submit,
)

POLICY = Policy()


def cycle(world: World, *, now: float = NOW, policy: Policy = POLICY) -> list[Decision]:
    """Plan one whole cycle and make it true."""
    is_idle = has_nothing_to_plan(world)
    decisions = list(plan_cycle(world, policy, Instant(now), budget=10_000).decisions)
    assert not (is_idle and decisions)
    commit(world, decisions, now)
    check_ledger(world)
    return decisions


def started(decisions: list[Decision]) -> list[str]:
    return [decision.subject for decision in decisions if decision.why == "admit"]


def stopped(decisions: list[Decision]) -> list[str]:
    return [write.task.id for d in decisions if d.why == "preempt" for write in d.tasks]


def ends(decisions: list[Decision]) -> list[tuple[str, PledgeEnd]]:
    return [(w.pledge.preemptor, w.end) for d in decisions for w in d.pledges if w.end is not None]


def test_there_is_something_to_plan_only_while_something_waits() -> None:
    assert has_nothing_to_plan(a_world())
    world = a_world(a_task("first", gpu_mb=30 * GIB))
    assert not has_nothing_to_plan(world)
    cycle(world)
    assert has_nothing_to_plan(world)
    submit(world, a_task("later", not_before=Instant(NOW + 60)))
    assert not has_nothing_to_plan(world)


def test_admission_is_a_new_claim_with_its_leases_and_the_order_to_start() -> None:
    again = a_task(
        "again",
        gpu_mb=30 * GIB,
        fence=4,
        version=9,
        shareable=True,
        not_before=Instant(NOW - 1.0),
        checkpoint_at=Instant(NOW - 50.0),
    )
    world = a_world(a_device(), again)
    (decision,) = cycle(world)
    task = world.tasks[TaskId("again")]
    assert (decision.subject, decision.why) == ("again", "admit")
    assert (task.state, task.fence, task.version, task.node) == (TaskState.ADMITTED, 5, 10, "n1")
    assert (task.admitted_at, task.not_before, task.checkpoint_at) == (NOW, None, NOW - 50.0)
    assert decision.tasks[0].changed == ("fence", "node", "admitted_at", "not_before")
    devices = ((key("gpu0"), Mib(30 * GIB)),)
    shares = ((Mib(30 * GIB), 0.375),)
    start = StartOrder(
        TaskId("again"), Fence(5), NodeName("n1"), "n1-1", devices, shareable=True, priority=50, shares=shares
    )
    assert decision.orders == (start,)
    assert decision.leases == (
        Lease(
            HolderKind.RUN,
            "again",
            Fence(5),
            key("gpu0"),
            Mib(30 * GIB),
            "default",
            50,
            NOW,
            LeaseState.RESERVED,
            1,
        ),
    )


def test_a_task_without_gpu_takes_no_lease() -> None:
    world = a_world(a_node(), a_task("cpu", cpu=2.0))
    (decision,) = cycle(world)
    assert decision.leases == ()
    assert world.use[NodeName("n1")].cpu == 2.0


def test_tasks_start_in_the_order_of_the_queue_while_there_is_room() -> None:
    names = {"low": 10, "high": 80, "mid": 50}
    world = a_world(a_device(), *(a_task(n, priority=p, gpu_mb=30 * GIB) for n, p in names.items()))
    assert started(cycle(world)) == ["high", "mid"]


def test_a_smaller_task_passes_one_for_which_there_is_no_room() -> None:
    world = a_world(
        holding(a_task("peer", priority=95, gpu_mb=60 * GIB), "gpu0"),
        a_task("large", priority=80, gpu_mb=40 * GIB),
        a_task("small", priority=10, gpu_mb=20 * GIB),
    )
    assert started(cycle(world)) == ["small"]


def test_held_and_delayed_tasks_are_not_planned_until_they_may_be() -> None:
    world = a_world(
        a_device(), a_task("held", held=True), a_task("delayed", not_before=Instant(NOW + 5.0)), a_task("due")
    )
    assert started(cycle(world)) == ["due"]
    assert started(cycle(world, now=NOW + 5.0)) == ["delayed"]


def test_a_preemption_gives_notice_and_pledges_what_will_be_freed() -> None:
    low = a_task("low", priority=10, gpu_mb=60 * GIB, grace_seconds=Seconds(45.0))
    world = a_world(holding(low, "gpu0"), a_task("high", priority=80, gpu_mb=40 * GIB))
    (decision,) = cycle(world)
    assert (decision.subject, decision.why) == ("high", "preempt")
    victim = world.tasks[TaskId("low")]
    assert (victim.state, victim.stop_reason) == (TaskState.STOPPING, StopReason.PREEMPT)
    assert (victim.stop_deadline_at, victim.freeing_for) == (NOW + 45.0, "high")
    order = StopOrder(TaskId("low"), Fence(1), NodeName("n1"), "n1-1", StopReason.PREEMPT, Seconds(45.0))
    assert decision.orders == (order,)
    pledge = a_pledge(world.tasks[TaskId("high")], "gpu0", 40 * GIB, deadline_at=Instant(NOW + 45.0))
    assert world.pledges == {"high": {key("gpu0"): pledge}}
    assert world.tasks[TaskId("high")].state is TaskState.PENDING


def test_a_preemptor_with_live_pledges_stops_nobody_else() -> None:
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(a_task("a", priority=10, gpu_mb=80 * GIB), "gpu0"),
        holding(a_task("b", priority=10, gpu_mb=80 * GIB), "gpu1"),
        a_task("high", priority=80, gpu_mb=80 * GIB),
    )
    assert stopped(cycle(world)) == ["a"]
    assert cycle(world) == []


def test_freed_memory_goes_to_the_preemptor_not_to_the_first_victim() -> None:
    """As in kubernetes-sigs/kueue#13662, two victims end at different times; the first comes back."""
    world = a_world(
        a_device(),
        holding(a_task("first", priority=10, gpu_mb=40 * GIB), "gpu0"),
        holding(a_task("second", priority=10, gpu_mb=40 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=80 * GIB),
    )
    assert stopped(cycle(world)) == ["first", "second"]
    let_go(world, "first")
    assert cycle(world) == []
    let_go(world, "second")
    (decision,) = cycle(world)
    assert started([decision]) == ["high"]
    assert ends([decision]) == [("high", PledgeEnd.CONSUMED)]
    assert world.pledges == {}


def test_what_the_victims_leave_over_is_free_for_all() -> None:
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=50 * GIB),
    )
    cycle(world)
    let_go(world, "low")
    submit(world, a_task("small", priority=5, gpu_mb=30 * GIB))
    assert started(cycle(world)) == ["high", "small"]


def test_preemptor_keeps_only_the_free_room_its_victims_do_not_bring() -> None:
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=60 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=70 * GIB),
        a_task("small", priority=5, gpu_mb=10 * GIB),
        a_task("tiny", priority=5, gpu_mb=1 * GIB),
    )
    decisions = cycle(world)
    assert stopped(decisions) == ["low"]
    assert started(decisions) == ["small"]


def test_strictly_higher_priority_takes_pledged_memory_and_ends_the_pledge() -> None:
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=80 * GIB),
    )
    cycle(world)
    let_go(world, "low")
    submit(world, a_task("urgent", priority=95, gpu_mb=20 * GIB))
    decisions = cycle(world)
    assert started(decisions) == ["urgent"]
    assert ends(decisions) == [("high", PledgeEnd.TAKEN)]
    assert world.pledges == {}


def test_a_higher_priority_that_leaves_enough_takes_no_pledge() -> None:
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=60 * GIB),
    )
    cycle(world)
    let_go(world, "low")
    submit(world, a_task("urgent", priority=95, gpu_mb=20 * GIB))
    decisions = cycle(world)
    assert started(decisions) == ["urgent", "high"]
    assert ends(decisions) == [("high", PledgeEnd.CONSUMED)]


def test_preemptor_that_loses_one_pledge_loses_all_and_is_planned_anew() -> None:
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(a_task("a", priority=10, gpu_mb=80 * GIB), "gpu0"),
        holding(a_task("b", priority=10, gpu_mb=80 * GIB), "gpu1"),
        a_task("pair", priority=80, gpus=2),
    )
    cycle(world)
    let_go(world, "a", requeue=False)
    submit(world, a_task("urgent", priority=95, gpu_mb=80 * GIB))
    decisions = cycle(world)
    assert started(decisions) == ["urgent"]
    assert ends(decisions) == [("pair", PledgeEnd.TAKEN)] * 2


def test_of_two_pledges_the_one_of_lower_priority_is_taken() -> None:
    waiting = [a_task(f"p{p}", priority=p, gpu_mb=40 * GIB) for p in (60, 70)]
    world = a_world(a_device(), *waiting, *(a_pledge(task, "gpu0", 40 * GIB) for task in waiting))
    submit(world, a_task("urgent", priority=95, gpu_mb=40 * GIB))
    decisions = cycle(world)
    assert ends(decisions) == [("p60", PledgeEnd.TAKEN), ("p70", PledgeEnd.CONSUMED)]
    assert started(decisions) == ["urgent", "p70"]


def test_an_eviction_may_overtake_a_pledge_of_lower_priority() -> None:
    world = a_world(
        holding(a_task("a", priority=10, gpu_mb=40 * GIB), "gpu0"),
        holding(a_task("b", priority=10, gpu_mb=40 * GIB, submitted_at=NOW - 1.0), "gpu0"),
        a_task("mid", priority=50, gpu_mb=40 * GIB),
    )
    assert stopped(cycle(world)) == ["a"]
    submit(world, a_task("urgent", priority=95, gpu_mb=80 * GIB))
    decisions = cycle(world)
    assert stopped(decisions) == ["b"]
    assert ends(decisions) == [("mid", PledgeEnd.TAKEN)]
    assert list(world.pledges) == ["urgent"]


def test_a_preemptor_that_finds_room_elsewhere_gives_its_pledge_back() -> None:
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0"),
        holding(a_task("peer", priority=95, gpu_mb=80 * GIB), "gpu1"),
        a_task("high", priority=80, gpu_mb=40 * GIB),
    )
    cycle(world)
    let_go(world, "peer", requeue=False)
    decisions = cycle(world)
    assert started(decisions) == ["high"]
    assert ends(decisions) == [("high", PledgeEnd.WITHDRAWN)]


def test_pledges_of_a_task_that_no_longer_waits_are_withdrawn() -> None:
    """Their memory is planned for others in the same cycle."""
    tasks = [a_task("held", held=True), a_task("late", not_before=Instant(NOW + 9.0)), a_task("gone")]
    pledges = [a_pledge(task, "gpu0", 20 * GIB, priority=80) for task in tasks]
    world = a_world(a_device(), *tasks[:2], *pledges, a_task("new", gpu_mb=80 * GIB))
    decisions = cycle(world)
    assert ends(decisions) == [(name, PledgeEnd.WITHDRAWN) for name in ("gone", "held", "late")]
    assert started(decisions) == ["new"]


def test_one_preemption_for_each_of_several_equal_tasks() -> None:
    world = a_world(
        *(a_device(f"gpu{n}") for n in range(2)),
        *(holding(a_task(f"low{n}", priority=10, gpu_mb=80 * GIB), f"gpu{n}") for n in range(2)),
        *(a_task(f"high{n}", priority=80, gpu_mb=80 * GIB) for n in range(3)),
    )
    decisions = cycle(world)
    assert [decision.subject for decision in decisions] == ["high0", "high1"]
    assert stopped(decisions) == ["low0", "low1"]


def test_a_preemptor_that_waits_holds_back_none_of_its_likes() -> None:
    waits, like = (a_task(name, priority=80, gpu_mb=80 * GIB) for name in ("a", "b"))
    notice: dict[str, Any] = {"stop_reason": StopReason.PREEMPT, "freeing_for": waits.id}
    victim = a_task("victim", priority=10, gpu_mb=80 * GIB)
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(victim, "gpu0", state=TaskState.STOPPING, **notice),
        a_pledge(waits, "gpu0", 80 * GIB),
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu1"),
        waits,
        like,
    )
    assert stopped(cycle(world)) == ["low"]


def test_preemptor_with_free_room_starts_though_an_equal_task_is_refused() -> None:
    early = a_task("early", priority=80, gpu_mb=80 * GIB, submitted_at=Instant(NOW - 9.0))
    pledged = a_task("pledged", priority=80, gpu_mb=80 * GIB)
    world = a_world(a_device(), early, pledged, a_pledge(pledged, "gpu0", 80 * GIB))
    assert started(cycle(world)) == ["pledged"]


def test_a_refused_demand_is_looked_at_once_however_many_tasks_share_it() -> None:
    world = a_world(
        holding(a_task("peer", priority=95, gpu_mb=80 * GIB), "gpu0"),
        *(a_task(f"t{n:04}", priority=50 + n % 3, gpu_mb=10 * GIB) for n in range(3000)),
        a_task("cpu", priority=5, cpu=1.0),
    )
    plan = plan_cycle(world, POLICY, NOW, budget=50)
    assert plan.cursor is None
    assert started(list(plan.decisions)) == ["cpu"]


def test_a_demand_that_was_refused_is_tried_again_at_a_higher_priority() -> None:
    """Ageing brought the lower priority to the front; only the higher one may preempt."""
    world = a_world(
        holding(a_task("run", priority=55, gpu_mb=80 * GIB), "gpu0"),
        a_task("aged", priority=50, gpu_mb=10 * GIB, submitted_at=Instant(NOW - 1e6)),
        a_task("high", priority=60, gpu_mb=10 * GIB),
    )
    (decision,) = cycle(world)
    assert decision.subject == "high"


def test_a_slice_ends_when_its_looks_are_used_up_and_the_next_goes_on() -> None:
    world = a_world(a_device(), *(a_task(f"t{n}", gpu_mb=10 * GIB) for n in range(8)))
    names, slices, cursor = [], 0, None
    while slices == 0 or cursor is not None:
        plan = plan_cycle(world, POLICY, NOW, cursor, budget=20)
        commit(world, plan.decisions)
        assert len(plan.decisions) < 5
        names += started(list(plan.decisions))
        slices, cursor = slices + 1, plan.cursor
    assert names == [f"t{n}" for n in range(8)]


def test_ageing_stands_still_during_a_cycle_so_that_nobody_is_skipped() -> None:
    """A thousand seconds later `old` would stand before the others, where the cycle has been already."""
    old = a_task("old", priority=40, submitted_at=Instant(NOW - 1000.0))
    world = a_world(a_node(), old, a_task("first", priority=69), a_task("second", priority=68))
    names, cursor = [], None
    for now in (NOW, NOW + 1000.0, NOW + 2000.0):
        plan = plan_cycle(world, POLICY, Instant(now), cursor, budget=1)
        commit(world, plan.decisions)
        names += started(list(plan.decisions))
        cursor = plan.cursor
    assert names == ["first", "second", "old"]


def test_tasks_start_in_the_order_of_their_aged_priority() -> None:
    aged = a_task("aged", priority=50, submitted_at=Instant(NOW - 900.0))
    assert started(cycle(a_world(a_node(), aged, a_task("new", priority=60)))) == ["aged", "new"]


def test_what_was_refused_costs_no_look_in_the_next_cycle() -> None:
    world = a_world(
        holding(a_task("peer", priority=95, gpu_mb=80 * GIB), "gpu0"),
        *(a_task(f"t{n}", gpu_mb=10 * GIB) for n in range(4)),
        a_task("cpu", priority=5, cpu=1.0),
    )
    cache = PlanCache()
    first = plan_cycle(world, POLICY, NOW, cache=cache)
    commit(world, first.decisions)
    submit(world, a_task("late", priority=5, cpu=1.0))
    assert started(list(first.decisions)) == ["cpu"]
    assert started(list(plan_cycle(world, POLICY, NOW, budget=2, cache=cache).decisions)) == ["late"]


def test_task_admitted_in_a_cycle_is_not_stopped_in_a_later_slice_of_it() -> None:
    aged = a_task("aged", priority=60, gpu_mb=50 * GIB, submitted_at=Instant(NOW - 1e6))
    world = a_world(a_device(), aged, a_task("high", priority=65, gpu_mb=40 * GIB))
    policy = Policy(shield_seconds=Seconds(0.0))
    first = plan_cycle(world, policy, NOW, budget=1)
    commit(world, first.decisions)
    assert started(list(first.decisions)) == ["aged"]
    assert plan_cycle(world, policy, Instant(NOW + 1.0), first.cursor).decisions == ()
    assert stopped(cycle(world, now=NOW + 2.0, policy=policy)) == ["aged"]


def test_task_whose_pledge_was_just_taken_is_refused_like_its_equals() -> None:
    """`mid` stood for itself while it had a pledge; without one it is one of its likes again."""
    mid = a_task("mid", priority=50, gpu_mb=40 * GIB)
    like = a_task("like", priority=60, gpu_mb=40 * GIB)
    urgent = a_task("urgent", priority=95, gpu_mb=80 * GIB)
    world = a_world(a_device(), mid, like, urgent, a_pledge(mid, "gpu0", 40 * GIB))
    decisions = cycle(world)
    assert started(decisions) == ["urgent"]
    assert ends(decisions) == [("mid", PledgeEnd.TAKEN)]


def test_planning_changes_nothing_but_who_is_due() -> None:
    parts: list[Any] = [
        holding(a_task("low", priority=10, gpu_mb=80 * GIB), "gpu0"),
        a_task("high", priority=80, gpu_mb=80 * GIB),
        a_task("cpu", cpu=1.0),
    ]
    world = a_world(*parts)
    first = plan_cycle(world, POLICY, NOW)
    assert plan_cycle(world, POLICY, NOW) == first
    assert [decision.why for decision in first.decisions] == ["preempt", "admit"]
