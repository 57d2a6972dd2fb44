"""Models that do not fit together take turns: which of them makes room for what waits, and when."""

from collections.abc import Set

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import PlacementConstraints
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.model_orders import ModelsInUse, ModelState
from gpubroker_server.core.domain.models import ModelUsage, turn_seconds
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import NodeName, Seconds
from gpubroker_server.core.lifecycle.model_lifecycle import due as standings_due
from gpubroker_server.core.lifecycle.model_lifecycle import needs_want_request
from gpubroker_server.core.lifecycle.model_turns import is_contended, turns
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, a_device, a_task, a_world, commit, submit
from tests.core.served import LLM, POLICY, WANTED, a_model, an_inference, ask, at, index, loaded, plan, the


def contended(world: World, seconds: float) -> bool:
    return is_contended(world, at(seconds), POLICY)


IN_USE = frozenset({LLM})
IDLE: frozenset[str] = frozenset()
TURN = turn_seconds(Seconds(1.0))


def tell(world: World, in_use: Set[str], seconds: float, recent: Set[str] = frozenset()) -> list[Decision]:
    decisions = turns(world, ModelsInUse(frozenset(in_use), frozenset(recent)), at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions


@pytest.mark.parametrize("rival", [a_model("other"), a_task("run", priority=50, gpu_mb=60 * GIB)])
def test_an_idle_model_makes_room_at_once_for_an_equal(rival: Task) -> None:
    world = loaded()
    submit(world, rival)
    assert plan(world, 20.0) == []
    assert contended(world, 20.0)
    tell(world, IDLE, 20.0)
    assert the(world).priority == 49
    plan(world, 20.1)
    assert the(world).freeing_for == rival.id


@pytest.mark.parametrize("rival", [a_model("other", priority=0), a_task("run", priority=0, gpu_mb=60 * GIB)])
def test_a_model_of_the_lowest_priority_makes_room_for_an_equal_too(rival: Task) -> None:
    world = loaded(a_model(priority=0, terms={"asked_priority": 0}))
    submit(world, rival)
    tell(world, IDLE, 20.0)
    plan(world, 20.1)
    assert the(world).freeing_for == rival.id


def test_a_model_in_use_makes_room_when_its_turn_is_over() -> None:
    world = loaded()
    submit(world, a_model("other"))
    assert tell(world, IN_USE, 1.0 + TURN - 0.1) == []
    tell(world, IN_USE, 1.0 + TURN)
    plan(world, 1.1 + TURN)
    assert the(world).freeing_for == "other"


def a_low_task(priority: int = 49) -> Task:
    return a_task("low", priority=priority, gpu_mb=60 * GIB)


@pytest.mark.parametrize("priority", [0, 10, 49])
def test_an_idle_model_makes_room_at_once_for_a_model_of_any_priority(priority: int) -> None:
    world = loaded()
    submit(world, a_model("other", priority=priority, terms={"asked_priority": priority}))
    assert contended(world, 6.0)
    assert tell(world, IDLE, 5.9) == [], "its minimum residency"
    tell(world, IDLE, 6.0)
    plan(world, 6.1)
    assert the(world).freeing_for == "other"


def test_a_model_in_use_makes_no_room_for_a_lower_model() -> None:
    world = loaded()
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    assert tell(world, IN_USE, 200.0) == []


def test_a_model_that_left_for_a_lower_one_is_back_when_it_is_asked() -> None:
    world = loaded()
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    tell(world, IDLE, 6.0)
    plan(world, 6.1)
    index(world, {LLM: ModelState.ABSENT}, 6.2)
    assert [task.id for task in world.models.live() if task.id in world.queue] == ["other"]
    plan(world, 6.3)
    index(world, {"other": ModelState.READY}, 7.0)
    ask(world, "want", 8.0, priority=50, used_at=at(3.0))
    assert the(world).id not in world.queue, "that use was before it left"
    ask(world, "want", 12.0, priority=50)
    plan(world, 12.1)
    assert the(world, "other").freeing_for == LLM


def test_a_model_that_had_to_come_back_keeps_its_memory_for_a_turn() -> None:
    world = loaded(a_model(terms={"left_at": at(-10.0), "usage": ModelUsage(at(0.0))}))
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    assert tell(world, IDLE, 1.0 + TURN - 0.1) == []
    tell(world, IDLE, 1.0 + TURN)
    plan(world, 1.1 + TURN)
    assert the(world).freeing_for == "other"


def test_a_lower_model_that_nobody_asked_since_it_left_is_not_waited_for() -> None:
    world = loaded()
    terms = {"asked_priority": 10, "left_at": at(5.0)}
    submit(world, a_model("other", priority=10, terms=terms))
    assert tell(world, IDLE, 20.0) == []
    assert needs_want_request(the(world, "other"), 10, at(20.0)), "the next request says so"
    ask(world, "want", 20.0, task="other", priority=10)
    assert not needs_want_request(the(world, "other"), 10, at(20.1))
    assert len(tell(world, IDLE, 20.1)) == 1


def test_an_idle_model_makes_room_for_a_lower_task_after_a_while() -> None:
    world = loaded(a_model(terms={"usage": ModelUsage(at(10.0))}))
    submit(world, a_low_task())
    assert not contended(world, 39.9)
    assert tell(world, IDLE, 39.9) == []
    assert plan(world, 39.9) == []
    assert contended(world, 40.0)
    tell(world, IDLE, 40.0)
    plan(world, 40.1)
    assert the(world).freeing_for == "low"
    index(world, {LLM: ModelState.ABSENT}, 41.0)
    assert the(world).id not in world.queue, "nobody asks for it"


@pytest.mark.parametrize("used", ["now", "lately", "by a queued inference"])
def test_a_model_that_was_used_lately_makes_no_room_for_a_lower_task(used: str) -> None:
    world = loaded()
    submit(world, a_low_task())
    if used == "by a queued inference":
        ended = {"state": TaskState.SUCCEEDED, "started_at": at(60.0), "finished_at": at(90.0)}
        world.models.note(replace(an_inference(), **ended))
    recent = {"now": IN_USE, "lately": IN_USE}.get(used, IDLE)
    assert tell(world, IN_USE if used == "now" else IDLE, 100.0, recent) == []
    assert len(tell(world, IDLE, 120.0)) == 1


def test_a_task_lower_than_the_model_that_waits_does_not_take_the_memory() -> None:
    world = loaded()
    submit(world, a_model("other", priority=30, terms={"asked_priority": 30}), a_low_task(20))
    tell(world, IDLE, 20.0)
    assert the(world).priority == 29


def test_a_model_goes_on_making_room_for_the_same_ones() -> None:
    world = loaded()
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}))
    assert len(tell(world, IDLE, 6.0)) == 1
    assert tell(world, IDLE, 6.1) == []


