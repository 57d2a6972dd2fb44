"""What the data plane says itself, in Triton's form: clients of Triton look for `error`, ours for `code`."""

from pydantic_core import to_json

from service.gateway.problems import Problem, headers_of
from service.model_ports import Header, Trouble

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
        }
    )
    headers = {"Content-Type": "application/json", **headers_of(problem)}
    return kind.status, [(name.encode(), value.encode()) for name, value in headers.items()], body
