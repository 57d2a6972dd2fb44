"""Queued inferences: when their turn comes, what keeps their model wanted, and how they end."""

from typing import Any

import pytest
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.model_orders import CheckOrder, DropOrder, InferOrder, ModelState
from gpubroker_server.core.domain.orders import Ended, Ending, Failure, Gone
from gpubroker_server.core.domain.policy import CustomLimit, InferenceServers, Policy
from gpubroker_server.core.domain.ranks import ranks_of
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import StopReason, TaskState
from gpubroker_server.core.domain.units import Fence, Mib, Seconds, TaskId
from gpubroker_server.core.explain.explain import explain
from gpubroker_server.core.lifecycle.runs import (
    AGAIN_MOST_SECONDS,
    INFERENCE_REFUSED,
    LOST_RETRIES,
    apply_reports,
)
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.planning.inferences import (
    admissions,
    check_failed_models,
    claims_at_takeover,
    keep_models_wanted,
    requeue_claims,
)
from gpubroker_server.core.world.events import submitted
from gpubroker_server.core.world.payload import encode, read_task
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, a_task, a_world, commit, key, submit
from tests.core.served import LLM, WANTED, a_model, an_inference, ask, at, index, loaded, pass_time, plan, the

POLICY = Policy(serving=InferenceServers(ledger=("main",), at_once=2))
OPEN = Policy(serving=InferenceServers(others=("lab",), at_once=2))
NO_SUCH_INPUT = Failure(INFERENCE_REFUSED, "no such input")
BROKE_OFF = Failure("model_server_lost", "reset by peer")


def admit(world: World, seconds: float = 5.0, policy: Policy = POLICY) -> list[str]:
    decisions = admissions(world, policy, at(seconds))
    commit(world, decisions, at(seconds))
    return [decision.subject for decision in decisions]


