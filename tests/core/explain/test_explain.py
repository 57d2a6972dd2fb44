"""Explanations: blockers, devices and the place in the queue."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.device import Closure, NodeSample
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import CustomLimit, Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Dependency, Move, StopReason, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId
from gpubroker_server.core.explain.explain import Explanation, explain
from gpubroker_server.core.explain.survey import Verdict
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.dependencies import TaskEnd
from gpubroker_server.core.world.world import World

from tests.builders import (
    GIB,
    NOW,
    a_demand,
    a_device,
    a_lease,
    a_node,
    a_pledge,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    submit,
)

POLICY = Policy(custom_limits=(CustomLimit("licence", 4.0),))


def explained(world: World, task: str = "new", *, now: float = NOW) -> Explanation:
    return explain(world, TaskId(task), POLICY, Instant(now))


def reasons(explanation: Explanation) -> list[Reason]:
    return [blocker.reason for blocker in explanation.blockers]


def test_task_waiting_for_memory_reads_its_need_and_the_largest_free_block() -> None:
    runs = holding(a_task("a", gpu_mb=70 * GIB), "gpu0"), holding(a_task("b", gpu_mb=76 * GIB), "gpu1")
    world = a_world(a_device(), a_device("gpu1"), *runs, a_task("new", gpu_mb=18 * GIB))
    explanation = explained(world)
    assert explanation.reason is Reason.WAITING_FOR_MEMORY
    assert explanation.message == "needs 18.0 GiB on one GPU; the largest free block is 10.0 GiB (n1/gpu0)"
    assert (explanation.position, explanation.queue_length) == (1, 1)


def test_sizes_that_differ_below_rounding_are_told_in_mib() -> None:
    world = a_world(
        a_device(), holding(a_task("a", gpu_mb=70 * GIB), "gpu0"), a_task("new", gpu_mb=10 * GIB + 1)
    )
    needs, block = "needs 10241 MiB on one GPU", "the largest free block is 10240 MiB (n1/gpu0)"
    assert explained(world).message == f"{needs}; {block}"
    assert explained(world).devices[0].message == "10241 MiB are needed, 10240 MiB are free"
    large = a_world(a_device(), a_task("new", gpu_mb=80 * GIB + 1))
    assert "81921 MiB on one GPU exceed the largest, which offers 81920 MiB" in explained(large).message
    assert explained(large).devices[0].message == "too small: 81920 MiB in all"


def test_free_memory_in_pieces_is_fragmented() -> None:
    world = a_world(
        a_device(),
        a_device("gpu1"),
        holding(a_task("a", gpu_mb=70 * GIB), "gpu0"),
        holding(a_task("b", gpu_mb=68 * GIB), "gpu1"),
        a_task("new", gpu_mb=18 * GIB),
    )
    message = (
        "needs 18.0 GiB on one GPU; 22.0 GiB are free in all, but the largest block is 12.0 GiB (n1/gpu1)"
    )
    assert (explained(world).reason, explained(world).message) == (Reason.FRAGMENTED, message)


def test_a_task_for_whole_gpus_in_pieces_reads_the_best_node() -> None:
    world = a_world(
        a_device("gpu0", "n1"),
        a_device("gpu1", "n1"),
        a_device("gpu0", "n2"),
        a_device("gpu1", "n2"),
        holding(a_task("a", gpus=1), "n1/gpu0", mb=80 * GIB),
        holding(a_task("b", gpus=1), "n2/gpu1", mb=80 * GIB),
        a_task("new", gpus=2),
    )
    assert explained(world).reason is Reason.FRAGMENTED
    assert explained(world).message == (
        "needs 2 whole GPUs of one node; no node has more than 1 empty (n2/gpu0)"
    )


def test_a_task_for_several_gpus_reads_how_near_the_best_node_comes() -> None:
    taken = holding(a_task("a", gpu_mb=75 * GIB), "gpu0")
    world = a_world(a_device(), a_device("gpu1"), taken, a_task("new", gpus=2, gpu_mb=44 * GIB))
    assert explained(world).reason is Reason.WAITING_FOR_MEMORY
    assert explained(world).message == (
        "needs 44.0 GiB on each of 2 GPUs of one node; no node has more than 1 with that much free (n1/gpu1)"
    )
    full = a_world(
        a_device(), a_device("gpu1"), taken, a_task("new", gpus=2), holding(a_task("b"), "gpu1", mb=1)
    )
    assert explained(full).message == "needs 2 whole GPUs of one node; no node has one empty"


def test_a_blocker_names_the_device_whose_memory_is_being_released() -> None:
    over = a_task("over", gpu_mb=60 * GIB, fence=1)
    releasing = a_lease(over, "gpu0", 60 * GIB, state=LeaseState.RELEASING)
    world = a_world(a_device(), releasing, a_task("new", gpu_mb=30 * GIB))
    assert "which is being released on n1/gpu0" in explained(world).message


def test_blocker_names_the_preemptor_with_the_pledge_and_its_priority() -> None:
    preemptor = a_task("first", priority=80, gpu_mb=60 * GIB)
    world = a_world(
        a_device(), preemptor, a_pledge(preemptor, "gpu0", 60 * GIB), a_task("new", gpu_mb=30 * GIB)
    )
    assert explained(world).reason is Reason.BEHIND_HIGHER_PRIORITY
    assert explained(world).message == "the free memory of n1/gpu0 is pledged to first (priority 80)"
    assert explained(world).devices[0].message == "the free memory is pledged to first"


def test_tasks_of_other_tenants_are_not_named() -> None:
    theirs: dict[str, Any] = {"tenant": "theirs", "gpu_mb": 40 * GIB}
    waiting, mine = a_task("secret", priority=80, **theirs), a_task("new", priority=80, gpu_mb=60 * GIB)
    leaving: dict[str, Any] = {"state": TaskState.STOPPING, "stop_reason": StopReason.PREEMPT}
    kept = a_world(a_device(), waiting, a_pledge(waiting, "gpu0", 60 * GIB), mine)
    assert (
        explained(kept).message
        == "the free memory of n1/gpu0 is pledged to a task of another tenant (priority 80)"
    )
    assert explained(kept).devices[0].message == "the free memory is pledged to a task of another tenant"
    victim = holding(a_task("secret", **theirs), "gpu0", freeing_for="new", **leaving)
    pledged = a_world(a_device(), victim, mine, a_pledge(mine, "gpu0", 80 * GIB))
    assert "waits for a task of another tenant to stop" in explained(pledged).message
    stopping = holding(mine, "gpu0", freeing_for="secret", **leaving)
    assert "to make room for a task of another tenant;" in explained(a_world(stopping, waiting)).message
    assert "to make room for a task that has ended;" in explained(a_world(stopping)).message


def test_a_preemptor_reads_its_victims_and_their_deadline() -> None:
    world = a_world(
        *(holding(a_task(f"low{n}", priority=10, gpu_mb=20 * GIB), "gpu0") for n in range(4)),
        a_device(),
        a_task("new", priority=80, gpu_mb=70 * GIB),
    )
    commit(world, plan_cycle(world, POLICY, NOW).decisions)
    assert reasons(explained(world)) == [Reason.WAITING_FOR_PREEMPTION]
    world.measure([a_sample("gpu0", NOW + 35.0)])
    assert explained(world, now=NOW + 10.0).message == (
        "70.0 GiB on n1/gpu0 are pledged to it; it waits for low0, low1, low2 and 1 more to stop "
        "(within 20 s)"
    )
    assert "(due 5 s ago)" in explained(world, now=NOW + 35.0).message


def test_a_preemptor_reads_its_other_blockers() -> None:
    waiting = a_task("new", priority=80, gpu_mb=60 * GIB)
    world = a_world(a_device(), waiting, a_pledge(waiting, "gpu0", 60 * GIB))
    assert reasons(explained(world, now=NOW + 60.0)) == [
        Reason.BACKEND_UNAVAILABLE,
        Reason.WAITING_FOR_PREEMPTION,
    ]


def test_a_preemptor_whose_victims_have_ended_waits_for_their_memory() -> None:
    waiting = a_task("new", priority=80, gpu_mb=60 * GIB)
    over = a_task("over", gpu_mb=60 * GIB, fence=1, freeing_for="new", state=TaskState.SUCCEEDED)
    releasing = a_lease(over, "gpu0", 60 * GIB, state=LeaseState.RELEASING)
    world = a_world(a_device(), over, releasing, waiting, a_pledge(waiting, "gpu0", 60 * GIB))
    assert "waits for their memory to be released" in explained(world).message


def test_blockers_come_most_structural_first() -> None:
    world = a_world(
        a_node(max_runs=1),
        a_device(),
        holding(a_task("run", gpu_mb=60 * GIB, custom={"licence": 4.0}), "gpu0"),
        a_task(
            "new",
            gpu_mb=30 * GIB,
            held=True,
            not_before=Instant(NOW + 60.0),
            failures=2,
            max_retries=5,
            custom={"licence": 1.0},
        ),
    )
    explanation = explained(world)
    assert reasons(explanation) == [
        Reason.HELD,
        Reason.NOT_BEFORE,
        Reason.CONCURRENCY_LIMITED,
        Reason.CONCURRENCY_LIMITED,
        Reason.WAITING_FOR_MEMORY,
    ]
    messages = [blocker.message for blocker in explanation.blockers]
    assert messages[1] == "attempt 2 of at most 6 failed; the next is in 60 s"
    assert messages[2] == "needs 1 of 'licence'; too few of the cluster's 4 are left"
    assert [blocker.reason.tier for blocker in explanation.blockers] == [1, 7, 9, 9, 11]
    assert explanation.position is None


def test_a_blocker_says_what_a_full_node_has_left() -> None:
    run = holding(a_task("run", cpu=3.0, memory_mb=20 * GIB), node="n1")
    world = a_world(a_node(cpu=4.0, memory_mb=32 * GIB, max_runs=5), run, a_task("new", cpu=2.0))
    assert explained(world).message == (
        "needs 2 CPUs, of which 1 are left (on n1, the node with the most CPU left)"
    )


def test_a_full_node_names_only_what_is_short() -> None:
    run = holding(a_task("run", cpu=3.0, memory_mb=20 * GIB), node="n1")
    wanted = a_task("new", cpu=1.0, memory_mb=16 * GIB)
    world = a_world(a_node(cpu=4.0, memory_mb=32 * GIB, max_runs=1), run, wanted)
    assert explained(world).message.startswith(
        "needs a run slot, and none is left; 16.0 GiB of host memory, of which 12.0 GiB are left (on n1"
    )


def test_a_task_with_room_waits_for_the_next_cycle_behind_the_tasks_ahead() -> None:
    tasks = [a_task("urgent", priority=95), a_task("older", submitted_at=NOW - 1.0), a_task("new")]
    world = a_world(a_device(), *tasks, a_task("later", priority=10))
    assert explained(world, "urgent").message == "there is room for it now; the next cycle plans it"
    assert (explained(world).reason, explained(world).position) == (Reason.PENDING_EVALUATION, 3)
    assert explained(world).message.endswith("after the 2 tasks ahead of it")


def test_a_delayed_task_whose_time_has_come_waits_for_the_next_cycle() -> None:
    world = a_world(a_node(), a_task("new", not_before=Instant(NOW - 1.0)))
    assert (explained(world).reason, explained(world).position) == (Reason.PENDING_EVALUATION, None)


def test_positions_are_places_in_the_order_in_which_tasks_are_planned() -> None:
    tasks = [
        a_task(f"t{n:02}", priority=40 + 7 * (n % 4), submitted_at=NOW - 37.0 * (n % 5), cpu=float(n % 2))
        for n in range(40)
    ]
    world = a_world(a_node(cpu=1000.0, max_runs=100), *tasks)
    planned = [decision.subject for decision in plan_cycle(world, POLICY, NOW, budget=10_000).decisions]
    assert len(planned) == 40
    assert [explained(world, name).position for name in planned] == list(range(1, 41))


def test_a_task_that_can_never_run_reads_what_the_largest_device_offers() -> None:
    world = a_world(a_device(), a_task("new", gpu_mb=90 * GIB, priority=10))
    assert reasons(explained(world)) == [Reason.EXCEEDS_CAPACITY]
    assert "90.0 GiB on one GPU exceed the largest" in explained(world).message
    assert explained(world).devices[0].message == "too small: 80.0 GiB in all"


def some_verdicts(world: World) -> dict[str, tuple[Verdict, str]]:
    return {
        verdict.finding.ledger.device.label: (verdict.finding.verdict, verdict.message)
        for verdict in explained(world).devices
    }


def test_every_device_is_judged_with_its_holders_and_why_not() -> None:
    waiting = a_task("first", priority=80, gpu_mb=60 * GIB)
    low = holding(a_task("low", priority=10, gpu_mb=60 * GIB), "n1/gpu1")
    world = a_world(
        a_node("n2", ready=False),
        a_node("n3", cordoned=True),
        *(a_device(f"gpu{n}", "n1") for n in range(5)),
        a_device("gpu5", "n1", mb=10 * GIB, kind="T4"),
        a_device("gpu6", "n1", present=False),
        a_device("gpu0", "n2"),
        a_device("gpu0", "n3"),
        low,
        a_lease(a_task("dead", fence=1), "n1/gpu1", 1 * GIB, state=LeaseState.RELEASING),
        a_sample("n1/gpu1", by_holder={"low:1": 70 * GIB}),
        a_sample("n1/gpu2", foreign_mb=75 * GIB),
        waiting,
        a_pledge(waiting, "n1/gpu3", 80 * GIB),
        a_task("new", gpu_mb=30 * GIB),
    )
    stale = world.ledgers[DeviceKey("test/n1/gpu4")]
    stale.measure(a_sample("n1/gpu4", NOW - 60.0))
    assert some_verdicts(world) == {
        "n1/gpu0": (Verdict.FITS, "fits: 80.0 GiB are free"),
        "n1/gpu1": (Verdict.NO_ROOM, "30.0 GiB are needed, 9.0 GiB are free"),
        "n1/gpu2": (
            Verdict.NO_ROOM,
            "30.0 GiB are needed, 5.0 GiB are free, 75.0 GiB are used by processes outside gpubroker",
        ),
        "n1/gpu3": (Verdict.KEPT_FOR_OTHERS, "the free memory is pledged to first"),
        "n1/gpu4": (Verdict.STALE, "its memory use has not been reported lately"),
        "n1/gpu5": (Verdict.TOO_SMALL, "too small: 10.0 GiB in all"),
        "n1/gpu6": (Verdict.GONE, "its node no longer has it"),
        "n2/gpu0": (Verdict.NODE_NOT_READY, "its node does not answer"),
        "n3/gpu0": (Verdict.CORDONED, "its node is cordoned"),
    }
    crowded = explained(world).devices[1]
    assert [(h.lease.holder, h.lease.priority, h.occupied_mb, h.is_leaving) for h in crowded.holders] == [
        ("low", 10, 70 * GIB, False),
        ("dead", 50, 1 * GIB, True),
    ]
    assert (crowded.finding.need_mb, crowded.finding.free_mb) == (30 * GIB, 9 * GIB)


def test_a_whole_device_in_use_without_a_lease_says_by_what_and_what_to_do() -> None:
    world = a_world(a_device(), a_sample("gpu0", used_mb=1536, foreign_mb=512), a_task("new", gpus=1))
    others = "0.5 GiB are used by processes outside gpubroker and 1.0 GiB are used by unknown processes"
    assert explained(world).devices[0].message == f"not empty: 78.5 GiB of 80.0 GiB are free, {others}"
    assert explained(world).reason is Reason.WAITING_FOR_MEMORY
    assert explained(world).message == (
        f"needs a whole GPU, and of n1/gpu0 {others}: end or declare them, or ask for a size (gpu_mb); "
        "the largest free block is 78.5 GiB (n1/gpu0)"
    )


def test_whole_device_with_a_lease_on_it_does_not_mention_other_processes() -> None:
    run = holding(a_task("run", gpu_mb=8 * GIB), "gpu0")
    world = a_world(a_device(), run, a_sample("gpu0", foreign_mb=512), a_task("new", gpus=1))
    assert explained(world).message == "needs a whole GPU; the largest free block is 71.5 GiB (n1/gpu0)"


def test_a_task_without_gpus_has_no_device_verdicts() -> None:
    assert explained(a_world(a_device(), a_task("new", cpu=1.0))).devices == ()


@pytest.mark.parametrize(
    ("state", "fields", "message"),
    [
        (TaskState.ADMITTED, {"admitted_at": NOW}, "admitted to n1; it is being started"),
        (TaskState.RUNNING, {}, "running on n1 for 100 s"),
        (
            TaskState.STOPPING,
            {
                "stop_reason": StopReason.PREEMPT,
                "stop_deadline_at": Instant(NOW + 7.0),
                "freeing_for": "high",
            },
            "asked to stop (preempt) to make room for high; 7 s of grace are left",
        ),
        (
            TaskState.STOPPING,
            {"stop_reason": StopReason.CANCEL, "stop_deadline_at": Instant(NOW - 7.0)},
            "asked to stop (cancel); 0 s of grace are left",
        ),
        (TaskState.SUCCEEDED, {}, "succeeded"),
    ],
)
def test_a_task_that_does_not_wait_says_what_it_does(
    state: TaskState, fields: dict[str, Any], message: str
) -> None:
    run = holding(a_task("new", gpu_mb=1), "gpu0", state=state, **fields)
    world = a_world(run, a_task("high", priority=80))
    explanation = explained(world)
    assert (explanation.state, explanation.reason, explanation.message) == (state, None, message)
    assert (explanation.blockers, explanation.devices, explanation.position) == ((), (), None)


@pytest.mark.parametrize("reason", StopReason)
def test_a_stopping_task_names_the_reason_or_else_the_cause(reason: StopReason) -> None:
    stop: dict[str, Any] = {"stop_reason": reason, "stop_deadline_at": Instant(NOW + 7.0)}
    world = a_world(holding(a_task("new", gpu_mb=1), "gpu0", state=TaskState.STOPPING, **stop))
    assert explained(world).message.startswith(f"asked to stop ({reason.value})")
    stop["stop_cause"] = "the drain of n1 by admin"
    world = a_world(holding(a_task("new", gpu_mb=1), "gpu0", state=TaskState.STOPPING, **stop))
    told = explained(world).message
    assert told == "asked to leave for the drain of n1 by admin; 7 s of grace are left"


def test_an_unknown_task_raises_key_error() -> None:
    with pytest.raises(KeyError):
        explained(World())


def test_the_published_reasons_are_a_total_order_with_one_shared_place() -> None:
    tiers = [reason.tier for reason in Reason]
    assert tiers == sorted(tiers)
    assert set(tiers) == set(range(1, 16))
    assert Reason.NOT_BEFORE.tier == Reason.DEPENDENCY_PENDING.tier


def test_explaining_changes_nothing() -> None:
    world = a_world(a_device(), a_task("new", gpu_mb=1), a_task("late", not_before=Instant(NOW - 1.0)))
    assert explained(world) == explained(world)
    assert TaskId("late") not in world.queue


def test_a_blocker_says_what_a_node_has_left_of_its_custom_resource() -> None:
    policy = Policy(custom_limits=(CustomLimit("fpga", 2.0, per_node=True),))
    run = holding(a_task("run", cpu=1.0, custom={"fpga": 1.0}), node="n1")
    world = a_world(a_node("n1", custom=(("fpga", 2.0),)), run)
    submit(world, a_task("new", cpu=1.0, custom={"fpga": 2.0}))
    found = explain(world, TaskId("new"), policy, NOW)
    assert found.reason is Reason.CONCURRENCY_LIMITED
    assert found.message == "needs 2 of 'fpga', of which 1 are left (on n1, the node with the most CPU left)"


def test_a_task_lowered_below_the_threshold_of_a_resource_says_so() -> None:
    policy = Policy(custom_limits=(CustomLimit("seat", 2.0, priority_threshold=70),))
    world = a_world(a_node("n1"))
    submit(world, a_task("new", priority=50, cpu=1.0, custom={"seat": 1.0}))
    found = explain(world, TaskId("new"), policy, NOW)
    assert found.reason is Reason.EXCEEDS_CAPACITY
    assert "priority 70 and above" in found.message


def test_a_gpu_that_does_not_match_the_demand_says_so() -> None:
    task = a_task("new", gpus=1, where=PlacementConstraints(kinds=("A100",)))
    world = a_world(a_device("gpu0", kind="H100"), a_device("gpu1", kind="A100"), task)
    found = explain(world, task.id, POLICY, NOW)
    assert [verdict.finding.verdict for verdict in found.devices] == [Verdict.NOT_WANTED, Verdict.FITS]
    assert found.devices[0].message == "does not match the demand (kinds A100)"


def test_task_too_large_for_any_node_waits_for_one_the_autoscaler_may_add() -> None:
    policy = Policy(autoscaler="keda")
    for demand in ({"gpus": 9}, {"bundles": (a_demand(gpus=9),)}):
        world = a_world(a_device(), a_task("new", **demand))
        found = explain(world, TaskId("new"), policy, NOW)
        assert found.reason is Reason.EXCEEDS_CAPACITY
        assert found.message.startswith("it waits for a node that autoscaler keda may add: ")
        assert "keda" not in explain(world, TaskId("new"), Policy(), NOW).message


def test_task_after_an_array_or_a_worker_set_says_what_is_left_of_them() -> None:
    workers = [a_task(name, holder=WorkerSeat(TaskId("w0"))) for name in ("w0", "w1")]
    places = (TaskId("s0"),)
    after = (Dependency(TaskId("s0")), Dependency(TaskId("w0")))
    world = a_world(a_device(), *workers, a_task("s0"))
    world.worker_sets.restore([WorkerSet(places[0], "default", "", places, 1, 1, 1, 1, NOW)])
    submit(world, a_task("new", after=after, awaits=True))
    said = "runs after s0 (a worker set), w0 (an array, of which {} left)"
    assert explain(world, TaskId("new"), POLICY, NOW).message == said.format("2 workers are")
    row = world.tasks[TaskId("w0")]
    commit(world, Decision(row.id, "test", tasks=(write_move(row, Move.CANCELLED, finished_at=NOW),)))
    assert explain(world, TaskId("new"), POLICY, NOW).message == said.format("1 worker is")


def test_a_task_that_runs_after_others_names_them_and_how_they_stand() -> None:
    names = ("a", "b", "c", "d")
    after = tuple(Dependency(TaskId(name)) for name in names)
    run = holding(a_task("b", cpu=1.0), node="n1")
    world = a_world(a_device(), a_task("a"), run, a_task("c"), a_task("new", after=after, awaits=True))
    found = explain(world, TaskId("new"), POLICY, NOW)
    assert found.reason is Reason.DEPENDENCY_PENDING
    assert found.message == "runs after a (pending), b (running), c (pending) and 1 more"
    assert found.position is None
    world.awaited.learn([TaskId("d")], {TaskId("d"): TaskEnd(TaskState.SUCCEEDED)})
    assert "c (pending)" in explain(world, TaskId("new"), POLICY, NOW).message
    assert "more" not in explain(world, TaskId("new"), POLICY, NOW).message


def test_a_task_whose_gpus_are_closed_says_which_and_why() -> None:
    closure = Closure("xid", "48", "XID 48: uncorrectable memory error", NOW)
    world = a_world(
        a_device("gpu0", closure=closure), a_device("gpu1", mb=10 * GIB), a_task("new", gpu_mb=18 * GIB)
    )
    told = explained(world)
    assert told.reason is Reason.GPU_CLOSED
    assert "n1/gpu0: XID 48: uncorrectable memory error" in told.message
    verdicts = some_verdicts(world)
    assert verdicts["n1/gpu0"] == (Verdict.GPU_CLOSED, "it is closed: XID 48: uncorrectable memory error")
    assert verdicts["n1/gpu1"][0] is Verdict.TOO_SMALL


def test_a_start_that_takes_long_says_so_and_whether_the_cpus_are_busy() -> None:
    run = holding(a_task("new", gpu_mb=1), "gpu0", state=TaskState.ADMITTED, admitted_at=NOW)
    world = a_world(run)
    assert explained(world, now=NOW + 20.0).message == "admitted to n1; it is being started"
    slow = explained(world, now=NOW + 70.0).message
    assert slow == "admitted to n1; it is being started; starts are slow on n1: it has taken 70 s so far"
    sample = NodeSample(NodeName("n1"), NOW, 0.99, Mib(100), Mib(50))
    world.measure((), [sample])
    assert "starts are slow on n1, whose CPUs are 99% busy" in explained(world, now=NOW + 70.0).message
