"""Who may take what is being freed for another: only who stands before it in the queue."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.lease import PledgeEnd, Proof, release
from gpubroker_server.core.domain.policy import Policy, TenantPolicy
from gpubroker_server.core.domain.task import Move, Placement, Task
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.deadlines import ObservationWindow, due
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.reservations import Basis, Forecast
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_node,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    let_go,
    submit,
)
from tests.core.planning.test_cycle import cycle, ends, started, stopped
from tests.core.world.test_inherited_priority import after

HOURS_AGO = Instant(NOW - 9_999.0)
POLICY = Policy()


def freed_for(task: Task, *others: Any) -> World:
    """Two runs are being stopped for the task, and one has left."""
    low = [holding(a_task(f"low{n}", priority=10, gpu_mb=40 * GIB), "gpu0") for n in range(2)]
    world = a_world(a_device(), *low, *others, task)
    assert stopped(cycle(world)) == ["low0", "low1"]
    let_go(world, "low0", requeue=False)
    return world


def a_wide(name: str, priority: int, **fields: Any) -> Task:
    return a_task(name, priority=priority, gpu_mb=80 * GIB, **fields)


def a_small(name: str, priority: int, **fields: Any) -> Task:
    return a_task(name, priority=priority, gpu_mb=40 * GIB, **fields)


def test_freed_memory_is_kept_from_tasks_behind_the_preemptor_in_its_band() -> None:
    world = freed_for(a_wide("aged", 55, submitted_at=HOURS_AGO))
    submit(world, a_small("fresh", 69))
    assert cycle(world, now=NOW + 2.0) == []
    let_go(world, "low1", requeue=False)
    decisions = cycle(world, now=NOW + 4.0)
    assert (started(decisions), ends(decisions)) == (["aged"], [("aged", PledgeEnd.CONSUMED)])


@pytest.mark.parametrize("priority", [58, 69])
def test_who_stands_before_it_in_its_band_takes_what_is_freed_for_a_task(priority: int) -> None:
    world = freed_for(a_wide("young", 55, submitted_at=Instant(NOW - 120.0)))
    submit(world, a_small("above", priority, submitted_at=NOW))
    decisions = cycle(world, now=NOW + 2.0)
    assert (started(decisions), ends(decisions)) == (["above"], [("young", PledgeEnd.TAKEN)])


def test_a_higher_band_takes_what_is_freed_for_a_task_however_old_that_is() -> None:
    world = freed_for(a_wide("aged", 55, submitted_at=HOURS_AGO))
    submit(world, a_small("above", 70))
    assert started(cycle(world, now=NOW + 2.0)) == ["above"]


def test_with_tenant_shares_freed_memory_is_kept_from_the_whole_band() -> None:
    """Priority comes after the shares of tenants: `later` stands behind `first`."""
    held = holding(a_task("run", tenant="busy", gpu_mb=70 * GIB, priority=69), "gpu1")
    world = freed_for(a_wide("first", 55, tenant="idle"), a_device("gpu1"), held)
    submit(world, a_small("later", 69, tenant="busy"))
    assert cycle(world, now=NOW + 2.0) == []


def test_inherited_urgency_keeps_freed_memory_from_its_own_band_only() -> None:
    heir = a_wide("heir", 85, **after("needed"))
    world = freed_for(a_wide("needed", 55), heir)
    submit(world, a_small("behind", 69))
    assert cycle(world, now=NOW + 2.0) == []
    submit(world, a_small("above", 70))
    assert started(cycle(world, now=NOW + 4.0)) == ["above"]


def test_memory_freed_for_an_owner_is_kept_from_a_later_borrower() -> None:
    """When it was asked for nobody else had ever held anything: there was nothing to go by but priority."""
    owner, borrower = TenantPolicy("owner", "lab", Mib(200 * GIB)), TenantPolicy("borrower", "lab", Mib(0))
    policy, mine = Policy(tenants=(owner, borrower)), {"tenant": "owner", "gpu_mb": 40 * GIB}
    low = [holding(a_task(f"low{n}", priority=10, **mine), "gpu0") for n in range(2)]
    world = a_world(a_device(), *low, a_wide("wide", 55, tenant="owner"))
    assert stopped(cycle(world, policy=policy)) == ["low0", "low1"]
    let_go(world, "low0", requeue=False)
    submit(world, a_small("later", 69, tenant="borrower"))
    assert cycle(world, now=NOW + 2.0, policy=policy) == []


def started_from_its_pledge(**fields: Any) -> World:
    """`aged` had low runs stopped, and began 5 s ago in what they left."""
    aged = a_wide("aged", 55, **({"submitted_at": HOURS_AGO} | fields))
    world = freed_for(aged)
    let_go(world, "low1", requeue=False)
    decisions = cycle(world, now=NOW + 2.0)
    assert started(decisions) == ["aged"]
    commit(world, begun(world, "aged", NOW + 3.0))
    return world


def begun(world: World, name: str, at: float, move: Move = Move.STARTED, **fields: Any) -> Decision:
    heard: dict[str, Any] = {"started_at": Instant(at)} if move is Move.STARTED else fields
    row = write_move(world.tasks[TaskId(name)], move, **heard)
    return Decision(TaskId(name), "heard", tasks=(row,))


def stopped_at(world: World, seconds: float, policy: Policy = POLICY) -> list[str]:
    world.measure([a_sample("gpu0", NOW + seconds)])
    return stopped(cycle(world, now=NOW + seconds, policy=policy))


@pytest.mark.parametrize("priority", [56, 69])
def test_who_stood_behind_it_in_its_band_does_not_stop_what_has_just_begun(priority: int) -> None:
    world = started_from_its_pledge()
    submit(world, a_small("fresh", priority))
    assert stopped_at(world, 8.0) == []


@pytest.mark.parametrize(("priority", "submitted_at"), [(70, HOURS_AGO), (95, HOURS_AGO), (60, NOW - 120.0)])
def test_run_started_from_its_pledge_is_stopped_by_tasks_ranked_above_it(
    priority: int, submitted_at: float
) -> None:
    """They are those of a higher band and those that would have stood before it."""
    world = started_from_its_pledge(submitted_at=Instant(submitted_at))
    submit(world, a_small("fresh", priority))
    assert stopped_at(world, 8.0) == ["aged"]


def test_what_went_first_may_be_stopped_once_it_has_saved_its_work() -> None:
    world = started_from_its_pledge()
    submit(world, a_small("fresh", 69))
    assert stopped_at(world, 8.0) == []
    commit(world, begun(world, "aged", 0.0, Move.CHANGED, checkpoint_at=Instant(NOW + 9.0)))
    assert stopped_at(world, 10.0) == ["aged"]


def test_what_went_first_may_be_stopped_once_it_has_run_for_long_enough() -> None:
    world, until = started_from_its_pledge(), 3.0 + POLICY.shield_seconds
    submit(world, a_small("fresh", 69))
    assert (stopped_at(world, until - 1.0), stopped_at(world, until)) == ([], ["aged"])


def test_nobody_keeps_its_turn_where_the_operator_gives_it_no_time() -> None:
    world = started_from_its_pledge()
    submit(world, a_small("fresh", 69))
    assert stopped_at(world, 8.0, Policy(shield_seconds=Seconds(0.0))) == ["aged"]


def test_pledged_room_is_not_subtracted_twice_beside_a_reservation() -> None:
    """One run slot is for a stopped run, one for the task it is stopped for, and one for a task behind."""
    first, behind = a_task("first", priority=95, gpu_mb=80 * GIB), a_task("behind", priority=50, cpu=1.0)
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB, grace_seconds=Seconds(30.0)), "gpu0")
    world = a_world(a_node(max_runs=3), a_device(), low, first, behind)
    there = Placement(NodeName("n1"), ((key("gpu0"), Mib(80 * GIB)),))
    due = Instant(NOW - 20.0)
    late = Forecast(first.id, (there,), due, due, Instant(NOW + 999.0), 0, Basis.STATED)
    decisions = plan_cycle(world, POLICY, NOW, budget=10_000, forecasts=[late]).decisions
    assert [(d.why, d.subject) for d in decisions] == [("preempt", "first"), ("admit", "behind")]


def given_up(world: World, *names: str) -> None:
    """Their time to leave is over, and their processes are still there."""
    now = Instant(NOW + POLICY.kill_patience_seconds)
    decisions = due(world, now, POLICY, ObservationWindow(since=NOW, last=now))
    assert [(d.subject, d.why) for d in decisions] == [(name, "unconfirmed") for name in names]
    commit(world, decisions, now)


def confirmed_gone(world: World, name: str) -> None:
    """The first run of a task that was given up, and may run again."""
    leases = world.unconfirmed.quarantined[name].values()
    gone = tuple(release(lease, Proof.PROCESS_ABSENT) for lease in leases)
    commit(world, Decision(name, "gone", leases=gone))


def full_gpus(count: int) -> list[Any]:
    """One run on each of a node."""
    low = [a_wide(f"low{n}", 10, grace_seconds=Seconds(0.0)) for n in range(count)]
    return [part for n, run in enumerate(low) for part in (a_device(f"gpu{n}"), holding(run, f"gpu{n}"))]


def at(world: World, seconds: float) -> list[Decision]:
    world.measure([a_sample(device, NOW + seconds) for device in world.ledgers])
    return cycle(world, now=NOW + seconds)


def test_what_other_victims_freed_waits_for_the_one_in_quarantine() -> None:
    """They took it again at once, were stopped for it again, and so on, and `both` never began."""
    world = a_world(*full_gpus(2), a_task("both", priority=55, gpus=2))
    assert stopped(cycle(world)) == ["low0", "low1"]
    let_go(world, "low1")
    given_up(world, "low0")
    assert at(world, 11.0) == []
    confirmed_gone(world, "low0")
    decisions = at(world, 60.0)
    assert (started(decisions), ends(decisions)) == (["both"], [("both", PledgeEnd.CONSUMED)] * 2)


def test_a_preemptor_goes_elsewhere_while_its_victim_is_in_quarantine() -> None:
    world = a_world(*full_gpus(2), a_wide("high", 55))
    assert stopped(cycle(world)) == ["low0"]
    assert at(world, 5.0) == []  # it may still leave
    given_up(world, "low0")
    decisions = at(world, 11.0)
    assert (stopped(decisions), ends(decisions)) == (["low1"], [("high", PledgeEnd.DISSOLVED)])
    assert [*world.pledges[TaskId("high")]] == [key("gpu1")]
    confirmed_gone(world, "low0")
    assert started(at(world, 12.0)) == ["high"]


def test_what_was_freed_for_a_preemptor_is_part_of_its_other_way() -> None:
    world = a_world(*full_gpus(4), a_task("both", priority=55, gpus=2))
    assert stopped(cycle(world)) == ["low0", "low1"]
    let_go(world, "low1")
    given_up(world, "low0")
    assert stopped(at(world, 11.0)) == ["low2"]
    assert [*world.pledges[TaskId("both")]] == [key("gpu1"), key("gpu2")]
