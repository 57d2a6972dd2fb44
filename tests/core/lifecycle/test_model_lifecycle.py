"""Models on a server as holders of memory: wanted, loaded, unloaded, and what the index says."""

import pytest
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.model_orders import LoadOrder, ModelState, UnloadOrder
from gpubroker_server.core.domain.models import ModelKey
from gpubroker_server.core.domain.orders import Ending, Failure
from gpubroker_server.core.domain.ranks import ranks_of
from gpubroker_server.core.domain.task import StopReason, TaskState, model_of
from gpubroker_server.core.domain.units import Fence, Mib, Seconds
from gpubroker_server.core.lifecycle.model_lifecycle import due as standings_due
from gpubroker_server.core.lifecycle.quarantine import is_watched, quarantined
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    a_sample,
    a_task,
    a_world,
    commit,
    holding,
    key,
    submit,
)
from tests.core.served import (
    LLM,
    POLICY,
    WANTED,
    a_model,
    ask,
    at,
    fail,
    index,
    leases,
    loaded,
    orders,
    pass_time,
    plan,
    the,
)


def test_wanted_model_is_admitted_as_a_task_and_its_load_is_ordered() -> None:
    world = a_world()
    submit(world, a_model())
    [decision] = plan(world)
    assert decision.orders == (LoadOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),)),)
    assert the(world).state is TaskState.ADMITTED
    assert leases(world) == [(HolderKind.MODEL, LeaseState.RESERVED)]
    assert ranks_of(the(world)) == ()


def test_a_model_is_running_when_the_index_says_so() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    index(world, {"llm": ModelState.LOADING}, 1.0)
    assert the(world).state is TaskState.ADMITTED
    index(world, {"llm": ModelState.READY}, 7.0)
    task = the(world)
    assert (task.state, task.started_at) == (TaskState.RUNNING, at(7.0))
    assert model_of(task).load_seconds == 7.0
    assert leases(world) == [(HolderKind.MODEL, LeaseState.HELD)]
    assert index(world, {"llm": ModelState.READY}, 8.0) == []


def test_a_load_that_took_no_time_keeps_the_expected_load_time() -> None:
    world = a_world()
    submit(world, a_model(terms={"load_seconds": Seconds(4.0)}))
    plan(world)
    index(world, {"llm": ModelState.READY})
    assert the(world).holder == replace(model_of(a_model()), load_seconds=Seconds(4.0))


def test_a_load_order_lost_with_its_leader_is_repeated() -> None:
    world = a_world()
    submit(world, a_model())
    plan(world)
    assert index(world, {}, under_way={"llm"}) == []
    [again] = index(world, {})
    assert orders([again]) == [LoadOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),))]


