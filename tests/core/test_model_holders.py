"""Models on a server as holders of memory: wanted, loaded, in the way, unloaded, and what the index says."""

from dataclasses import replace
from typing import Any

import pytest

from service.core.cycle import plan_cycle
from service.core.deadlines import due, keep_watch
from service.core.lease import HolderKind, LeaseState
from service.core.model_holders import due as standings_due
from service.core.model_holders import in_time, seen
from service.core.model_orders import Indexed, LoadOrder, ServerSeen, Stage, UnloadOrder
from service.core.model_terms import Home, ModelTerms
from service.core.orders import Ended, Ending, Failure, NodeLost
from service.core.overuse import overuse
from service.core.plan import Decision, Request
from service.core.policy import Policy
from service.core.quarantine import is_watched, quarantined
from service.core.ranks import ranks_of
from service.core.requests import carry_out
from service.core.residency import Usage
from service.core.runs import react
from service.core.task import StopReason, Task, TaskState
from service.core.units import Fence, Instant, Mib, NodeName, Seconds, TaskId
from service.core.victims import lost_gpu_seconds
from service.core.world import World
from tests.builders import (
    GIB,
    NOW,
    a_device,
    a_sample,
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
LLM = TaskId("llm")
WANTED = 300.0


def at(seconds: float) -> Instant:
    return Instant(NOW + seconds)


def a_model(
    id: str = LLM, *, server: str = "main", terms: dict[str, Any] | None = None, **fields: Any
) -> Task:
    """50 of 80 GiB, wanted by somebody of priority 50 for five minutes."""
    facts = {"gpu_mb": 50 * GIB, "expires_at": at(WANTED), "grace_seconds": Seconds(10.0), "max_retries": 1}
    model = ModelTerms(server, id, **(terms or {}))
    return a_task(id, model=model, **{**facts, **fields})


def the(world: World, task: str = LLM) -> Task:
    return world.tasks[TaskId(task)]


def plan(world: World, seconds: float = 0.0, policy: Policy = POLICY) -> list[Decision]:
    world.measure([a_sample(device, at(seconds)) for device in world.books])
    decisions = list(plan_cycle(world, policy, at(seconds)).decisions)
    commit(world, decisions, at(seconds))
    check_ledger(world)
    return decisions


def index(
    world: World, stages: dict[str, Stage], seconds: float = 0.0, under_way: set[str] | None = None
) -> list[Decision]:
    """Read on `main`; what is not named was never loaded."""
    models = {name: Indexed(name, stage) for name, stage in stages.items()}
    claims = frozenset((TaskId(name), the(world, name).fence) for name in under_way or ())
    decisions = seen(world, ServerSeen("main", at(seconds), models, claims), at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions


def loaded(*tasks: Task, seconds: float = 1.0) -> World:
    world = a_world()
    models = tasks or (a_model(),)
    submit(world, *models)
    plan(world)
    index(world, {task.name: Stage.READY for task in models}, seconds)
    assert all(the(world, task.id).state is TaskState.RUNNING for task in models)
    return world


def ask(world: World, what: str, seconds: float = 0.0, task: str = LLM, **fields: Any) -> Decision:
    request = Request("r1", TaskId(task), "default", what, fields, NOW)
    world.add_request(request)
    decision = carry_out(world, request, at(seconds), POLICY)
    commit(world, decision, at(seconds))
    return decision


def pass_time(world: World, seconds: float) -> list[Decision]:
    """A leader that has looked since the beginning."""
    watch = replace(keep_watch(None, NOW), last=at(seconds - 1.0))
    decisions = due(world, at(seconds), POLICY, watch)
    commit(world, decisions, at(seconds))
    return decisions


def orders(decisions: list[Decision]) -> list[Any]:
    return [order for decision in decisions for order in decision.orders]


def leases(world: World) -> list[tuple[HolderKind, LeaseState]]:
    return [(lease.holder_kind, lease.state) for claim in world.leases.values() for lease in claim.values()]


def fail(
    world: World, ending: Ending = Ending.FAILED, fence: int = 1, seconds: float = 2.0
) -> list[Decision]:
    failure = Failure("load_failed", "no such layer")
    report = Ended(LLM, Fence(fence), at(seconds), ending, failure=failure)
    decisions = react(world, [report], at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions


def test_a_wanted_model_gets_its_room_as_a_task_does_and_its_server_is_told_to_load_it() -> None:
    world = a_world()
    submit(world, a_model())
    [decision] = plan(world)
    assert decision.orders == (LoadOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),)),)
    assert the(world).state is TaskState.ADMITTED
    assert leases(world) == [(HolderKind.MODEL, LeaseState.RESERVED)]
    assert ranks_of(the(world)) == ()


