"""The route that retries an ended task, as a new task with the same run."""

from functools import partial

from fastapi import Response
from gpubroker.wire.tasks import Task

from gpubroker_server.core.domain.holders import WorkerSeat
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.again import again
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, Submissions, sent_key
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import RUN_PROBLEMS, Problem
from gpubroker_server.http.routing import Call, Resource, answer
from gpubroker_server.ports.store import AdmittedTask, TaskRecord

resource = Resource("tasks")


@resource.route(
    "POST /tasks/{task_id}/retry",
    "tasks_retry",
    Scope.TASKS_WRITE,
    Task,
    f"not-found task-not-finished task-not-retryable result-damaged {RUN_PROBLEMS}",
    status_code=202,
    response_description="A new task is on disk; its `retry_of` is the old one.",
)
async def retry_task(
    call: Call, parts: Parts, task_id: str, idempotency_key: IdempotencyKey = None
) -> Response:
    """Run an ended task again, as a new task with the same run, resources, priority, labels and limits.

    The token needs the scopes that submitting the task needs. The new task is not held, depends on no other
    task, and has no start time and no deadline.
    """
    submissions = parts.submissions
    record = await parts.records.find_to_change(call.identity, task_id, "task.retry")
    sent = await sent_key(call, idempotency_key, f"retry of {record.task.id}")
    new_task = partial(_again, submissions, call.identity, record)
    stored = await submissions.once(call.identity, sent, "task", new_task)
    return answer(await parts.records.view(stored.record), 202, stored.headers)


async def _again(submissions: Submissions, identity: Identity, record: TaskRecord) -> AdmittedTask:
    """Return the admitted task that repeats an ended one. Raises Problem if the task cannot be retried or is
    refused."""
    old = record.task
    if old.holder == WorkerSeat(old.id):
        detail = f"{old.id} is an array: POST /arrays/{old.id}/retry does its failed items again"
        raise Problem("task-not-retryable", detail)
    if record.spec.items is not None:
        raise Problem("task-not-retryable", task=old.id, kind="worker of an array")
    if record.spec.seat is not None:
        detail = (
            f"{old.id} is a worker of a set, and is started again as long as the set lasts; "
            "POST /worker-sets forms a new set"
        )
        raise Problem("task-not-retryable", detail)
    if not old.is_terminal:
        detail = f"task {old.id} is {old.state}; it can be retried when it has ended (or cancel it first)"
        raise Problem("task-not-finished", detail)
    return await submissions.admitted(identity, await again(submissions.blobs, record))
