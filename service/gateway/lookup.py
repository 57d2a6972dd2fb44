"""One task as its row and the World know it, for the token that asks."""

import asyncio

from pydantic_core import from_json

from service.core.task import Task, TaskState
from service.core.units import Seconds, TaskId
from service.gateway.direct import Call
from service.gateway.ids import is_task_id
from service.gateway.parts import GatewayParts
from service.gateway.problems import Problem
from service.gateway.translate import Live, base64_text, task_view
from service.gateway.views import ResultFields, TaskView
from service.ports import BlobCorrupt, BlobMissing, StoredResult, TaskRecord

_PARSED_INLINE_BYTES = 256 * 1024
"""Larger results are parsed on a thread, so that nobody else waits for them."""


async def find(call: Call, task_id: str) -> TaskRecord:
    """Raises Problem not-found; also for a task of another tenant, so that ids can not be probed."""
    record = await call.parts.store.record(TaskId(task_id)) if is_task_id(task_id) else None
    if record is None or record.task.tenant != call.identity.tenant:
        raise Problem("not-found", f'there is no task "{task_id[:100]}"; GET /tasks lists yours')
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


async def reread(parts: GatewayParts, record: TaskRecord) -> TaskRecord:
    return await parts.store.record(record.task.id) or record


def live_of(parts: GatewayParts, task: Task, *, explained: bool = True) -> Live:
    """What the World adds to a row. Explaining why it waits costs most, and lists leave it out."""
    leases = parts.world.leases.get((task.id, task.fence), {})
    waits = explained and task.state is TaskState.PENDING
    return Live(
        leases=[leases[key] for key in sorted(leases)],
        uuids={lease.device: parts.world.books[lease.device].device.uuid for lease in leases.values()},
        progress=parts.progress.get(task.id) if task.is_active else None,
        pending=parts.pending.of(task, parts.clock.now()) if waits else None,
    )


async def finished_view(parts: GatewayParts, record: TaskRecord) -> TaskView:
    """The view of a task that has ended, with its result in it."""
    view = task_view(record, live_of(parts, record.task))
    stored = await parts.store.result(record.task.id)
    fields: ResultFields = {"result": None} if stored is None else await result_fields(parts, stored)
    return {**view, **fields}


async def result_fields(parts: GatewayParts, stored: StoredResult) -> ResultFields:
    """`result` or `data_base64`, whichever the bytes are. Raises Problem result-damaged."""
    data = await _bytes_of(parts, stored)
    if data is None:
        return {"result": None}
    if stored.format != "json":
        return {"data_base64": base64_text(data)}
    try:
        return {"result": await _parsed(data)}
    except ValueError:
        # Written by a process that runs user code: hand on what it wrote rather than fail.
        return {"data_base64": base64_text(data)}


async def _parsed(data: bytes) -> object:
    if len(data) <= _PARSED_INLINE_BYTES:
        return from_json(data, allow_inf_nan=False)
    return await asyncio.to_thread(from_json, data, allow_inf_nan=False)


async def _bytes_of(parts: GatewayParts, stored: StoredResult) -> bytes | None:
    if stored.digest is None:
        return stored.data
    try:
        return await parts.blobs.get(stored.digest)
    except (BlobMissing, BlobCorrupt):
        raise Problem(
            "result-damaged",
            f"the result was stored as object {stored.digest}, whose bytes are missing or damaged; "
            "run the task again, and check the disk that holds the blobs",
        ) from None
