"""Many tasks in one call: sent in parts, each part in one request and one commit."""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from gpubroker.errors import BrokerError, WrongArgument
from gpubroker.tasks.submission import SubmitOptions, Target, submission_body
from gpubroker.transport.exchange import Call, Steps, error_of_problem, exchange

TASKS_PER_PART = 1000
BYTES_PER_PART = 8 * 2**20
MOST_TASKS = 10_000


class Submission:
    """What `submit` would be given, for `submit_many`."""

    def __init__(self, target: Target, *args: Any, **options: Unpack[SubmitOptions]) -> None:
        """Raises WrongArgument for what no service could accept."""
        if "idempotency_key" in options:
            raise WrongArgument("a task of many has no key of its own; give submit_many one for all of them")
        self.body = submission_body(target, args, options)


Wanted = Submission | Mapping[str, Any]
"""A mapping is the body of `POST /tasks`."""

Answered = str | BrokerError
"""A task's id, or why there is none."""


def submit_all(
    tasks: Iterable[Wanted], *, all_or_nothing: bool, key: str | None, retry_seconds: float
) -> Steps[list[Answered]]:
    bodies = [_body_of(task) for task in tasks]
    if all_or_nothing and len(bodies) > MOST_TASKS:
        raise WrongArgument(
            f"{len(bodies)} tasks are more than {MOST_TASKS}, and those are the most that can be stored "
            "together; leave all_or_nothing out, or send fewer"
        )
    whole = [bodies] if all_or_nothing and bodies else list(_parts(bodies))
    key = key or uuid.uuid4().hex
    answers: list[Answered] = []
    for number, part in enumerate(whole):
        call = Call(
            "POST",
            "/tasks/batch",
            body=_batch_of(part, all_or_nothing),
            headers={"Idempotency-Key": f'"{key if len(whole) == 1 else f"{key}-{number}"}"'},
            patience_seconds=60.0,
        )
        try:
            answer = yield from exchange(call, retry_seconds)
        except BrokerError as error:
            if not answers:
                raise
            return answers + [error] * (len(bodies) - len(answers))
        answers += [_answered(item) for item in answer.json()["items"]]
    return answers


def _answered(item: Mapping[str, Any]) -> Answered:
    return str(item["id"]) if "id" in item else error_of_problem(item["problem"], int(item["status"]))


def _body_of(task: Wanted) -> bytes:
    if isinstance(task, Submission):
        return task.body
    try:
        return json.dumps(task, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise WrongArgument(f"a task is no JSON ({error}); give plain values, or a Submission") from None


def _parts(bodies: Sequence[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size_bytes = 0
    for body in bodies:
        if part and (len(part) == TASKS_PER_PART or size_bytes + len(body) > BYTES_PER_PART):
            yield part
            part, size_bytes = [], 0
        part.append(body)
        size_bytes += len(body) + 1
    if part:
        yield part


def _batch_of(part: Sequence[bytes], all_or_nothing: bool) -> bytes:
    whole = b',"all_or_nothing":true' if all_or_nothing else b""
    return b'{"tasks":[' + b",".join(part) + b"]" + whole + b"}"
