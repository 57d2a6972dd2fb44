"""How log lines are written, and the names of their fields."""

import logging
import sys
from collections.abc import Mapping
from typing import IO, Literal

import structlog

LOG_FIELDS: Mapping[str, str] = {
    "request": "id of the HTTP request, as in the Request-Id header",
    "path": "path of the HTTP request, or of a directory or file",
    "method": "method of the HTTP request",
    "status": "of its answer; 0 if the client was gone before",
    "seconds": "how long it took",
    "token": "name of the token that it came with",
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
    **more: str,
) -> None:
    """The line of the access log. `path`: without its query, which may hold what users call secret."""
    _access.info(
        "answered",
        method=method, path=path, status=status, seconds=round(seconds, 4), token=token, tenant=tenant,
        **more,
    )  # fmt: skip


def configure_logs(level: str, form: Form, stream: IO[str] | None = None) -> None:
    """Structured lines to a stream, or to stderr, from this process's own code and from the libraries it
    uses."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    # Tracebacks without local variables: those hold tokens and what users submit.
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    frames = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
    )
    render: list[structlog.typing.Processor] = (
        [frames, structlog.processors.JSONRenderer()] if form == "json" else [plain]
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for library in ("alembic", "uvicorn"):
        logging.getLogger(library).setLevel(max(logging.WARNING, root.level))
