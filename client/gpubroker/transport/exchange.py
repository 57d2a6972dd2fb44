"""One request and its answer as values, and the rules for asking again. Nothing here touches a socket.

An operation is a generator: it yields a Call or a Pause, is sent the Answer to each Call, and returns what
its caller wanted. `Broker` and `AsyncBroker` differ only in how they carry those steps out.
"""

import itertools
import json
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpubroker.errors import BrokerError, ModelUnavailable, Refused, Unreachable

T = TypeVar("T")

_OF_A_MODEL = frozenset({"model-not-ready", "model-not-loaded", "model-queue-timeout"})
"""Codes of the service about one model, where it serves well otherwise."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_NOTHING_DONE = frozenset({429, 503})
"""Statuses that promise that nothing was done and that asking again may help."""
_NO_WORD = frozenset({502, 504})
"""Of a proxy: the service may have done it all the same."""
_TRIED_IN_VAIN = "model-not-loaded"
"""The same status, and the service's own word: to load it once more would fail once more."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. `patience_seconds` is how long the service itself may take on top of the usual."""

    method: str
    path: str
    params: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    patience_seconds: float = 0.0
    repeatable: bool = True
    """Whether doing it twice is the same as doing it once."""


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """`headers` has lower-case names."""

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
    """Send a call; after a lost connection or a 'not now' repeat it for `retry_seconds`.

    They count from the first failure, so that an answer which never came is asked for again however long it
    was waited for.
    A call that is not repeatable is repeated only where the answer said that nothing was done.
    Raises Refused, Unreachable or BrokerError; an answer that is returned is a good one.
    """
    give_up_at: float | None = None
    for attempt in itertools.count():
        wanted_pause = min(_FIRST_PAUSE_SECONDS * 2**attempt, _LONGEST_PAUSE_SECONDS)
        pause = wanted_pause * random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing
        try:
            answer = yield call
        except Unreachable as error:
            failure: BrokerError = error
            again = call.repeatable
        else:
            assert answer is not None, "a Call is always answered"
            if answer.status < 400:
                return answer
            failure = error_of(answer)
            is_lost = answer.status in _NO_WORD and failure.code != _TRIED_IN_VAIN
            again = answer.status in _NOTHING_DONE or (call.repeatable and is_lost)
            pause = max(pause, failure.retry_after_seconds or 0.0)
        failed_at = time.monotonic()
        give_up_at = failed_at + retry_seconds if give_up_at is None else give_up_at
        if not again or failed_at + pause > give_up_at:
            raise failure
        yield Pause(pause)
    raise AssertionError("unreachable: count() does not end")


def error_of(answer: Answer) -> BrokerError:
    """The exception for an answer of 400 or more, from its problem document where it has one."""
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
    """Of the service, or of a model's server, which calls its words `error` and has no codes."""
    said = problem.get("detail") or problem.get("title") or problem.get("error")
    headers = headers or {}
    code = str(problem.get("code", ""))
    return _kind_of(code, status)(
        str(said or f"the service answered {status}"),
        code=code,
        status=status,
        request_id=problem.get("request_id") or headers.get("request-id"),
        errors=problem.get("errors") or (),
        retry_after_seconds=_retry_after_seconds(headers),
    )


def _kind_of(code: str, status: int) -> type[BrokerError]:
    if code in _OF_A_MODEL:
        return ModelUnavailable
    if status in (502, 503, 504):
        return Unreachable
    return Refused if status < 500 else BrokerError


def _retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Seconds from `Retry-After`; its date form is treated as not given."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
