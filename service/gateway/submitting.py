"""A task enters the store once, however often a client sends it."""

import hashlib
from typing import Annotated, NamedTuple

from fastapi import Header

from service.core.task import Task
from service.gateway.direct import Call
from service.gateway.lookup import find
from service.gateway.problems import Problem
from service.ports import RunSpec, Submission, SubmitVerdict, TaskRecord

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r'^("[\x21\x23-\x7e]{1,255}"|[\x21\x23-\x7e]{1,255})$',
        description="The same key with the same body answers with the first one, however often it is sent.",
    ),
]


class Submitted(NamedTuple):
    record: TaskRecord
    is_new: bool
    headers: dict[str, str]
    """Of the answer: which one it is of, if it was sent before."""


async def submitted(call: Call, task: Task, spec: RunSpec, key: str | None, what: str) -> Submitted:
    """Durable when this returns. Raises Problem idempotency-key-reused.

    `what` it is for the client, `task` or `lease`: a key and a body of one are none of the other.
    """
    submission = Submission(task, spec)
    if key is not None:
        named = f"{what}\0{task.tenant}\0".encode()
        submission = Submission(
            task, spec, key.strip('"'), hashlib.sha256(named + await call.body()).hexdigest()
        )
    outcome = await call.parts.store.submit(submission)
    headers = {"Location": f"/{what}s/{outcome.task}"}
    match outcome.verdict:
        case SubmitVerdict.KEY_REUSED:
            raise Problem(
                "idempotency-key-reused",
                f'the key "{submission.idempotency_key}" was used with another body, for {outcome.task}; '
                f"nothing was stored; use a new key for a new {what}",
            )
        case SubmitVerdict.DUPLICATE:
            headers["Idempotency-Replayed"] = "true"
            return Submitted(await find(call, outcome.task), is_new=False, headers=headers)
        case SubmitVerdict.ACCEPTED:
            return Submitted(TaskRecord(task, spec), is_new=True, headers=headers)
