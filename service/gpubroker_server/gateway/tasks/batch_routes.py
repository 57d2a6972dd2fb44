"""Thousands of tasks in one request."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field
from pydantic_core import to_json
from typing_extensions import TypedDict

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.http.identity import Scope
from gpubroker_server.gateway.http.problems import Problem, ProblemDocument, problem_document
from gpubroker_server.gateway.http.routing import Call, DirectRoute, json_answer, needs, problems
from gpubroker_server.gateway.submission.submitting import IdempotencyKey, hash_of, key_reused
from gpubroker_server.gateway.submission.task_body import SubmitBatch
from gpubroker_server.gateway.tasks.batch import Batch, at_item
from gpubroker_server.ports.store import BatchSubmission, Submission, SubmitVerdict

router = APIRouter(route_class=DirectRoute, tags=["tasks"])


class AcceptedView(TypedDict):
    """It is on disk and will run as soon as there is room."""

    status: Annotated[int, Field(description="202.", examples=[202])]
    id: str
    url: str


class RefusedView(TypedDict):
    """Nothing of it was stored."""

    status: Annotated[int, Field(description="What it would have been answered alone.", examples=[422])]
    problem: ProblemDocument


class BatchView(TypedDict):
    """What became of each task, in the order in which they were sent."""

    accepted: int
    refused: int
    items: list[AcceptedView | RefusedView]


@router.post(
    "/tasks/batch",
    operation_id="tasks_submit_batch",
    dependencies=[needs(Scope.TASKS_WRITE)],
    status_code=207,
    response_model=BatchView,
    response_description="Those with status 202 are on disk, all in one commit; the others say why not.",
    responses={
        202: {"model": BatchView, "description": "`all_or_nothing`: all of them are on disk."},
        **problems(
            "malformed-json",
            "unauthenticated",
            "forbidden",
            "payload-too-large",
            "unsupported-media-type",
            "validation-failed",
            "batch-refused",
            "idempotency-key-reused",
            "too-many-requests",
            "store-unavailable",
        ),
    },
)
async def submit_batch(call: Call, body: SubmitBatch, idempotency_key: IdempotencyKey = None) -> Response:
    """Submit up to 10,000 tasks.

    Each is judged as if it came alone: those that are refused say why, and the others are stored in one
    commit. With `all_or_nothing` one that is refused keeps all of them out. A key is for the whole batch.
    """
    parts, key = call.parts, None if idempotency_key is None else idempotency_key.strip('"')
    body_hash = "" if key is None else await hash_of(call, "batch")
    if key is not None and (known := await parts.store.known_key(call.identity.tenant, key)) is not None:
        if known.body_hash != body_hash:
            raise key_reused(key, known.task, "batch")
        return await _replayed(call, known.task, body)
    async with parts.batches.take():
        taken = await Batch(call).take_in(body.tasks)
        if body.all_or_nothing:
            _check_all(taken)
        text = to_json(_view(call, taken))
    submissions = [one for one in taken if isinstance(one, Submission)]
    if submissions:
        batch = BatchSubmission(submissions, key, body_hash, "" if key is None else text.decode())
        outcome = await parts.store.submit_batch(batch)
        if outcome.verdict is SubmitVerdict.KEY_REUSED:
            raise key_reused(str(key), outcome.task, "batch")
        if outcome.verdict is SubmitVerdict.DUPLICATE:
            return await _replayed(call, outcome.task, body)
    return json_answer(text, _status(body))


def _status(body: SubmitBatch) -> int:
    return 202 if body.all_or_nothing else 207


async def _replayed(call: Call, first: str, body: SubmitBatch) -> Response:
    text = await call.parts.store.batch_answer(TaskId(first))
    return json_answer(text.encode(), _status(body), {"Idempotency-Replayed": "true"})


def _check_all(taken: Sequence[Submission | Problem]) -> None:
    """Raises Problem batch-refused, which names all that are wrong."""
    bad = [(number, one) for number, one in enumerate(taken) if isinstance(one, Problem)]
    if bad:
        faults = [fault for number, problem in bad for fault in at_item(number, problem)]
        raise Problem(
            "batch-refused",
            f"{len(bad)} of {len(taken)} tasks cannot be accepted, so nothing was stored; the first: "
            f"{faults[0]['pointer']}: {faults[0]['detail']}",
            errors=faults,
        )


def _view(call: Call, taken: Sequence[Submission | Problem]) -> BatchView:
    items: list[AcceptedView | RefusedView] = []
    for number, one in enumerate(taken):
        if isinstance(one, Submission):
            items.append({"status": 202, "id": one.task.id, "url": f"/tasks/{one.task.id}"})
        else:
            one.errors = at_item(number, one)
            items.append({"status": one.kind.status, "problem": problem_document(one, call.scope)})
    refused = sum(isinstance(one, Problem) for one in taken)
    return {"accepted": len(taken) - refused, "refused": refused, "items": items}
