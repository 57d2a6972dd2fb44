"""Errors of the data plane: its own in Triton's form (clients of Triton look for `error`, ours for `code`),
and those of Triton that it acts upon."""

from collections.abc import Mapping
from math import ceil
from typing import Final

from pydantic_core import to_json

from gpubroker_server.core.serving.lane import LaneFull, QueueEstimate
from gpubroker_server.gateway.http.problems import Problem, headers_of
from gpubroker_server.ports.backends import Header, Trouble

_CODES = {
    Trouble.UNREACHABLE: "model-server-unavailable",
    Trouble.BUSY: "model-server-busy",
    Trouble.BROKEN: "model-server-failed",
    Trouble.SILENT: "model-server-silent",
    Trouble.TOO_LARGE: "headers-too-large",
}

_WORDS = {
    Trouble.UNREACHABLE: "Triton server {server} cannot be reached and was sent nothing: {detail}; try again",
    Trouble.BUSY: "Triton server {server} is busy and nothing was sent: {detail}; send it again later",
    Trouble.BROKEN: "Triton server {server} broke off and may have done it: {detail}",
    Trouble.SILENT: "Triton server {server} gave no answer and may still do it: {detail}",
    Trouble.TOO_LARGE: "{detail}; send fewer or shorter headers",
}


def problem_of(trouble: Trouble, server: str, detail: str) -> Problem:
    return Problem(_CODES[trouble], _WORDS[trouble].format(server=server, detail=detail))


def body_too_large(most: str, body_bytes: int, remedy: str) -> Problem:
    return Problem("payload-too-large", f"{most} and this one has {body_bytes} or more; {remedy}")


def bad_encoding(encoding: bytes) -> Problem:
    return Problem(
        "unsupported-media-type",
        f'Content-Encoding is "{encoding.decode("latin-1")[:40]}"; give one of gzip and deflate',
    )


def not_encoded(encoding: bytes, fault: Exception) -> Problem:
    return Problem(
        "unsupported-media-type",
        f"Content-Encoding is {encoding.decode()}, and the body cannot be inflated: {fault}",
    )


def no_shared_memory() -> Problem:
    """In Triton's own words, which clients know."""
    return Problem(
        "shared-memory-disabled",
        "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable.",
    )


def no_files() -> Problem:
    return Problem(
        "load-files-disabled",
        "this load brings files (parameters that begin with file:), or cannot be read; a file may be code, "
        "which would run as Triton's user; put it into the model repository, or have the operator set "
        "triton.load_files",
    )


class NoSlot(Problem):
    """A request gets no slot of its model now; says when it might."""

    def __init__(self, code: str, detail: str, estimate: QueueEstimate) -> None:
        eta = None if estimate.eta_seconds is None else round(estimate.eta_seconds, 3)
        self.facts: Mapping[str, float | None] = {
            "queue_position": estimate.position,
            "queue_eta_seconds": eta,
        }
        headers = {"x-queue-position": str(estimate.position), "Retry-After": str(max(1, ceil(eta or 0)))}
        if eta is not None:
            headers["x-queue-eta-seconds"] = str(eta)
        super().__init__(code, detail, headers=headers)


def queue_full(full: LaneFull, tenant: str) -> NoSlot:
    if full.is_share:
        return NoSlot(
            "model-queue-share",
            f'tenant "{tenant}" has all the waiting places it may have at this model; send fewer at once, or '
            "have the operator raise triton.waiting or triton.tenant_share",
            full.estimate,
        )
    return NoSlot(
        "model-queue-full",
        "all waiting places of this model are taken by requests of equal or higher priority; send it again "
        "later, or have the operator raise triton.waiting",
        full.estimate,
    )


def displaced(estimate: QueueEstimate) -> NoSlot:
    return NoSlot(
        "model-queue-full",
        "all waiting places of this model are taken, and a request of higher priority, or of a tenant "
        "within its share, took the place of this one, of which nothing was sent; send it again later",
        estimate,
    )


def queue_timeout(estimate: QueueEstimate, seconds: float) -> NoSlot:
    return NoSlot(
        "model-queue-timeout",
        f"the request waited {seconds:.1f} s for a slot of this model, as long as it may, and nothing was "
        "sent; send it again later, or allow more with x-timeout-seconds, up to the operator's "
        "triton.queue_seconds",
        estimate,
    )


def bad_header(name: str, found: str, remedy: str) -> Problem:
    return Problem("header-invalid", f'the header {name} is "{found[:40]}"; {remedy}')


def our_mistake(request_id: str) -> Problem:
    return Problem("internal-error", f"the service made a mistake; its log has more under {request_id}")


def rendered(problem: Problem, request_id: str) -> tuple[int, list[Header], bytes]:
    """Status, headers and body."""
    kind = problem.kind
    body = to_json(
        {
            "error": problem.detail,
            "code": problem.code,
            "request_id": request_id,
            "retryable": kind.retryable,
            **(problem.facts if isinstance(problem, NoSlot) else {}),
        }
    )
    headers = {"Content-Type": "application/json", **headers_of(problem)}
    return kind.status, [(name.encode(), value.encode()) for name, value in headers.items()], body


_UNKNOWN_MODEL: Final = "Request for unknown model: "
_DEAD: Final = "is not healthy"


def says_unknown_model(message: str) -> bool:
    """Whether Triton says that it does not have the model; it may have other versions of it and say so."""
    lacks_version = " version " in message and message.endswith(" is not found")
    return message.startswith(_UNKNOWN_MODEL) and not lacks_version


def says_dead(message: str) -> bool:
    """Whether Triton says that the model's process is gone. It calls such a model ready all the same."""
    return _DEAD in message
