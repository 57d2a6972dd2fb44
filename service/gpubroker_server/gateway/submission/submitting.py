"""A task enters the store once, however often a client sends it."""

import asyncio
import hashlib
from typing import Annotated, NamedTuple

from fastapi import Header

from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.gateway.http.problems import Problem
from gpubroker_server.gateway.http.routing import Call
from gpubroker_server.gateway.status.records import find
from gpubroker_server.ports.store import RunSpec, Submission, SubmitVerdict, TaskRecord

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        pattern=r'^("[\x21\x23-\x7e]{1,255}"|[\x21\x23-\x7e]{1,255})$',
        description="The same key with the same body answers with the first one, however often it is sent.",
    ),
]


_HASHED_AT_ONCE_BYTES = 256 * 1024


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
        submission = Submission(task, spec, key.strip('"'), await hash_of(call, what))
    outcome = await call.parts.store.submit(submission)
    headers = {"Location": f"/{what}s/{outcome.task}"}
    match outcome.verdict:
        case SubmitVerdict.KEY_REUSED:
            raise key_reused(str(submission.idempotency_key), outcome.task, what)
        case SubmitVerdict.DUPLICATE:
            headers["Idempotency-Replayed"] = "true"
            return Submitted(await find(call, outcome.task), is_new=False, headers=headers)
        case SubmitVerdict.ACCEPTED:
            return Submitted(TaskRecord(task, spec), is_new=True, headers=headers)


async def sent_before(call: Call, key: str | None, what: str) -> Submitted | None:
    """What the same key and body have come to: told also where they would be refused by now."""
    if key is None:
        return None
    known = await call.parts.store.known_key(call.identity.tenant, key.strip('"'))
    if known is None or known.body_hash != await hash_of(call, what):
        return None
    headers = {"Location": f"/{what}s/{known.task}", "Idempotency-Replayed": "true"}
    return Submitted(await find(call, known.task), is_new=False, headers=headers)


async def hash_of(call: Call, what: str) -> str:
    """Of this body, sent by this tenant to make a task, a lease or a batch."""
    named = f"{what}\0{call.identity.tenant}\0".encode() + await call.body()
    if len(named) <= _HASHED_AT_ONCE_BYTES:
        return hashlib.sha256(named).hexdigest()
    return await asyncio.to_thread(lambda: hashlib.sha256(named).hexdigest())


def key_reused(key: str, task: TaskId, what: str) -> Problem:
    return Problem(
        "idempotency-key-reused",
        f'the key "{key}" was used with another body, for {task}; nothing was stored; '
        f"use a new key for a new {what}",
    )
