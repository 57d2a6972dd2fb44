"""What can go wrong, as few exceptions as there are things a caller does differently."""

from collections.abc import Mapping, Sequence
from typing import Any


class BrokerError(Exception):
    """The service answered with an error that is not the caller's, or something below this class happened.

    `code` is the stable token of the problem (`exceeds-capacity`, `not-found`, ...); `status` the HTTP
    status, 0 when there was no answer; `request_id` finds the request in the service's log; `errors` lists
    `{pointer, detail, code}` for each wrong part of the request; `retry_after_seconds` is when to come again,
    where the service said so.
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
        """The first wrong part is told in `detail`, the others below it."""
        parts = [self.detail]
        parts += [f"  {error.get('pointer', '')}: {error.get('detail', '')}" for error in self.errors[1:]]
        if self.request_id and self.status >= 500:
            parts.append(f"  (request {self.request_id})")
        return "\n".join(parts)


class WrongArgument(TypeError):
    """What was given can be no request at all; nothing was sent."""


class Unreachable(BrokerError):
    """No service is known, none answered, or it said that it cannot serve now, until patience ran out."""


class ModelUnavailable(BrokerError):
    """The service was reached, and the model cannot answer now.

    `code` is `model-not-ready` while it waits for room or is being loaded, `model-queue-timeout` if it had no
    time, and `model-not-loaded` if its load failed.

    `model` is its name; `retry_after_seconds` is when to come again, None where that alone would not help.
    """

    model = ""


class Refused(BrokerError):
    """The service understood the request and said no (4xx). Repeating it unchanged will not help."""


class TaskFailed(BrokerError):
    """The task ended without a result: its code failed, or it ran out of time.

    `kind` is the failure's stable token (`exception`, `timeout`, `exit`, ...); `traceback` is the task's
    own, as text, where there is one; `log_tail` the end of what it printed.
    """

    ending = "failed"

    def __init__(
        self, task_id: str, *, kind: str, message: str, traceback: str | None = None, log_tail: str = ""
    ) -> None:
        why = kind if kind == self.ending else f"{self.ending} ({kind})"
        super().__init__(f"task {task_id} {why}: {message}", code="task-failed")
        self.task_id = task_id
        self.kind = kind
        self.message = message
        self.traceback = traceback
        self.log_tail = log_tail

    def __str__(self) -> str:
        return f"{self.detail}\n\n{self.traceback.rstrip()}" if self.traceback else self.detail


class TaskExpired(TaskFailed):
    """It waited longer than it was to wait, or its deadline came."""

    ending = "expired"


class TaskCancelled(BrokerError):
    """The task was cancelled, so it has no result."""

    def __init__(self, task_id: str) -> None:
        super().__init__(f"task {task_id} was cancelled", code="task-cancelled")
        self.task_id = task_id


class WaitTimeout(BrokerError):
    """The task was not finished in the time the caller was willing to wait. The task goes on."""

    def __init__(self, task_id: str, state: str, waited_seconds: float) -> None:
        super().__init__(
            f"task {task_id} is still {state} after waiting {waited_seconds:g} s; it goes on: wait again, "
            "or cancel it",
            code="wait-timeout",
        )
        self.task_id = task_id
        self.state = state