def test_a_model_whose_node_is_unknown_has_no_rivals() -> None:
    world = loaded()
    submit(world, a_model("other"))
    del world.nodes[NodeName("n1")]
    assert not contended(world, 90.0)


def test_a_model_that_waits_for_another_device_is_no_rival() -> None:
    world = loaded()
    elsewhere = PlacementConstraints(devices=("GPU-elsewhere",))
    submit(world, a_model("other", priority=10, terms={"asked_priority": 10}, where=elsewhere))
    assert not contended(world, 90.0)
    assert tell(world, IDLE, 90.0) == []


def test_a_model_makes_room_for_any_task_when_it_is_no_longer_wanted() -> None:
    world = loaded()
    submit(world, a_low_task())
    commit(world, standings_due(world, at(WANTED + 1)))
    plan(world, WANTED + 1)
    assert the(world).freeing_for == "low"


def test_a_model_that_is_asked_again_before_it_has_left_no_longer_yields() -> None:
    world = loaded()
    submit(world, a_model("other"))
    tell(world, IDLE, 3.0)
    assert (the(world).priority, plan(world, 3.0)) == (49, []), "it was loaded a second ago"
    tell(world, IN_USE, 4.0)
    assert the(world).priority == 50


def test_a_model_no_longer_yields_when_nothing_waits() -> None:
    world = loaded()
    submit(world, a_model("other"))
    tell(world, IDLE, 3.0)
    ask(world, "cancel", 3.5, task="other")
    assert contended(world, 3.5), "to take it back"
    tell(world, IDLE, 4.0)
    assert (the(world).priority, contended(world, 4.0)) == (50, False)


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_model_that_queued_inferences_wait_for_is_in_use(is_sent: bool) -> None:
    world = loaded()
    submit(world, a_model("other", priority=50))
    submit(world, an_inference())
    if is_sent:
        world.models.note(replace(the(world, "ask"), state=TaskState.RUNNING))
        world.queue.remove(the(world, "ask"))
    assert tell(world, IDLE, 3.0) == []


