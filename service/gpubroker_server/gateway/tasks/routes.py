"""Tasks: submit, list, read, change, cancel."""

import re
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.queries import TaskQuery
from gpubroker_server.gateway.http.routing import Call, DirectRoute, answer, needs, problems
from gpubroker_server.gateway.status.pending import NOT_YET_SEEN
from gpubroker_server.gateway.status.records import ask_leader, at_its_end, find, finished, live_of, reread
from gpubroker_server.gateway.status.task_pages import page_of
from gpubroker_server.gateway.status.task_view import Live, task_view
from gpubroker_server.gateway.status.views import TaskPage, TaskView
from gpubroker_server.gateway.submission.permission import check_priority
from gpubroker_server.gateway.submission.submissions import (
    check_allowed,
    check_possible,
    stored_spec,
    take_in,
)
from gpubroker_server.gateway.submission.submitting import IdempotencyKey, Submitted, sent_before, submitted
from gpubroker_server.gateway.submission.task_body import CancelTask, ChangeTask, SubmitTask
from gpubroker_server.gateway.submission.timing import changed_times

router = APIRouter(route_class=DirectRoute, tags=["tasks"])

Prefer = Annotated[
    str | None,
    Header(
        alias="Prefer", description="`wait=20` holds the answer back until the task ends, at most 20 seconds."
    ),
]
_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,9})\"?(?=$|[,;\s])", re.IGNORECASE)

_JUST_ACCEPTED = Live(leases=[], uuids={}, pending=NOT_YET_SEEN)


@router.post(
    "/tasks",
    operation_id="tasks_submit",
    dependencies=[needs(Scope.TASKS_WRITE)],
    status_code=202,
    response_model=TaskView,
    response_description="The task is on disk and will run as soon as there is room.",
    responses={
        201: {"model": TaskView, "description": "It ended while the answer was held back; see `result`."},
        **problems(
            "malformed-json",
            "unauthenticated",
            "forbidden",
            "priority-not-allowed",
            "payload-too-large",
            "unsupported-media-type",
            "validation-failed",
            "exceeds-capacity",
            "no-matching-device",
            "exceeds-maximum",
            "exceeds-quota",
            "pool-mismatch",
            "unknown-resource",
            "priority-too-low",
            "entrypoint-not-allowed",
            "python-mismatch",
            "idempotency-key-reused",
            "store-unavailable",
        ),
    },
)
async def submit_task(
    call: Call, body: SubmitTask, idempotency_key: IdempotencyKey = None, prefer: Prefer = None
) -> Response:
    """Submit a task.

    What could never run here is refused at once. When the answer leaves, the task is on disk.
    """
    parts = call.parts
    record, is_new, headers = await _taken_or_known(call, body, idempotency_key)
    wait_seconds, preference = _wait_of(prefer, parts.limits.wait_seconds)
    headers |= preference
    live = _JUST_ACCEPTED if is_new else live_of(parts, record.task)
    if wait_seconds is None:
        return answer(task_view(record, live), 202, headers)
    record = await at_its_end(parts, record, wait_seconds)
    if record.task.is_terminal:
        return await finished(parts, record, 201, headers)
    return answer(task_view(record, live_of(parts, record.task)), 202, headers)


async def _taken_or_known(call: Call, body: SubmitTask, key: str | None) -> Submitted:
    try:
        task, learned = await take_in(call, body)
        check_allowed(call, body, task)
        check_possible(call, task)
    except Problem:
        known = await sent_before(call, key, "task")
        if known is None:
            raise
        return known
    spec = await stored_spec(call, body, task, learned)
    return await submitted(call, task, spec, key, "task")


def _wait_of(prefer: str | None, most_seconds: float) -> tuple[float | None, dict[str, str]]:
    """How long to hold the answer back, and the header that says so; None if nobody asked (RFC 7240)."""
    asked = _WAIT.search(prefer) if prefer else None
    if asked is None:
        return None, {}
    seconds = min(int(asked[1]), int(most_seconds))
    return seconds, {"Preference-Applied": f"wait={seconds}"}


