"""Thousands of tasks in one request. Tasks that differ in nothing but their run share all other work."""

import asyncio
import re
from collections.abc import Sequence
from time import monotonic
from typing import Annotated, ClassVar, NamedTuple

import structlog
from fastapi import Response
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import to_json
from typing_extensions import TypedDict

from gpubroker_server.core.domain.submission import RunSpec, bytes_of
from gpubroker_server.core.domain.task import TaskState
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.planning.forecasts.run_estimates import Size
from gpubroker_server.gateway.http.bodies import ListBody
from gpubroker_server.gateway.http.faults import body_faults, duplicate_key, invalid
from gpubroker_server.gateway.http.identity import Identity, Scope
from gpubroker_server.gateway.http.problems import Fault, Problem, ProblemDocument, problem_document
from gpubroker_server.gateway.http.routing import Call, Resource, json_answer
from gpubroker_server.gateway.parts import Parts
from gpubroker_server.gateway.submission.batches import sent_batch
from gpubroker_server.gateway.submission.named_objects import may_name_objects, objects_in_run
from gpubroker_server.gateway.submission.submissions import IdempotencyKey, Submissions, submission_of
from gpubroker_server.gateway.submission.task_body import SubmitTask
from gpubroker_server.gateway.tasks.batch_references import BatchReferences
from gpubroker_server.gateway.tasks.run_text import (
    EntrypointCall,
    Surroundings,
    call_within,
    is_split_at_run,
    split_at_run,
)
from gpubroker_server.ports.store import BatchSubmission, StoredState, Submission

log = structlog.get_logger("gpubroker.gateway")

resource = Resource("tasks")

MAX_TASKS = 10_000
SLICE_SECONDS = 0.003
"""After this long the batch lets other requests use the event loop."""
IDS_PER_LINE = 100
MAX_STANDS = 1000
"""Rows read in one query."""

_read_task = TypeAdapter(SubmitTask).validator.validate_json
_TASK_IDS = re.compile(rb"task_[0-7][0-9a-hjkmnp-tv-z]{25}")


class SubmitBatch(ListBody):
    """Many tasks. Each is as if it were sent alone, `key` and `after` included."""

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


class AcceptedView(TypedDict):
    """It is on disk and will run as soon as there is room."""

    status: Annotated[int, Field(description="202.", examples=[202])]
    id: str
    url: str


class RefusedView(TypedDict):
    """Nothing of it was stored."""

    status: Annotated[int, Field(description="What it would have got if it were alone.", examples=[422])]
    problem: ProblemDocument


class BatchView(TypedDict):
    """What became of each task, in the order in which they were sent."""

    accepted: int
    refused: int
    items: list[AcceptedView | RefusedView]


@resource.route(
    "POST /tasks/batch",
    "tasks_submit_batch",
    Scope.TASKS_WRITE,
    BatchView,
    "malformed-json payload-too-large unsupported-media-type validation-failed batch-refused "
    "idempotency-key-reused tenant-queue-full tenant-queue-bytes backpressure too-many-requests "
    "leader-outdated "
    "store-unavailable",
    accepted="`all_or_nothing`: all of them are on disk.",
    status_code=207,
    response_description="Tasks with status 202 are on disk, all in one commit; the others have a problem.",
)
async def submit_batch(
    call: Call, parts: Parts, body: SubmitBatch, idempotency_key: IdempotencyKey = None
) -> Response:
    """Submit up to 10,000 tasks.

    Each is checked as if it were sent alone. Those that are refused have a problem each, and the others are
    stored in one commit. With `all_or_nothing` one refused task keeps all out. A key is for the whole batch.
    """
    sent = await sent_batch(call, parts.submissions.store, idempotency_key, "batch")
    if (known := await sent.stored_before()) is not None:
        return await _replayed(parts, known, body)
    async with parts.batches.slot():
        batch = BatchTasks(parts.submissions, call.identity)
        made = await batch.make(body.tasks, has_dependencies=b"after" in await call.body())
        if body.all_or_nothing:
            _check_all(made)
        text = to_json(_view(call, made))
    submissions = [one for one in made if isinstance(one, Submission)]
    parts.submissions.check_queue(submission.task for submission in submissions)
    if submissions:
        answered = "" if sent.key is None else text.decode()
        if (known := await sent.store(BatchSubmission(submissions, answer=answered))) is not None:
            return await _replayed(parts, known, body)
        _log_accepted(submissions, call.identity.tenant)
    return json_answer(text, _status(body))


def _log_accepted(submissions: Sequence[Submission], tenant: str) -> None:
    """Some in each line: a line for each would keep other requests waiting."""
    for start in range(0, len(submissions), IDS_PER_LINE):
        ids = [one.task.id for one in submissions[start : start + IDS_PER_LINE]]
        log.info("tasks accepted", tasks=" ".join(ids), tenant=tenant)


def _status(body: SubmitBatch) -> int:
    return 202 if body.all_or_nothing else 207


async def _replayed(parts: Parts, first: TaskId, body: SubmitBatch) -> Response:
    text = await parts.submissions.store.batch_answer(first)
    return json_answer(text.encode(), _status(body), {"Idempotency-Replayed": "true"})


def _check_all(made: Sequence[Submission | Problem]) -> None:
    """Raises Problem batch-refused with the faults of all tasks."""
    bad = [(number, one) for number, one in enumerate(made) if isinstance(one, Problem)]
    if bad:
        faults = [fault for number, problem in bad for fault in _faults_at(number, problem)]
        first = f"{faults[0]['pointer']}: {faults[0]['detail']}"
        raise Problem("batch-refused", errors=faults, refused=len(bad), sent=len(made), first=first)


