"""Models as holders of memory, and their changes by their server's index, by requests and with time.

A model is a task that waits, is loaded, stays and leaves. While it is wanted, its priority is that of its
requests. While it makes room, its priority is one less than that of the tasks that may have its memory, since
preemption needs a strictly lower priority. Once it is no longer wanted, its priority is -1, so that any task
may take its memory.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import AuditNote, Decision, Outcome, Request, write_move
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import LeaseState, Proof
from gpubroker_server.core.domain.model_orders import (
    ModelOrder,
    ModelState,
    ServerIndex,
    check_order,
    load_order,
    unload_order,
)
from gpubroker_server.core.domain.models import ModelUsage
from gpubroker_server.core.domain.orders import Ended, Ending, Failure
from gpubroker_server.core.domain.policy import Policy, next_retry_at
from gpubroker_server.core.domain.task import Move, Task, TaskState, model_of
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, Seconds
from gpubroker_server.core.lifecycle.model_adoption import adopt, base_released, step_covered
from gpubroker_server.core.lifecycle.stopping import requeued_fields
from gpubroker_server.core.lifecycle.task_update import TaskUpdate
from gpubroker_server.core.world.model_index import is_unasked
from gpubroker_server.core.world.world import World

TOP_PRIORITY = 100
"""The highest priority: a model that has it is never preempted."""

UNWANTED_PRIORITY = -1
"""The priority of a model that is not wanted, below that of any task."""

MAX_USES = 64
"""The most uses that one request may report; a larger number counts as this."""

WANTED_SHARE = 0.5
"""The share of the wanted time after which a client that still wants a model repeats its request."""


def is_wanted(task: Task, now: Instant) -> bool:
    return task.expires_at is None or now < task.expires_at


def is_asked_since_it_left(task: Task) -> bool:
    """Return False if the model left for another holder and no request has come since, else True."""
    terms = model_of(task)
    return terms.left_at is None or terms.usage.at >= terms.left_at


def needs_want_request(task: Task, priority: int, now: Instant, *, queued: bool = False) -> bool:
    """Return True if a request at this priority changes anything. `queued` is True if the priority is the
    highest of all queued inferences."""
    terms = model_of(task)
    if is_unasked(task) or (task.state is TaskState.PENDING and not is_asked_since_it_left(task)):
        return True
    if task.expires_at is None or priority > terms.asked_priority:
        return priority > terms.asked_priority
    until = task.expires_at
    if priority < terms.asked_priority:
        if _gives_way(terms, now, queued=queued):
            return True
    else:
        until = min(until, _asked_until(terms))
    return until - now < WANTED_SHARE * terms.wanted_seconds


def _gives_way(terms: Model, now: Instant, *, queued: bool) -> bool:
    """Return True if the model's priority may fall, because it was not wanted at that priority lately, or
    only by inferences that no longer wait."""
    return (queued and terms.queued) or now >= _asked_until(terms)


def _asked_until(terms: Model) -> Instant:
    return Instant(terms.asked_at + terms.wanted_seconds)


def standing(task: Task, now: Instant) -> int:
    """Return the present priority of a model."""
    terms = model_of(task)
    if terms.pinned or not terms.model:
        return TOP_PRIORITY
    if not is_wanted(task, now):
        return UNWANTED_PRIORITY
    return min(terms.asked_priority, terms.yields_to) - 1 if terms.yields else terms.asked_priority


def due(world: World, now: Instant) -> list[Decision]:
    """Return the priority changes that are due with time or after a change of pinning, and the ends of base
    costs that the settings of a server no longer name."""
    decisions: list[Decision] = []
    for task in world.models.live():
        if task.state is TaskState.STOPPING and not model_of(task).model:
            decisions.append(base_released(world, task, Move.CANCELLED, now))
        elif task.state is TaskState.RUNNING and (priority := standing(task, now)) != task.priority:
            write = write_move(task, Move.CHANGED, priority=priority)
            decisions.append(Decision(task.id, "standing", tasks=(write,)))
    return decisions


def seen(world: World, index: ServerIndex, now: Instant, policy: Policy) -> list[Decision]:
    """Apply a server's index to its models, with one decision per changed model."""
    decisions: list[Decision] = []
    is_adopting = False
    for task in world.models.on(index.server, index.address, index.process):
        # While a call is under way, the index may show the model as before it or as after it.
        if (task.id, task.fence) in index.under_way:
            continue
        update = TaskUpdate(world, task.id, now)
        terms = model_of(task)
        stage = index.stage_of(terms.model)
        if task.state is TaskState.PENDING and stage is ModelState.READY:
            # Adopt one model at a time, so that the next adoption sees the leases of this one.
            seen_task = replace(task, holder=_seen_at(terms, index))
            adopted = None if is_adopting else adopt(world, seen_task, standing(task, now), now)
            is_adopting = is_adopting or adopted is not None
            decisions += filter(None, [adopted])
            continue
        is_loaded = task.state is TaskState.RUNNING and stage is ModelState.READY
        if is_loaded and (covered := step_covered(world, task, now)) is not None:
            decisions.append(covered)
            continue
        if stage is ModelState.ABSENT:
            for fence in _claims(world, task):
                update.release_leases(fence, 0, Proof.UNLOADED)
        _follow(update, task, index, now, policy)
        orders = tuple(_orders_again(world, task, stage, now))
        decision = update.decision() or Decision(task.id, "again")
        if orders or not decision.is_empty():
            decisions.append(replace(decision, orders=orders))
    return decisions