def test_a_model_is_there_when_the_index_says_so() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    index(world, {"llm": Stage.LOADING}, 1.0)
    assert the(world).state is TaskState.ADMITTED
    index(world, {"llm": Stage.READY}, 7.0)
    task = the(world)
    assert (task.state, task.started_at) == (TaskState.RUNNING, at(7.0))
    assert task.model is not None
    assert task.model.load_seconds == 7.0
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]
    assert index(world, {"llm": Stage.READY}, 8.0) == []


def test_a_load_that_took_no_time_leaves_what_was_expected() -> None:
    world = a_world()
    submit(world, a_model(terms={"load_seconds": Seconds(4.0)}))
    plan(world)
    index(world, {"llm": Stage.READY})
    assert the(world).model == replace(a_model().model or ModelTerms("", ""), load_seconds=Seconds(4.0))


def test_an_order_to_load_that_was_lost_with_its_leader_is_given_again() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    assert index(world, {}, under_way={"llm"}) == []
    [again] = index(world, {})
    assert orders([again]) == [LoadOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),))]


def test_one_that_nobody_wants_any_longer_before_there_was_room_expires() -> None:
    world = a_world(holding(a_task("run", gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    plan(world)
    pass_time(world, WANTED)
    assert the(world, "run").state is TaskState.RUNNING
    assert LLM not in world.tasks
    assert world.homes.of(Home("main", "llm")) is None


def test_requests_keep_a_model_wanted_and_raise_its_priority() -> None:
    world = loaded()
    ask(world, "want", 100.0, priority=80, uses=3)
    task = the(world)
    assert (task.priority, task.expires_at) == (80, at(100 + WANTED))
    assert task.model is not None
    assert task.model.usage.at == at(100.0)
    ask(world, "want", 110.0, priority=20)
    assert the(world).priority == 80, "somebody of 80 wants it still"


def test_who_comes_after_all_the_others_brings_his_own_priority() -> None:
    world = loaded(a_model(priority=80, terms={"asked_priority": 80}))
    ask(world, "want", WANTED + 1.0, priority=20)
    assert the(world).priority == 20


def test_one_that_waits_is_wanted_for_longer_and_stands_higher_with_each_that_asks() -> None:
    world = a_world(holding(a_task("run", priority=90, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    ask(world, "want", 200.0, priority=70)
    assert pass_time(world, WANTED) == []
    assert (the(world).state, the(world).priority) == (TaskState.PENDING, 70)


def test_a_model_that_nobody_wants_stays_until_anybody_wants_its_room() -> None:
    world = loaded()
    assert standings_due(world, at(WANTED - 1)) == []
    commit(world, standings_due(world, at(WANTED)), at(WANTED))
    assert the(world).priority == 0
    submit(world, a_task("run", priority=1, gpu_mb=60 * GIB, submitted_at=at(WANTED)))
    plan(world, WANTED)
    assert (the(world).state, the(world).stop_reason) == (TaskState.STOPPING, StopReason.PREEMPT)


def test_a_wanted_model_is_left_to_those_who_are_not_more_urgent() -> None:
    world = loaded()
    submit(world, a_task("run", priority=50, gpu_mb=60 * GIB))
    assert plan(world, 100.0) == []


def test_for_a_more_urgent_task_its_server_is_told_to_unload_it_and_then_the_room_is_the_task_s() -> None:
    world = loaded()
    submit(world, a_task("run", priority=95, gpu_mb=60 * GIB))
    assert orders(plan(world, 100.0)) == [UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(10.0))]
    assert index(world, {"llm": Stage.UNLOADING}, 101.0) == []
    assert plan(world, 102.0) == []
    index(world, {}, 103.0)
    task = the(world)
    assert (task.state, task.priority, task.preemptions) == (TaskState.PENDING, 50, 1)
    plan(world, 104.0)
    assert the(world, "run").state is TaskState.ADMITTED


def test_what_an_unloaded_model_freed_is_taken_when_somebody_has_looked_what_is_in_use() -> None:
    world = loaded()
    ask(world, "cancel", 100.0)
    world.measure([a_sample("gpu0", at(100.0))])
    index(world, {}, 101.0)
    submit(world, a_task("run", gpu_mb=60 * GIB))
    assert plan_cycle(world, POLICY, at(101.5)).decisions == ()
    left = Mib(45 * GIB)
    world.measure([a_sample("gpu0", at(102.0), used_mb=left, foreign_mb=left)])
    assert plan_cycle(world, POLICY, at(102.0)).decisions == (), "the server has not given its memory back"
    plan(world, 103.0)
    assert the(world, "run").state is TaskState.ADMITTED


def test_one_that_is_unloaded_for_somebody_and_wanted_no_longer_is_over() -> None:
    world = loaded(a_model(expires_at=at(105.0)))
    submit(world, a_task("run", priority=95, gpu_mb=60 * GIB))
    plan(world, 100.0)
    index(world, {}, 106.0)
    assert LLM not in world.tasks
    assert world.finished["default", TaskState.SUCCEEDED] == 1


def test_an_unload_that_was_asked_for_ends_it() -> None:
    world = loaded()
    decision = ask(world, "cancel", 2.0)
    assert decision.orders == (UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(10.0)),)
    index(world, {}, 4.0)
    assert LLM not in world.tasks
    assert world.finished["default", TaskState.CANCELLED] == 1


def test_a_shorter_time_to_unload_takes_the_place_of_a_longer_one() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert ask(world, "cancel", 3.0, grace_seconds=0.0).orders == (
        UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(0.0)),
    )


def test_an_order_to_unload_that_was_lost_is_given_again_with_the_time_that_is_left() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert index(world, {"llm": Stage.READY}, 3.0, under_way={"llm"}) == []
    [again] = orders(index(world, {"llm": Stage.READY}, 5.0))
    assert again == UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(7.0))
    [again] = orders(pass_time(world, 12.5))
    assert again == UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(0.0))


def test_one_that_does_not_go_in_time_counts_as_there_until_the_index_says_that_it_is_gone() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    [decision] = pass_time(world, 23.0)
    assert decision.outcome is not None
    assert decision.outcome.failure is not None
    assert decision.outcome.failure.kind == "not_unloaded"
    assert the(world).state is TaskState.FAILED
    [stuck] = quarantined(world)
    assert stuck.awaits[0] == "unloaded"
    assert stuck.message == "waits until the index of its server says that it is not there"
    assert not is_watched(world, stuck.leases[0])
    index(world, {"llm": Stage.UNLOADING}, 30.0)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.QUARANTINED)]
    index(world, {}, 40.0)
    assert leases(world) == []
    assert list(world.homes.on("main")) == []


