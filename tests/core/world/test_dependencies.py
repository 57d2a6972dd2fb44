"""Tasks that run after others: which are queued, which fail with a dependency, and that no end is missed."""

from typing import Any

import pytest
from gpubroker.wire.tasks import Inherited
from gpubroker_server.core.domain.decisions import Decision, WorkerSetWrite, write_move
from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Dependency, Move, OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world import dependencies
from gpubroker_server.core.world.dependencies import TaskEnd, settle_dependencies
from gpubroker_server.core.world.world import World
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.builders import NOW, a_node, a_task, a_world, commit, holding, submit

LATER = Instant(NOW + 60.0)
ENDS = {
    "succeeded": Move.SUCCEEDED,
    "failed": Move.FAILED,
    "cancelled": Move.CANCELLED,
    "expired": Move.EXPIRED,
}


def one_round(world: World) -> list[Decision]:
    return settle_dependencies(world.awaited, world.tasks, LATER)


def after(*tasks: str, ignore: bool = False) -> dict[str, Any]:
    what = OnFailure.IGNORE if ignore else OnFailure.FAIL
    return {"after": tuple(Dependency(TaskId(task), what) for task in tasks), "awaits": True}


def end(world: World, task: str, how: str = "succeeded") -> None:
    row = world.tasks[TaskId(task)]
    if row.state is TaskState.PENDING and how == "succeeded":
        row = end_of_start(world, row)
    write = write_move(row, ENDS[how], finished_at=NOW)
    commit(world, Decision(row.id, "test", tasks=(write,)))


def end_of_start(world: World, row: Task) -> Task:
    commit(world, Decision(row.id, "admit", tasks=(write_move(row, Move.ADMITTED, fence=1, node="n1"),)))
    return world.tasks[row.id]


def settled(world: World) -> dict[str, str]:
    """What becomes of each dependent, after as many rounds as it takes."""
    told: dict[str, str] = {}
    while decisions := one_round(world):
        commit(world, decisions)
        for decision in decisions:
            failure = decision.outcome.failure if decision.outcome is not None else None
            told[decision.subject] = failure.message if failure is not None else "in"
    return told


def test_a_task_with_two_failed_dependencies_fails_once() -> None:
    world = a_world(a_task("a"), a_task("b", **after("a")), a_task("c", **after("a", "b")))
    end(world, "a", "failed")
    assert sorted(decision.subject for decision in one_round(world)) == ["b", "c"]


def test_a_task_is_queued_when_its_last_dependency_has_succeeded() -> None:
    world = a_world(a_task("a"), a_task("b"), a_task("c", **after("a", "b")))
    assert (TaskId("c") in world.queue, len(world.queue)) == (False, 3)
    end(world, "a")
    assert settled(world) == {}
    end(world, "b")
    assert settled(world) == {"c": "in"}
    assert TaskId("c") in world.queue
    assert world.awaited.remaining == world.awaited.dependents == {}


@pytest.mark.parametrize(
    ("how", "says"), [("failed", "has failed"), ("cancelled", "was cancelled"), ("expired", "has expired")]
)
def test_a_dependency_that_does_not_succeed_fails_its_dependents_at_once(how: str, says: str) -> None:
    world = a_world(a_task("a"), a_task("b"), a_task("c", **after("a", "b")))
    end(world, "a", how)
    assert settled(world) == {"c": f"it runs after a, which {says}"}
    assert TaskId("c") not in world.tasks
    assert world.finished["default", TaskState.FAILED] == 1 + (how == "failed")
    end(world, "b")
    assert settled(world) == {}


def test_a_failure_that_is_ignored_counts_as_an_end() -> None:
    world = a_world(a_task("a"), a_task("b"), a_task("c", **after("a", "b", ignore=True)))
    end(world, "a", "failed")
    assert settled(world) == {}
    end(world, "b", "cancelled")
    assert settled(world) == {"c": "in"}


def test_a_failure_cascades_in_one_round_and_names_the_first_of_the_chain() -> None:
    chain = [a_task("t1"), *(a_task(f"t{n}", **after(f"t{n - 1}")) for n in range(2, 6))]
    free = a_task("free", **after("t3", ignore=True))
    world = a_world(*chain, free)
    end(world, "t1", "failed")
    decisions = one_round(world)
    assert [decision.subject for decision in decisions] == ["t2", "t3", "t4", "t5"]
    assert {decision.tasks[0].task.failed_by for decision in decisions} == {"t1"}
    assert settled(world) == {
        "t2": "it runs after t1, which has failed",
        "t3": "it runs after t2, which could not run because t1 did not succeed",
        "t4": "it runs after t3, which could not run because t1 did not succeed",
        "t5": "it runs after t4, which could not run because t1 did not succeed",
        "free": "in",
    }


def test_many_dependents_are_settled_a_bounded_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "MAX_DECISIONS", 3)
    first = [a_task("a"), *(a_task(f"b{n}", **after("a")) for n in range(7))]
    world = a_world(*first, *(a_task(f"c{n}", **after(f"b{n}", "a")) for n in range(7)))
    end(world, "a", "failed")
    assert len(one_round(world)) == 3
    assert len(settled(world)) == 14
    assert world.awaited.unsatisfiable == {}
    assert world.awaited.ready == set()