def end(
    world: World, id: str = "ask", ending: Ending = Ending.SUCCEEDED, seconds: float = 6.0,
    failure: Failure | None = None, fence: int = 1,
) -> list[Decision]:  # fmt: skip
    result = b"answer" if ending is Ending.SUCCEEDED else None
    report = Ended(TaskId(id), Fence(fence), at(seconds), ending, result, "tensors", failure)
    decisions = apply_reports(world, [report], at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions


def asked(policy: Policy = POLICY, **fields: Any) -> World:
    """One inference that is being answered."""
    world = loaded()
    submit(world, an_inference(**fields))
    assert admit(world, policy=policy) == ["ask"]
    return world


def test_an_inference_runs_as_soon_as_its_model_is_there_and_needs_no_node() -> None:
    world = a_world()
    submit(world, a_model(), an_inference())
    assert admit(world) == []
    plan(world)
    index(world, {"llm": ModelState.READY})
    [decision] = admissions(world, POLICY, at(5))
    assert decision.orders == (InferOrder(TaskId("ask"), Fence(1), "main", "llm"),)
    commit(world, decision)
    task = the(world, "ask")
    assert (task.state, task.node, task.started_at) == (TaskState.RUNNING, None, at(5))
    assert ranks_of(task) == ()
    assert world.leases_of(task) == []
    assert explain(world, task.id, POLICY, at(7)).message == "running on model llm for 2 s"


def test_the_planner_places_no_inference_on_a_node() -> None:
    world = loaded()
    submit(world, an_inference())
    assert plan_cycle(world, POLICY, at(5)).decisions == ()


def test_a_server_that_is_not_in_the_ledger_is_asked_at_once() -> None:
    world = a_world()
    submit(world, an_inference())
    [decision] = admissions(world, OPEN, at(5))
    assert decision.orders == (InferOrder(TaskId("ask"), Fence(1), "lab", "llm"),)


def test_without_a_server_of_models_it_waits_and_is_told_what_to_set() -> None:
    world = a_world()
    submit(world, an_inference())
    assert admissions(world, Policy(), at(5)) == []
    found = explain(world, TaskId("ask"), Policy(), at(5))
    assert found.reason is Reason.BACKEND_UNAVAILABLE
    assert "set triton.servers" in found.message


def test_model_concurrency_limit_admits_the_most_urgent_inferences() -> None:
    world = loaded()
    submit(world, an_inference("low", priority=10), an_inference("mid"), an_inference("high", priority=95))
    assert admit(world) == ["high", "mid"]
    assert admit(world) == []
    assert explain(world, TaskId("low"), POLICY, at(5)).reason is Reason.CONCURRENCY_LIMITED
    end(world, "mid")
    assert explain(world, TaskId("low"), POLICY, at(6)).reason is Reason.PENDING_EVALUATION
    assert admit(world) == ["low"]


def test_a_model_s_turns_are_dealt_among_the_tenants_that_wait_for_it() -> None:
    world = loaded()
    mine = [an_inference(f"a{at}", tenant="acme") for at in range(4)]
    submit(world, *mine, an_inference("z0", tenant="zeta", submitted_at=at(1)))
    assert admit(world) == ["a0", "z0"]


def test_a_limit_of_what_runs_at_once_counts_inferences_as_well() -> None:
    policy = Policy(serving=POLICY.serving, custom_limits=(CustomLimit("tenant:default", 1.0),))
    world = loaded()
    slots = (("tenant:default", 1.0),)
    submit(world, an_inference("first", slots=slots), an_inference("second", slots=slots))
    assert admit(world, policy=policy) == ["first"]
    assert explain(world, TaskId("second"), policy, at(5)).reason is Reason.CONCURRENCY_LIMITED
    end(world, "first")
    assert admit(world, policy=policy) == ["second"]


def test_one_that_is_held_or_delayed_waits_though_its_model_is_there() -> None:
    world = loaded()
    submit(world, an_inference("held", held=True), an_inference("later", not_before=at(60)))
    assert admit(world) == []
    world.enter_due(at(60))
    assert admit(world, 60) == ["later"]
    assert the(world, "later").not_before is None


@pytest.mark.parametrize(
    ("stage", "says"), [(None, "it waits for room"), (ModelState.LOADING, "it is being loaded")]
)
def test_the_reason_why_the_model_waits_is_shown(stage: ModelState | None, says: str) -> None:
    world = a_world()
    submit(world, a_model(), an_inference())
    if stage is not None:
        plan(world)
        index(world, {"llm": stage})
    found = explain(world, TaskId("ask"), POLICY, at(5))
    assert found.reason is Reason.MODEL_LOADING
    assert found.message == f"model llm is not in memory: {says}"


def test_one_whose_model_nobody_has_asked_for_is_told_so_and_sent_nowhere() -> None:
    world = a_world()
    submit(world, an_inference())
    assert admit(world) == []
    assert "the load is retried" in explain(world, TaskId("ask"), POLICY, at(5)).message


def test_waiting_inferences_keep_their_model_wanted_at_highest_priority() -> None:
    world = loaded()
    submit(world, an_inference("low", priority=10), an_inference("high", priority=85, submitted_at=at(1)))
    commit(world, keep_models_wanted(world, POLICY, at(5)), at(5))
    assert (the(world).priority, the(world).expires_at) == (85, at(5 + WANTED))
    assert keep_models_wanted(world, POLICY, at(6)) == [], "it need not be said in each cycle"
    [again] = keep_models_wanted(world, POLICY, at(5 + 0.6 * WANTED))
    commit(world, again)
    assert the(world).expires_at == at(5 + 1.6 * WANTED)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_model_is_wanted_at_the_priority_of_those_that_still_wait(is_there: bool) -> None:
    world = loaded() if is_there else a_world()
    if not is_there:
        submit(world, a_model())
    submit(world, an_inference("low", priority=10), an_inference("high", priority=85, submitted_at=at(1)))
    commit(world, keep_models_wanted(world, POLICY, at(5)), at(5))
    assert the(world).priority == 85
    ask(world, "cancel", 6.0, task="high")
    [told] = keep_models_wanted(world, POLICY, at(7))
    commit(world, told, at(7))
    assert (the(world).priority, the(world).expires_at) == (10, at(7 + WANTED))
    assert keep_models_wanted(world, POLICY, at(8)) == []


def test_who_asks_directly_is_not_made_less_urgent_by_those_in_the_queue() -> None:
    world = loaded()
    ask(world, "want", 1.0, priority=70)
    submit(world, an_inference("low", priority=10))
    assert keep_models_wanted(world, POLICY, at(2)) == []
    [again] = keep_models_wanted(world, POLICY, at(0.6 * WANTED))
    commit(world, again, at(0.6 * WANTED))
    assert (the(world).priority, the(world).expires_at) == (70, at(1.6 * WANTED))
    [late] = keep_models_wanted(world, POLICY, at(1.0 + WANTED))
    commit(world, late, at(1.0 + WANTED))
    assert the(world).priority == 10, "nobody has asked directly for so long"


def test_inferences_keep_the_model_priority_against_lower_want_requests() -> None:
    world = loaded()
    submit(world, an_inference("high", priority=85))
    commit(world, keep_models_wanted(world, POLICY, at(5)), at(5))
    ask(world, "want", 0.5 * WANTED, priority=20)
    [again] = keep_models_wanted(world, POLICY, at(0.6 * WANTED))
    commit(world, again, at(0.6 * WANTED))
    ask(world, "want", 6.0 + WANTED, priority=20)
    assert the(world).priority == 85


def test_a_model_that_answers_inferences_is_wanted_until_they_have_ended() -> None:
    world = asked()
    [told] = keep_models_wanted(world, POLICY, at(0.9 * WANTED))
    assert told.subject == LLM
    end(world)
    assert keep_models_wanted(world, POLICY, at(0.9 * WANTED)) == []


def test_want_is_not_renewed_for_pinned_models_and_servers_off_the_ledger() -> None:
    world = asked()
    ask(world, "pin", pinned=True, by="admin")
    assert keep_models_wanted(world, POLICY, at(10 * WANTED)) == []
    assert keep_models_wanted(world, OPEN, at(10 * WANTED)) == []


def test_an_answer_ends_the_inference_and_is_its_result() -> None:
    world = asked()
    [decision] = end(world)
    assert TaskId("ask") not in world.tasks
    assert decision.outcome is not None
    assert (decision.outcome.result, decision.outcome.result_format) == (b"answer", "tensors")
    assert world.models.asked() == []


def test_an_answer_of_an_earlier_claim_changes_nothing() -> None:
    world = asked()
    assert end(world, fence=2) == []
    assert the(world, "ask").state is TaskState.RUNNING


def test_a_request_that_the_model_does_not_take_is_not_sent_again() -> None:
    world = asked(max_retries=5)
    [decision] = end(world, ending=Ending.FAILED, failure=NO_SUCH_INPUT)
    assert decision.tasks[0].task.state is TaskState.FAILED
    assert decision.outcome is not None
    assert decision.outcome.failure == NO_SUCH_INPUT


def test_inference_on_which_its_model_fails_is_retried_up_to_max_retries() -> None:
    world = asked(max_retries=1)
    end(world, ending=Ending.FAILED, failure=Failure("inference_failed", "division by zero"))
    task = the(world, "ask")
    assert (task.state, task.failures, task.started_at) == (TaskState.PENDING, 1, None)
    world.enter_due(at(60))
    assert admit(world, 60) == ["ask"]
    end(world, ending=Ending.FAILED, failure=Failure("inference_failed", "again"), fence=2)
    assert TaskId("ask") not in world.tasks


def test_inference_whose_server_broke_off_is_retried_but_not_for_ever() -> None:
    """The limit is the same whatever number of retries the inference asked for."""
    world = asked()
    for tried in range(1, LOST_RETRIES + 2):
        [decision] = end(
            world, ending=Ending.LOST, failure=Failure("model_server_lost", "reset"), fence=tried
        )
        if tried <= LOST_RETRIES:
            world.enter_due(at(600 * tried))
            assert admit(world, 600 * tried) == ["ask"]
    assert decision.tasks[0].task.state is TaskState.FAILED


def test_a_model_whose_process_is_reported_gone_is_checked_by_its_server() -> None:
    world = asked()
    gone = Failure("model_process_gone", "stub process is not healthy")
    report = Ended(TaskId("ask"), Fence(1), at(6), Ending.LOST, failure=gone)
    [doubt] = check_failed_models(world, [report], POLICY, at(6))
    assert doubt.orders == (CheckOrder(LLM, Fence(1), "main", "llm", ((key("gpu0"), Mib(50 * GIB)),)),)
    commit(world, doubt)
    end(world, ending=Ending.LOST, failure=gone)
    assert (the(world, "ask").state, the(world, "ask").failures) == (TaskState.PENDING, 1)
    assert check_failed_models(world, [replace(report, fence=Fence(2))], POLICY, at(7)) == []
    assert check_failed_models(world, [replace(report, failure=BROKE_OFF)], POLICY, at(7)) == []


def test_inference_its_server_could_not_take_waits_and_loses_no_retry() -> None:
    world = asked()
    end(world, ending=Ending.NEVER_STARTED, seconds=6.0)
    task = the(world, "ask")
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 0, at(7.5))
    found = explain(world, task.id, OPEN, at(6.5))
    assert (found.reason, found.message) == (
        Reason.MODEL_LOADING,
        "its server does not answer or does not have model llm; it is asked again in 1 s",
    )
    world.enter_due(at(4000))
    admit(world, 4000)
    end(world, ending=Ending.NEVER_STARTED, seconds=4000, fence=2)
    assert the(world, "ask").not_before == at(4000 + AGAIN_MOST_SECONDS)


