"""The route that submits thousands of tasks in one request. Tasks that differ only in their run share all
other work."""

import asyncio
import re
from collections.abc import Sequence
from time import monotonic
from typing import Annotated, ClassVar

import structlog
from fastapi import Response
from gpubroker.wire.answered import encode
from gpubroker.wire.tasks import SubmittedBatch, SubmittedTask
from msgspec.structs import replace
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema

from gpubroker_server.core.admission.admit import like, like_with
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.hot.batch_references import BatchReferences
from gpubroker_server.gateway.hot.direct_route import DirectRoute
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.named_objects import (
    may_name_objects,
    objects_in_arguments,
    objects_in_run,
)
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, Submissions
from gpubroker_server.gateway.submission.task_body import Function, SubmitTask
from gpubroker_server.gateway.submission.translation import submission_of, with_run_of
from gpubroker_server.gateway.tasks.run_text import (
    EntrypointCall,
    Surroundings,
    arguments_within,
    is_split_at_run,
    split_at_run,
)
from gpubroker_server.gateway.tasks.selection import MAX_STANDS
from gpubroker_server.http.bodies import ListBody
from gpubroker_server.http.faults import body_faults, duplicate_key, invalid, refuse
from gpubroker_server.http.identity import Identity, Scope
from gpubroker_server.http.problems import QUEUE_PROBLEMS, Fault, Problem, problem_document
from gpubroker_server.http.proxies import current_prefix
from gpubroker_server.http.routing import Call, Resource, json_answer
from gpubroker_server.ports.store import AdmittedTask, BatchSubmission, StoredState

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("tasks", DirectRoute)

MAX_TASKS = 10_000
SLICE_SECONDS = 0.003
"""The time after which a batch lets other requests use the event loop."""
IDS_PER_LINE = 100

_read_task = TypeAdapter(SubmitTask).validator.validate_json
_TASK_IDS = re.compile(rb"task_[0-7][0-9a-hjkmnp-tv-z]{25}")


class SubmitBatch(ListBody):
    """A batch of tasks. Each task is treated as if it were sent alone."""

    list_name: ClassVar = "tasks"
    tasks: Annotated[
        list[bytes],
        Field(min_length=1, max_length=MAX_TASKS),
        WithJsonSchema(
            {
                "type": "array",
                "minItems": 1,
                "maxItems": MAX_TASKS,
                "items": {"$ref": "#/components/schemas/SubmitTask"},
            }
        ),
    ]
    all_or_nothing: Annotated[bool, Field(description="Store all, or none if one is refused.")] = False