def _view(call: Call, made: Sequence[Submission | Problem]) -> BatchView:
    items: list[AcceptedView | RefusedView] = []
    for number, one in enumerate(made):
        if isinstance(one, Submission):
            items.append({"status": 202, "id": one.task.id, "url": f"/tasks/{one.task.id}"})
        else:
            one.errors = _faults_at(number, one)
            items.append({"status": one.kind.status, "problem": problem_document(one, call.scope)})
    refused = sum(isinstance(one, Problem) for one in made)
    return {"accepted": len(made) - refused, "refused": refused, "items": items}


def _faults_at(number: int, problem: Problem) -> list[Fault]:
    """The faults of one task, with pointers into the batch."""
    place = f"/tasks/{number}"
    if not problem.errors:
        return [Fault(pointer=place, detail=problem.detail, code=problem.code)]
    return [
        Fault(pointer=f"{place}{fault['pointer']}", detail=fault["detail"], code=fault["code"])
        for fault in problem.errors
    ]


class _Prototype(NamedTuple):
    """The first of several tasks that differ in nothing but their run."""

    body: SubmitTask
    submission: Submission
    learned: Size | None


class BatchTasks:
    """Makes the tasks of one request, each as if it were sent alone."""

    def __init__(self, submissions: Submissions, identity: Identity) -> None:
        self._submissions = submissions
        self._identity = identity
        self._now = submissions.clock.now()
        self._prototypes: dict[Surroundings, _Prototype] = {}
        self._last: tuple[Surroundings, Submission] | None = None
        """The surroundings of the last task's run, and their prototype."""
        self._stands: dict[TaskId, StoredState] = {}
        self._unborn = StoredState(identity.tenant, TaskState.PENDING)

    async def make(self, texts: Sequence[bytes], *, has_dependencies: bool) -> list[Submission | Problem]:
        """What to store of each task, or why it is refused. Large arguments are objects by then."""
        if has_dependencies:
            await self._read_stands(texts)
        made: list[Submission | Problem] = []
        until = monotonic() + SLICE_SECONDS
        ids = self._submissions.ids.tasks(self._now, len(texts))
        references = BatchReferences(texts, ids) if has_dependencies else None
        for number, (id, text) in enumerate(zip(ids, texts, strict=True)):
            try:
                if fault := duplicate_key(text):
                    raise invalid(fault)
                if references is not None:
                    text = references.resolved(number, made)
                    self._stands |= dict.fromkeys(references.named, self._unborn)
                made.append(self._as_the_last(text, id) or await self._submission(text, id))
            except Problem as problem:
                made.append(problem)
            if monotonic() > until:
                await asyncio.sleep(0)
                until = monotonic() + SLICE_SECONDS
        return made

    async def _read_stands(self, texts: Sequence[bytes]) -> None:
        """Of everything that may be the id of a dependency."""
        named = sorted({id for text in texts if b"after" in text for id in _TASK_IDS.findall(text)})
        ids = [TaskId(id.decode()) for id in named]
        for start in range(0, len(ids), MAX_STANDS):
            self._stands |= await self._submissions.store.states(ids[start : start + MAX_STANDS])

    def _as_the_last(self, text: bytes, id: TaskId) -> Submission | None:
        """If it calls the same entrypoint as the task before it, and differs in nothing else."""
        if self._last is None:
            return None
        surroundings, first = self._last
        call = None if may_name_objects(text) else call_within(text, surroundings)
        if call is None or len(call.arguments) > self._submissions.inline_bytes:
            return None
        return self._alike(first, id, changed(first.spec, arguments=call.arguments, arguments_digest=None))

    async def _submission(self, text: bytes, id: TaskId) -> Submission:
        """Raises Problem."""
        split = split_at_run(text)
        if split is None:
            return (await self._prototype(text, id)).submission
        prototype = self._prototypes.get(split.surroundings)
        if prototype is None:
            prototype = await self._prototype(text, id)
            if is_split_at_run(split):
                self._prototypes[split.surroundings] = prototype
                self._last = split.surroundings, prototype.submission
            return prototype.submission
        first = prototype.submission
        self._last = split.surroundings, first
        if isinstance(split.run, EntrypointCall):
            spec = changed(first.spec, arguments=split.run.arguments, arguments_digest=None)
        else:
            self._submissions.permissions.check_run(self._identity, split.run)
            spec = self._submissions.run_spec(prototype.body, split.run, prototype.learned)
        await self._check_objects(spec)
        return await self._submissions.with_object(self._alike(first, id, spec))

    async def _check_objects(self, spec: RunSpec) -> None:
        await self._submissions.check_objects(self._identity.tenant, objects_in_run(spec))

    def _alike(self, first: Submission, id: TaskId, spec: RunSpec) -> Submission:
        return Submission(changed(first.task, id=id, queued_bytes=bytes_of(spec)), spec, like=first)

    async def _prototype(self, text: bytes, id: TaskId) -> _Prototype:
        """Raises Problem."""
        try:
            body = _read_task(text)
        except ValidationError as error:
            raise invalid(*body_faults(error, SubmitTask)) from None
        make = self._submissions
        task, learned = make.task_of(body, self._identity.tenant, id, self._stands, self._now)
        await make.check_allowed(self._identity, body, task)
        make.check_possible(task)
        submission = submission_of(task, make.run_spec(body, body.run, learned))
        await self._check_objects(submission.spec)
        return _Prototype(body, await make.with_object(submission), learned)
