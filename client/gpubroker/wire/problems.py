"""Errors of the API: RFC 9457 problem details."""

from typing import Annotated

from msgspec import Meta

from gpubroker.wire.answered import Answered


class Fault(Answered, frozen=True):
    """A fault of a request."""

    pointer: Annotated[
        str,
        Meta(
            description="RFC 6901 pointer into the body (`/resources/gpu_mb`, empty: the whole body), or "
            "`query:NAME`, `header:NAME`."
        ),
    ]
    detail: str
    code: str


class ProblemPage(Answered, frozen=True):
    """What a code of problems means, and what to do."""

    code: str
    status: int
    title: str
    retryable: bool
    text: Annotated[str, Meta(description="Markdown.")]


class ProblemDocument(Answered, frozen=True):
    """RFC 9457 problem details. `code` is stable, `detail` is for people."""

    type: Annotated[str, Meta(description="The path of the page about the code, which needs no token.")]
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    retryable: bool
    errors: tuple[Fault, ...]
