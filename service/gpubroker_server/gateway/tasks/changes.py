"""Changing and cancelling a task. The leader carries both out."""

from typing import Annotated, Self

from fastapi import Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.gateway.http.bodies import Body, line
from gpubroker_server.gateway.http.call import Call, answer
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import STORED, Resource
from gpubroker_server.gateway.status.task_view import task_view
from gpubroker_server.gateway.status.views import TaskView
from gpubroker_server.gateway.submission.task_body import GraceSeconds, Priority
from gpubroker_server.gateway.submission.timing import CHANGEABLE_TIMES, ChangedTimes, changed_times
from gpubroker_server.gateway.tasks.parts import Parts
from gpubroker_server.ports.store import TaskRecord

resource = Resource("tasks")


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
    record = await parts.records.find(call.identity, task_id)
    task = record.task
    if body.priority is not None:
        submissions.permissions.check_priority(call.identity, body.priority)
        submissions.capacity.check_priority(task.demand, body.priority)
    if task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    times = changed_times(body, task, submissions.clock.now())
    if (body.held is not None or times) and task.state is not TaskState.PENDING:
        fields = " and ".join(sorted(times)) or "held"
        raise Problem("task-not-pending", task=task.id, state=task.state, fields=fields)
    changed = body.model_dump(exclude_none=True, include={"priority", "held"}) | times
    settled = await parts.requests.ask(task.id, task.tenant, "change", changed)
    return _answer(parts, await parts.records.reread(record), 200 if settled else 202)


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
    record = await parts.records.find(call.identity, task_id)
    task = record.task
    if task.state is TaskState.CANCELLED:
        return _answer(parts, record, 200)
    if task.is_terminal:
        raise Problem("task-already-finished", task=task.id, state=task.state)
    given = body.model_dump(exclude_none=True, exclude_defaults=True)
    await parts.requests.ask(task.id, task.tenant, "cancel", given)
    return _answer(parts, await parts.records.reread(record), 202)


def _answer(parts: Parts, record: TaskRecord, status: int) -> Response:
    return answer(task_view(record, parts.records.live(record.task)), status)
