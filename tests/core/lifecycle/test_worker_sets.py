"""Worker sets: how many workers are wanted, which come and leave, and what becomes of those that fail."""

from typing import Any

import pytest
from gpubroker.wire.worker_sets import Scaling
from gpubroker_server.core.domain.decisions import Decision, Notice, Request, TaskWrite, write_move
from gpubroker_server.core.domain.lease import PledgeEnd
from gpubroker_server.core.domain.orders import Loaded, StopOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Move, StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.change_requests import carry_out, carry_out_all
from gpubroker_server.core.lifecycle.stopping import after_stop
from gpubroker_server.core.lifecycle.worker_sets import STABLE_SECONDS, Autoscaler, due, scaled, with_notices
from gpubroker_server.core.world.events import events_of
from gpubroker_server.core.world.payload import fields_of
from gpubroker_server.core.world.worker_sets import WorkerSets
from gpubroker_server.core.world.world import World
from msgspec import to_builtins
from msgspec.structs import replace

from tests.builders import GIB, NOW, Holding, a_device, a_pledge, a_task, a_world, commit, holding

POLICY = Policy()
CALLS = Scaling("calls", 4.0, Seconds(60.0))


def a_set(*workers: str, count: int, **fields: Any) -> WorkerSet:
    ids = tuple(TaskId(worker) for worker in workers)
    limits = {"least": 0, "most": len(ids), "max_concurrency": 4, "created_at": NOW, **fields}
    return WorkerSet(ids[0], "default", "solvers", ids, count=count, **limits)


def of(workers: WorkerSet, *contents: Any) -> World:
    """A World with these contents and the set."""
    world = a_world(*contents)
    ask(world, workers.id, "form", to_builtins(workers))
    return world


def ask(world: World, workers: str, what: str, fields: dict[str, Any]) -> Decision:
    request = Request("r1", TaskId(workers), "default", what, fields, NOW)
    world.add_request(request)
    decision = carry_out(world, request, NOW, POLICY)
    commit(world, decision)
    assert world.requests == {}
    return decision


def running(name: str, gpu: str, seconds: float = 10.0, **fields: Any) -> Holding:
    return holding(a_task(name, gpu_mb=GIB), gpu, started_at=Instant(NOW - seconds), **fields)


def stopping(name: str, gpu: str, why: StopReason) -> Holding:
    return running(name, gpu, state=TaskState.STOPPING, stop_reason=why, stop_deadline_at=NOW)


def step(world: World, loads: dict[str, Loaded] | None = None, at: float = 0.0, by: Any = None) -> Any:
    """What is decided by then, committed."""
    known = {TaskId(task): load for task, load in (loads or {}).items()}
    decisions = due(world, known, by or Autoscaler(), Instant(NOW + at))
    commit(world, decisions)
    return decisions


def busy(world: World, **running: int) -> dict[str, Loaded]:
    return {
        name: Loaded(TaskId(name), world.tasks[TaskId(name)].fence, NOW, calls, 0, 12.5 * calls)
        for name, calls in running.items()
    }


def held(world: World) -> set[str]:
    return {task.id for task in world.tasks.values() if task.held}


def test_as_many_workers_are_let_go_as_are_wanted_and_no_more() -> None:
    workers = a_set("a", "b", "c", count=2)
    world = of(workers, *(a_task(name, held=True) for name in "abc"))
    step(world)
    assert held(world) == {"c"}
    assert step(world) == []


def test_a_set_without_its_tasks_is_not_formed_and_one_is_formed_once() -> None:
    workers = a_set("a", count=1)
    assert ask(a_world(), "a", "form", to_builtins(workers)).worker_sets == ()
    world = of(workers, a_task("a"))
    assert ask(world, "a", "form", to_builtins(replace(workers, count=0))).worker_sets == ()
    assert world.worker_sets == {"a": workers}


def ask_together(world: World, *asked: tuple[str, dict[str, Any]]) -> WorkerSet:
    """What one batch of requests makes of the only set, or of the set `a` that it forms."""
    requests = [
        Request(f"r{at}", TaskId("a"), "default", what, fields, NOW)
        for at, (what, fields) in enumerate(asked)
    ]
    for request in requests:
        world.add_request(request)
    commit(world, carry_out_all(world, requests, NOW, POLICY))
    assert world.requests == {}
    return world.worker_sets[TaskId("a")]


