"""Refusals of requests to models, as problems. Each protocol writes them in the form that its clients
read."""

from collections.abc import Mapping
from math import ceil

from gpubroker_server.core.serving.lane import LaneFull, QueueEstimate
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.backends import Trouble

_CODES = {
    Trouble.UNREACHABLE: "model-server-unavailable",
    Trouble.BUSY: "model-server-busy",
    Trouble.BROKEN: "model-server-failed",
    Trouble.SILENT: "model-server-silent",
    Trouble.TOO_LARGE: "headers-too-large",
    Trouble.UNAUTHORIZED: "model-server-unauthorized",
}

_WORDS = {
    Trouble.UNREACHABLE: "model server {server} cannot be reached and was sent nothing: {detail}; try again",
    Trouble.BUSY: "model server {server} is busy and nothing was sent: {detail}; send it again later",
    Trouble.BROKEN: "model server {server} broke off and may have done it: {detail}",
    Trouble.SILENT: "model server {server} gave no answer and may still do it: {detail}",
    Trouble.TOO_LARGE: "{detail}; send fewer or shorter headers",
    Trouble.UNAUTHORIZED: (
        "model server {server} does not accept the service's own credentials ({detail}); the operator sets "
        "them with token_file or headers of triton.servers"
    ),
}


def problem_of(trouble: Trouble, server: str, detail: str) -> Problem:
    return Problem(_CODES[trouble], _WORDS[trouble].format(server=server, detail=detail))


def body_too_large(most: str, body_bytes: int, remedy: str) -> Problem:
    return Problem("payload-too-large", f"{most} and this one has {body_bytes} or more; {remedy}")


class NoSlot(Problem):
    """The problem of a request that gets no slot of its model now. It says when the request might get one."""

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
