"""Submits the run of an ended task again, as a new task."""

from msgspec.structs import replace

from gpubroker_server.core.admission.submission import AskedTimes, Submission
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import Task
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, BlobStore, TaskRecord

_KINDS = (Entrypoint.tag, Command.tag, Function.tag)


async def again(blobs: BlobStore, record: TaskRecord) -> Submission:
    """Return a submission of the run of an ended task, including its arguments however large they are. The
    queue TTL begins anew.

    Raises Problem for a task that cannot be retried, and for arguments that are damaged.
    """
    old, spec = record.task, record.spec
    if spec.kind not in _KINDS:
        raise Problem("task-not-retryable", task=old.id, kind=spec.kind)
    ttl = old.queue_ttl_seconds
    return Submission(
        tenant=old.tenant,
        spec=replace(await _with_arguments(blobs, old, spec), retry_of=old.id),
        demand=old.demand,
        name=old.name,
        priority=old.priority,
        max_retries=old.max_retries,
        retry_on=old.retry_on,
        timeout_seconds=old.timeout_seconds,
        grace_seconds=old.grace_seconds,
        expected_seconds=old.expected_seconds,
        times=None if ttl is None else AskedTimes(queue_ttl_seconds=ttl),
        stream=old.stream,
    )


async def _with_arguments(blobs: BlobStore, old: Task, spec: RunSpec) -> RunSpec:
    """Return the specification with its arguments read from their object. The new task stores an object of
    its own, because the old object may be deleted with the old task."""
    if spec.arguments_digest is None:
        return spec
    try:
        arguments = await blobs.get(spec.arguments_digest)
    except (BlobMissing, BlobCorrupt):
        detail = (
            f"the arguments of task {old.id} were stored as object {spec.arguments_digest}, and its bytes "
            "are missing or damaged; submit the task again, and check the disk that holds the blobs"
        )
        raise Problem("result-damaged", detail) from None
    return replace(spec, arguments=arguments, arguments_digest=None)