@resource.route(
    "POST /tasks/batch",
    "tasks_submit_batch",
    Scope.TASKS_WRITE,
    SubmittedBatch,
    "malformed-json payload-too-large unsupported-media-type batch-refused too-many-requests leader-outdated "
    f"{QUEUE_PROBLEMS}",
    accepted="`all_or_nothing`: all of them are on disk.",
    status_code=207,
    response_description="Tasks with status 202 are on disk, all in one commit; the others have a problem.",
)
async def submit_batch(
    call: Call, parts: Parts, body: SubmitBatch, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit up to 10,000 tasks.

    Each task is checked as if it were sent alone. The answer has a problem for each refused task, and the
    other tasks are stored in one commit. With `all_or_nothing`, nothing is stored if one task is refused. An
    idempotency key belongs to the whole batch.
    """
    status, text, made = 202 if body.all_or_nothing else 207, b"", BatchSubmission(())

    async def new() -> BatchSubmission:
        nonlocal text, made
        async with parts.batches.slot():
            batch = BatchTasks(parts.submissions, call.identity)
            judged = await batch.make(body.tasks, await call.body())
            if body.all_or_nothing:
                _check_all(judged)
            text = encode(_submitted(call, judged))
        admitted = [admitted_task for admitted_task in judged if isinstance(admitted_task, AdmittedTask)]
        made = BatchSubmission(admitted, answer="" if idempotency_key is None else text.decode())
        return made

    first, is_new = await parts.submissions.batch_once(call, idempotency_key, "batch", new)
    if not is_new:
        stored = await parts.submissions.store.batch_answer(first)
        return json_answer(stored.encode(), status, {"Idempotency-Replayed": "true"})
    _log_accepted(made.submissions, call.identity.tenant)
    return json_answer(text, status)


def _log_accepted(submissions: Sequence[AdmittedTask], tenant: str) -> None:
    """Log the accepted tasks, several per line, because one line per task would delay other requests."""
    for start in range(0, len(submissions), IDS_PER_LINE):
        ids = [submission.task.id for submission in submissions[start : start + IDS_PER_LINE]]
        log.info("tasks accepted", tasks=" ".join(ids), tenant=tenant)


def _check_all(made: Sequence[AdmittedTask | Problem]) -> None:
    """Check that no task is refused. Raises Problem batch-refused with the faults of all refused tasks."""
    bad = [(number, result) for number, result in enumerate(made) if isinstance(result, Problem)]
    if bad:
        faults = [fault for number, problem in bad for fault in _faults_at(number, problem)]
        first = f"{faults[0].pointer}: {faults[0].detail}"
        raise Problem("batch-refused", errors=faults, refused=len(bad), sent=len(made), first=first)


def _submitted(call: Call, made: Sequence[AdmittedTask | Problem]) -> SubmittedBatch:
    items: list[SubmittedTask] = []
    refused, place = 0, f"{current_prefix.get()}/tasks"
    for number, result in enumerate(made):
        if isinstance(result, AdmittedTask):
            items.append(SubmittedTask(status=202, id=result.task.id, url=f"{place}/{result.task.id}"))
        else:
            result.errors = _faults_at(number, result)
            problem = problem_document(result, call.scope)
            items.append(SubmittedTask(status=problem.status, problem=problem))
            refused += 1
    return SubmittedBatch(len(made) - refused, refused, tuple(items))


def _faults_at(number: int, problem: Problem) -> list[Fault]:
    """Return the faults of one task, with pointers relative to the batch."""
    place = f"/tasks/{number}"
    if not problem.errors:
        return [Fault(pointer=place, detail=problem.detail, code=problem.code)]
    return [replace(fault, pointer=f"{place}{fault.pointer}") for fault in problem.errors]


def _check_keys(text: bytes) -> None:
    """Check that no object in the text has a key twice. Raises Problem validation-failed."""
    if fault := duplicate_key(text):
        raise invalid(fault)


class BatchTasks:
    """Admits the tasks of one request, each as if it were sent alone."""

    def __init__(self, submissions: Submissions, identity: Identity) -> None:
        self._submissions = submissions
        self._identity = identity
        self._now = submissions.clock.now()
        self._firsts: dict[Surroundings, AdmittedTask] = {}
        """Surroundings of a run -> the first task that has them. Later tasks with these surroundings share
        all work that does not depend on the run."""
        self._last: tuple[Surroundings, AdmittedTask] | None = None
        """The surroundings of the last task's run, and the first task that has them."""
        self._stands: dict[TaskId, StoredState] = {}
        self._unborn = StoredState(identity.tenant, TaskState.PENDING)
        self._may_name_objects = False
        """True if some task of the request may name an object."""

    async def make(self, texts: Sequence[bytes], body: bytes) -> list[AdmittedTask | Problem]:
        """Return for each text the admitted task, or the Problem for which it is refused. Large arguments
        have been moved to objects when this returns. `body` contains the texts; what it does not contain is
        looked for in none of them."""
        has_dependencies = b"after" in body
        self._may_name_objects = may_name_objects(body)
        if has_dependencies:
            await self._read_stands(texts)
        made: list[AdmittedTask | Problem] = []
        until = monotonic() + SLICE_SECONDS
        ids = self._submissions.ids.tasks(self._now, len(texts))
        references = BatchReferences(texts, ids) if has_dependencies else None
        for number, (id, text) in enumerate(zip(ids, texts, strict=True)):
            try:
                if references is not None:
                    _check_keys(text)  # `resolved` may write the text anew, and would drop the second key.
                    text = references.resolved(number, made)
                    self._stands |= dict.fromkeys(references.named, self._unborn)
                made.append(self._as_the_last(text, id) or await self._new_task(text, id))
            except Problem as problem:
                made.append(problem)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + SLICE_SECONDS
        return made

    async def _read_stands(self, texts: Sequence[bytes]) -> None:
        """Read the states of all tasks whose ids occur in the texts of tasks that may have dependencies."""
        named = sorted({id for text in texts if b"after" in text for id in _TASK_IDS.findall(text)})
        ids = [TaskId(id.decode()) for id in named]
        for start in range(0, len(ids), MAX_STANDS):
            self._stands |= await self._submissions.store.states(ids[start : start + MAX_STANDS])

    def _as_the_last(self, text: bytes, id: TaskId) -> AdmittedTask | None:
        """Return the task of a text that differs from the last one only in the arguments of its entrypoint;
        None for any other text."""
        if self._last is None or (self._may_name_objects and may_name_objects(text)):
            return None
        surroundings, first = self._last
        arguments = arguments_within(text, surroundings)
        if arguments is None or len(arguments) > self._submissions.limits.inline_bytes:
            return None
        return like_with(first, id, arguments)

    async def _new_task(self, text: bytes, id: TaskId) -> AdmittedTask:
        """Return the task that the text describes. Raises Problem if the task is refused."""
        _check_keys(text)
        split = None if _names_directory(text) else split_at_run(text)
        if split is None:
            return await self._first(text, id)
        first = self._firsts.get(split.surroundings)
        if first is None:
            first = await self._first(text, id)
            if is_split_at_run(split):
                self._firsts[split.surroundings] = first
                self._remember(split.surroundings, first)
            return first
        self._remember(split.surroundings, first)
        if isinstance(split.run, EntrypointCall):
            objects = tuple(objects_in_arguments(split.run.arguments).values())
            arguments = split.run.arguments
            spec = replace(first.spec, arguments=arguments, arguments_digest=None, objects=objects)
        else:
            spec = with_run_of(split.run, first.spec)
            pickled_by = split.run.cloudpickle if isinstance(split.run, Function) else None
            refuse(self._submissions.permissions.check_run(self._identity, spec, pickled_by))
        await self._submissions.use_objects(self._identity.tenant, objects_in_run(spec))
        return await self._submissions.with_object(like(first, id, spec))

    def _remember(self, surroundings: Surroundings, first: AdmittedTask) -> None:
        # `like_with` replaces only the arguments in the row, so a task with objects cannot serve it.
        if first.spec.arguments_digest is None and not first.spec.objects:
            self._last = surroundings, first

    async def _first(self, text: bytes, id: TaskId) -> AdmittedTask:
        """Return the task of a text after full validation and admission. Raises Problem if the task is
        refused."""
        try:
            body = _read_task(text)
        except ValidationError as error:
            raise invalid(*body_faults(error, SubmitTask)) from None
        submission = submission_of(body, self._identity.tenant)
        new = await self._submissions.admitted(
            self._identity, submission, id=id, now=self._now, states=self._stands
        )
        return await self._submissions.with_object(new)


def _names_directory(text: bytes) -> bool:
    """Return True if the task may have an upload or outputs, which must be validated together with its
    run."""
    return b'"upload"' in text or b'"outputs"' in text or b'"environment"' in text
