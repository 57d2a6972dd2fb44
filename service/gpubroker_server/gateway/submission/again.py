"""What an ended task ran, to run it again as a new one."""

from typing import NamedTuple

from gpubroker_server.core.domain.submission import ARRAY_VARIABLE, WORKER_SET_VARIABLE, RunSpec
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.status.task_view import (
    CONCURRENCY_VARIABLE,
    PROFILE_VARIABLE,
    RETRY_VARIABLE,
    ROLES_VARIABLE,
)
from gpubroker_server.gateway.submission.named_objects import objects_in_run
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.gateway.submission.task_body import Command, Entrypoint, Function
from gpubroker_server.ports.store import BlobCorrupt, BlobMissing, TaskRecord

_KINDS = (Entrypoint.tag, Command.tag, Function.tag)
_OURS = (ROLES_VARIABLE, RETRY_VARIABLE, PROFILE_VARIABLE, CONCURRENCY_VARIABLE, ARRAY_VARIABLE)


class Again(NamedTuple):
    task: Task
    spec: RunSpec
    """With its arguments, however large, and with `retry_of` among its variables."""


async def again(submissions: Submissions, identity: Identity, record: TaskRecord) -> Again:
    """Raises Problem for whatever a submit of this task would be refused for now, except for objects of an
    array."""
    old, spec = record.task, record.spec
    if WORKER_SET_VARIABLE in spec.env:
        raise Problem("task-not-retryable", task=old.id, kind="worker of a set")
    if spec.kind not in _KINDS:
        raise Problem("task-not-retryable", task=old.id, kind=spec.kind)
    permissions = submissions.permissions
    permissions.check_run(identity, _run_of(spec))
    permissions.check_env(identity, {name: spec.env[name] for name in spec.env if name not in _OURS})
    await submissions.check_secrets(identity, spec.env, old.tenant)
    permissions.check_priority(identity, old.priority, old.tenant)
    submissions.check_stream(old.stream)
    now = submissions.clock.now()
    task = new_attempt(old, submissions.ids.task(now), now)
    submissions.check_possible(task)
    spec = changed(spec, env={**spec.env, RETRY_VARIABLE: old.id})
    spec = await _with_arguments(submissions, old, spec)
    if ARRAY_VARIABLE not in spec.env:
        await submissions.check_objects(old.tenant, objects_in_run(spec))
    return Again(task, spec)


def new_attempt(old: Task, id: TaskId, now: Instant) -> Task:
    """A pending task that asks for the same, in a process of its own. Its times to wait begin now."""
    ttl = old.queue_ttl_seconds
    return Task(
        id=id,
        tenant=old.tenant,
        name=old.name,
        priority=old.priority,
        demand=old.demand,
        submitted_at=now,
        max_retries=old.max_retries,
        timeout_seconds=old.timeout_seconds,
        grace_seconds=old.grace_seconds,
        queue_ttl_seconds=ttl,
        expires_at=None if ttl is None else Instant(now + ttl),
        expected_seconds=old.expected_seconds,
        stream=old.stream,
        subject=old.subject,
    )


def _run_of(spec: RunSpec) -> Entrypoint | Command | Function:
    """What decides whether it is allowed; without its arguments."""
    if spec.kind == Entrypoint.tag:
        return Entrypoint(entrypoint=spec.entrypoint)
    if spec.kind == Command.tag:
        return Command(command=list(spec.command))
    return Function.model_construct(function=b"", python=spec.python)


async def _with_arguments(submissions: Submissions, old: Task, spec: RunSpec) -> RunSpec:
    """In the row again: the new task writes its object anew, since the old one may go with its task."""
    if spec.arguments_digest is None:
        return spec
    try:
        arguments = await submissions.blobs.get(spec.arguments_digest)
    except (BlobMissing, BlobCorrupt):
        detail = (
            f"the arguments of task {old.id} were stored as object {spec.arguments_digest}, and its bytes "
            "are missing or damaged; submit the task again, and check the disk that holds the blobs"
        )
        raise Problem("result-damaged", detail) from None
    return changed(spec, arguments=arguments, arguments_digest=None)
