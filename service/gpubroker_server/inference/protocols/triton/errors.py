"""Errors in Triton's form. The service writes its own errors as Triton's clients read them, and recognizes
the errors of Triton that it acts upon."""

from typing import Final

from pydantic_core import to_json

from gpubroker_server.http.problems import Problem, headers_of
from gpubroker_server.inference.refusals import NoSlot
from gpubroker_server.ports.backends import Header


def no_shared_memory() -> Problem:
    """Return the error that Triton itself gives without shared memory, which clients know."""
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


def rendered(problem: Problem, request_id: str) -> tuple[int, list[Header], bytes]:
    """Return the status, the headers and the body of the answer."""
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
ERROR_EVENT: Final = b'data: {"error":'
"""The beginning of an event with which `generate_stream` reports an error. An answer that has begun keeps its
status 200."""


def says_unknown_model(message: str) -> bool:
    """Return True if Triton says that it does not have the model. A message that only the version is missing
    does not count, because then Triton has the model."""
    lacks_version = " version " in message and message.endswith(" is not found")
    return message.startswith(_UNKNOWN_MODEL) and not lacks_version


def says_dead(message: str) -> bool:
    """Return True if Triton says that the model's process is gone. Triton still calls such a model ready."""
    return _DEAD in message
