"""Every error of the API, with its status, title and text, as RFC 9457 problem details. See also
docs/errors.md."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpubroker.wire.answered import encode
from gpubroker.wire.problems import Fault, ProblemDocument
from msgspec import Struct
from starlette.responses import Response

from gpubroker_server.http.proxies import current_prefix

__all__ = [
    "CATALOGUE",
    "MEDIA_TYPE",
    "PAGES",
    "SUBMIT_PROBLEMS",
    "Fault",
    "Problem",
    "ProblemKind",
    "headers_of",
    "problem_document",
    "problem_response",
]

PAGES: Final = "/problems"
"""The path below which the service answers what a code means. It is the beginning of `type`."""
MEDIA_TYPE: Final = "application/problem+json"


class ProblemKind(Struct, frozen=True):
    """The properties that all problems of one code share."""

    status: int
    title: str
    detail: str = ""
    """A template of the text, in which names in braces stand for values; empty if each problem brings its own
    text."""
    retryable: bool = False
    """True if repeating the request unchanged may succeed later."""


CATALOGUE: Final[Mapping[str, ProblemKind]] = {
    "malformed-json": ProblemKind(
        400, "The body is not JSON", "the body is not JSON: {why}; send one JSON object in UTF-8"
    ),
    "cursor-invalid": ProblemKind(400, "The cursor does not belong to this list"),
    "header-invalid": ProblemKind(400, "A header has an invalid value"),
    "unauthenticated": ProblemKind(
        401,
        "A token is needed",
        "{found}; send Authorization: Bearer <token> "
        "(the first token is in client.json in the service's data directory)",
    ),
    "forbidden": ProblemKind(403, "The token does not allow this"),
    "load-files-disabled": ProblemKind(403, "Loading a model with files is disabled"),
    "priority-not-allowed": ProblemKind(403, "The priority is above the token's cap"),
    "not-found": ProblemKind(404, "Not found"),
    "method-not-allowed": ProblemKind(
        405, "The path does not support the method", "{path} does not support {method}; it supports {allowed}"
    ),
    "request-timeout": ProblemKind(
        408,
        "The head of the request did not come in time",
        "the head of a request did not come within {seconds} s (limits.head_seconds); send it at once",
        retryable=True,
    ),
    # 409: the request is valid, but what it names is not in a state that allows it.
    "task-already-finished": ProblemKind(
        409,
        "The task has already finished",
        "task {task} is already {state} and cannot be changed or cancelled; submit it again as a new task",
    ),
    "task-not-finished": ProblemKind(
        409,
        "The task has not finished",
        "task {task} is {state} and has no result yet; GET /tasks/{task}/wait answers when it ends",
        retryable=True,
    ),
    "task-not-pending": ProblemKind(
        409,
        "The task is no longer pending",
        "task {task} is {state}, and {fields} can be changed only while a task is pending; "
        "cancel it and submit it again",
    ),
    "task-not-running": ProblemKind(
        409,
        "The task does not run now",
        "task {task} is {state} and has no process of its own that could be looked at; GET /tasks/{task} "
        "says where it stands",
    ),
    "task-not-retryable": ProblemKind(
        409,
        "A task of this kind cannot be retried",
        "task {task} is of kind {kind}; only entrypoints, commands and functions are retried; send the "
        "request again that made it",
    ),
    "array-not-finished": ProblemKind(
        409,
        "The array has not ended",
        "array {array} is {state}; its failed items can be done again when it has ended (or cancel it first)",
        retryable=True,
    ),
    "nothing-to-retry": ProblemKind(
        409, "No item is left to do again", "every item of array {array} has succeeded"
    ),
    "no-ray-driver": ProblemKind(
        409,
        "This gateway cannot call workers",
        "this gateway has no Ray driver, so it takes no calls to workers; send them to a gateway whose "
        "settings name the Ray cluster (ray.address), or to `gpubroker serve`",
    ),
    "model-ambiguous": ProblemKind(
        409,
        "The model is at several servers",
        'model "{model}" is at several servers ({servers}); choose one of them: ?server={first}, or on the '
        "command line --server {first}",
    ),
    "model-in-use": ProblemKind(
        409,
        "The model is in use",
        'model "{model}" is in memory, or waits for it ({state}, task {task}), and is measured from its load '
        "on; unload it first (gpubroker unload, POST /models/{model}/unload)",
    ),
    "model-is-step": ProblemKind(
        409,
        "The model is a step of a loaded ensemble",
        'model "{model}" is a step of the ensemble "{ensemble}", which is in memory and would fail without '
        "it; unload the ensemble (gpubroker unload, POST /models/{ensemble}/unload)",
    ),
    "not-measurable": ProblemKind(409, "The model's size cannot be measured"),
    "lease-ended": ProblemKind(409, "The lease has ended", "lease {lease} {ended}; {remedy}"),
    "lease-under-notice": ProblemKind(
        409,
        "The lease is under notice",
        "the holder of lease {lease} was asked to leave ({reason}), so it cannot be renewed; "
        "free its memory, then DELETE /leases/{lease}",
    ),
    "nothing-quarantined": ProblemKind(
        409,
        "Nothing is in quarantine",
        'there is {found} of "{holder}" in quarantine; GET /quarantine lists what is',
    ),
    "still-in-use": ProblemKind(
        409,
        "The memory is still in use",
        "attempt {attempt} of {holder} is not gone: it was just measured to use {used_mb} MiB of {device}; "
        "end its process, or reboot {node}",
    ),
    "nothing-paused": ProblemKind(
        409,
        "Detection is not paused",
        "the leader holds no silent node back, so there is nothing to resume; GET /stats has its state",
    ),
    "leader-outdated": ProblemKind(
        409,
        "The leader is of an earlier release, which does not know this",
        "{what} needs a leader of gpubroker {since} or later, and {holder}, which leads, is of {found}; "
        "nothing was changed. Upgrade the brokers, then send the request again",
        retryable=True,
    ),
    "token-exists": ProblemKind(
        409,
        "A token of this name exists",
        'there is a token "{name}" already; delete it first, or choose another name',
    ),
    "idle-template-exists": ProblemKind(
        409,
        "An idle template of this name exists",
        'there is an idle template "{name}" already; delete it first, or choose another name',
    ),
    "events-gone": ProblemKind(
        410,
        "These events are no longer kept",
        "events up to position {last_gone} are no longer kept, and some of them came after {after}; the "
        "oldest that is kept is at {oldest}; read the present state (GET /tasks, GET /gpus), then read on "
        "without `after`",
    ),
    "payload-too-large": ProblemKind(413, "The body is too large"),
    "unsupported-media-type": ProblemKind(415, "The body has a type or encoding that is not supported"),
    "host-not-allowed": ProblemKind(
        421,
        "The service does not have this name",
        'the service is not known as "{host}" but as {known}; '
        "use one of those names, or have the operator add yours to allowed_hosts",
    ),
    "validation-failed": ProblemKind(422, "The request does not match its schema"),
    "exceeds-capacity": ProblemKind(422, "The task could never run here"),
    "no-matching-device": ProblemKind(422, "There is no such GPU or node here"),
    "exceeds-maximum": ProblemKind(422, "The task asks for more than one task may have"),
    "exceeds-quota": ProblemKind(422, "The task asks for more than its tenant may have"),
    "objects-full": ProblemKind(422, "The tenant's objects exceed a limit"),
    "range-not-satisfiable": ProblemKind(416, "The object has no such bytes"),
    "priority-too-low": ProblemKind(422, "What the task asks for is kept for higher priorities"),
    "pool-mismatch": ProblemKind(422, "The pool does not have what the task asks for"),
    "unknown-resource": ProblemKind(422, "There is no such resource"),
    "entrypoint-not-allowed": ProblemKind(422, "The operator does not allow this entrypoint"),
    "environment-not-allowed": ProblemKind(422, "The operator does not allow this environment"),
    "python-mismatch": ProblemKind(422, "The function was pickled by another Python"),
    "idempotency-key-reused": ProblemKind(
        422,
        "The idempotency key belongs to another body",
        'the key "{key}" was used with another body, for {task}; nothing was stored; '
        "use a new key for a new {what}",
    ),
    "batch-refused": ProblemKind(
        422,
        "Some tasks of the batch cannot be accepted",
        "{refused} of {sent} tasks cannot be accepted, so nothing was stored; the first: {first}",
    ),
    "too-many-requests": ProblemKind(
        429,
        "Too many requests",
        "{what} are computed one at a time; one is being computed{more}; ask again in a second",
        retryable=True,
    ),
    "tenant-queue-full": ProblemKind(
        429,
        "The tenant has too many tasks in the queue",
        'tenant "{tenant}" has {pending} tasks that wait, and may have {most} (limits.tenant_pending_tasks); '
        "nothing was stored; send it again when some have started, or cancel some",
        retryable=True,
    ),
    "backpressure": ProblemKind(
        429,
        "The service takes no more work of this priority now",
        "{measure} is {value}, which is too high ({high}): nothing of a priority below {below} is taken now, "
        "and this has {priority}; nothing was stored; send it again in {seconds} s or more, or with a higher "
        "priority",
        retryable=True,
    ),
    "tenant-queue-bytes": ProblemKind(
        429,
        "The tenant's tasks in the queue keep too many bytes",
        'tenant "{tenant}" has tasks that wait and keep {pending} bytes of arguments, commands, env and '
        "labels; this would add {more}, and it may have {most} (limits.tenant_pending_bytes); nothing was "
        "stored; pass large data by its address, or send it again when some have started, or cancel some",
        retryable=True,
    ),
    "tenant-waits": ProblemKind(
        429,
        "The tenant has too many requests that wait",
        'tenant "{tenant}" has {waiting} requests that wait here for a task, and may have {most} '
        "(limits.tenant_waits); wait for fewer tasks at once, or ask again without waiting",
        retryable=True,
    ),
    "event-streams-full": ProblemKind(429, "Too many event streams are open", retryable=True),
    "tenant-requests": ProblemKind(
        429,
        "The tenant has too many requests to models under way",
        'tenant "{tenant}" has {most} requests to models under way at this gateway, as many as it may '
        "(limits.tenant_requests), and nothing of this one was sent; send fewer at once",
        retryable=True,
    ),
    "worker-queue-full": ProblemKind(
        429,
        "Too many calls wait for the workers",
        "each of the {workers} ready workers of set {set} has as many calls of this gateway as may be: "
        "{most}; nothing of this one was sent; send fewer at once, or raise max_count",
        retryable=True,
    ),
    "model-queue-full": ProblemKind(429, "The model's queue is full", retryable=True),
    "model-queue-share": ProblemKind(429, "The tenant's share of the model's queue is full", retryable=True),
    "headers-too-large": ProblemKind(431, "The headers are too long"),
    "internal-error": ProblemKind(
        500, "Internal error", "internal error; the service's log has more under {request_id}"
    ),
    "result-damaged": ProblemKind(500, "The stored bytes are missing or damaged"),
    "shared-memory-disabled": ProblemKind(501, "Shared memory with model servers is disabled"),
    "call-failed": ProblemKind(502, "The method failed"),
    "worker-lost": ProblemKind(
        502,
        "The worker was lost with the call",
        "worker {worker} (attempt {attempt}) ended while it had the call, which may have begun: {why}; look "
        "at what it has done before you send it again",
    ),
    "model-not-loaded": ProblemKind(502, "The model was not loaded"),
    "model-server-failed": ProblemKind(502, "The model server failed"),
    "model-server-unauthorized": ProblemKind(502, "The model server refused the service"),
    "identity-provider-unavailable": ProblemKind(
        503,
        "The issuer's keys are being fetched",
        "the key that signed the JWT is being fetched from {issuer}; send the request again",
        retryable=True,
    ),
    "follower-stale": ProblemKind(503, "The overview is too old to be trusted", retryable=True),
    "stack-unavailable": ProblemKind(
        503,
        "The node agent sent no stack in time",
        "the agent of node {node} said nothing of task {task} within {seconds} s, or the task has just "
        "ended; ask again",
        retryable=True,
    ),
    "disk-unavailable": ProblemKind(
        503,
        "The node agent said nothing of its disks in time",
        "the agent of node {node} has not answered within {seconds} s; it may still be at work: what it "
        "deletes is in the audit log and in the events; ask again later",
        retryable=True,
    ),
    "store-unavailable": ProblemKind(
        503,
        "The database cannot be reached",
        "the database, or the disk for large objects, cannot be reached and nothing was changed; "
        "send the request again",
        retryable=True,
    ),
    "too-many-connections": ProblemKind(
        503,
        "Too many connections",
        "{most} connections are open, as many as may be (limits.connections); close some, or try again later",
        retryable=True,
    ),
    "model-server-unavailable": ProblemKind(503, "The model server cannot be reached", retryable=True),
    "model-queue-timeout": ProblemKind(503, "The request waited too long for the model", retryable=True),
    "model-server-busy": ProblemKind(503, "Too many requests wait for the model server", retryable=True),
    "model-not-ready": ProblemKind(503, "The model is not in memory yet", retryable=True),
    "no-worker": ProblemKind(
        503,
        "No worker takes calls",
        "no worker of set {set} took the call within {seconds} s: {states}; it has not begun; GET "
        "/tasks/{task}/explain says why one waits",
        retryable=True,
    ),
    "call-timeout": ProblemKind(504, "The call was not answered in time"),
    "model-server-silent": ProblemKind(504, "The model server does not answer"),
}

DEMAND_PROBLEMS = "priority-not-allowed exceeds-capacity no-matching-device exceeds-maximum exceeds-quota"
"""The reasons why a demand or its priority is refused, as routes declare them."""
QUEUE_PROBLEMS = "idempotency-key-reused tenant-queue-full tenant-queue-bytes backpressure store-unavailable"
"""The reasons why an admitted task is not stored."""
RUN_PROBLEMS = (
    f"{DEMAND_PROBLEMS} pool-mismatch unknown-resource priority-too-low entrypoint-not-allowed "
    f"environment-not-allowed python-mismatch {QUEUE_PROBLEMS} leader-outdated"
)
"""The reasons why a task that runs code is refused."""
SUBMIT_PROBLEMS = f"malformed-json payload-too-large unsupported-media-type {RUN_PROBLEMS}"
"""The reasons why a body that submits a task that runs code is refused."""

_NOT_NOW = frozenset({429, 503})
_RETRY_AFTER_SECONDS = "1"


class Problem(Exception):
    """An error that the request is answered with. `code` must be in the catalogue.

    Give either `detail`, or in `values` the values for the catalogue's text.
    """

    def __init__(
        self,
        code: str,
        detail: str = "",
        *,
        errors: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
        **values: object,
    ) -> None:
        self.code = code
        self.kind = CATALOGUE[code]
        self.detail = detail or self.kind.detail.format(**values)
        self.errors = errors
        self.headers = headers or {}
        super().__init__(self.detail)


def problem_document(problem: Problem, scope: Mapping[str, Any]) -> ProblemDocument:
    """Return the body of the answer that reports the problem. `scope` is the ASGI scope of the request."""
    kind = problem.kind
    return ProblemDocument(
        type=f"{current_prefix.get()}{PAGES}/{problem.code}",
        title=kind.title,
        status=kind.status,
        detail=problem.detail,
        instance=current_prefix.get() + scope["path"],
        code=problem.code,
        request_id=scope["state"]["request_id"],
        retryable=kind.retryable,
        errors=tuple(problem.errors),
    )


def problem_response(problem: Problem, scope: Mapping[str, Any]) -> Response:
    document = problem_document(problem, scope)
    return Response(encode(document), problem.kind.status, headers_of(problem), MEDIA_TYPE)


def headers_of(problem: Problem) -> dict[str, str]:
    """Return the problem's own headers, with Retry-After if its status is 429 or 503."""
    headers = dict(problem.headers)
    if problem.kind.status in _NOT_NOW:
        headers.setdefault("Retry-After", _RETRY_AFTER_SECONDS)
    return headers