def test_a_cancel_of_one_that_is_being_answered_has_its_answer_dropped() -> None:
    world = asked()
    decision = ask(world, "cancel", 6.0, task="ask")
    assert decision.orders == (DropOrder(TaskId("ask"), Fence(1)),)
    assert the(world, "ask").stop_reason is StopReason.CANCEL
    [gone] = end(world, ending=Ending.STOPPED)
    assert gone.tasks[0].task.state is TaskState.CANCELLED


def test_an_answer_that_came_before_it_was_dropped_is_taken() -> None:
    world = asked()
    ask(world, "cancel", 6.0, task="ask")
    [decision] = end(world)
    assert decision.tasks[0].task.state is TaskState.SUCCEEDED


def test_its_limits_of_time_hold_for_it_as_for_runs() -> None:
    world = asked(timeout_seconds=Seconds(10.0))
    stopped = pass_time(world, 20.0)
    assert [order for decision in stopped for order in decision.orders] == [
        DropOrder(TaskId("ask"), Fence(1))
    ]
    [gone] = end(world, ending=Ending.STOPPED, seconds=20.0)
    assert gone.tasks[0].task.state is TaskState.FAILED


def test_new_leader_requeues_inferences_under_way_with_a_new_fence() -> None:
    world = asked()
    submit(world, an_inference("stopping"))
    admit(world)
    ask(world, "cancel", 6.0, task="stopping")
    found = claims_at_takeover(world)
    commit(world, requeue_claims(world, found, at(7), POLICY), at(7))
    assert TaskId("stopping") not in world.tasks
    task = the(world, "ask")
    assert (task.state, task.failures, task.fence) == (TaskState.PENDING, 0, 1)
    assert admit(world, 8) == ["ask"]
    assert requeue_claims(world, found, at(9), POLICY) == [], "its new claim is this leader's own"


