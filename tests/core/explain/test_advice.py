"""When a waiting task is expected to start, and why no run is preempted for it."""

from collections.abc import Mapping
from typing import Any

import pytest
from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Instant, Seconds, TaskId
from gpubroker_server.core.explain.advice import Advice, advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain_pending
from gpubroker_server.core.explain.preemption_verdict import PreemptionStatus, Protection
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_sample,
    a_sketch,
    a_task,
    a_world,
    commit,
    holding,
    key,
)
from tests.core.expected import starting_in
from tests.core.scenarios import POLICY as SCENARIO_POLICY
from tests.core.scenarios import Chapter, Story, clusters, stories

POLICY = Policy(custom_limits=(CustomLimit("licence", 1.0),))
STATED = Seconds(100.0)
"""Seconds for which runs of the builders have run."""


def advice(world: World, policy: Policy = POLICY, task: str = "new") -> Advice:
    return advise(diagnose(survey_nodes(Draft(world), world.tasks[TaskId(task)], policy, NOW)))


def after(p50: float, p90: float | None = None, n: int = 0) -> Remaining:
    return Remaining(Seconds(p50), Seconds(p50 if p90 is None else p90), n)


def run(name: str, device: str = "gpu0", *, left: float | None = None, gib: int = 40, **fields: Any) -> Any:
    """A run that is expected to end in `left` seconds; None: unknown."""
    stated = None if left is None else STATED + left
    task = a_task(name, gpu_mb=gib * GIB, **{"priority": 100, "expected_seconds": stated, **fields})
    return holding(task, device)


def test_a_device_has_enough_when_the_first_to_leave_have_left() -> None:
    world = a_world(
        run("a", left=30.0, gib=30),
        run("b", left=10.0, gib=30),
        run("c", gib=20),
        a_task("new", gpu_mb=50 * GIB),
    )
    found = advice(world)
    assert found.free_in == {key("gpu0"): after(30.0)}
    assert found.start == starting_in(30.0)


def test_no_start_is_known_when_too_few_runs_have_a_known_end() -> None:
    found = advice(a_world(run("a", left=30.0), run("b"), a_task("new", gpu_mb=60 * GIB)))
    assert (found.free_in, found.start) == ({}, None)


def test_runs_of_a_subject_are_expected_to_take_what_such_runs_took() -> None:
    world = a_world(
        a_device("gpu0"),
        a_device("gpu1"),
        run("a", gib=80, subject="resnet"),
        run("b", "gpu1", gib=80, subject="resnet"),
        a_task("new", gpus=1),
    )
    topic = SketchKey("default", "resnet", "H100", What.SECONDS)
    world.learned.put(topic, a_sketch([50.0, 200.0, 200.0, 300.0]))
    found = advice(world)
    assert found.start is not None
    assert (found.start.p50_at - NOW, found.start.p90_at - NOW) == (
        pytest.approx(100, rel=0.05),
        pytest.approx(200, rel=0.05),
    )
    assert found.start.n == 3
    assert set(found.free_in) == {key("gpu0"), key("gpu1")}


def test_what_runs_took_on_devices_of_another_kind_tells_nothing() -> None:
    world = a_world(run("a", subject="fit"), a_task("new", gpu_mb=60 * GIB))
    world.learned.put(SketchKey("default", "fit", "A100", What.SECONDS), a_sketch([300.0] * 9))
    assert advice(world).start is None


def test_what_was_admitted_a_moment_ago_is_expected_to_take_its_whole_time() -> None:
    task = a_task("a", priority=100, gpu_mb=60 * GIB, expected_seconds=70.0)
    found = advice(a_world(holding(task, "gpu0", state=TaskState.ADMITTED), a_task("new", gpus=1)))
    assert found.start == starting_in(70.0)


def test_what_outlasted_what_was_stated_of_it_goes_by_runs_like_it() -> None:
    world = a_world(run("a", left=-10.0, gib=60, subject="resnet"), a_task("new", gpus=1))
    assert advice(world).start is None
    world.learned.put(SketchKey("default", "resnet", "H100", What.SECONDS), a_sketch([200.0]))
    start = advice(world).start
    assert start is not None
    assert (start.p50_at - NOW, start.n) == (pytest.approx(100, rel=0.05), 1)


def test_memory_that_is_being_released_counts_as_available_at_once() -> None:
    over = a_task("over", fence=1, state=TaskState.SUCCEEDED, gpu_mb=60 * GIB)
    world = a_world(over, a_lease(over, "gpu0", 60 * GIB, state=LeaseState.RELEASING), a_task("new", gpus=1))
    assert advice(world).start == starting_in(0.0)