def _claims(world: World, task: Task) -> set[Fence]:
    return world.unconfirmed.claims_of(task.id) | (
        {task.fence} if task.state in (TaskState.STOPPING, TaskState.RUNNING) else set()
    )


def _follow(update: TaskUpdate, task: Task, index: ServerIndex, now: Instant, policy: Policy) -> None:
    before = model_of(task)
    match task.state, index.stage_of(before.model):
        case TaskState.ADMITTED, ModelState.READY:
            took_seconds = Seconds(round(now - (task.admitted_at or now), 3))
            loaded = replace(
                _seen_at(before, index),
                # A load that took no time found the model READY, and says nothing about the time of a load.
                load_seconds=took_seconds or before.load_seconds,
                versions=index.versions_of(before.model),
                yields=False,
            )
            priority = standing(replace(task, holder=loaded), now)
            update.move(Move.STARTED, "loaded", started_at=now, holder=loaded, priority=priority)
            update.move_leases(task.fence, 0, LeaseState.HELD)
        case TaskState.RUNNING, ModelState.READY if (seen := _seen_at(before, index)) != before:
            update.move(Move.CHANGED, "server_seen", holder=seen)
        case TaskState.PENDING, ModelState.ABSENT if task.held:
            # The model was loaded without a lease and waited for one; no request wants it.
            update.outcome = Outcome(task.id, task.fence, TaskState.EXPIRED, now, failure=_VANISHED)
            update.move(Move.EXPIRED, "vanished", finished_at=now)
        case TaskState.RUNNING, ModelState.ABSENT if is_wanted(task, now):
            update.move(Move.REQUEUED, "vanished", **back_in_queue(task))
        case TaskState.RUNNING, ModelState.ABSENT:
            update.outcome = Outcome(task.id, task.fence, Ending.LOST, now, failure=_VANISHED)
            update.move(Move.FAILED, "vanished", finished_at=now)
        case TaskState.STOPPING, ModelState.ABSENT:
            update.stopped("unloaded", policy)
        case _:
            pass


def _seen_at(terms: Model, index: ServerIndex) -> Model:
    if not index.address:
        return terms
    return replace(terms, address=index.address, process=index.process)


_VANISHED = Failure(
    "model_gone", "its server no longer has it: it was unloaded by hand, or the server was restarted"
)


def _orders_again(world: World, task: Task, stage: ModelState, now: Instant) -> Iterator[ModelOrder]:
    """Yield load and unload orders again, which may have been lost with an earlier leader."""
    if task.state is TaskState.ADMITTED and stage is ModelState.ABSENT:
        yield load_order(task, _room_of(world, task))
    elif task.state is TaskState.STOPPING and stage is ModelState.READY:
        yield unload_order(task, Seconds(max(0.0, (task.stop_deadline_at or now) - now)))


def back_in_queue(task: Task, **changes: Any) -> dict[str, Any]:
    """Return the changes of a model that is requeued with the priority of its requests."""
    return requeued_fields(task, priority=model_of(task).asked_priority, **changes)