def test_the_next_holder_of_a_home_is_another_one_and_both_copies_count() -> None:
    world = loaded(a_model(gpu_mb=30 * GIB))
    ask(world, "cancel", 2.0)
    pass_time(world, 23.0)
    submit(world, replace(a_model("again", gpu_mb=30 * GIB), model=ModelTerms("main", "llm")))
    plan(world, 24.0)
    held = world.homes.of(Home("main", "llm"))
    assert held is not None
    assert (held.id, held.state) == ("again", TaskState.ADMITTED)
    assert world.books[key("gpu0")].held_mb() == 60 * GIB


@pytest.mark.parametrize(("seconds", "state"), [(10.0, TaskState.PENDING), (WANTED + 1, None)])
def test_a_model_that_vanished_waits_again_if_it_is_wanted(seconds: float, state: TaskState | None) -> None:
    world = loaded()
    index(world, {}, seconds)
    assert leases(world) == []
    assert (the(world).state if LLM in world.tasks else None) is state


def test_a_load_that_fails_is_tried_again_and_then_given_up_with_the_words_of_the_server() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    fail(world)
    assert (the(world).state, the(world).failures) == (TaskState.PENDING, 1)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.RELEASING)]
    index(world, {}, 3.0)
    assert leases(world) == []
    plan(world, 10.0)
    [decision] = fail(world, fence=2, seconds=11.0)
    assert the(world).state is TaskState.FAILED
    assert decision.outcome is not None
    assert decision.outcome.failure == Failure("load_failed", "no such layer")


def test_a_load_that_was_never_begun_uses_up_no_try() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    fail(world, Ending.NEVER_STARTED)
    task = the(world)
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 0, at(3.0))


def test_a_load_that_fails_while_it_is_to_be_unloaded_is_over() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    ask(world, "cancel", 1.0)
    fail(world)
    assert the(world).state is TaskState.CANCELLED
    assert fail(world) == [], "nobody listens to it any more"


def test_a_pinned_model_is_left_alone_by_everybody_until_it_is_not_pinned_any_more() -> None:
    world = loaded()
    decision = ask(world, "pin", 2.0, pinned=True, by="ann")
    assert [(note.action, note.subject, note.actor) for note in decision.audit] == [
        ("model.pin", "main/llm", "ann")
    ]
    commit(world, standings_due(world, at(10 * WANTED)))
    submit(world, a_task("run", priority=99, gpu_mb=60 * GIB))
    assert plan(world, 10 * WANTED) == []
    ask(world, "want", 10 * WANTED, priority=10)
    assert the(world).expires_at is None
    ask(world, "pin", 10 * WANTED, pinned=False, by="ann")
    plan(world, 10 * WANTED)
    assert the(world).state is TaskState.STOPPING


