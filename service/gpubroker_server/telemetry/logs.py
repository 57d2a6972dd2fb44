"""The format of log lines, and the names of their fields."""

import logging
import re
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import IO, Any, Final, Literal

import msgspec
import structlog
from structlog.typing import EventDict

LOG_FIELDS: Mapping[str, str] = {
    "request": "id of the HTTP request, as in the Request-Id header",
    "path": "path of the HTTP request, or of a directory or file",
    "method": "method of the HTTP request",
    "status": "of its answer; 0 if the client was gone before",
    "seconds": "how long it took",
    "token": "name of the token that it came with",
    "client": "address that it came from, as the connection or a trusted proxy says",
    "environment": "key of an environment of runs",
    "task": "id of the task",
    "tasks": "ids of tasks that came with one request",
    "tenant": "to which the task belongs, or in whose name a request was made",
    "attempt": "how often the task has been given devices",
    "rank": "of a process within its gang; 0 for other tasks",
    "what": "what a client asks of the leader, a fixed token",
    "sequence": "number of a checkpoint within its run",
    "digest": "sha256 of an object's bytes",
    "expected": "the digest that was announced",
    "found": "the digest of the bytes that came",
    "term": "number of the leader's term",
    "leader": "the process that leads, as host:process",
    "lineage": "of the database; rises when that went back, as after a restore",
    "known_lineage": "the lineage that a node agent follows",
    "reports": "number of reports of node agents",
    "subject": "task or node that a decision is about",
    "why": "reason of a decision, a fixed token",
    "node": "name of the node",
    "connections": "number of connections to the database that this process keeps",
    "waiting": "number of tasks that wait for the same",
    "gpus": "number of GPUs that are asked for",
    "need_mb": "MiB that are needed on each GPU",
    "free_mb": "free MiB on all GPUs that could be used",
    "largest_mb": "the largest piece of that",
    "server": "name of a Triton server, as configured",
    "way": "the protocol in which a model server is asked",
    "model": "name of a model, as its server knows it",
    "template": "name of an idle template",
    "runner": "name of a process that runs tasks, as Ray knows it",
    "extension": "name of an extension, as configured",
    "issuer": "address of an issuer of JWTs, as configured",
    "job": "what a node agent is doing",
    "fault": "what went wrong, as text",
}
"""The fields of structured log lines."""


_access = structlog.get_logger("gpubroker.access")

Form = Literal["console", "json"]


def log_answered(
    method: str,
    path: str,
    status: int | str,
    seconds: float,
    token: str | None,
    tenant: str | None,
    *,
    client: str,
    **more: str,
) -> None:
    """Write a line of the access log. `path` is without its query, because a query may contain secrets of
    users."""
    _access.info(
        "answered",
        method=method, path=path, status=status, seconds=round(seconds, 4), token=token, tenant=tenant,
        client=client, **more,
    )  # fmt: skip


current_request: ContextVar[str] = ContextVar("current_request", default="")
"""The id of the request that is being answered. All log lines of that time have it."""

_is_quoted = re.compile("[ \t=\r\n\"']").search
_NUMBERS: Final = frozenset({int, float, bool, type(None)})
"""The usual types of fields that are no text, which are told from texts without a call."""
_SLOW: Final = frozenset({"exc_info", "exception", "stack", "stack_info"})
"""The fields that structlog's own processors render."""


class ConsoleLines:
    """Renders the fields of a line as structlog's `ConsoleRenderer` does without colours. That renderer
    takes ten times as many calls, which was a third of the time to accept a task."""

    def __init__(self) -> None:
        # Tracebacks are without local variables, because these contain tokens and submitted data.
        self._plain = structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        )

    def __call__(self, logger: Any, level: str, fields: EventDict) -> str:
        if not _SLOW.isdisjoint(fields):
            return str(self._plain(logger, level, fields))
        line = f"{fields.pop('timestamp')} [{fields.pop('level'):<9}] {fields.pop('event'):<30}"
        for name in sorted(fields):
            value = fields[name]
            kind = type(value)
            is_text = kind is str or (kind not in _NUMBERS and isinstance(value, str))
            is_plain = is_text and not _is_quoted(value)
            line += f" {name}={value}" if is_plain else f" {name}={value!r}"
        return line.rstrip(" ")


class JsonLines:
    """Renders the fields of a line as a JSON object."""

    def __init__(self) -> None:
        self._frames = structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        )
        self._lenient = structlog.processors.JSONRenderer()

    def __call__(self, logger: Any, level: str, fields: EventDict) -> str:
        if not _SLOW.isdisjoint(fields):
            fields = self._frames(logger, level, fields)
        try:
            return msgspec.json.encode(fields).decode()
        except (
            TypeError,
            ValueError,
            OverflowError,
        ):  # a value without a form in JSON, or text that is no Unicode
            return str(self._lenient(logger, level, fields))


_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)


def _about_line(logger: Any, level: str, fields: EventDict) -> EventDict:
    """Add the fields that every line has: its request, level and time."""
    request = current_request.get()
    if request:
        fields.setdefault("request", request)
    fields["level"] = level
    return _stamp(logger, level, fields)


class _Lines:
    """Writes each line with one call, so that lines of several threads do not mix. A line that cannot be
    written is lost, so that the service goes on when the disk is full."""

    def __init__(self, stream: IO[str]) -> None:
        self._write = stream.write
        self._flush = stream.flush

    def msg(self, line: str) -> None:
        try:
            self._write(line + "\n")
            self._flush()
        except UnicodeEncodeError:
            self.msg(line.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):
            return  # a full disk; a closed stream

    debug = info = warning = error = critical = exception = msg


def configure_logs(level: str, form: Form, stream: IO[str] | None = None) -> None:
    """Write the log lines of this process's own code and of its libraries as structured lines to a stream,
    which is standard error by default."""
    stream = stream or sys.stderr
    render = JsonLines() if form == "json" else ConsoleLines()
    lines = _Lines(stream)
    structlog.configure(
        processors=[_about_line, render],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=lambda *_names: lines,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_about_line],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for library in ("alembic", "uvicorn"):
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))
