"""Tasks: list, read, change, cancel. Submit, wait and result are in `gateway/hot`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from fastapi import Query, Response
from gpubroker.wire.answered import Page
from gpubroker.wire.tasks import Task as Shown
from msgspec.structs import replace
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.admission.facts import Refused
from gpubroker_server.core.admission.feasibility import check_priority
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import (
    order_of,
)
from gpubroker_server.gateway.status.task_view import task_view
from gpubroker_server.gateway.status.wholes import (
    Whole,
    WorkerQuery,
    standing_of,
    view_of_whole,
    whole_of,
    worker_asked_for,
)
from gpubroker_server.gateway.submission.task_body import GraceSeconds, Priority
from gpubroker_server.gateway.submission.timing import CHANGEABLE_TIMES, ChangedTimes, changed_times
from gpubroker_server.gateway.tasks.selection import TaskSelection
from gpubroker_server.http.bodies import LABELS_PARAMETER, Body, JsonBody, LabelQuery, PageQuery, line
from gpubroker_server.http.faults import invalid, problem_of, refuse
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import Fault, Problem
from gpubroker_server.http.routing import STORED, Call, Resource, answer
from gpubroker_server.ports.store import TaskRecord, TaskSort

resource = Resource("tasks")


class TaskQuery(TaskSelection, PageQuery, LabelQuery):
    order: Annotated[
        Literal["newest", "turn"],
        Field(
            description="`newest`: by submission, the newest first. `turn`: what runs, then what waits in "
            "the order of the queue, then what ended last; one page without a cursor."
        ),
    ] = "newest"

    sort: Annotated[
        Literal["submitted", "-submitted", "finished", "-finished", "priority", "-priority"],
        Field(
            description="`-`: the latest, or the highest, first; equal ones by submission. By `finished`, "
            "only tasks that have ended. Not for `order=turn`."
        ),
    ] = "-submitted"


@resource.route(
    "GET /tasks",
    "tasks_list",
    Scope.TASKS_READ,
    Page[Shown],
    "cursor-invalid not-found validation-failed",
    openapi_extra={"parameters": [LABELS_PARAMETER]},
)
async def list_tasks(call: Call, parts: Parts, query: Annotated[TaskQuery, Query()]) -> Response:
    """List your tenant's tasks.

    A list that is sorted by priority misses or repeats a task whose priority changes between two pages.
    """
    filters = await query.filters(parts.records, call.identity)
    if query.order == "turn":
        if "sort" in query.model_fields_set:
            detail = "a list by turn has its own order; leave sort out, or order=turn"
            raise invalid(Fault(pointer="query:sort", detail=detail, code="not-by-turn"))
        if query.cursor is not None:
            raise Problem("cursor-invalid", "a list by turn is one page; send no cursor")
        return await parts.records.in_turn(query.limit, task_view, labels=query.labels, **filters)
    filters |= order_of(query.sort)
    if filters["sort"] is TaskSort.FINISHED:
        filters["states"] = _ends(filters["states"])
    return await parts.records.page(call.identity, query, task_view, labels=query.labels, **filters)


def _ends(states: Sequence[TaskState]) -> Sequence[TaskState]:
    """Return the terminal states among `states`, or all terminal states if `states` is empty. Raises Problem
    if none of `states` is terminal."""
    ends = tuple(state for state in states or TaskState if state.is_terminal)
    if not ends:
        named = ", ".join(states)
        detail = (
            f"sort=finished lists tasks that have ended, and state={named} asks for others; leave one out"
        )
        raise invalid(Fault(pointer="query:sort", detail=detail, code="not-ended"))
    return ends


@resource.route("GET /tasks/{task_id}", "tasks_get", Scope.TASKS_READ, Shown, "not-found validation-failed")
async def get_task(
    call: Call, parts: Parts, task_id: str, query: Annotated[WorkerQuery, Query()]
) -> Response:
    """Read a task: its state, what it holds, and, if it waits, the reason.

    The id of an array or a worker set is the id of its first worker. The answer then has the state and the
    error of the whole; its other fields are those of the first worker. With `worker`, all fields are those of
    that worker.
    """
    record = await parts.records.find(call.identity, task_id)
    if query.worker is not None:
        return answer(await parts.records.view(await worker_asked_for(parts.records, record, query.worker)))
    if (whole := await whole_of(parts.records.store, record)) is not None:
        return answer(await view_of_whole(parts.records, whole))
    return answer(await parts.records.view(record))


class ChangeTask(ChangedTimes):
    """Changes of a task. A field that is left out stays as it is. A null removes a time."""

    priority: Priority | None = None
    held: Annotated[bool | None, Field(description="A held task is not planned until it is released.")] = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if self.priority is None and self.held is None and not self.model_fields_set & CHANGEABLE_TIMES:
            raise PydanticCustomError(
                "nothing_to_change",
                "give one or more of priority, held, not_before, queue_ttl_seconds, deadline_at",
            )
        return self


class CancelTask(Body):
    grace_seconds: Annotated[
        GraceSeconds | None, Field(description="Time between notice and force; left out: the task's own.")
    ] = None
    reason: Annotated[str, line(500)] = ""


@resource.route(
    "PATCH /tasks/{task_id}",
    "tasks_change",
    Scope.TASKS_WRITE,
    Shown,
    "malformed-json priority-not-allowed not-found task-already-finished task-not-pending "
    "priority-too-low validation-failed",
    accepted=STORED,
)
async def change_task(call: Call, parts: Parts, task_id: str, body: JsonBody[ChangeTask]) -> Response:
    """Change a task's priority, hold it or release it, and change its times while it waits.

    A waiting task with a new priority is planned again at once; a running task is not moved. With the id of
    an array or a worker set, all its workers are changed.
    """
    submissions = parts.submissions
    record = await parts.records.find_to_change(call.identity, task_id, "task.change")
    task = record.task
    if body.priority is not None:
        refuse(submissions.permissions.check_priority(call.identity, body.priority))
        refusal = check_priority(task.demand, body.priority, submissions.permissions.policy)
        if refusal is not None:
            raise problem_of(Refused(refusal.code, refusal.message, (replace(refusal, field="/priority"),)))
    times = changed_times(body, task, submissions.clock.now())
    changed = body.model_dump(exclude_none=True, include={"priority", "held"}) | times
    if (whole := await whole_of(parts.records.store, record)) is not None:
        return await _change_whole(parts, whole, changed)
    _check_changeable(task, changed)
    settled = await parts.requests.ask(task.id, task.tenant, "change", changed)
    record = await parts.records.reread(record)
    if settled:  # The task may have started or ended before the leader decided.
        _check_changeable(record.task, _not_changed(record.task, changed))
    return await _answer(parts, record, 200 if settled else 202)


async def _change_whole(parts: Parts, whole: Whole, changed: dict[str, Any]) -> Response:
    """Change all workers of an array or a worker set that have not ended. Raises Problem if it is too late
    for one of the changes, or if a worker set is to be held."""
    task, standing = whole.first.task, await standing_of(parts.records.store, whole)
    if "held" in changed and not whole.is_array:
        detail = "a worker set holds the workers that are not wanted; PATCH /worker-sets/{id} scales it"
        raise invalid(Fault(pointer="/held", detail=detail, code="worker-set"))
    if not standing.left:
        raise Problem("task-already-finished", task=task.id, state=standing.state)
    pending_only = sorted(changed.keys() - {"priority"})
    if pending_only and standing.state is not TaskState.PENDING:
        fields = " and ".join(pending_only)
        raise Problem("task-not-pending", task=task.id, state=standing.state, fields=fields)
    await parts.requests.ask_many(standing.left, task.tenant, "change", changed)
    rows = (await parts.records.store.record(worker) for worker in standing.left)
    left = [_not_changed(row.task, changed) async for row in rows if row is not None]
    return answer(await view_of_whole(parts.records, whole), 202 if any(left) else 200)


def _check_changeable(task: Task, changes: Mapping[str, Any]) -> None:
    """Check that the state of the task allows the changes. Raises Problem task-already-finished or
    task-not-pending."""
    if changes and task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    pending_only = sorted(changes.keys() - {"priority"})
    if pending_only and task.state is not TaskState.PENDING:
        raise Problem("task-not-pending", task=task.id, state=task.state, fields=" and ".join(pending_only))


def _not_changed(task: Task, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that the task does not show. A start time is left out, because a task no longer
    shows one that has passed."""
    return {
        name: value
        for name, value in changes.items()
        if name != "not_before" and getattr(task, name) != value
    }