def test_requests_about_one_set_that_come_together_all_count() -> None:
    workers = a_set("a", "b", "c", count=1)
    tasks = [a_task(name, held=True) for name in "abc"]
    scale, signal = ("scale", {"count": 3}), ("signal", {"value": 7.0})
    for asked in ((scale, signal), (signal, scale)):
        after = ask_together(of(workers, *tasks), *asked)
        assert (after.count, after.signal) == (3, 7.0)
    after = ask_together(a_world(*tasks), ("form", to_builtins(workers)), scale, ("cancel", {}))
    assert after.count == 3


def test_a_change_of_one_bound_keeps_what_was_changed_meanwhile() -> None:
    world = of(a_set("a", "b", "c", count=1, most=1), *(a_task(name, held=True) for name in "abc"))
    after = ask_together(world, ("scale", {"most": 3}), ("scale", {"count": 2}), ("scale", {"least": 1}))
    assert (after.least, after.count, after.most) == (1, 2, 3)


@pytest.mark.parametrize(
    ("scaling", "given", "after"),
    [
        (None, {"count": 4}, (2, 4, 4)),
        (None, {"count": 1}, (1, 1, 3)),
        (None, {"count": 0, "most": 1}, (0, 0, 1)),
        (None, {"count": 9}, (2, 4, 4)),
        (None, {"least": 4}, (4, 4, 4)),
        (None, {"most": 1}, (1, 1, 1)),
        (CALLS, {"count": 4}, (2, 3, 3)),
        (CALLS, {"count": 1}, (2, 2, 3)),
        (CALLS, {"least": 1, "count": 1}, (1, 1, 3)),
    ],
)
def test_what_is_not_given_follows_what_is(
    scaling: Scaling | None, given: dict[str, int], after: tuple[int, int, int]
) -> None:
    workers = scaled(a_set(*"abcd", count=2, least=2, most=3, scaling=scaling), **given)
    assert (workers.least, workers.count, workers.most) == after


@pytest.mark.parametrize("what", ["scale", "signal"])
def test_a_request_about_a_set_that_is_over_is_settled_without_effect(what: str) -> None:
    assert ask(a_world(), "a", what, {"value": 1.0}).worker_sets == ()


def test_the_newest_run_leaves_first_and_what_only_waits_before_it() -> None:
    workers = a_set("old", "new", "waits", count=3)
    world = of(
        workers, a_device("gpu0"), running("old", "gpu0", 90), running("new", "gpu0", 10), a_task("waits")
    )
    ask(world, "old", "scale", {"least": 0, "most": 3, "count": 2})
    [decision] = step(world)
    assert (held(world), decision.orders) == ({"waits"}, ())
    ask(world, "old", "scale", {"least": 0, "most": 3, "count": 1})
    [decision] = step(world)
    [order] = decision.orders
    assert isinstance(order, StopOrder)
    assert (order.task, order.reason) == ("new", StopReason.PREEMPT)
    assert world.tasks[TaskId("new")].state is TaskState.STOPPING
    assert step(world) == []


def test_leaving_worker_is_requeued_held_and_not_counted_as_preempted() -> None:
    workers = a_set("a", count=0)
    world = of(workers, a_device("gpu0"), running("a", "gpu0"))
    step(world)
    what, changes = after_stop(world.tasks[TaskId("a")], NOW, POLICY)
    assert (what, changes["preemptions"], "held" in changes) == (Move.REQUEUED, 0, False)


def test_a_worker_that_leaves_names_the_scaling_of_its_set() -> None:
    world = of(a_set("a", "b", count=1), a_device("gpu0"), running("a", "gpu0"), running("b", "gpu0"))
    step(world)
    causes = {task.stop_cause for task in world.tasks.values() if task.state is TaskState.STOPPING}
    assert causes == {"the scaling of its set to 1 worker"}


def test_a_place_that_is_free_is_taken_before_one_that_still_leaves() -> None:
    leaves = running(
        "a", "gpu0", state=TaskState.STOPPING, stop_reason=StopReason.PREEMPT, stop_deadline_at=NOW
    )
    world = of(a_set("a", "b", count=1), a_device("gpu0"), leaves, a_task("b", held=True))
    world.tasks[TaskId("a")] = replace(world.tasks[TaskId("a")], held=True)
    step(world)
    assert held(world) == {"a"}


