"""One task as its row and the World know it, for the token that asks."""

from collections.abc import Mapping
from typing import Any

from fastapi import Response

from gpubroker_server.core.domain.decisions import Request
from gpubroker_server.core.domain.reasons import Reason
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Seconds, TaskId
from gpubroker_server.core.explain.inference_wait import sent_at
from gpubroker_server.core.lifecycle.learning import kind_of_run
from gpubroker_server.core.lifecycle.quarantine import quarantined
from gpubroker_server.core.planning.expected_start import start_of
from gpubroker_server.core.planning.run_estimates import remaining_seconds
from gpubroker_server.gateway.http.ids import is_task_id
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, answer
from gpubroker_server.gateway.parts import GatewayParts
from gpubroker_server.gateway.status.quarantine import quarantined_view
from gpubroker_server.gateway.status.results import result_member
from gpubroker_server.gateway.status.task_view import Live, expected_view, task_view
from gpubroker_server.gateway.status.unled import told_unled, unled
from gpubroker_server.gateway.status.views import ExpectedView, PendingView
from gpubroker_server.ports.store import TaskRecord


async def find(call: Call, task_id: str, what: str = "task") -> TaskRecord:
    """Raises Problem not-found; also for a task of another tenant, so that ids can not be probed."""
    record = await call.parts.store.record(TaskId(task_id)) if is_task_id(task_id) else None
    if record is None or record.task.tenant != call.identity.tenant:
        raise Problem("not-found", f'there is no {what} "{task_id[:100]}"; GET /{what}s lists yours')
    await _in_step(call.parts, record.task)
    return record


async def at_its_end(parts: GatewayParts, record: TaskRecord, seconds: float) -> TaskRecord:
    """The record once the task has ended, or as it stands when the time is over."""
    task = record.task
    if task.is_terminal or seconds <= 0:
        return record
    with parts.waiters.expect(task.id) as end:
        row = parts.world.tasks.get(task.id)
        if row is None or row.is_terminal:
            record = await reread(parts, record)  # it ended meanwhile, or the World has yet to hear of it
        if not record.task.is_terminal:
            await end.within(Seconds(seconds))
            record = await reread(parts, record)
    return record


async def caught_up(parts: GatewayParts) -> None:
    """Return when the World knows all that was committed when this was called, or when its time is over:
    what a client has read in a row or in the log, an explanation does not contradict."""
    head = await parts.store.head()
    if parts.world.position < head:
        with parts.waiters.behind(head) as caught:
            await caught.within(parts.limits.settle_seconds)


async def ask_leader(call: Call, task: Task, what: str, fields: dict[str, Any]) -> bool:
    """Store the request; whether the leader has carried it out by the time this returns."""
    return await ask(call, task.id, task.tenant, what, fields)


async def ask(call: Call, subject: str, tenant: str, what: str, fields: dict[str, Any]) -> bool:
    """The same of whatever may hold memory, and of the cluster."""
    parts = call.parts
    now = parts.clock.now()
    request = Request(parts.ids.request(now), TaskId(subject), tenant, what, fields, now)
    with parts.waiters.expect(request.id) as done:
        await parts.store.request(request)
        return await done.within(parts.limits.settle_seconds)


async def reread(parts: GatewayParts, record: TaskRecord) -> TaskRecord:
    record = await parts.store.record(record.task.id) or record
    await _in_step(parts, record.task)
    return record


async def _in_step(parts: GatewayParts, row: Task) -> None:
    """Views take a task from its row and its devices from the World, which may hear of a commit later."""
    known = parts.world.tasks.get(row.id)
    if row.is_active and (known is None or known.version < row.version):
        await caught_up(parts)


def live_of(parts: GatewayParts, task: Task, *, explained: bool = True) -> Live:
    """What the World adds to a row. Explaining why it waits costs most, and lists leave it out."""
    leases = parts.world.leases.get((task.id, task.fence), {})
    waits = explained and task.state is TaskState.PENDING
    return Live(
        leases=[leases[key] for key in sorted(leases)],
        uuids={lease.device: parts.world.books[lease.device].device.uuid for lease in leases.values()},
        progress=parts.progress.get(task.id) if task.is_active else None,
        eta=_eta_of(parts, task),
        pending=_pending_of(parts, task) if waits else None,
        quarantine=[quarantined_view(parts.world, one) for one in quarantined(parts.world, task.id)],
    )


def _pending_of(parts: GatewayParts, task: Task) -> PendingView | None:
    now = parts.clock.now()
    view = parts.pending.of(task, now)
    if view is not None and (blocker := unled(parts, task)) is not None:
        return told_unled(view, blocker)
    start = None
    if not task.is_inference:
        start = start_of(parts.world, task, parts.forecasts(), now)
    elif view is not None and view["reason"] == Reason.MODEL_LOADING.value:
        start = sent_at(parts.world, task, parts.policy, parts.forecasts(), now)
    return view if view is None or start is None else {**view, "start": expected_view(start, now)}


def _eta_of(parts: GatewayParts, task: Task) -> ExpectedView | None:
    if task.state is not TaskState.RUNNING:
        return None
    now = parts.clock.now()
    kind = kind_of_run(parts.world, task)
    remaining = remaining_seconds(task, parts.world.learned.sketches, now, kind=kind)
    return None if remaining is None else expected_view(remaining, now)


async def finished(
    parts: GatewayParts, record: TaskRecord, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer about a task that has ended, with its result in it."""
    view = task_view(record, live_of(parts, record.task))
    stored = await parts.store.result(record.task.id)
    return answer(view, status, headers, member=await result_member(parts, stored))