def test_a_model_that_was_pinned_while_it_waited_has_no_end_to_its_waiting() -> None:
    world = a_world(holding(a_task("run", priority=90, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    ask(world, "pin", 2.0, pinned=True)
    assert pass_time(world, 10 * WANTED) == []
    assert (the(world).state, the(world).priority) == (TaskState.PENDING, 50)


def test_only_models_are_wanted_or_pinned() -> None:
    world = a_world()
    submit(world, a_task("run"))
    assert ask(world, "want", task="run", priority=90).tasks == ()
    assert ask(world, "pin", task="run", pinned=True).tasks == ()


def test_a_model_that_has_just_come_is_left_alone_for_a_while_except_by_who_is_critical() -> None:
    """Twice as long as it took to load."""
    world = loaded(seconds=30.0)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    assert plan(world, 89.0) == []
    submit(world, a_task("now", priority=95, gpu_mb=60 * GIB))
    plan(world, 89.5)
    assert the(world).freeing_for == "now"


def test_after_that_while_it_has_to_make_room() -> None:
    world = loaded(seconds=30.0)
    submit(world, a_task("run", priority=80, gpu_mb=60 * GIB))
    plan(world, 90.5)
    assert the(world).freeing_for == "run"


def test_of_two_models_that_goes_whose_loading_is_expected_to_cost_less() -> None:
    often = Usage(at(0.0), (9.0, 20.0, 50.0, 50.0))
    used = a_model("used", gpu_mb=30 * GIB, terms={"usage": often})
    idle = a_model("idle", gpu_mb=30 * GIB, terms={"usage": Usage(at(0.0), (0.0, 0.1, 0.1, 0.1))})
    world = loaded(used, idle, seconds=5.0)
    submit(world, a_task("run", priority=95, gpu_mb=40 * GIB))
    plan(world, 100.0)
    assert (the(world, "used").state, the(world, "idle").state) == (TaskState.RUNNING, TaskState.STOPPING)
    assert lost_gpu_seconds(the(world, "used"), at(100.0)) == pytest.approx(4.9, abs=0.1)


def test_a_critical_model_stops_a_task_of_low_priority() -> None:
    run = holding(a_task("run", priority=20, gpu_mb=60 * GIB), "gpu0")
    world = a_world(run)
    submit(world, a_model(priority=95, terms={"asked_priority": 95}))
    plan(world)
    assert the(world, "run").freeing_for == LLM
    let_go(world, "run")
    plan(world, 1.0)
    assert the(world).state is TaskState.ADMITTED


def test_a_model_stops_nobody_for_whom_it_would_come_too_late() -> None:
    run = holding(a_task("run", priority=20, gpu_mb=60 * GIB, grace_seconds=Seconds(30.0)), "gpu0")
    world = a_world(run)
    submit(world, a_model(priority=95, terms={"load_seconds": Seconds(271.0)}))
    assert plan(world) == []
    assert the(world, "run").state is TaskState.RUNNING


def test_what_has_no_end_is_always_in_time() -> None:
    assert in_time(a_task("run"), at(1e9))
    assert in_time(a_model(expires_at=None), at(1e9))
    assert in_time(a_model(), at(WANTED))
    assert not in_time(a_model(), at(WANTED + 1))


def test_a_lost_node_takes_nothing_from_a_model() -> None:
    """Its server may be there all the same, and says so itself."""
    world = loaded()
    commit(world, react(world, [NodeLost(NodeName("n1"), "n1-1", at(2), "silent")], at(2), POLICY))
    assert the(world).state is TaskState.RUNNING
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]


def test_a_server_s_own_memory_is_held_as_long_as_it_answers_and_nobody_takes_it() -> None:
    base = replace(a_model("base", gpu_mb=2 * GIB), model=ModelTerms("main", ""))
    world = a_world()
    submit(world, base)
    plan(world)
    index(world, {}, 1.0)
    assert leases(world) == [(HolderKind.SERVER, LeaseState.HELD)]
    assert the(world, "base").priority == 100


def test_over_use_is_no_fault_of_a_model() -> None:
    world = loaded()
    [lease] = [lease for claim in world.leases.values() for lease in claim.values()]
    used = Mib(60 * GIB)
    world.measure([a_sample("gpu0", at(2), used_mb=used, by_holder={lease.mark: used})])
    assert overuse(world, at(2), replace(POLICY, overuse="stop")) == []


def test_an_ensemble_is_there_for_its_steps_as_well() -> None:
    terms = ModelTerms("main", "chat", steps=("tokens", "llm"))
    assert terms.covers == (Home("main", "chat"), Home("main", "tokens"), Home("main", "llm"))


def test_an_index_tells_of_its_own_server_only() -> None:
    world = a_world(a_device("gpu0"), a_device("gpu1"))
    submit(world, a_model(), a_model("other", server="second"))
    plan(world)
    index(world, {"llm": Stage.READY, "other": Stage.READY}, 1.0)
    assert [task.id for task in world.homes.live()] == ["llm", "other"]
    assert the(world, "other").state is TaskState.ADMITTED
