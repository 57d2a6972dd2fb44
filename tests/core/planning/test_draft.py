"""A draft is tried out beside the World."""

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.errors import Overcommitted
from gpubroker_server.core.domain.policy import CustomLimit
from gpubroker_server.core.domain.task import Move, StopReason, TaskState
from gpubroker_server.core.domain.units import NodeName, TaskId
from gpubroker_server.core.lifecycle.stopping import withdraw_pledges
from gpubroker_server.core.planning.nodes.draft import Draft
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_task,
    a_world,
    commit,
    holding,
    key,
)
from tests.core.gangs import a_gang, bundles
from tests.core.world.test_world import picture


def test_a_lease_that_does_not_fit_is_a_mistake_and_changes_nothing() -> None:
    draft = Draft(a_world(a_device(), holding(a_task("run", gpu_mb=60 * GIB), "gpu0")))
    with pytest.raises(Overcommitted, match="do not fit"):
        draft.put_lease(a_lease(a_task("new"), "gpu0", 21 * GIB))
    assert draft.ledger(key("gpu0")).free_mb() == 20 * GIB
    draft.put_lease(a_lease(a_task("new"), "gpu0", 20 * GIB))
    assert draft.ledger(key("gpu0")).free_mb() == 0


def test_what_changes_in_a_draft_stays_there() -> None:
    high = a_task("high", priority=80, gpu_mb=20 * GIB)
    world = a_world(a_device(), high, holding(a_task("run", gpu_mb=60 * GIB, cpu=2.0), "gpu0"))
    before = str(picture(world))
    draft = Draft(world)
    draft.put_pledge(a_pledge(high, "gpu0", 20 * GIB))
    draft.put_lease(a_lease(a_task("new"), "gpu0", 10 * GIB))
    draft.end_pledges(high.id)
    assert str(picture(world)) == before


def test_what_a_gang_with_pledges_will_count_is_kept_for_it_once() -> None:
    """Of limits that stand on the gang, and not on its ranks."""
    gang = a_gang("gang", *bundles(2, gpu_mb=80 * GIB), priority=60, slots=(("runs", 1.0),))
    pledges = [a_pledge(gang, f"gpu{n}", 80 * GIB, ranks=(n,)) for n in (0, 1)]
    draft = Draft(a_world(a_device("gpu0"), a_device("gpu1"), gang, *pledges))
    low = a_task("low", priority=40, cpu=1.0, slots=(("runs", 1.0),))
    assert draft.short_of(low, [CustomLimit("runs", 1.0)]) == ["runs"]
    assert draft.short_of(low, [CustomLimit("runs", 2.0)]) == []
    for ahead in (replace(low, priority=70), gang):
        assert draft.short_of(ahead, [CustomLimit("runs", 1.0)]) == []


def test_a_pledge_that_ends_beside_a_draft_stays_in_it() -> None:
    high = a_task("high", priority=80, gpu_mb=20 * GIB, cpu=2.0)
    world = a_world(a_node(cpu=8.0), a_device(), high, a_pledge(high, "gpu0", 20 * GIB))
    draft = Draft(world)
    commit(world, Decision("high", "story", pledges=withdraw_pledges(world, high)))
    assert draft.headroom(NodeName("n1"), priority=50).cpu == 6.0


def test_run_given_notice_before_its_start_is_not_one_that_starts() -> None:
    """A task without GPUs goes where fewer runs start, in the cycle that gives the notice as in the next."""
    world = a_world(a_node(), holding(a_task("run", cpu=1.0), node="n1", state=TaskState.ADMITTED))
    draft, run = Draft(world), world.tasks[TaskId("run")]
    notice = write_move(run, Move.STOPPING, stop_reason=StopReason.PREEMPT, stop_deadline_at=NOW)
    draft.replace_task(run, notice.task)
    planned = draft.use(NodeName("n1")).copy()
    commit(world, Decision(run.id, "preempt", tasks=(notice,)))
    for use in (planned, world.use[NodeName("n1")]):
        assert (use.starting, use.stopping, use.cpu, use.runs) == (0, {"run"}, 1.0, 1)


def test_the_holder_of_a_lease_is_the_task_whose_newest_claim_it_is() -> None:
    world = a_world(a_device(), holding(a_task("run", gpu_mb=1), "gpu0", fence=2))
    draft = Draft(world)
    (lease,) = world.leases_of(world.tasks[TaskId("run")])
    assert draft.holder(lease) is world.tasks[TaskId("run")]
    assert draft.holder(a_lease(a_task("run", fence=1), "gpu0", 1)) is None
    assert draft.holder(a_lease(a_task("nobody"), "gpu0", 1)) is None


def test_pledged_custom_resource_is_only_closed_to_tasks_that_ask_for_it() -> None:
    low = holding(a_task("low", priority=10, gpu_mb=80 * GIB, custom={"fpga": 1.0}), "gpu0")
    high = a_task("high", priority=80, gpu_mb=80 * GIB, custom={"fpga": 1.0})
    pledge = a_pledge(high, "gpu0", 80 * GIB)
    world = a_world(a_node(custom=(("fpga", 1.0),)), a_device(), a_device("gpu1"), low, high, pledge)
    room = Draft(world).headroom(NodeName("n1"), priority=50)
    assert room.custom == (("fpga", -1.0),)
    assert room.short_of(a_task("new", custom={"licence": 1.0})) == []
    assert room.short_of(a_task("new", custom={"fpga": 1.0})) == ["fpga"]
