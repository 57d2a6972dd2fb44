"""Queues of tenants and of work streams that are paused: what waits starts no more, and what runs goes on."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision, QueuePause, Request
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import PledgeEnd
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.explain.advice import advise
from gpubroker_server.core.explain.diagnosis import diagnose
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.explain.survey import survey_nodes
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_pledge, a_task, a_world, commit, holding, submit

POLICY = Policy()


def ask(world: World, what: str, queue: str, reason: str = "") -> Decision:
    fields = {"queue": queue, "by": "ada", "reason": reason}
    request = Request("r1", TaskId("queue"), "ops", what, fields, NOW)
    world.add_request(request)
    decision = carry_out(world, request, NOW, POLICY)
    commit(world, decision)
    assert world.requests == {}
    return decision


def starts(world: World) -> list[str]:
    """The tasks that the next cycle admits; they are."""
    decisions = plan_cycle(world, POLICY, NOW).decisions
    commit(world, decisions)
    return [decision.subject for decision in decisions if decision.why == "admit"]


def of(tenant: str, name: str, **fields: Any) -> Task:
    return a_task(name, tenant=tenant, gpu_mb=GIB, **fields)


def test_nothing_of_a_paused_tenant_starts_until_it_is_resumed() -> None:
    world = a_world(of("acme", "a"), of("beta", "b"))
    ask(world, "pause", "tenant:acme")
    submit(world, of("acme", "a2"))
    assert starts(world) == ["b"]
    assert (len(world.queue), world.queue.paused) == (2, {"a", "a2"})
    ask(world, "unpause", "tenant:acme")
    assert starts(world) == ["a", "a2"]
    assert len(world.queue) == 0


def test_a_paused_stream_holds_the_tasks_of_all_tenants_that_name_it() -> None:
    world = a_world(of("acme", "a", stream="night"), of("beta", "b", stream="night"), of("beta", "c"))
    ask(world, "pause", "stream:night")
    ask(world, "pause", "tenant:acme")
    assert starts(world) == ["c"]
    ask(world, "unpause", "stream:night")
    assert starts(world) == ["b"]
    ask(world, "unpause", "tenant:acme")
    assert starts(world) == ["a"]


def test_a_pause_and_its_end_are_audited_once_with_who_asked_and_why() -> None:
    world = a_world()
    first, again = ask(world, "pause", "tenant:acme", "moving"), ask(world, "pause", "tenant:acme", "other")
    [note] = first.audit
    assert (note.tenant, note.actor, note.action, note.subject, note.reason) == (
        "acme", "ada", "queue.pause", "tenant:acme", "moving",
    )  # fmt: skip
    assert (again.audit, again.paused) == ((), ())
    assert world.queue.pauses == {"tenant:acme": QueuePause("tenant:acme", NOW, "ada", "moving")}
    ended, none_left = ask(world, "unpause", "tenant:acme"), ask(world, "unpause", "tenant:acme")
    assert [note.action for note in ended.audit] == ["queue.resume"]
    assert (none_left.audit, none_left.resumed) == ((), ())
    assert ask(world, "pause", "stream:night").audit[0].tenant == "ops"


def test_held_or_delayed_task_of_a_paused_tenant_waits_on_afterwards() -> None:
    """It waits for the end of the pause when it is released or its time has come."""
    world = a_world(of("acme", "held", held=True), of("acme", "late", not_before=Instant(NOW - 1.0)))
    ask(world, "pause", "tenant:acme")
    request = Request("r2", TaskId("held"), "acme", "change", {"held": False}, NOW)
    world.add_request(request)
    commit(world, carry_out(world, request, NOW, POLICY))
    assert starts(world) == []
    assert world.queue.paused == {"held", "late"}
    ask(world, "unpause", "tenant:acme")
    assert sorted(starts(world)) == ["held", "late"]


def test_what_runs_goes_on_and_comes_back_to_a_paused_queue() -> None:
    run = holding(of("acme", "run"), "gpu0")
    world = a_world(run)
    assert ask(world, "pause", "tenant:acme").orders == ()
    assert world.tasks[TaskId("run")].state is TaskState.RUNNING


def test_a_preemptor_whose_queue_is_paused_gives_back_what_is_freed_for_it() -> None:
    preemptor = of("acme", "p")
    world = a_world(preemptor, a_pledge(preemptor, "gpu0", GIB))
    ask(world, "pause", "tenant:acme")
    [decision] = plan_cycle(world, POLICY, NOW).decisions
    assert [written.end for written in decision.pledges] == [PledgeEnd.WITHDRAWN]


@pytest.mark.parametrize(
    "fields",
    [{"stop_reason": StopReason.MOVE}, {"holder": Model("models", "resnet")}],
    ids=["a run that moves", "a model"],
)
def test_a_pause_does_not_keep_from_starting(fields: dict[str, Any]) -> None:
    world = a_world()
    ask(world, "pause", "tenant:acme")
    assert world.queue.pause_of(of("acme", "t", **fields)) is None


def test_a_task_of_a_paused_queue_reads_who_waits_for_whom() -> None:
    world = a_world(of("acme", "a"), of("acme", "s", stream="night"))
    ask(world, "pause", "tenant:acme", "moving house")
    found = explain(world, TaskId("a"), POLICY, Instant(NOW + 60.0))
    assert (found.reason, found.position, found.queue_length) == (Reason.QUEUE_PAUSED, None, 2)
    assert found.message == "tenant acme was paused 60 s ago (moving house); it starts nothing until resumed"
    ask(world, "unpause", "tenant:acme")
    ask(world, "pause", "stream:night")
    found = explain(world, TaskId("s"), POLICY, NOW)
    assert found.message.startswith("work stream night was paused")


def test_no_change_of_its_own_helps_a_task_of_a_paused_queue() -> None:
    world = a_world(of("acme", "a"))
    ask(world, "pause", "tenant:acme")
    for task in (world.tasks[TaskId("a")], replace(of("acme", "new"), id=TaskId("unsent"))):
        advice = advise(diagnose(survey_nodes(Draft(world), task, POLICY, NOW)))
        assert (advice.start, advice.remedies) == (None, ())