def test_a_pinned_model_never_yields() -> None:
    world = loaded()
    ask(world, "pin", 2.0, pinned=True)
    submit(world, a_model("other", priority=100, terms={"asked_priority": 100}))
    assert tell(world, IDLE, 100.0) == []
    base = replace(a_model("base"), holder=Model("main", ""))
    world = a_world()
    submit(world, base)
    plan(world)
    index(world, {}, 1.0)
    submit(world, a_model("other", priority=50))
    assert tell(world, IDLE, 100.0) == []


def test_an_equal_that_may_not_use_the_node_changes_nothing() -> None:
    world = loaded()
    submit(
        world,
        a_task(
            "elsewhere", priority=50, gpu_mb=60 * GIB, where=PlacementConstraints(nodes=(("node", ("n9",)),))
        ),
    )
    assert not contended(world, 90.0)
    submit(world, a_task("no_gpu", priority=50, cpu=1.0, gpus=0))
    assert not contended(world, 90.0)


def test_model_with_no_least_residency_leaves_at_once_except_while_loading() -> None:
    policy = replace(POLICY, min_residency_seconds=Seconds(0.0))
    world = a_world()
    submit(world, a_model())
    plan(world, 0.0, policy)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    assert plan(world, 0.5, policy) == []
    index(world, {LLM: ModelState.READY}, 1.0)
    plan(world, 1.1, policy)
    assert the(world).freeing_for == "run"


def test_a_model_is_not_protected_for_having_been_preempted_often() -> None:
    model = a_model(preemptions=POLICY.preemption_budget)
    world = loaded(model)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    plan(world, 8.0)
    assert the(world).freeing_for == "run"


def test_five_models_always_asked_take_turns_in_their_order_of_waiting() -> None:
    names = ["a", "b", "c", "d", "e"]
    world, held = a_world(a_device("gpu0")), []
    submit(world, *(a_model(name, expires_at=None) for name in names))
    now = 0.0
    for _ in range(12):
        plan(world, now)
        [model] = [task for task in world.models.live() if task.state is TaskState.ADMITTED]
        held.append(model.id)
        index(world, {model.name: ModelState.READY}, now + 1.0)
        now += 1.0 + TURN
        tell(world, frozenset(names), now)
        plan(world, now)
        assert the(world, model.id).state is TaskState.STOPPING
        now += 0.1
        index(world, {model.name: ModelState.ABSENT}, now)
        now += 0.1
    assert "".join(held) == "abcdeabcdeab"


def test_model_that_made_room_for_an_equal_takes_its_turn_again_when_asked() -> None:
    """It does not take it before it is asked."""
    world = loaded()
    submit(world, a_model("other"))
    tell(world, IDLE, 20.0)
    plan(world, 20.1)
    index(world, {LLM: ModelState.ABSENT}, 20.2)
    plan(world, 20.3)
    index(world, {"other": ModelState.READY}, 21.0)
    assert the(world).state is TaskState.PENDING
    assert not contended(world, 21.0)
    assert needs_want_request(the(world), 50, at(30.0))
    ask(world, "want", 30.0, priority=50)
    assert not needs_want_request(the(world), 50, at(30.0))
    tell(world, IDLE, 40.0)
    plan(world, 40.1)
    assert the(world, "other").freeing_for == LLM


def test_a_use_that_is_reported_late_does_not_count_as_new() -> None:
    world = loaded()
    ask(world, "want", 30.0, priority=50, used_at=at(2.0))
    assert the(world).expires_at == at(2.0 + WANTED)
    ask(world, "want", 31.0, priority=50, used_at=at(1.0))
    assert the(world).expires_at == at(2.0 + WANTED), "never earlier than it was"