def test_quarantined_memory_and_memory_pledged_to_others_does_not_count() -> None:
    gone = a_task("gone", fence=1, gpu_mb=60 * GIB)
    stuck = a_world(
        gone, a_lease(gone, "gpu0", 60 * GIB, state=LeaseState.QUARANTINED), a_task("new", gpus=1)
    )
    assert advice(stuck).start is None
    first = a_task("first", priority=100, gpu_mb=80 * GIB)
    leaving: dict[str, Any] = {
        "state": TaskState.STOPPING,
        "stop_deadline_at": Instant(NOW + 10.0),
        "freeing_for": "first",
    }
    victim = holding(a_task("victim", gpu_mb=80 * GIB), "gpu0", **leaving)
    taken = a_world(victim, first, a_pledge(first, "gpu0", 80 * GIB), a_task("new", gpu_mb=10 * GIB))
    assert advice(taken).start is None


def test_the_node_that_has_room_first_counts_with_cpu_and_all() -> None:
    slow_cpu = holding(a_task("cpu", cpu=64.0, expected_seconds=STATED + 50.0, priority=100), node="n1")
    world = a_world(
        a_device("gpu0", "n1"),
        a_device("gpu0", "n2"),
        a_device("gpu0", "n3"),
        run("a", "n1/gpu0", left=10.0, gib=80),
        run("b", "n2/gpu0", left=30.0, gib=80),
        run("c", "n3/gpu0", left=40.0, gib=80),
        slow_cpu,
        a_task("new", gpus=1, cpu=1.0),
    )
    assert advice(world).start == starting_in(30.0)
    n1 = a_world(
        a_device("gpu0", "n1"),
        run("a", "n1/gpu0", left=10.0, gib=80),
        slow_cpu,
        a_task("new", gpus=1, cpu=1.0),
    )
    assert advice(n1).start == starting_in(50.0)


def test_a_later_device_does_not_hide_a_sooner_one() -> None:
    world = a_world(
        a_device("gpu0", "n1"),
        a_device("gpu0", "n2"),
        run("a", "n1/gpu0", left=10.0, gib=80),
        holding(a_task("x", cpu=64.0, expected_seconds=STATED + 90.0), node="n1"),
        run("b", "n2/gpu0", left=20.0, gib=80),
        a_task("new", gpus=1, cpu=1.0),
    )
    assert advice(world).start == starting_in(20.0)


def test_task_short_of_a_shared_limit_starts_when_the_run_that_has_it_ends() -> None:
    user = run("a", left=30.0, gib=10, custom={"licence": 1.0})
    world = a_world(
        user, run("b", left=10.0, gib=10), a_task("new", gpu_mb=10 * GIB, custom={"licence": 1.0})
    )
    assert advice(world).start == starting_in(30.0)
    elsewhere = a_world(
        a_device("gpu0", "n1"),
        a_node("n2"),
        holding(a_task("a", custom={"licence": 1.0}), node="n2"),
        a_task("new", gpu_mb=1, custom={"licence": 1.0}),
    )
    assert advice(elsewhere).start is None


def test_a_preemptor_starts_by_the_deadline_of_its_victims() -> None:
    low = holding(a_task("low", priority=10, gpu_mb=60 * GIB, grace_seconds=20.0), "gpu0")
    found = advice(a_world(low, a_task("new", gpus=1)))
    assert (found.start, found.preemption.why) == (starting_in(20.0), PreemptionStatus.POSSIBLE)
    assert found.preemption.message == "1 run would be preempted for it"
    waiting = a_task("new", priority=80, gpu_mb=60 * GIB)
    leaving: dict[str, Any] = {
        "state": TaskState.STOPPING,
        "stop_reason": StopReason.PREEMPT,
        "freeing_for": "new",
    }
    victim = holding(a_task("low", gpu_mb=60 * GIB), "gpu0", stop_deadline_at=Instant(NOW + 30.0), **leaving)
    under_way = advice(a_world(victim, waiting, a_pledge(waiting, "gpu0", 60 * GIB)))
    assert (under_way.start, under_way.preemption.why) == (starting_in(30.0), PreemptionStatus.UNDER_WAY)
    assert under_way.preemption.message == "runs are being preempted for it"


def preemption_of(world: World, policy: Policy = POLICY) -> tuple[str, Mapping[str, int], str]:
    found = advice(world, policy).preemption
    return found.why, found.counts, found.message


