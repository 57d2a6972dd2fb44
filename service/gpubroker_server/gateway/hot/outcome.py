"""Routes that wait for the end of a task and return its result."""

from typing import Annotated

from fastapi import Query, Response
from gpubroker.wire.tasks import Outcome, Task, TaskState

from gpubroker_server.gateway.hot.direct_route import DirectRoute
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import NO_RESULT, result_member, shown_format
from gpubroker_server.gateway.status.task_view import failure_of
from gpubroker_server.gateway.status.wholes import (
    Whole,
    at_its_end,
    failure_of_whole,
    standing_of,
    view_of_whole,
    whole_of,
)
from gpubroker_server.http.bodies import WaitQuery
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Problem
from gpubroker_server.http.routing import Call, Resource, answer

resource = Resource("tasks", DirectRoute)


@resource.route(
    "GET /tasks/{task_id}/wait",
    "tasks_wait",
    Scope.TASKS_READ,
    Task,
    "not-found tenant-waits validation-failed result-damaged",
    accepted="The time is over and the task goes on; ask again.",
    response_description="The task has ended; see `result`.",
)
async def wait_for_task(
    call: Call, parts: Parts, task_id: str, query: Annotated[WaitQuery, Query()]
) -> Response:
    """Wait for the end of a task. The answer comes as soon as it ends.

    With the id of an array or a worker set, the request waits for the end of all its workers.
    """
    records, seconds = parts.records, min(query.timeout_seconds, parts.limits.wait_seconds)
    record = await records.find(call.identity, task_id)
    if (whole := await whole_of(records.store, record)) is not None:
        standing = await at_its_end(records, whole, seconds)
        view = await view_of_whole(records, whole, standing)
        return answer(view, 202) if standing.left else answer(view, member=NO_RESULT)
    record = await records.at_its_end(record, seconds)
    if record.task.is_terminal:
        return await records.finished(record)
    return answer(await records.view(record), 202)


@resource.route(
    "GET /tasks/{task_id}/result",
    "tasks_result",
    Scope.TASKS_READ,
    Outcome,
    "not-found task-not-finished result-damaged",
)
async def get_result(call: Call, parts: Parts, task_id: str) -> Response:
    """Fetch the outcome of a finished task: its result or its error, and the end of its log.

    With the id of an array, the answer has the state and the error of the whole array; the results of its
    items are at `/arrays/{array_id}/items`. For an array or a worker set of several workers, `log_tail` is
    empty.
    """
    records = parts.records
    record = await records.find(call.identity, task_id)
    task = record.task
    if (whole := await whole_of(records.store, record)) is not None:
        return await _outcome_of_whole(parts, whole)
    if not task.is_terminal:
        raise Problem("task-not-finished", task=task.id, state=task.state)
    stored = await records.store.result(task.id)
    outcome = Outcome(
        id=task.id,
        state=TaskState(task.state),
        format=record.spec.result_format if stored is None else shown_format(stored.format),
        error=failure_of(record.failure),
        log_tail="" if stored is None else stored.log_tail.decode("utf-8", "replace"),
    )
    return answer(outcome, member=await result_member(records.blobs, stored))


async def _outcome_of_whole(parts: Parts, whole: Whole) -> Response:
    """Return the outcome of an array or a worker set as a whole. Raises Problem task-not-finished while one
    of its workers has not ended."""
    records, task = parts.records, whole.first.task
    standing = await standing_of(records.store, whole)
    if standing.left:
        raise Problem("task-not-finished", task=task.id, state=standing.state)
    # With several workers the end of one log would be mistaken for the end of all logs.
    stored = await records.store.result(task.id) if len(whole.workers) == 1 else None
    outcome = Outcome(
        id=task.id,
        state=TaskState(standing.state),
        format=whole.first.spec.result_format,
        error=failure_of_whole(whole, standing) or failure_of(whole.first.failure),
        log_tail="" if stored is None else stored.log_tail.decode("utf-8", "replace"),
    )
    return answer(outcome, member=NO_RESULT)
