"""Tasks: submit, list, read, wait for the end, fetch the result, change, cancel."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import Header, Query, Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.gateway.http.bodies import LABEL_KEY, Body, LabelValue, PageQuery, WaitQuery, line
from gpubroker_server.gateway.http.faults import invalid
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import SUBMIT_PROBLEMS, Fault, Problem
from gpubroker_server.gateway.http.routing import STORED, Call, Resource, answer
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import (
    JUST_ACCEPTED,
    order_of,
    result_member,
    shown_format,
)
from gpubroker_server.gateway.status.task_view import error_view, task_view
from gpubroker_server.gateway.status.views import ResultView, TaskPage, TaskView
from gpubroker_server.gateway.submission.submissions import IdempotencyKey
from gpubroker_server.gateway.submission.task_body import GraceSeconds, Priority, SubmitTask
from gpubroker_server.gateway.submission.timing import CHANGEABLE_TIMES, ChangedTimes, changed_times
from gpubroker_server.gateway.tasks.selection import TaskSelection
from gpubroker_server.ports.store import TaskRecord, TaskSort

resource = Resource("tasks")

Prefer = Annotated[
    str | None,
    Header(
        alias="Prefer", description="`wait=20` holds the answer back until the task ends, at most 20 seconds."
    ),
]
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)


@resource.route(
    "POST /tasks",
    "tasks_submit",
    Scope.TASKS_WRITE,
    TaskView,
    SUBMIT_PROBLEMS,
    status_code=202,
    response_description="The task is on disk and will run as soon as there is room.",
    responses={
        201: {"model": TaskView, "description": "It ended while the answer was held back; see `result`."}
    },
)
async def submit_task(
    call: Call,
    parts: Parts,
    body: SubmitTask,
    idempotency_key: IdempotencyKey = None,
    prefer: Prefer = None,
) -> Response:
    """Submit a task.

    A task that could never run here is refused at once. When the answer is sent, the task is on disk.
    """
    records = parts.records
    record, is_new, headers = await parts.submissions.accept(call, body, idempotency_key)
    asked = _WAIT.search(prefer) if prefer else None  # RFC 7240
    if asked is None:
        is_planned_next = not record.task.held and parts.world.queue.pause_of(record.task) is None
        just_accepted = is_new and is_planned_next
        view = task_view(record, JUST_ACCEPTED) if just_accepted else await records.view(record)
        return answer(view, 202, headers)
    if not records.waiters.has_room_for(record.task.tenant):
        return answer(await records.view(record), 202, headers)  # the wait was a wish
    seconds = min(int(asked[1]), int(parts.limits.wait_seconds))
    headers["Preference-Applied"] = f"wait={seconds}"
    record = await records.at_its_end(record, seconds)
    if record.task.is_terminal:
        return await records.finished(record, 201, headers)
    return answer(await records.view(record), 202, headers)


class TaskQuery(TaskSelection, PageQuery):
    open_names: ClassVar = re.compile(rf"label\.{LABEL_KEY}")
    __pydantic_extra__: dict[str, LabelValue]

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

    @property
    def labels(self) -> dict[str, str]:
        extra: dict[str, str] = self.model_extra or {}
        return {name.removeprefix("label."): value for name, value in extra.items()}


@resource.route(
    "GET /tasks",
    "tasks_list",
    Scope.TASKS_READ,
    TaskPage,
    "cursor-invalid not-found validation-failed",
    openapi_extra={
        "parameters": [
            {
                "name": "label",
                "in": "query",
                "style": "form",
                "explode": True,
                "description": "`label.team=vision`: only tasks with this label; all given must match.",
                "schema": {"type": "object", "patternProperties": {r"^label\.": {"type": "string"}}},
            }
        ]
    },
)
async def list_tasks(call: Call, parts: Parts, query: Annotated[TaskQuery, Query()]) -> Response:
    """List your tenant's tasks.

    Sorted by priority, a list misses or repeats a task whose priority changes between two of its pages.
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
    """Of these, or of all, those that are ends. Raises Problem if none is."""
    ends = tuple(state for state in states or TaskState if state.is_terminal)
    if not ends:
        named = ", ".join(states)
        detail = (
            f"sort=finished lists tasks that have ended, and state={named} asks for others; leave one out"
        )
        raise invalid(Fault(pointer="query:sort", detail=detail, code="not-ended"))
    return ends


@resource.route("GET /tasks/{task_id}", "tasks_get", Scope.TASKS_READ, TaskView, "not-found")
async def get_task(call: Call, parts: Parts, task_id: str) -> Response:
    """Read a task: its state, what it holds, and why it waits if it does."""
    record = await parts.records.find(call.identity, task_id)
    return answer(await parts.records.view(record))


