"""The exceptions of the SDK: one class for each case that a caller handles differently."""

from collections.abc import Mapping, Sequence
from typing import Any


class BrokerError(Exception):
    """The service failed, or an error of a subclass occurred.

    `code` is the stable token of the problem (`exceeds-capacity`, `not-found`, ...); `status` the HTTP
    status, 0 without an answer; `request_id` finds the request in the service's log; `errors` lists
    `{pointer, detail, code}` for each wrong part of the request; `retry_after_seconds` says when to try
    again, if the service said so.
    """

    def __init__(
        self,
        detail: str,
        *,
        code: str = "",
        status: int = 0,
        request_id: str | None = None,
        errors: Sequence[Mapping[str, Any]] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code
        self.status = status
        self.request_id = request_id
        self.errors = tuple(errors)
        self.retry_after_seconds = retry_after_seconds

    def __str__(self) -> str:
        """Return `detail`, which describes the first wrong part, and the other wrong parts below it."""
        parts = [self.detail]
        parts += [f"  {error.get('pointer', '')}: {error.get('detail', '')}" for error in self.errors[1:]]
        if self.request_id and self.status >= 500:
            parts.append(f"  (request {self.request_id})")
        return "\n".join(parts)


class WrongArgument(TypeError):
    """The arguments cannot make a valid request; nothing was sent."""


class NotCollected(BrokerError):
    """No files of the task's runs are there to download; the message says why."""


class Unreachable(BrokerError):
    """No service is known, none answered, or it could not serve until the retry time ended."""


class ModelUnavailable(BrokerError):
    """The service answered, but the model cannot answer now.

    `code` is `model-not-ready` while the model waits for memory or loads, `model-queue-timeout` if the
    request waited too long, and `model-not-loaded` if the load failed. `model` is its name;
    `retry_after_seconds` is None if waiting alone does not help.
    """

    model = ""


class Refused(BrokerError):
    """The service refused the request (4xx). Repeating it unchanged does not help."""


class CallFailed(BrokerError):
    """A call to a worker set has no result.

    `code` is `call-failed` if the method raised, `call-timeout` if its time was over, and `worker-lost` if
    the worker ended during the call. After a timeout or a lost worker it is unknown how far the method went.
    The text ends with the method's own traceback, if there is one.
    """

    def __str__(self) -> str:
        return _with_traceback(self.detail, self.traceback)

    @property
    def kind(self) -> str:
        """The stable token of the failure, such as `exception` or `no_such_method`; otherwise the code."""
        return str(self.errors[0]["code"]) if self.errors else self.code

    @property
    def traceback(self) -> str | None:
        """The traceback of the method, as text."""
        return str(self.errors[0]["detail"]) if self.errors else None


class ItemFailed(BrokerError):
    """An item of an array has no result. `kind` and `traceback` are as those of TaskFailed; `array` is the id
    of the array, with which the array can be cancelled or retried."""

    def __init__(
        self, number: int, kind: str, message: str, traceback: str | None = None, *, array: str = ""
    ) -> None:
        of_array = f" of array {array}" if array else ""
        super().__init__(f"item {number}{of_array} failed ({kind}): {message}", code="item-failed")
        self.number = number
        self.array = array
        self.kind = kind
        self.traceback = traceback


class ResultUnreadable(BrokerError):
    """A result cannot be unpickled here, for example because a module of its type is missing. `source` is the
    id of the task or of the array, `number` that of the item; the cause is `__cause__`. The stored result is
    intact: `outcome` returns its bytes."""

    def __init__(self, source: str, why: BaseException, *, number: int | None = None) -> None:
        what = f"the result of {source}" if number is None else f"the result of item {number} of {source}"
        try:
            text = f"{type(why).__name__}: {why}"
        except Exception:  # a foreign exception may not even have a text
            text = type(why).__name__
        super().__init__(
            f"{what} cannot be opened here ({text}); install here what it is made of, or return plain data",
            code="result-unreadable",
        )
        self.source = source
        self.number = number


class TaskFailed(BrokerError):
    """The task ended without a result: its code failed, or it ran out of time.

    `kind` is the failure's stable token (`exception`, `timeout`, `exit`, ...); `traceback` is the traceback
    of the task as text, if there is one; `log_tail` is the end of what the task printed.
    """

    ending = "failed"

    def __init__(
        self, task_id: str, *, kind: str, message: str, traceback: str | None = None, log_tail: str = ""
    ) -> None:
        ending = kind if kind == self.ending else f"{self.ending} ({kind})"
        super().__init__(f"task {task_id} {ending}: {message}", code="task-failed")
        self.task_id = task_id
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.log_tail = log_tail

    def __str__(self) -> str:
        return _with_traceback(self.detail, self.traceback)


class TaskExpired(TaskFailed):
    """The task waited longer than its queue TTL, or reached its deadline."""

    ending = "expired"


class TaskCancelled(BrokerError):
    """The task was cancelled, so it has no result."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"task {task_id} was cancelled", code="task-cancelled")
        self.task_id = task_id


class WaitTimeout(BrokerError):
    """The task did not finish within the timeout. The task continues."""

    def __init__(self, task_id: str, state: str, waited_seconds: float) -> None:
        super().__init__(
            f"task {task_id} is still {state} after {waited_seconds:g} s; it continues: wait again or "
            "cancel it",
            code="wait-timeout",
        )
        self.task_id = task_id
        self.state = state


def _with_traceback(detail: str, traceback: str | None) -> str:
    """Return the message with the traceback below it, unless that only repeats the message, as for a fault
    before the first line of the user's code."""
    text = (traceback or "").strip()
    return f"{detail}\n\n{text}" if text and text not in detail else detail
