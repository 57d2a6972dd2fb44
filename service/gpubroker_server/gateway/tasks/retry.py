"""Retry: a new task that runs what an ended one ran."""

from fastapi import Response

from gpubroker_server.core.domain.submission import ARRAY_VARIABLE
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call, Resource, answer
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.status.views import TaskView
from gpubroker_server.gateway.submission.again import again
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, Submissions, submission_of
from gpubroker_server.ports.store import Submission, TaskRecord

resource = Resource("tasks")


@resource.route(
    "POST /tasks/{task_id}/retry",
    "tasks_retry",
    Scope.TASKS_WRITE,
    TaskView,
    "not-found task-not-finished task-not-retryable priority-not-allowed exceeds-capacity no-matching-device "
    "exceeds-maximum exceeds-quota pool-mismatch unknown-resource priority-too-low entrypoint-not-allowed "
    "python-mismatch idempotency-key-reused tenant-queue-full tenant-queue-bytes backpressure result-damaged "
    "validation-failed leader-outdated store-unavailable",
    status_code=202,
    response_description="A new task is on disk; its `retry_of` is the old one.",
)
async def retry_task(
    call: Call, parts: Parts, task_id: str, idempotency_key: IdempotencyKey = None
) -> Response:
    """Run an ended task again, as a new task with the same run, resources, priority, labels and limits.

    It needs what submitting that task needs. It is not held and waits for no other task, time or deadline.
    """
    submissions = parts.submissions
    record = await parts.records.find_to_change(call.identity, task_id, "task.retry")
    purpose = f"retry of {record.task.id}"
    try:
        submission = await _again(submissions, call.identity, record)
    except Problem:
        known = await submissions.sent_before(call, idempotency_key, "task", purpose)
        if known is None:
            raise
        return answer(await parts.records.view(known.record), 202, known.headers)
    stored = await submissions.submit(call, submission, idempotency_key, "task", purpose)
    return answer(await parts.records.view(stored.record), 202, stored.headers)


async def _again(submissions: Submissions, identity: Identity, record: TaskRecord) -> Submission:
    """Raises Problem."""
    old = record.task
    if not old.is_terminal:
        detail = f"task {old.id} is {old.state}; it can be retried when it has ended (or cancel it first)"
        raise Problem("task-not-finished", detail)
    if ARRAY_VARIABLE in record.spec.env:
        raise Problem("task-not-retryable", task=old.id, kind="worker of an array")
    submission = submission_of(*await again(submissions, identity, record))
    submissions.check_queue([submission.task])
    return submission