@resource.route(
    "GET /tasks/{task_id}/wait",
    "tasks_wait",
    Scope.TASKS_READ,
    TaskView,
    "not-found tenant-waits validation-failed result-damaged",
    accepted="The time is over and the task goes on; ask again.",
    response_description="The task has ended; see `result`.",
)
async def wait_for_task(
    call: Call, parts: Parts, task_id: str, query: Annotated[WaitQuery, Query()]
) -> Response:
    """Wait for the end of a task. The answer comes as soon as it ends."""
    records, seconds = parts.records, min(query.timeout_seconds, parts.limits.wait_seconds)
    record = await records.at_its_end(await records.find(call.identity, task_id), seconds)
    if record.task.is_terminal:
        return await records.finished(record)
    return answer(await records.view(record), 202)


@resource.route(
    "GET /tasks/{task_id}/result",
    "tasks_result",
    Scope.TASKS_READ,
    ResultView,
    "not-found task-not-finished result-damaged",
)
async def get_result(call: Call, parts: Parts, task_id: str) -> Response:
    """Fetch what a finished task left: its result or its error, and the end of its log."""
    records = parts.records
    record = await records.find(call.identity, task_id)
    task = record.task
    if not task.is_terminal:
        raise Problem("task-not-finished", task=task.id, state=task.state)
    stored = await records.store.result(task.id)
    view: ResultView = {
        "id": task.id,
        "state": task.state.value,
        "format": record.spec.result_format if stored is None else shown_format(stored.format),
        "error": error_view(record.failure),
        "log_tail": "" if stored is None else stored.log_tail.decode("utf-8", "replace"),
    }
    return answer(view, member=await result_member(records.blobs, stored))


class ChangeTask(ChangedTimes):
    """What to change; what is left out stays. A null removes a time."""

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
    TaskView,
    "malformed-json priority-not-allowed not-found task-already-finished task-not-pending "
    "priority-too-low validation-failed",
    accepted=STORED,
)
async def change_task(call: Call, parts: Parts, task_id: str, body: ChangeTask) -> Response:
    """Change a task's priority, hold it or release it, and change its times while it waits.

    A waiting task with a new priority is planned again at once; a running one is not moved.
    """
    submissions = parts.submissions
    record = await parts.records.find_to_change(call.identity, task_id, "task.change")
    task = record.task
    if body.priority is not None:
        submissions.permissions.check_priority(call.identity, body.priority)
        submissions.capacity.check_priority(task.demand, body.priority)
    times = changed_times(body, task, submissions.clock.now())
    changed = body.model_dump(exclude_none=True, include={"priority", "held"}) | times
    _check_changeable(task, changed)
    settled = await parts.requests.ask(task.id, task.tenant, "change", changed)
    record = await parts.records.reread(record)
    if settled:  # the task may have started or ended before the leader decided
        _check_changeable(record.task, _not_changed(record.task, changed))
    return await _answer(parts, record, 200 if settled else 202)


def _check_changeable(task: Task, changes: Mapping[str, Any]) -> None:
    """Raises Problem if it is too late for one of the changes."""
    if changes and task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    pending_only = sorted(changes.keys() - {"priority"})
    if pending_only and task.state is not TaskState.PENDING:
        raise Problem("task-not-pending", task=task.id, state=task.state, fields=" and ".join(pending_only))


def _not_changed(task: Task, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A start time that is over leaves no trace."""
    return {
        name: value
        for name, value in changes.items()
        if name != "not_before" and getattr(task, name) != value
    }


@resource.route(
    "POST /tasks/{task_id}/cancel",
    "tasks_cancel",
    Scope.TASKS_WRITE,
    TaskView,
    "not-found task-already-finished validation-failed",
    status_code=202,
    response_description="Stored. `stop_deadline_at` says when its memory is free again at the latest.",
    responses={200: {"model": TaskView, "description": "It had been cancelled before."}},
)
async def cancel_task(
    call: Call,
    parts: Parts,
    task_id: str,
    body: CancelTask = CancelTask(),  # noqa: B008  # frozen
) -> Response:
    """Cancel a task. A running one gets the stop notice, and is killed when its grace period is over."""
    record = await parts.records.find_to_change(call.identity, task_id, "task.cancel")
    task = record.task
    if task.state is TaskState.CANCELLED:
        return await _answer(parts, record, 200)
    if task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    given = body.model_dump(exclude_none=True, exclude_defaults=True)
    await parts.requests.ask(task.id, task.tenant, "cancel", given)
    return await _answer(parts, await parts.records.reread(record), 202)


async def _answer(parts: Parts, record: TaskRecord, status: int) -> Response:
    return answer(await parts.records.view(record), status)