def test_software_that_knows_no_inferences_does_not_read_on_past_one() -> None:
    assert (submitted(a_task()).reader, submitted(an_inference()).reader) == (1, 3)


def test_an_inference_comes_back_from_its_event_as_it_was() -> None:
    task = an_inference()
    assert read_task(encode(task)) == task


def test_an_inference_whose_request_cannot_be_read_now_is_retried() -> None:
    world = asked()
    unread = Gone(TaskId("ask"), Fence(1), at(6), Proof.NEVER_STARTED)
    commit(world, apply_reports(world, [unread, replace(unread, fence=Fence(0))], at(6), POLICY), at(6))
    task = the(world, "ask")
    assert (task.state, task.failures, task.not_before) == (TaskState.PENDING, 0, at(7.5))
    found = explain(world, task.id, OPEN, at(6.5))
    assert (found.reason, found.message) == (
        Reason.MODEL_LOADING,
        "its server does not answer or does not have model llm; it is asked again in 1 s",
    )
    assert apply_reports(world, [unread], at(7), POLICY) == []


def test_one_that_waited_too_long_for_its_model_says_so() -> None:
    world = a_world()
    submit(world, an_inference(queue_ttl_seconds=Seconds(30.0), expires_at=at(30)))
    [expired] = pass_time(world, 30.0)
    assert expired.outcome is not None
    assert expired.outcome.failure is not None
    assert "a turn at its model llm within its time limit to wait of 30 s" in expired.outcome.failure.message
