"""One request and its answer as values, and the rules for retries. Nothing here touches a socket.

An operation of the API is a generator of steps: it yields a Call or a Pause, is sent the Answer to each Call,
and returns a value. `gpubroker.transport.http` carries the steps out, for threads and for asyncio.
"""

import itertools
import json
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpubroker.errors import BrokerError, CallFailed, ModelUnavailable, Refused, Unreachable
from gpubroker.transport.bodies import Body

T = TypeVar("T")

_MODEL_CODES = frozenset({"model-not-ready", "model-not-loaded", "model-queue-timeout"})
"""The problem codes about one model, with which the service itself is healthy."""

_CALL_CODES = frozenset({"call-failed", "call-timeout", "worker-lost"})
"""The problem codes about one call of a worker's method."""

UNTRUSTED, WRONG_SCHEME = "untrusted-certificate", "wrong-scheme"
_HOPELESS = frozenset({UNTRUSTED, WRONG_SCHEME})
"""The codes of failed connections for which retries do not help."""

_FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0
_NOTHING_DONE = frozenset({429, 503})
"""The statuses which promise that nothing was done and that a retry may help."""
_UNKNOWN_OUTCOME = frozenset({502, 504})
"""The statuses of a proxy, after which the service may or may not have carried out the request."""
_LOAD_FAILED = "model-not-loaded"
"""The code that the service itself sends with 502; a retry would fail again."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `patience_seconds` is added to the usual timeout."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | Body | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience_seconds: float = 0.0
    repeatable: bool = True
    """True if sending it twice has the same effect as sending it once."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer. `headers` has lower-case names."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            start = self.content[:80].decode("utf-8", "replace")
            raise BrokerError(
                f"the answer is not JSON (it starts with {start!r}); is this address a gpubroker service?",
                code="not-a-service",
                status=self.status,
            ) from None


Steps = Generator[Call | Pause, Answer | None, T]


def exchange(call: Call, retry_seconds: float) -> Steps[Answer]:
    """Send a call and return its answer; after a lost connection or a temporary refusal, retry for
    `retry_seconds`.

    The time counts from the first failure, so a request that timed out is retried however long it took. A
    call that is not repeatable is only repeated if the answer says that nothing was done. Raises Refused,
    Unreachable or BrokerError; a returned answer has a status below 400.
    """
    give_up_at: float | None = None
    for attempt in itertools.count():
        pause = pause_seconds(attempt)
        try:
            answer = yield call
        except Unreachable as error:
            failure: BrokerError = error
            retry = call.repeatable and error.code not in _HOPELESS
        else:
            assert answer is not None, "a Call is always answered"
            if answer.status < 400:
                return answer
            failure = error_of(answer)
            is_lost = answer.status in _UNKNOWN_OUTCOME and failure.code != _LOAD_FAILED
            retry = answer.status in _NOTHING_DONE or (call.repeatable and is_lost)
            pause = max(pause, failure.retry_after_seconds or 0.0)
        failed_at = time.monotonic()
        give_up_at = failed_at + retry_seconds if give_up_at is None else give_up_at
        if not retry or failed_at + pause > give_up_at:
            raise failure
        yield Pause(pause)
    raise AssertionError("unreachable: count() does not end")


def pause_seconds(attempt: int) -> float:
    """Return the seconds to wait after an attempt. Attempts are counted from 0."""
    longest = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(attempt, 16), LONGEST_PAUSE_SECONDS)
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing


def error_of(answer: Answer) -> BrokerError:
    """Return the exception for an answer of 400 or more, from its problem document if it has one."""
    try:
        problem = json.loads(answer.content)
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    return error_of_problem(problem, answer.status, answer.headers)


def error_of_problem(
    problem: Mapping[str, Any], status: int, headers: Mapping[str, str] | None = None
) -> BrokerError:
    """Return the exception for a problem document of the service, or of Triton, whose documents have `error`
    and no codes."""
    detail = problem.get("detail") or problem.get("title") or problem.get("error")
    headers = headers or {}
    code = str(problem.get("code", ""))
    return _error_class(code, status)(
        str(detail or f"the service answered {status}"),
        code=code,
        status=status,
        request_id=problem.get("request_id") or headers.get("request-id"),
        errors=problem.get("errors") or (),
        retry_after_seconds=_retry_after_seconds(headers),
    )


def _error_class(code: str, status: int) -> type[BrokerError]:
    if code in _MODEL_CODES:
        return ModelUnavailable
    if code in _CALL_CODES:
        return CallFailed
    if status in (502, 503, 504):
        return Unreachable
    return Refused if status < 500 else BrokerError


def _retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`; a date counts as absent."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