def test_a_worker_that_is_wanted_again_while_it_leaves_comes_back() -> None:
    world = of(a_set("a", count=0), a_device("gpu0"), running("a", "gpu0"))
    step(world)
    ask(world, "a", "scale", {"least": 0, "most": 1, "count": 1})
    step(world)
    assert (world.tasks[TaskId("a")].state, held(world)) == (TaskState.STOPPING, set())


def test_a_preempted_worker_that_is_wanted_no_more_is_held_when_it_is_gone() -> None:
    world = of(a_set("a", count=0), a_device("gpu0"), stopping("a", "gpu0", StopReason.PREEMPT))
    [decision] = step(world)
    assert (held(world), decision.orders) == ({"a"}, ())


def test_a_cancelled_worker_is_let_go() -> None:
    world = of(a_set("a", count=0), a_device("gpu0"), stopping("a", "gpu0", StopReason.CANCEL))
    assert step(world) == []


def test_pledge_of_a_worker_that_is_no_longer_wanted_is_withdrawn() -> None:
    task = a_task("a", gpu_mb=GIB)
    world = of(a_set("a", count=0), a_device("gpu0"), task, a_pledge(task, "gpu0", GIB))
    [decision] = step(world)
    assert [written.end for written in decision.pledges] == [PledgeEnd.WITHDRAWN]


def test_a_set_is_over_when_none_of_its_workers_is_left() -> None:
    world = of(a_set("a", count=1), a_task("a"))
    commit(world, carry_out(world, Request("r2", TaskId("a"), "default", "cancel", {}, NOW), NOW, POLICY))
    [decision] = step(world)
    assert (decision.why, world.worker_sets) == ("worker_set_over", {})


def test_failures_are_forgotten_after_a_long_time_at_work() -> None:
    world = of(a_set("a", count=1), a_device("gpu0"), running("a", "gpu0", 0.0, failures=3))
    assert step(world, at=STABLE_SECONDS - 1) == []
    step(world, at=STABLE_SECONDS)
    assert world.tasks[TaskId("a")].failures == 0


def two_at_work(count: int = 2, **fields: Any) -> World:
    workers = a_set("a", "b", "c", count=count, scaling=CALLS, **{"least": 1, **fields})
    runs = (running("a", "gpu0", 90), running("b", "gpu0", 60))
    return of(workers, a_device("gpu0"), *runs, a_task("c", held=True, gpu_mb=GIB))


def test_workers_come_at_once_when_calls_wait() -> None:
    world = two_at_work()
    step(world, busy(world, a=5, b=4))
    assert (world.worker_sets[TaskId("a")].count, held(world)) == (3, set())


def test_no_more_workers_come_than_the_most() -> None:
    world = two_at_work(most=2)
    assert step(world, busy(world, a=50, b=40)) == []


def test_workers_leave_only_when_fewer_were_enough_for_the_whole_time() -> None:
    world, scaler = two_at_work(), Autoscaler()
    assert step(world, busy(world, a=1, b=1), 0, scaler) == []
    assert step(world, busy(world, a=4, b=4), 50, scaler) == []
    assert step(world, busy(world, a=1, b=1), 55, scaler) == []
    assert step(world, busy(world, a=1, b=1), 114, scaler) == []
    step(world, busy(world, a=1, b=1), 115, scaler)
    assert (world.worker_sets[TaskId("a")].count, world.tasks[TaskId("b")].state) == (1, TaskState.STOPPING)


def test_a_load_at_the_border_changes_nothing() -> None:
    """Four calls would fill one worker, and the next call would bring the second one back."""
    world, scaler = two_at_work(), Autoscaler()
    assert [step(world, busy(world, a=2, b=2), at, scaler) for at in (0, 100, 200)] == [[], [], []]


@pytest.mark.parametrize("stale", [None, Fence(0)])
def test_no_worker_leaves_while_one_at_work_has_told_nothing(stale: Fence | None) -> None:
    world, scaler = two_at_work(), Autoscaler()
    loads = busy(world, a=0, b=0)
    if stale is None:
        del loads["b"]
    else:
        loads["b"] = replace(loads["b"], fence=stale)
    assert [step(world, loads, at, scaler) for at in (0, 100)] == [[], []]


