"""What a task inherits from those that wait for it: its place in the queue, and no rights."""

from typing import Any

from gpubroker.wire.tasks import Inherited
from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Dependency, Move, TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.plan_cache import PlanCache
from gpubroker_server.core.world.dependencies import settle_dependencies
from gpubroker_server.core.world.world import World
from hypothesis import given, settings

from tests.builders import GIB, NOW, a_device, a_node, a_task, a_world, commit, holding, submit
from tests.core.naive import Naive
from tests.core.scenarios import POLICY, Chapter, Story, clusters, stories


def after(*tasks: str) -> dict[str, Any]:
    return {"after": tuple(Dependency(TaskId(task)) for task in tasks), "awaits": True}


def change(world: World, task: str, **changes: Any) -> None:
    row = world.tasks[TaskId(task)]
    commit(world, Decision(row.id, "change", tasks=(write_move(row, Move.CHANGED, **changes),)))


def standing(world: World, task: str) -> int:
    return world.queue.effective_priority_of(world.tasks[TaskId(task)])


def source(world: World, task: str) -> str | None:
    found = world.awaited.inheritance.of(world.tasks[TaskId(task)])
    return None if found is None else found.task


def started(world: World) -> list[str]:
    return [decision.subject for decision in plan_cycle(world, Policy(), NOW).decisions]


def test_a_task_takes_the_place_of_its_most_urgent_dependent() -> None:
    world = a_world(a_node(cpu=1.0), a_task("early", cpu=1.0), a_task("late", cpu=1.0, submitted_at=NOW))
    submit(world, a_task("urgent", priority=80, **after("late")))
    assert started(world) == ["late"]
    assert explain(world, TaskId("early"), Policy(), NOW).position == 2
    assert explain(world, TaskId("late"), Policy(), NOW).inherits == Inherited(80, "urgent")


def test_lowering_one_of_two_equal_dependents_changes_nothing() -> None:
    world = a_world(a_task("t"))
    submit(world, a_task("one", priority=80, **after("t")), a_task("two", priority=80, **after("t")))
    change(world, "one", priority=60)
    assert standing(world, "t") == 80


def test_priority_is_inherited_through_any_number_of_tasks() -> None:
    chain = [a_task("t0"), *(a_task(f"t{n}", **after(f"t{n - 1}")) for n in range(1, 2000))]
    world = a_world(*chain)
    submit(world, a_task("last", priority=95, **after("t1999")))
    assert standing(world, "t0") == standing(world, "t1999") == 95
    assert source(world, "t0") == "last"
    change(world, "last", priority=60)
    assert standing(world, "t0") == 60


def test_the_most_urgent_dependent_counts_and_the_next_one_once_it_is_gone() -> None:
    world = a_world(
        a_task("a"), a_task("b", priority=70, **after("a")), a_task("c", priority=90, **after("a"))
    )
    assert (standing(world, "a"), source(world, "a")) == (90, "c")
    commit(world, Decision(TaskId("c"), "x", tasks=(write_move(world.tasks[TaskId("c")], Move.CANCELLED),)))
    assert (standing(world, "a"), source(world, "a")) == (70, "b")
    change(world, "b", priority=20)
    assert (standing(world, "a"), source(world, "a")) == (50, None)


def test_a_held_dependent_passes_no_priority_on() -> None:
    world = a_world(a_task("a"), a_task("b", **after("a")), a_task("c", priority=90, **after("b")))
    change(world, "b", held=True)
    assert (standing(world, "a"), standing(world, "b")) == (50, 90)
    change(world, "b", held=False)
    assert standing(world, "a") == 90


def test_an_ended_task_inherits_nothing() -> None:
    world = a_world(a_node(), a_task("a", cpu=1.0), a_task("b", priority=90, **after("a")))
    commit(world, plan_cycle(world, Policy(), NOW).decisions)
    row = world.tasks[TaskId("a")]
    commit(world, Decision(row.id, "end", tasks=(write_move(row, Move.SUCCEEDED, finished_at=NOW),)))
    commit(world, settle_dependencies(world.awaited, world.tasks, NOW))
    assert world.awaited.inheritance.priorities == {}
    assert TaskId("b") in world.queue


def test_an_inherited_priority_preempts_nothing() -> None:
    world = a_world(a_device(), holding(a_task("run", priority=60, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_task("a", gpu_mb=60 * GIB), a_task("b", priority=95, gpu_mb=60 * GIB, **after("a")))
    assert standing(world, "a") == 95
    assert plan_cycle(world, Policy(), NOW).decisions == ()
    change(world, "a", priority=95)
    assert started(world) == ["a"]


def test_higher_priority_is_tried_though_tasks_before_it_cannot_start() -> None:
    """The tasks before it have an inherited priority only, and may preempt nothing."""
    world = a_world(a_device(), holding(a_task("run", priority=45, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_task("a", priority=40, gpu_mb=60 * GIB), a_task("b", priority=95, **after("a")))
    cache = PlanCache()
    assert plan_cycle(world, Policy(), NOW, cache=cache).decisions == ()
    submit(world, a_task("own", priority=60, gpu_mb=60 * GIB))
    decisions = plan_cycle(world, Policy(), NOW, cache=cache).decisions
    assert [(decision.why, decision.subject) for decision in decisions] == [("preempt", "own")]


def test_a_dependent_may_be_known_before_its_dependency() -> None:
    world = a_world(a_task("b", priority=90, **after("a")))
    submit(world, a_task("a"))
    assert (standing(world, "a"), source(world, "a")) == (90, "b")


@given(clusters(), stories)
@settings(max_examples=100, deadline=None)
def test_task_standing_equals_a_naive_computation_after_any_course(
    world: World, story: list[Chapter]
) -> None:
    tale = Story(world)
    for chapter in story:
        for _ in tale.happens(chapter):
            naive = Naive(world, POLICY, tale.now)
            for task in world.tasks.values():
                if task.state is not TaskState.PENDING:
                    continue
                assert world.queue.effective_priority_of(task) == naive.standing(task)
                assert (task.id not in world.queue) or (
                    world.queue.group_of(task.id).standing == naive.standing(task)
                )
                told = world.awaited.inheritance.of(task)
                assert (told is not None) == (naive.standing(task) > task.priority)
                assert told is None or told.priority == world.tasks[
                    TaskId(told.task)
                ].priority == naive.standing(task)
