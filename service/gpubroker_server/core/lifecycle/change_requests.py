"""Requests of clients for existing tasks: cancel, change, renew, release, attest, and so on. Only the leader
carries them out."""

from collections import ChainMap
from collections.abc import Iterable, Mapping
from math import exp
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import (
    AuditNote,
    Decision,
    Notice,
    QueuePause,
    Request,
    StreamState,
    known_streams,
    write_move,
)
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.orders import StackOrder
from gpubroker_server.core.domain.policy import Policy, StreamRules
from gpubroker_server.core.domain.ranks import node_of, rank_count
from gpubroker_server.core.domain.submission import WorkerSet
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId, node_key
from gpubroker_server.core.lifecycle import (
    external_leases,
    gpu_closures,
    model_lifecycle,
    quarantine,
    worker_sets,
)
from gpubroker_server.core.lifecycle.runs import dissolved_pledges
from gpubroker_server.core.lifecycle.stopping import (
    AnyStopOrder,
    cancel_pending,
    give_notice,
    orders_to_leave,
    will_requeue,
    with_cause,
    withdraw_pledges,
)
from gpubroker_server.core.world.events import cordon_of
from gpubroker_server.core.world.world import World

CORDONINGS = frozenset({"cordon", "drain", "uncordon"})

TIMES = ("not_before", "queue_ttl_seconds", "deadline_at")
"""The times of a pending task that may be changed: instants and durations in seconds."""


STACK_SECONDS = Seconds(10.0)
"""The longest time that an agent has for reading the stacks of a run."""


HOUR_SECONDS = 3600.0


def carry_out_all(world: World, requests: Iterable[Request], now: Instant, policy: Policy) -> list[Decision]:
    """Return the decisions that carry out the requests in their order.

    The row of a work stream or of a worker set is written whole. Therefore all requests about one stream
    become one decision, and each request about a set begins with what the requests before it have made of the
    set.
    """
    decisions, about_streams = [], dict[str, list[Request]]()
    sets: ChainMap[TaskId, WorkerSet] = ChainMap({}, world.worker_sets)
    for request in requests:
        if request.what in ("stream", "stream_signal"):
            about_streams.setdefault(request.task, []).append(request)
        elif request.what in worker_sets.REQUESTS:
            decision = worker_sets.carry_out(world, sets.get(request.task), request)
            sets.update({row.workers.id: row.workers for row in decision.worker_sets})
            decisions.append(decision)
        else:
            decisions.append(carry_out(world, request, now, policy))
    decisions += (_change_stream(world, asked, now, policy) for asked in about_streams.values())
    return decisions


def carry_out(world: World, request: Request, now: Instant, policy: Policy) -> Decision:
    """Return the decision that settles the request. Only a request for a stack stays open, until the agent
    has sent the stack. A request that comes too late, or that a newer release wrote, changes nothing."""
    done = Decision(subject=request.task, why=request.what, requests_done=(request.id,))
    task = world.tasks.get(request.task)
    if request.what == "resume":
        entry = str(request.fields["by"]), "detection.resume", ", ".join(request.fields["nodes"])
        return replace(done, audit=(AuditNote(now, request.tenant, *entry, str(request.fields["reason"])),))
    if request.what in ("pause", "unpause"):
        return _change_pause(world, request, now, done)
    if request.what == "attest":
        return quarantine.attest(world, request, now, policy.sample_period_seconds, done)
    if request.what in CORDONINGS:
        return _cordon(world, request, now, done)
    if request.what in gpu_closures.REQUESTS:
        return gpu_closures.carry_out(world, request, now, done)
    if request.what in worker_sets.REQUESTS:
        return worker_sets.carry_out(world, world.worker_sets.get(request.task), request)
    # Before the check below: a holder may release memory that is in quarantine since its task ended.
    if task is not None and request.what == "release":
        return external_leases.release(world, task, request, now, done)
    if task is None or task.is_terminal:
        return done
    match request.what:
        case "cancel":
            return _cancel(world, task, request, now, done)
        case "change":
            return _change(world, task, request, now, done)
        case "renew":
            return external_leases.renew(task, request, now, done)
        case "stack":
            return _read_stack(world, task, request, now, done)
        case "want":
            return model_lifecycle.want(world, task, request, now, done)
        case "pin":
            return model_lifecycle.pin(task, request, now, done)
        case _:
            return done


