"""Every way in which the API says no: RFC 9457 documents, one code each, explained in docs/errors.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json
from starlette.responses import Response
from typing_extensions import TypedDict

DOCS: Final = "https://github.com/gpubroker/gpubroker/blob/main/docs/errors.md"
MEDIA_TYPE: Final = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is the same for every problem of one code."""

    status: int
    title: str
    retryable: bool = False
    """Whether the very same request may succeed later."""


CATALOGUE: Final[Mapping[str, Kind]] = {
    "malformed-json": Kind(400, "The body is not JSON"),
    "cursor-invalid": Kind(400, "The cursor does not belong to this list"),
    "header-invalid": Kind(400, "A header cannot be read"),
    "unauthenticated": Kind(401, "A token is needed"),
    "forbidden": Kind(403, "The token does not allow this"),
    "load-files-disabled": Kind(403, "Loads of models bring no files here"),
    "priority-not-allowed": Kind(403, "The priority is above the token's cap"),
    "not-found": Kind(404, "There is no such thing"),
    "method-not-allowed": Kind(405, "This path does not know the method"),
    "task-already-finished": Kind(409, "The task has already finished"),
    "task-not-finished": Kind(409, "The task has not finished", retryable=True),
    "task-not-pending": Kind(409, "The task no longer waits"),
    "model-ambiguous": Kind(409, "The model is at several servers"),
    "lease-ended": Kind(409, "The lease has ended"),
    "lease-under-notice": Kind(409, "The lease is to be given back"),
    "nothing-quarantined": Kind(409, "Nothing of it is in quarantine"),
    "still-in-use": Kind(409, "It is measured to be in use"),
    "nothing-paused": Kind(409, "No silent node is kept from being given up"),
    "token-exists": Kind(409, "A token of this name exists"),
    "events-gone": Kind(410, "These events are no longer kept"),
    "payload-too-large": Kind(413, "The body is too large"),
    "unsupported-media-type": Kind(415, "The body is of a type or encoding that is not read here"),
    "host-not-allowed": Kind(421, "The service does not go by this name"),
    "validation-failed": Kind(422, "The request does not fit its schema"),
    "exceeds-capacity": Kind(422, "The task could never run here"),
    "no-matching-device": Kind(422, "There is no such GPU or node here"),
    "exceeds-maximum": Kind(422, "The task asks for more than one task may have"),
    "exceeds-quota": Kind(422, "The task asks for more than its tenant may have"),
    "objects-full": Kind(422, "The tenant's objects would take more than they may"),
    "priority-too-low": Kind(422, "What the task asks for is kept for higher priorities"),
    "pool-mismatch": Kind(422, "The pool does not give what the task asks for"),
    "unknown-resource": Kind(422, "Nobody offers this resource"),
    "entrypoint-not-allowed": Kind(422, "The operator does not allow this entrypoint"),
    "python-mismatch": Kind(422, "The function was pickled by another Python"),
    "idempotency-key-reused": Kind(422, "The idempotency key belongs to another body"),
    "batch-refused": Kind(422, "Some tasks of the batch cannot be accepted"),
    "too-many-requests": Kind(429, "Too much is being worked out already", retryable=True),
    "model-queue-full": Kind(429, "Too many wait for the model", retryable=True),
    "model-queue-share": Kind(429, "Too many of the tenant wait for the model", retryable=True),
    "headers-too-large": Kind(431, "The headers are longer than the server of models takes"),
    "internal-error": Kind(500, "The service made a mistake"),
    "result-damaged": Kind(500, "The stored bytes are missing or damaged"),
    "shared-memory-disabled": Kind(501, "Memory is not shared with servers of models"),
    "model-not-loaded": Kind(502, "The model was not loaded"),
    "model-server-failed": Kind(502, "The server of models broke off"),
    "follower-stale": Kind(503, "The overview is too old to be trusted", retryable=True),
    "store-unavailable": Kind(503, "The database cannot be reached", retryable=True),
    "model-server-unavailable": Kind(503, "The server of models cannot be reached", retryable=True),
    "model-queue-timeout": Kind(503, "The model had no time for the request", retryable=True),
    "model-server-busy": Kind(503, "Too many wait for the server of models", retryable=True),
    "model-not-ready": Kind(503, "The model is not in memory yet", retryable=True),
    "model-server-silent": Kind(504, "The server of models says nothing"),
}

_NOT_NOW = frozenset({429, 503})
_RETRY_AFTER_SECONDS = "1"


class Fault(TypedDict):
    """One thing that is wrong with a request."""

    pointer: str
    """RFC 6901 pointer into the body (`/resources/gpu_mb`, empty: the whole body), or `query:NAME`,
    `header:NAME`."""
    detail: str
    code: str


class ProblemDocument(TypedDict):
    """RFC 9457 problem details. `code` is stable, `detail` is for people."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    retryable: bool
    errors: list[Fault]


class Problem(Exception):
    """Ends a request with this problem. `code` must be in the catalogue."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.kind = CATALOGUE[code]
        self.detail = detail
        self.errors = errors
        self.headers = headers or {}


def problem_document(problem: Problem, scope: Mapping[str, Any]) -> ProblemDocument:
    """What is told to whoever sent the request of this ASGI scope."""
    kind = problem.kind
    return {
        "type": f"{DOCS}#{problem.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": problem.detail,
        "instance": scope["path"],
        "code": problem.code,
        "request_id": scope["state"]["request_id"],
        "retryable": kind.retryable,
        "errors": list(problem.errors),
    }


def problem_response(problem: Problem, scope: Mapping[str, Any]) -> Response:
    """The answer to the request of this ASGI scope."""
    kind = problem.kind
    return Response(to_json(problem_document(problem, scope)), kind.status, headers_of(problem), MEDIA_TYPE)


def headers_of(problem: Problem) -> dict[str, str]:
    """Its own, and when to come again where that helps."""
    headers = dict(problem.headers)
    if problem.kind.status in _NOT_NOW:
        headers.setdefault("Retry-After", _RETRY_AFTER_SECONDS)
    return headers