def test_a_dependency_that_the_world_does_not_know_is_looked_up() -> None:
    world = a_world(a_node())
    submit(world, a_task("c", **after("gone", "lost")), a_task("d", **after("gone")))
    assert one_round(world) == []
    assert world.awaited.unknown == {"gone", "lost"}
    world.awaited.learn([TaskId("gone")], {TaskId("gone"): TaskEnd(TaskState.SUCCEEDED)})
    assert settled(world) == {"d": "in"}
    world.awaited.learn([TaskId("lost")], {})
    assert settled(world) == {"c": "it runs after lost, which ended long ago, and its record is gone"}
    assert world.awaited.unknown == set()


def workers(*names: str, **fields: Any) -> list[Task]:
    """Of the array that has the first one's id."""
    return [a_task(name, holder=WorkerSeat(TaskId(names[0])), **fields) for name in names]


def test_an_array_ends_with_its_last_worker_and_the_store_says_how() -> None:
    world = a_world(*workers("w0", "w1", "w2"), a_task("all", **after("w0")), a_task("one", **after("w1")))
    for first, state, told in (("w0", None, {}), ("w1", None, {"one": "in"}), ("w2", None, {})):
        assert (world.awaited.unknown, state) == (set(), None)
        end(world, first)
        assert settled(world) == told
    assert world.awaited.unknown == {"w0"}
    world.awaited.learn([TaskId("w0")], {TaskId("w0"): TaskEnd(TaskState.FAILED)})
    assert settled(world) == {"all": "it runs after w0, which has failed"}
    assert world.awaited.workers == {}


def test_an_array_of_which_the_first_worker_has_ended_before_is_waited_for() -> None:
    first, *others = workers("w0", "w1", "w2")
    dependent = a_task("all", **after("w0"))
    for parts in ((*others, dependent), (dependent, *others), (others[0], dependent, others[1])):
        world = a_world(*parts)
        assert world.awaited.unknown == set(), "its workers are at work"
        end(world, "w1")
        assert settled(world) == {}
        end(world, "w2")
        assert world.awaited.unknown == {"w0"}
        world.awaited.learn([TaskId("w0")], {TaskId("w0"): TaskEnd(TaskState.SUCCEEDED)})
        assert settled(world) == {"all": "in"}
    leaving = replace(first, state=TaskState.SUCCEEDED)
    for parts in ((leaving, dependent), (dependent, leaving)):
        world = a_world(*parts)
        assert world.awaited.unknown == {"w0"}, "it still holds memory"


def test_all_workers_of_an_array_inherit_what_the_array_does() -> None:
    world = a_world(
        *workers("w0", "w1", "w2", priority=20),
        a_task("x", priority=30),
        a_task("y", priority=60, **after("w0")),
    )
    assert {
        name: world.queue.effective_priority_of(world.tasks[TaskId(name)]) for name in ("w0", "w2", "x")
    } == {
        "w0": 60,
        "w2": 60,
        "x": 30,
    }
    inherited = world.awaited.inheritance.of(world.tasks[TaskId("w2")])
    assert inherited == Inherited(60, "y")
    order = list(world.queue.of_tenant("default", NOW, Policy()))
    assert order == ["w0", "w1", "w2", "x"]
    end(world, "y", "cancelled")
    assert list(world.queue.of_tenant("default", NOW, Policy())) == ["x", "w0", "w1", "w2"]


def test_a_worker_set_is_waited_for_until_it_is_over() -> None:
    places = (TaskId("s0"), TaskId("s1"))
    one = WorkerSet(places[0], "default", "", places, 1, 2, 2, 1, NOW)
    for is_known_first in (True, False):
        world = a_world(a_task("s1"), *((a_task("s0"),) if is_known_first else ()))
        world.worker_sets.restore([one])
        submit(world, a_task("b", **after("s0", ignore=True)))
        assert world.awaited.unknown == set()
        if is_known_first:
            end(world, "s0", "failed")
        assert settled(world) == {}
        commit(world, Decision(one.id, "over", worker_sets=(WorkerSetWrite(one, "over"),)))
        assert world.awaited.unknown == {"s0"}
        world.awaited.learn([TaskId("s0")], {TaskId("s0"): TaskEnd(TaskState.CANCELLED)})
        assert settled(world) == {"b": "in"}
    world.worker_sets.restore([one])
    commit(world, Decision(one.id, "over", worker_sets=(WorkerSetWrite(one, "over"),)))
    assert world.awaited.unknown == set(), "nothing waits for it"


def test_an_answer_that_a_dependency_has_not_ended_changes_nothing() -> None:
    world = a_world(a_node())
    submit(world, a_task("b", **after("a")))
    world.awaited.learn([TaskId("a")], {TaskId("a"): TaskEnd(TaskState.RUNNING)})
    assert world.awaited.unknown == {"a"}
    submit(world, a_task("a"))
    assert world.awaited.unknown == set()
    end(world, "a")
    assert settled(world) == {"b": "in"}