def _change_pause(world: World, request: Request, now: Instant, done: Decision) -> Decision:
    """Pause or resume a queue. Pausing it again keeps the first pause; resuming it again does nothing."""
    queue, by, reason = (str(request.fields[name]) for name in ("queue", "by", "reason"))
    present, pauses = world.queue.pauses.get(queue), request.what == "pause"
    if pauses is (present is not None):
        return done
    pause = QueuePause(queue, now, by, reason) if present is None else present
    action = "queue.pause" if pauses else "queue.resume"
    audit = (AuditNote(now, pause.tenant or request.tenant, by, action, queue, reason),)
    if present is None:
        return replace(done, paused=(pause,), audit=audit)
    return replace(done, resumed=(pause,), audit=audit)


def _change_stream(world: World, requests: list[Request], now: Instant, policy: Policy) -> Decision:
    """Return the decision that carries out all requests about one stream. Signals of a stream that does not
    exist are dropped."""
    name, audit = str(requests[0].task), []
    before = stream = world.streams.get(name, StreamState(name))
    for request in requests:
        asked = request.fields
        if request.what == "stream_signal":
            if name in known_streams(policy.streams, {name: stream}):
                stream = with_signal(stream, asked, request.made_at, policy.stream_rules)
            continue
        weight, was = asked["curriculum"], stream
        stream = StreamState(name) if weight is None else replace(stream, curriculum=weight)
        if stream != was:
            action = "stream.delete" if weight is None else "stream.put"
            entry = str(asked["by"]), action, name, str(asked["reason"])
            audit.append(AuditNote(now, request.tenant, *entry))
    return Decision(
        subject=name,
        why="stream",
        requests_done=tuple(request.id for request in requests),
        streams=() if stream == before else (stream,),
        audit=tuple(audit),
    )


def with_signal(
    stream: StreamState, signal: Mapping[str, Any], at: Instant, rules: StreamRules
) -> StreamState:
    """Return the stream after a client's signal. Progress of an earlier time than the known progress is
    dropped; progress of the same instant replaces it."""
    progress, age, quality = signal.get("progress"), signal.get("data_age_seconds"), signal.get("quality")
    progress_at = Instant(min(at, signal.get("progress_at") or at))
    since = progress_at - stream.progress_at
    if progress is not None and (stream.progress is None or since >= 0):
        velocity = stream.velocity_per_hour
        if stream.progress is not None and since > 0:
            # Smooth exponentially with the time constant `velocity_seconds`. Progress that is reported after
            # a longer time weighs more, so a client may report it as often as it likes.
            newest = (progress - stream.progress) / since * HOUR_SECONDS
            velocity += (1.0 - exp(-since / rules.velocity_seconds)) * (newest - velocity)
        stream = replace(stream, progress=progress, progress_at=progress_at, velocity_per_hour=velocity)
    if age is not None:
        stream = replace(stream, data_at=Instant(at - age))
    return stream if quality is None else replace(stream, quality=quality)


