"""What tests of models on servers say in one line: of 80 GiB, a model takes 50."""

from typing import Any

from gpubroker_server.core.domain.decisions import Decision, Request
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind, LeaseState
from gpubroker_server.core.domain.model_orders import IndexedModel, ModelState, ServerIndex
from gpubroker_server.core.domain.orders import Ended, Ending, Failure
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Fence, Instant, Seconds, TaskId
from gpubroker_server.core.lifecycle.change_requests import carry_out
from gpubroker_server.core.lifecycle.deadlines import due, extend_window
from gpubroker_server.core.lifecycle.model_lifecycle import seen
from gpubroker_server.core.lifecycle.runs import apply_reports
from gpubroker_server.core.planning.cycle import plan_cycle
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import (
    GIB,
    NOW,
    a_sample,
    a_task,
    a_world,
    check_ledger,
    commit,
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
    """50 of 80 GiB, wanted at priority 50 for five minutes."""
    facts = {"gpu_mb": 50 * GIB, "expires_at": at(WANTED), "grace_seconds": Seconds(10.0), "max_retries": 1}
    model = Model(server, id, **(terms or {}))
    return a_task(id, holder=model, **{**facts, **fields})


def an_inference(id: str = "ask", **fields: Any) -> Task:
    """In the queue, for the model above."""
    return a_task(id, answered_by=LLM, **{"submitted_at": at(0), **fields})


def the(world: World, task: str = LLM) -> Task:
    return world.tasks[TaskId(task)]


def plan(world: World, seconds: float = 0.0, policy: Policy = POLICY) -> list[Decision]:
    world.measure([a_sample(device, at(seconds)) for device in world.ledgers])
    decisions = list(plan_cycle(world, policy, at(seconds)).decisions)
    commit(world, decisions, at(seconds))
    check_ledger(world)
    return decisions


def index(
    world: World,
    stages: dict[str, ModelState],
    seconds: float = 0.0,
    under_way: set[str] | None = None,
    versions: tuple[str, ...] = (),
) -> list[Decision]:
    """Read on `main`; what is not named was never loaded."""
    models = {name: IndexedModel(name, stage, versions) for name, stage in stages.items()}
    claims = frozenset((TaskId(name), the(world, name).fence) for name in under_way or ())
    decisions = seen(world, ServerIndex("main", at(seconds), models, claims), at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions


def loaded(*tasks: Task, seconds: float = 1.0) -> World:
    world = a_world()
    models = tasks or (a_model(),)
    submit(world, *models)
    plan(world)
    index(world, {task.name: ModelState.READY for task in models}, seconds)
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
    watch = replace(extend_window(None, NOW), last=at(seconds - 1.0))
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
    decisions = apply_reports(world, [report], at(seconds), POLICY)
    commit(world, decisions, at(seconds))
    return decisions