def test_no_run_is_preempted_for_a_task_with_room_now_or_soon() -> None:
    assert preemption_of(a_world(a_task("new", gpus=1)))[0] is PreemptionStatus.NOT_NEEDED
    leaving: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 10.0)}
    world = a_world(holding(a_task("a", gpu_mb=60 * GIB), "gpu0", **leaving), a_task("new", gpus=1))
    why, counts, message = preemption_of(world)
    assert (why, counts) == (PreemptionStatus.ROOM_IS_COMING, {Protection.LEAVING: 1})
    assert message == "no run is preempted, because the memory that is being released is enough"


def test_no_run_is_preempted_without_preemption_gpus_or_nodes() -> None:
    full = (holding(a_task("low", priority=10, gpu_mb=60 * GIB), "gpu0"), a_task("new", gpus=1))
    assert preemption_of(a_world(*full), Policy(preemption=False))[::2] == (
        PreemptionStatus.OFF,
        "no run is preempted, because preemption is switched off",
    )
    cpu = a_world(holding(a_task("low", priority=10, cpu=64.0), node="n1"), a_task("new", cpu=1.0))
    assert preemption_of(cpu)[::2] == (
        PreemptionStatus.NO_GPUS,
        "for a task that asks for no GPU and isn't critical only idle work is preempted",
    )
    licence = {"custom": {"licence": 1.0}}
    used = holding(a_task("low", priority=10, gpu_mb=1, **licence), "gpu0")
    assert preemption_of(a_world(used, a_task("new", gpu_mb=1, **licence)))[0] is PreemptionStatus.LIMIT
    closed = a_world(a_device(), a_node("n1", ready=False), a_task("new", gpus=1))
    assert preemption_of(closed) == (
        PreemptionStatus.NO_RUNS,
        {},
        "nothing runs on the nodes that it could use",
    )


def test_each_run_has_its_protection() -> None:
    budget: dict[str, Any] = {"preemptions": 3, "started_at": NOW}
    world = a_world(
        holding(a_task("same", gpu_mb=20 * GIB), "gpu0"),
        holding(a_task("higher", priority=90, gpu_mb=20 * GIB), "gpu0"),
        holding(a_task("spent", priority=10, gpu_mb=20 * GIB), "gpu0", **budget),
        a_task("new", gpus=1),
    )
    why, counts, message = preemption_of(world)
    assert (why, counts) == (PreemptionStatus.ALL_SHIELDED, {Protection.BUDGET: 1, Protection.PRIORITY: 2})
    assert message == (
        "no run may be preempted for priority 50: 2 runs of the same or higher priority, 1 run preempted as "
        "often as is allowed"
    )
    assert [(one.run.id, one.shield, one.mb) for one in advice(world).preemption.runs] == [
        ("spent", Protection.BUDGET, 20 * GIB),
        ("same", Protection.PRIORITY, 20 * GIB),
        ("higher", Protection.PRIORITY, 20 * GIB),
    ]


def test_a_run_that_started_from_ahead_in_the_queue_is_protected() -> None:
    run = a_task("run", priority=45, gpu_mb=20 * GIB, submitted_at=Instant(NOW - 400.0))
    world = a_world(holding(run, "gpu0"), a_task("new", gpus=1))
    why, counts, message = preemption_of(world)
    assert (why, counts) == (PreemptionStatus.ALL_SHIELDED, {Protection.TURN: 1})
    assert (
        message
        == "no run may be preempted for priority 50: 1 run that started recently from ahead in the queue"
    )


def test_a_run_that_started_recently_is_protected() -> None:
    run = holding(a_task("run", priority=10, gpu_mb=20 * GIB), "gpu0")
    why, counts, message = preemption_of(
        a_world(run, a_task("new", gpus=1)), Policy(min_run_seconds=Seconds(101.0))
    )
    assert (why, counts) == (PreemptionStatus.ALL_SHIELDED, {Protection.YOUNG: 1})
    assert message == "no run may be preempted for priority 50: 1 run that started recently"


def test_runs_without_which_the_task_would_not_fit_are_not_enough() -> None:
    leaving: dict[str, Any] = {"state": TaskState.STOPPING, "stop_deadline_at": Instant(NOW + 10.0)}
    world = a_world(
        holding(a_task("low", priority=10, gpu_mb=20 * GIB), "gpu0"),
        holding(a_task("higher", priority=90, gpu_mb=20 * GIB), "gpu0"),
        holding(a_task("leaving", gpu_mb=1 * GIB), "gpu0", **leaving),
        a_task("new", gpus=1),
    )
    why, counts, message = preemption_of(world)
    assert (why, counts) == (
        PreemptionStatus.NOT_ENOUGH,
        {Protection.LEAVING: 1, Protection.PRIORITY: 1, Protection.WOULD_NOT_HELP: 1},
    )
    assert message == (
        "no run is preempted, because without 1 run it would still not fit; protected are 1 run of the "
        "same or higher priority, 1 run already stopping"
    )