def ended(update: TaskUpdate, task: Task, report: Ended, now: Instant, policy: Policy) -> None:
    """Record that the load failed or could not begin. Its memory is free once the server's index no longer
    lists the model."""
    update.move_leases(report.fence, 0, LeaseState.RELEASING)
    if task.state is TaskState.STOPPING:
        update.stopped("ended", policy)
    elif report.ending is Ending.NEVER_STARTED:
        update.move(
            Move.REQUEUED, "never_started", **back_in_queue(task, not_before=next_retry_at(1, now, policy))
        )
    else:
        update.outcome = Outcome(task.id, task.fence, Ending.FAILED, now, failure=report.failure)
        update.failed(task, now, policy)


def want(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Return the decision after a request for the model, or a report of its uses. A request that is `doubted`
    says that the model is loaded, but answers as if its process were gone."""
    if not isinstance(task.holder, Model):
        return done
    fields = request.fields
    used_at = Instant(min(now, fields.get("used_at", now)))
    usage = _used(task.holder.usage, min(int(fields.get("uses", 1)), MAX_USES), used_at)
    terms = replace(task.holder, usage=usage)
    if not fields.get("doubted"):
        terms = _asked(
            terms, int(fields["priority"]), used_at, wanted=is_wanted(task, now), queued="queued" in fields
        )
    changes: dict[str, Any] = {"holder": terms}
    # A use before the model left, which is reported late, is no reason to bring the model back.
    if is_unasked(task) and (terms.left_at is None or used_at >= terms.left_at):
        changes |= {"holder": replace(terms, yields=False, left_at=now), "not_before": None}
    if task.expires_at is not None:
        changes["expires_at"] = Instant(max(task.expires_at, used_at + terms.wanted_seconds))
    after = replace(task, **changes)
    priority = standing(after, now) if task.state is TaskState.RUNNING else terms.asked_priority
    if priority != task.priority:
        changes["priority"] = priority
    if task.held:  # the model was loaded without a lease, and is wanted now
        changes["held"] = False
    orders: tuple[ModelOrder, ...] = ()
    if fields.get("doubted") and task.state is TaskState.RUNNING:
        orders = (check_order(task, _room_of(world, task)),)
    return replace(done, tasks=(write_move(task, Move.CHANGED, **changes),), orders=orders)


def _asked(terms: Model, priority: int, now: Instant, *, wanted: bool, queued: bool) -> Model:
    is_new = not wanted or _gives_way(terms, now, queued=queued) or priority > terms.asked_priority
    if not is_new and priority < terms.asked_priority:
        return terms
    return replace(terms, asked_priority=priority, asked_at=now, queued=queued and (is_new or terms.queued))


def _room_of(world: World, task: Task) -> tuple[tuple[DeviceKey, Mib], ...]:
    return tuple((lease.device, lease.mb) for lease in world.leases_of(task))


def pin(task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Pin or unpin a model. A pinned model waits for its memory without limit."""
    if not isinstance(task.holder, Model):
        return done
    is_pinned = bool(request.fields["pinned"])
    terms = replace(task.holder, pinned=is_pinned)
    expires_at = None if is_pinned else Instant(now + terms.wanted_seconds)
    changes: dict[str, Any] = {"holder": terms, "expires_at": expires_at}
    if task.state is TaskState.RUNNING:
        changes["priority"] = standing(replace(task, **changes), now)
    action = "model.pin" if is_pinned else "model.unpin"
    name = f"{terms.server}/{terms.model}"
    note = AuditNote(now, task.tenant, str(request.fields.get("by", "")), action, name, "")
    return replace(done, tasks=(write_move(task, Move.CHANGED, **changes),), audit=(note,))


def _used(usage: ModelUsage, times: int, now: Instant) -> ModelUsage:
    for _ in range(times):
        usage = usage.used(now)
    return usage


def not_unloaded(task: Task, now: Instant) -> Outcome:
    """Return the outcome of a model without a confirmed unload."""
    message = (
        "its server was asked to unload it and still has it; its memory counts as used until the server's "
        "index says that it is gone: stop what still sends it requests, or restart the server"
    )
    return Outcome(task.id, task.fence, Ending.LOST, now, failure=Failure("not_unloaded", message))