def test_workers_come_though_one_still_makes_its_object() -> None:
    world = two_at_work()
    step(world, busy(world, a=9))
    assert (world.worker_sets[TaskId("a")].count, held(world)) == (3, set())


def test_a_signal_that_is_posted_again_writes_nothing() -> None:
    world = of(a_set("a", count=1, scaling=Scaling("signal", 10.0, Seconds(60.0))), a_task("a"))
    assert ask(world, "a", "signal", {"value": 5}).worker_sets != ()
    assert ask(world, "a", "signal", {"value": 5}).worker_sets == ()


def test_workers_follow_the_cpu_that_they_use() -> None:
    world = two_at_work()
    workers = world.worker_sets[TaskId("a")]
    world.worker_sets[TaskId("a")] = replace(workers, scaling=Scaling("cpu", 50.0, Seconds(60.0)))
    step(world, busy(world, a=8, b=8))  # 200 per cent in all
    assert world.worker_sets[TaskId("a")].count == 3


def test_workers_follow_a_posted_signal() -> None:
    workers = a_set("a", "b", "c", count=0, scaling=Scaling("signal", 10.0, Seconds(60.0)))
    world = of(workers, *(a_task(name, held=True) for name in "abc"))
    assert step(world) == []
    ask(world, "a", "signal", {"value": 11})
    step(world)
    assert held(world) == {"c"}


def test_worker_joined_and_left_are_logged_with_the_move_that_caused_them() -> None:
    world = of(a_set("a", count=1), a_device("gpu0"), running("a", "gpu0"), running("other", "gpu0"))
    a, other = world.tasks[TaskId("a")], world.tasks[TaskId("other")]

    def said(*writes: TaskWrite) -> list[tuple[str, str, dict[str, Any]]]:
        told = with_notices(world, Decision("a", "test", tasks=writes, notices=(Notice("x", "y", {}),)))
        assert told.notices[0].kind == "x"
        return [(notice.kind, notice.key, dict(notice.fields)) for notice in told.notices[1:]]

    assert said(write_move(other, Move.STOPPING), write_move(a, Move.CHANGED)) == []
    stops = write_move(a, Move.STOPPING)
    assert said(stops) == [("worker.left", "a", {"set": "a", "attempt": 1})]
    commit(world, Decision("a", "test", tasks=(stops,)))
    gone = write_move(stops.task, Move.REQUEUED, node=None)
    assert said(gone) == []
    commit(world, Decision("a", "test", tasks=(gone,)))
    starts = write_move(gone.task, Move.STARTED, fence=2, node="n2")
    assert said(starts) == [("worker.joined", "a", {"set": "a", "attempt": 2, "node": "n2"})]


def test_only_the_event_that_forms_a_worker_set_has_all_its_fields() -> None:
    """The others have what changed."""
    workers = a_set("a", "b", count=1, scaling=Scaling("signal", 10.0, Seconds(60.0)))
    world = a_world(a_task("a"))
    events: list[Any] = []
    for what, fields in (("form", to_builtins(workers)), ("scale", {"most": 1}), ("signal", {"value": 2})):
        events += events_of(ask(world, "a", what, fields))
    ask(world, "a", "cancel", {})
    events += events_of(*step(world))
    told = [(one.kind, one.fields) for one in events if one.kind.startswith("worker_set.")]
    assert told == [
        ("worker_set.formed", fields_of(workers)),
        ("worker_set.changed", {"most": 1}),
        ("worker_set.changed", {"signal": 2.0}),
        ("worker_set.over", {}),
    ]
    assert world.worker_sets.of(TaskId("b")) is None


def test_workers_that_run_are_counted_from_their_tasks() -> None:
    world = of(a_set("a", "b", "gone", count=2), a_device("gpu0"), running("a", "gpu0"), a_task("b"))
    assert WorkerSets(world.worker_sets.values()).running(world.tasks) == 1


def test_a_worker_that_its_set_does_not_want_says_so() -> None:
    world = of(a_set("a", "b", count=1), a_task("a"), a_task("b", held=True))
    told = explain(world, TaskId("b"), POLICY, NOW)
    assert told.message.startswith("a place of worker set a, which wants 1 of 2 workers now")