def test_a_dependency_that_ended_and_still_holds_memory_counts_as_ended() -> None:
    leaving = holding(a_task("a", gpu_mb=8), "gpu0", state=TaskState.SUCCEEDED)
    for parts in ((leaving, a_task("b", **after("a"))), (a_task("b", **after("a")), leaving)):
        world = a_world(*parts)
        assert world.awaited.unknown == set()
        assert settled(world) == {"b": "in"}


def test_a_cancelled_dependent_leaves_the_index_in_both_directions() -> None:
    world = a_world(a_task("a"), a_task("b", **after("a", "x")), a_task("c", **after("b")))
    end(world, "b", "cancelled")
    assert settled(world) == {"c": "it runs after b, which was cancelled"}
    assert world.awaited.remaining == world.awaited.dependents == {}
    assert world.awaited.unknown == set()


def test_held_dependent_is_queued_on_release_and_a_delayed_one_at_its_time() -> None:
    world = a_world(
        a_task("a"), a_task("h", held=True, **after("a")), a_task("d", not_before=LATER, **after("a"))
    )
    end(world, "a")
    assert settled(world) == {"h": "in", "d": "in"}
    assert (world.queue.held, set(world.queue.delayed), world.queue.awaiting) == ({"h"}, {"d"}, set())


def test_the_time_limit_to_wait_begins_when_a_dependent_is_queued() -> None:
    fields: dict[str, Any] = {"queue_ttl_seconds": 30.0}
    late = Instant(LATER + 100.0)
    world = a_world(
        a_task("a"), a_task("b", **fields, **after("a")), a_task("c", not_before=late, **fields, **after("a"))
    )
    assert world.expiring == {}
    end(world, "a")
    settled(world)
    assert world.expiring == {"b": LATER + 30.0, "c": late + 30.0}


dags = st.lists(
    st.tuples(st.sets(st.integers(0, 6), max_size=3), st.booleans(), st.sampled_from(sorted(ENDS))),
    min_size=1,
    max_size=8,
)


@given(dags, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=200, deadline=None)
def test_with_any_dependencies_every_task_ends_and_none_starts_early(
    dag: list[tuple[set[int], bool, str]], chance: Any, restart: bool
) -> None:
    """Tasks run when the planner lets them and end as drawn; a naive twin says which may run or fail."""
    tasks = [
        a_task(f"t{n}", cpu=1.0, **(after(*(f"t{d}" for d in sorted(before) if d < n), ignore=ignore)))
        for n, (before, ignore, _) in enumerate(dag)
    ]
    tasks = [task if task.after else a_task(task.id, cpu=1.0) for task in tasks]
    how = {task.id: end for task, (_, _, end) in zip(tasks, dag, strict=True)}
    world, ended = a_world(a_node()), dict[str, str]()
    submit(world, *tasks)
    for _ in range(4 * len(tasks)):
        for failed in settled_states(world):
            ended[failed] = "failed"
        assert {task.id for task in tasks if is_doomed(task, ended)} <= ended.keys()
        commit(world, plan_cycle(world, Policy(), LATER).decisions)
        started = sorted(world.active)
        assert {task.id for task in tasks if may_run(task, ended)} <= {*started, *ended}
        assert all(may_run(task, ended) for task in tasks if task.id in started)
        if started:
            name = chance.choice(started)
            ended[name] = "succeeded" if how[name] == "succeeded" else "failed"
            end(world, name, ended[name])
        if restart:
            world = reread(world, ended)
    assert ended.keys() == {task.id for task in tasks}


def settled_states(world: World) -> list[str]:
    return [name for name, told in settled(world).items() if told != "in"]


def may_run(task: Task, ended: dict[str, str]) -> bool:
    return all(
        dependency.task in ended
        and (dependency.on_failure is OnFailure.IGNORE or ended[dependency.task] == "succeeded")
        for dependency in task.after
    )


def is_doomed(task: Task, ended: dict[str, str]) -> bool:
    return any(
        dependency.on_failure is OnFailure.FAIL and ended.get(dependency.task, "succeeded") != "succeeded"
        for dependency in task.after
    )


def reread(world: World, ended: dict[str, str]) -> World:
    """A new process: it has the rows of what has not ended, the last ones first, and asks for the rest."""
    fresh = World()
    for node in world.nodes.values():
        fresh.add_node(node)
    for name in sorted(world.tasks, reverse=True):
        fresh.add_task(world.tasks[name])
    fresh.position, fresh.as_of = world.position, world.as_of
    asked = sorted(fresh.awaited.unknown)
    fresh.awaited.learn(asked, {task: TaskEnd(TaskState(ended[task])) for task in asked})
    return fresh


def test_a_delayed_task_explains_when_it_starts() -> None:
    world = a_world(a_task("later", not_before=Instant(NOW + 60.0)))
    told = explain(world, TaskId("later"), Policy(), NOW)
    assert told.message == "its start time is in 60 s"