def _cancel(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    asked, cause = request.fields.get("grace_seconds"), _cancel_cause(task, request)
    grace_seconds = None if asked is None else Seconds(asked)
    if task.state is TaskState.PENDING:
        return cancel_pending(world, task, now, done)
    if task.state is TaskState.STOPPING:
        return _cancel_stopping(world, task, grace_seconds, cause, now, done)
    grace = task.grace_seconds if grace_seconds is None else grace_seconds
    notice, orders = give_notice(world, task, StopReason.CANCEL, grace, now, cause)
    return replace(done, tasks=(notice,), orders=orders)


def _cancel_cause(task: Task, request: Request) -> str | None:
    """Return the cause that the task's owner reads; None if an earlier release wrote the request, which then
    does not say who made it."""
    by, reason = request.fields.get("by"), request.fields.get("reason")
    what = "unload" if isinstance(task.holder, Model) else "cancellation"
    return f"its {what} by {by}{f': {reason}' if reason else ''}" if by else None


def _read_stack(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Ask the agent for a stack; its answer settles the request. The request is settled without an answer if
    there is no process to ask about, or if the agent has not answered in time."""
    rank = int(request.fields["rank"])
    has_process = task.state in (TaskState.RUNNING, TaskState.STOPPING) and rank < rank_count(task)
    if not has_process or now > request.made_at + STACK_SECONDS:
        return done
    node = node_of(task, rank)
    order = StackOrder(task.id, task.fence, node, world.nodes[node].incarnation, request.id, rank)
    return replace(done, requests_done=(), orders=(order,))


def _cancel_stopping(
    world: World,
    task: Task,
    grace_seconds: Seconds | None,
    cause: str | None,
    now: Instant,
    done: Decision,
) -> Decision:
    """Cancel a run that is stopping. If it was to be requeued it is cancelled instead; a run past its time
    limit still ends as timed out. A shorter grace period replaces the current one."""
    assert task.stop_deadline_at is not None
    changes: dict[str, Any] = {}
    orders: tuple[AnyStopOrder, ...] = ()
    if will_requeue(task):
        changes |= {"stop_reason": StopReason.CANCEL, **with_cause(task, cause)}
    if grace_seconds is not None and now + grace_seconds < task.stop_deadline_at:
        changes["stop_deadline_at"] = Instant(now + grace_seconds)
        orders = orders_to_leave(world, task, grace_seconds)
    if not changes:
        return done
    return replace(done, tasks=(write_move(task, Move.CHANGED, **changes),), orders=orders)


def _change(world: World, task: Task, request: Request, now: Instant, done: Decision) -> Decision:
    """Change a task's priority, hold or times. A hold and times apply to pending tasks only. Leases keep the
    priority of their admission; decisions about a run read the priority of its task."""
    changes: dict[str, Any] = {}
    priority = request.fields.get("priority", task.priority)
    held = request.fields.get("held", task.held)
    if priority != task.priority:
        changes["priority"] = priority
    if task.state is TaskState.PENDING:
        if held != task.held:
            changes["held"] = held
        changes |= _new_times(task, request.fields, now)
    if not changes:
        return done
    # A pledge keeps room from all tasks of its priority or a lower one. The pledge ends when its task falls
    # below that priority, and when its task may not start for now, since the room would stand idle.
    stands_aside = changes.get("held", False) or changes.get("not_before") is not None
    # Room is kept for a task that is being moved, whatever its priority.
    is_moved = task.stop_reason is StopReason.MOVE
    gives_up_its_turn = stands_aside or (priority < task.priority and not is_moved)
    return replace(
        done,
        tasks=(write_move(task, Move.CHANGED, **changes),),
        pledges=withdraw_pledges(world, task) if gives_up_its_turn else (),
    )


def _new_times(task: Task, asked: Mapping[str, Any], now: Instant) -> dict[str, Any]:
    """Return the changed times. None removes a limit.

    If the time to wait or the start time changes, the time to wait counts anew: from now, or from the time at
    which the task may start. For a task with dependencies it counts from their end.
    """
    changes = {name: asked[name] for name in TIMES if name in asked and asked[name] != getattr(task, name)}
    if changes.get("not_before") is not None and changes["not_before"] <= now:
        changes["not_before"] = None
    if changes.keys() & {"not_before", "queue_ttl_seconds"}:
        ttl = changes.get("queue_ttl_seconds", task.queue_ttl_seconds)
        begins_at = max(now, changes.get("not_before", task.not_before) or now)
        changes["expires_at"] = None if ttl is None or task.awaits else Instant(begins_at + ttl)
    return changes


def _cordon(world: World, request: Request, now: Instant, done: Decision) -> Decision:
    """Cordon, drain or uncordon a node. Each sets the node's whole state, so a cordon ends a drain and leaves
    the node closed. Pledges on a closed node are dissolved, and their tasks are planned again for other
    nodes."""
    node = world.nodes.get(NodeName(request.task))
    if node is None:
        return done
    reason, closes = str(request.fields.get("reason") or ""), request.what != "uncordon"
    state: dict[str, Any] = {"cordoned": closes, "cordon_reason": reason if closes else ""}
    state["cordoned_by"] = str(request.fields["by"]) if closes else ""
    known_at = node.cordoned_at or now if node.cordoned else now
    state["cordoned_at"] = known_at if closes else None
    state |= {"draining_since": None, "drain_deadline_at": None}
    if request.what == "drain":
        limit = request.fields.get("deadline_seconds")
        state["draining_since"] = node.draining_since or now
        state["drain_deadline_at"] = None if limit is None else Instant(now + limit)
    places = node_key(node.name), *world.by_node.get(node.name, ())
    row = replace(node, **state, version=node.version + 1)
    entry = str(request.fields["by"]), f"node.{request.what}", node.name, reason
    return replace(
        done,
        nodes=(row,),
        notices=(Notice("cordon.changed", node.name, cordon_of(row)),),
        pledges=dissolved_pledges(world, places) if closes else (),
        audit=(AuditNote(now, request.tenant, *entry),),
    )