def test_a_pending_model_that_is_no_longer_wanted_expires() -> None:
    world = a_world(holding(a_task("run", gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    plan(world)
    pass_time(world, WANTED)
    assert the(world, "run").state is TaskState.RUNNING
    assert LLM not in world.tasks
    assert world.models.of(ModelKey("main", "llm")) is None


def test_requests_keep_a_model_wanted_and_raise_its_priority() -> None:
    world = loaded()
    ask(world, "want", 100.0, priority=80, uses=3)
    task = the(world)
    assert (task.priority, task.expires_at) == (80, at(100 + WANTED))
    assert model_of(task).usage.at == at(100.0)
    ask(world, "want", 110.0, priority=20)
    assert the(world).priority == 80, "somebody of 80 wants it still"


def test_a_models_priority_falls_when_only_less_urgent_requests_go_on() -> None:
    world = loaded()
    ask(world, "want", 10.0, priority=80)
    for seconds in (160.0, 305.0):
        ask(world, "want", seconds, priority=20)
        assert the(world).priority == 80, "it is kept for whoever asked and comes again"
    ask(world, "want", 10.0 + WANTED, priority=20)
    assert the(world).priority == 20
    ask(world, "want", 320.0, priority=80)
    ask(world, "want", 500.0, priority=80)
    ask(world, "want", 330.0 + WANTED, priority=20)
    assert the(world).priority == 80, "he has come again"


def test_a_request_after_a_pause_sets_its_own_priority() -> None:
    world = loaded(a_model(priority=80, terms={"asked_priority": 80}))
    ask(world, "want", WANTED + 1.0, priority=20)
    assert the(world).priority == 20


def test_each_request_extends_a_pending_model_and_may_raise_its_priority() -> None:
    world = a_world(holding(a_task("run", priority=90, gpu_mb=60 * GIB), "gpu0"))
    submit(world, a_model())
    ask(world, "want", 200.0, priority=70)
    assert pass_time(world, WANTED) == []
    assert (the(world).state, the(world).priority) == (TaskState.PENDING, 70)


def test_an_unwanted_model_stays_until_its_memory_is_needed() -> None:
    world = loaded()
    assert standings_due(world, at(WANTED - 1)) == []
    commit(world, standings_due(world, at(WANTED)), at(WANTED))
    assert the(world).priority == -1
    submit(world, a_task("run", priority=0, gpu_mb=60 * GIB, submitted_at=at(WANTED)))
    plan(world, WANTED)
    assert (the(world).state, the(world).stop_reason) == (TaskState.STOPPING, StopReason.PREEMPT)


def test_a_wanted_model_is_not_preempted_by_equal_priority() -> None:
    world = loaded()
    submit(world, a_task("run", priority=50, gpu_mb=60 * GIB))
    assert plan(world, 100.0) == []


def test_a_more_urgent_task_gets_a_models_memory_after_its_unload() -> None:
    world = loaded()
    submit(world, a_task("run", priority=95, gpu_mb=60 * GIB))
    assert orders(plan(world, 100.0)) == [UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(10.0))]
    assert index(world, {"llm": ModelState.UNLOADING}, 101.0) == []
    assert plan(world, 102.0) == []
    index(world, {}, 103.0)
    task = the(world)
    assert (task.state, task.priority, task.preemptions) == (TaskState.PENDING, 50, 1)
    plan(world, 104.0)
    assert the(world, "run").state is TaskState.ADMITTED


def test_memory_of_an_unloaded_model_is_free_after_a_new_sample() -> None:
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


def test_a_preempted_model_that_is_no_longer_wanted_has_ended() -> None:
    world = loaded(a_model(expires_at=at(105.0)))
    submit(world, a_task("run", priority=95, gpu_mb=60 * GIB))
    plan(world, 100.0)
    [ended] = index(world, {}, 106.0)
    assert LLM not in world.tasks
    assert ended.tasks[0].task.state is TaskState.SUCCEEDED
    assert world.finished == {}, "a model is no task"


def test_a_requested_unload_ends_the_model() -> None:
    world = loaded()
    decision = ask(world, "cancel", 2.0)
    assert decision.orders == (UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(10.0)),)
    [ended] = index(world, {}, 4.0)
    assert LLM not in world.tasks
    assert ended.tasks[0].task.state is TaskState.CANCELLED


def test_a_shorter_time_to_unload_takes_the_place_of_a_longer_one() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert ask(world, "cancel", 3.0, grace_seconds=0.0).orders == (
        UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(0.0)),
    )


def test_a_lost_unload_order_is_repeated_with_the_remaining_time() -> None:
    world = loaded()
    ask(world, "cancel", 2.0)
    assert index(world, {"llm": ModelState.READY}, 3.0, under_way={"llm"}) == []
    [again] = orders(index(world, {"llm": ModelState.READY}, 5.0))
    assert again == UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(7.0))
    [again] = orders(pass_time(world, 12.5))
    assert again == UnloadOrder(LLM, Fence(1), "main", "llm", Seconds(0.0))


def test_model_not_unloaded_in_time_counts_until_the_index_says_it_is_gone() -> None:
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
    index(world, {"llm": ModelState.UNLOADING}, 30.0)
    assert leases(world) == [(HolderKind.MODEL, LeaseState.QUARANTINED)]
    index(world, {}, 40.0)
    assert leases(world) == []
    assert list(world.models.on("main")) == []


def test_the_next_holder_of_a_model_is_another_task_and_both_copies_count() -> None:
    world = loaded(a_model(gpu_mb=30 * GIB))
    ask(world, "cancel", 2.0)
    pass_time(world, 23.0)
    submit(world, replace(a_model("again", gpu_mb=30 * GIB), holder=Model("main", "llm")))
    plan(world, 24.0)
    held = world.models.of(ModelKey("main", "llm"))
    assert held is not None
    assert (held.id, held.state) == ("again", TaskState.ADMITTED)
    assert world.ledgers[key("gpu0")].held_mb() == 60 * GIB
    later = World()
    for task in world.tasks.values():
        later.add_task(task)
    assert later.models.of(ModelKey("main", "llm")) == held, "a process that reads the rows has it too"


@pytest.mark.parametrize(("seconds", "state"), [(10.0, TaskState.PENDING), (WANTED + 1, None)])
def test_a_model_that_vanished_waits_again_if_it_is_wanted(seconds: float, state: TaskState | None) -> None:
    world = loaded()
    index(world, {}, seconds)
    assert leases(world) == []
    assert (the(world).state if LLM in world.tasks else None) is state


def test_a_failed_load_is_retried_and_then_fails_with_the_servers_message() -> None:
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


def test_a_load_that_never_began_uses_up_no_retry() -> None:
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