def rows(world: World) -> object:
    """All that a plan depends on, caches aside, and whether anything was marked as changed."""
    queue = world.queue
    return repr(
        (
            world.position,
            world.tasks,
            world.leases,
            world.pledges,
            world.requests,
            world.nodes,
            [
                (ledger.device, ledger.holdings, ledger.pledges, ledger.sample)
                for ledger in world.ledgers.values()
            ],
            [(name, use.cpu, use.memory_mb, use.runs, use.custom) for name, use in world.use.items()],
            world.custom_use,
            world.active,
            [(group.key, list(group)) for group in queue.groups.values()],
            (queue.held, queue.awaiting, dict(queue.delayed), len(queue)),
            (world.marks.changes.revision, world.marks.growth.revision, world.inventory_version),
        )
    )


@given(clusters(), stories)
@settings(max_examples=25, deadline=None)
def test_advice_changes_nothing(world: World, story: list[Chapter]) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            pass
        commit(world, plan_cycle(world, SCENARIO_POLICY, Instant(tale.now)).decisions, tale.now)
        before = rows(world)
        for task in [row for row in world.tasks.values() if row.state is TaskState.PENDING]:
            for asked in (task, replace(task, id=TaskId("new"))):
                seen = diagnose(survey_nodes(Draft(world), asked, SCENARIO_POLICY, Instant(tale.now)))
                explain_pending(seen)
                advise(seen)
        assert rows(world) == before


def test_use_that_is_not_attributed_leaves_with_the_run_that_explains_it() -> None:
    for fields in ({"foreign_mb": None}, {"by_holder": {"a:1": 60 * GIB}}):
        sample = a_sample("gpu0", used_mb=62 * GIB, **fields)
        world = a_world(run("a", left=10.0, gib=60), sample, a_task("new", gpu_mb=70 * GIB))
        assert advice(world).start == starting_in(10.0)
    begun = holding(
        a_task("a", priority=100, gpu_mb=60 * GIB, expected_seconds=70.0),
        "gpu0",
        state=TaskState.ADMITTED,
        lease_state=LeaseState.RESERVED,
    )
    world = a_world(begun, a_sample("gpu0", foreign_mb=None), a_task("new", gpu_mb=70 * GIB))
    assert advice(world).start == starting_in(70.0)


def test_a_run_that_is_over_and_not_gone_is_no_obstacle_to_an_explanation() -> None:
    leaving = holding(
        a_task("leaving", gpu_mb=60 * GIB), "gpu0", lease_state=LeaseState.RELEASING,
        state=TaskState.STOPPING, stop_reason=StopReason.PREEMPT, stop_deadline_at=Instant(NOW + 20.0),
    )  # fmt: skip
    world = a_world(a_device(), leaving, run("stays", left=500.0, gib=15), a_task("new", gpu_mb=70 * GIB))
    start = advice(world).start
    assert start is not None
    assert start.p50_at == NOW + 500.0


def test_no_start_is_known_when_more_is_missing_than_runs_hold() -> None:
    """The rest is in use by strangers."""
    world = a_world(run("a", left=30.0, gib=20), a_task("new", gpu_mb=60 * GIB))
    world.measure([a_sample("gpu0", Instant(NOW), foreign_mb=50 * GIB)])
    assert advice(world).free_in == {}


def test_what_the_user_of_a_limit_takes_of_others_is_no_matter() -> None:
    user = run("a", left=30.0, gib=10, custom={"licence": 1.0, "seat": 1.0})
    world = a_world(user, a_task("new", gpu_mb=10 * GIB, custom={"licence": 1.0}))
    assert advice(world).start == starting_in(30.0)


def test_advice_says_what_would_become_of_the_task_if_it_were_submitted() -> None:
    def told(*parts: Any, **fields: Any) -> tuple[str, str]:
        world = a_world(*parts, a_task("new", gpu_mb=50 * GIB, **fields))
        found = diagnose(survey_nodes(Draft(world), world.tasks[TaskId("new")], POLICY, NOW))
        given = advise(found)
        return given.verdict, given.message(explain_pending(found))

    empty, low = a_device("gpu0"), run("low", priority=10)
    assert told(empty) == ("starts", "the task would start now on n1")
    assert told(empty, held=True) == ("waits", "held in the queue; release it to let it run")
    verdict, message = told(low)
    assert verdict == "preempts"
    assert message.startswith("1 run would be preempted for it, and the task would start on n1; until then: ")
    assert told(run("high"))[0] == "waits"