@router.get(
    "/tasks",
    operation_id="tasks_list",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=TaskPage,
    responses=problems("cursor-invalid", "unauthenticated", "forbidden", "not-found", "validation-failed"),
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
async def list_tasks(call: Call, query: Annotated[TaskQuery, Query()]) -> Response:
    """List your tenant's tasks, newest first."""
    return await page_of(
        call,
        query,
        task_view,
        states=tuple(query.state),
        kind=query.kind,
        min_priority=query.min_priority,
        max_priority=query.max_priority,
        labels=query.labels,
        name=query.name,
        model_type=query.model_type,
        stream=query.stream,
        runs_after=None if query.after is None else (await find(call, query.after)).task.id,
        submitted_from=_instant(query.submitted_from),
        submitted_before=_instant(query.submitted_before),
        finished_from=_instant(query.finished_from),
        finished_before=_instant(query.finished_before),
    )


def _instant(time: datetime | None) -> Instant | None:
    return None if time is None else Instant(time.timestamp())


@router.get(
    "/tasks/{task_id}",
    operation_id="tasks_get",
    dependencies=[needs(Scope.TASKS_READ)],
    response_model=TaskView,
    responses=problems("unauthenticated", "forbidden", "not-found"),
)
async def get_task(call: Call, task_id: str) -> Response:
    """Read a task: its state, what it holds, and why it waits if it does."""
    record = await find(call, task_id)
    return answer(task_view(record, live_of(call.parts, record.task)))


@router.patch(
    "/tasks/{task_id}",
    operation_id="tasks_change",
    dependencies=[needs(Scope.TASKS_WRITE)],
    response_model=TaskView,
    responses={
        202: {"model": TaskView, "description": "Asked for; the leader has not carried it out yet."},
        **problems(
            "malformed-json",
            "unauthenticated",
            "forbidden",
            "priority-not-allowed",
            "not-found",
            "task-already-finished",
            "task-not-pending",
            "priority-too-low",
            "validation-failed",
        ),
    },
)
async def change_task(call: Call, task_id: str, body: ChangeTask) -> Response:
    """Change a task's priority, hold it or release it, and change its times while it waits.

    A higher priority is planned again at once; what runs already is not moved.
    """
    record = await find(call, task_id)
    if body.priority is not None:
        check_priority(call, body.priority)
        call.parts.capacity.check_priority(record.task.demand, body.priority)
    if record.task.is_terminal:
        raise _already_finished(record.task)
    times = changed_times(body, record.task, call.parts.clock.now())
    if (body.held is not None or times) and record.task.state is not TaskState.PENDING:
        what = " and ".join(sorted(times)) or "held"
        raise Problem(
            "task-not-pending",
            f"task {task_id} is {record.task.state}; {what} can be changed only while a task waits",
        )
    asked = body.model_dump(exclude_none=True, include={"priority", "held"}) | times
    settled = await ask_leader(call, record.task, "change", asked)
    record = await reread(call.parts, record)
    return answer(task_view(record, live_of(call.parts, record.task)), 200 if settled else 202)


@router.post(
    "/tasks/{task_id}/cancel",
    operation_id="tasks_cancel",
    dependencies=[needs(Scope.TASKS_WRITE)],
    status_code=202,
    response_model=TaskView,
    response_description="Asked for. `stop_deadline_at` says when its memory is back at the latest.",
    responses={
        200: {"model": TaskView, "description": "It had been cancelled before."},
        **problems("unauthenticated", "forbidden", "not-found", "task-already-finished", "validation-failed"),
    },
)
async def cancel_task(call: Call, task_id: str, body: CancelTask = CancelTask()) -> Response:  # noqa: B008  # frozen
    """Cancel a task. One that runs hears the stop notice and is killed when its grace period is over."""
    record = await find(call, task_id)
    if record.task.state is TaskState.CANCELLED:
        return answer(task_view(record, live_of(call.parts, record.task)))
    if record.task.is_terminal:
        raise _already_finished(record.task)
    asked = body.model_dump(exclude_none=True, exclude_defaults=True)
    await ask_leader(call, record.task, "cancel", asked)
    record = await reread(call.parts, record)
    return answer(task_view(record, live_of(call.parts, record.task)), 202)


def _already_finished(task: Task) -> Problem:
    return Problem(
        "task-already-finished",
        f"task {task.id} has {task.state}; nothing can change it any more",
    )