@resource.route(
    "POST /tasks/{task_id}/cancel",
    "tasks_cancel",
    Scope.TASKS_WRITE,
    Shown,
    "not-found task-already-finished validation-failed",
    status_code=202,
    response_description="Stored. `stop_deadline_at` says when its memory is free again at the latest.",
    responses={200: {"model": Shown, "description": "It had been cancelled before."}},
)
async def cancel_task(
    call: Call,
    parts: Parts,
    task_id: str,
    body: JsonBody[CancelTask] = CancelTask(),  # noqa: B008  # frozen
) -> Response:
    """Cancel a task. A running task gets the stop notice, and is killed when its grace period is over.

    With the id of an array or a worker set, all its workers are cancelled.
    """
    record = await parts.records.find_to_change(call.identity, task_id, "task.cancel")
    task, given = record.task, body.model_dump(exclude_none=True, exclude_defaults=True)
    given["by"] = call.identity.name
    if (whole := await whole_of(parts.records.store, record)) is not None:
        return await _cancel_whole(parts, whole, given)
    if task.state is TaskState.CANCELLED:
        return await _answer(parts, record, 200)
    if task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    await parts.requests.ask(task.id, task.tenant, "cancel", given)
    return await _answer(parts, await parts.records.reread(record), 202)


async def _cancel_whole(parts: Parts, whole: Whole, given: dict[str, Any]) -> Response:
    task, standing = whole.first.task, await standing_of(parts.records.store, whole)
    if not standing.left and standing.state is not TaskState.CANCELLED:
        raise Problem("task-already-finished", task=task.id, state=standing.state)
    if standing.left:
        await parts.requests.ask_many(standing.left, task.tenant, "cancel", given)
    return answer(await view_of_whole(parts.records, whole), 202 if standing.left else 200)


async def _answer(parts: Parts, record: TaskRecord, status: int) -> Response:
    return answer(await parts.records.view(record), status)
