"""The route that submits one task, and waits for its end if the client prefers that."""

import re
from typing import Annotated

from fastapi import Header, Response
from gpubroker.wire.tasks import Task

from gpubroker_server.core.admission.submission import Submission
from gpubroker_server.gateway.hot.direct_route import DirectRoute, ReadBy
from gpubroker_server.gateway.hot.known_bodies import KnownBodies
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.records import JUST_ACCEPTED
from gpubroker_server.gateway.status.task_view import task_view
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, sent_key
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.http.identity import Scope
from gpubroker_server.http.problems import SUBMIT_PROBLEMS
from gpubroker_server.http.routing import Call, Resource, answer

resource = Resource("tasks", DirectRoute)

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
    Task,
    SUBMIT_PROBLEMS,
    status_code=202,
    response_description="The task is on disk and will run as soon as there is room.",
    responses={201: {"model": Task, "description": "It ended while the answer was held back; see `result`."}},
)
async def submit_task(
    call: Call,
    parts: Parts,
    body: Annotated[Submission, ReadBy(SubmitTask, lambda read_body: KnownBodies(read_body).read)],
    idempotency_key: IdempotencyKey = None,
    prefer: Prefer = None,
) -> Response:
    """Submit a task.

    A task that could never run here is refused at once. When the answer is sent, the task is on disk.
    """
    records = parts.records
    sent = await sent_key(call, idempotency_key, "task")
    record, is_new, headers = await parts.submissions.accept(call.identity, body, sent)
    asked = _WAIT.search(prefer) if prefer else None  # RFC 7240
    if asked is None:
        is_planned_next = not record.task.held and parts.world.queue.pause_of(record.task) is None
        just_accepted = is_new and is_planned_next
        view = task_view(record, JUST_ACCEPTED) if just_accepted else await records.view(record)
        return answer(view, 202, headers)
    # Prefer: wait is optional (RFC 7240), so a full wait list is not an error.
    if not records.waiters.has_room_for(record.task.tenant):
        return answer(await records.view(record), 202, headers)
    seconds = min(int(asked[1]), int(parts.limits.wait_seconds))
    headers["Preference-Applied"] = f"wait={seconds}"
    record = await records.at_its_end(record, seconds)
    if record.task.is_terminal:
        return await records.finished(record, 201, headers)
    return answer(await records.view(record), 202, headers)
