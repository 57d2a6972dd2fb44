"""The head of a request over HTTP under /v2: its meaning, and the check of its client's rights."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpubroker_server.http.identity import Identity
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.operation import Target
from gpubroker_server.inference.plane import IDEMPOTENT, QUEUE_HEADERS, Plane
from gpubroker_server.inference.protocols.triton.errors import no_shared_memory
from gpubroker_server.inference.protocols.triton.loads import check_size
from gpubroker_server.inference.protocols.triton.operations import TritonOperation, http_target
from gpubroker_server.inference.protocols.triton_http.inflation import ENCODINGS, bad_encoding, inflating
from gpubroker_server.ports.backends import Header, RequestHead

_TO_US: Final = frozenset(
    {
        *(name.encode() for name in (IDEMPOTENT, *QUEUE_HEADERS)),
        b"authorization",
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that are for the client's connection or for the service. All others are passed on as they came."""

_PLAIN_CONNECTIONS: Final = frozenset({b"", b"close", b"keep-alive"})
"""Values of the header Connection that name no other header. Headers that Connection names belong to the
connection and are not passed on (RFC 9110, 7.6.1)."""


class ClientHead(NamedTuple):
    """The head of a request over HTTP, with its meaning. Clients send equal heads again and again, so
    everything that depends on the head alone is computed once."""

    target: Target
    passed_on: RequestHead
    to_us: Mapping[bytes, bytes]
    """Headers for the service and for the client's connection, by lowercase name."""
    queue: tuple[str | None, ...]
    """The values of QUEUE_HEADERS, in that order."""
    idempotent: bytes | None
    """The value of the header IDEMPOTENT."""
    expects_continue: bool
    encoding: bytes
    """The encoding of the body if Triton might inflate it; empty otherwise."""
    shares_memory: bool
    """True if the client wants Triton to read the client's memory."""

    @property
    def body_bytes(self) -> int | None:
        """The length of the body; None if the body comes in chunks."""
        return self.passed_on.body_bytes


def client_head(method: bytes, path: bytes, headers: Sequence[Header]) -> ClientHead:
    to_us: dict[bytes, bytes] = {}
    passed_on: list[Header] = []
    encodings: list[bytes] = []
    for header in headers:
        name = header[0].lower()
        if name == b"content-encoding":
            encodings.append(header[1].strip().lower())
        if name in _TO_US:
            to_us[name] = header[1]
        else:
            passed_on.append(header)
    named = to_us.get(b"connection", b"").lower()
    if named not in _PLAIN_CONNECTIONS:
        dropped = {word.strip() for word in named.split(b",")}
        passed_on = [header for header in passed_on if header[0].lower() not in dropped]
    is_chunked = b"transfer-encoding" in to_us
    # The parser has checked that the length is a number.
    length = None if is_chunked else int(to_us.get(b"content-length", b"0"))
    queue = [to_us.get(name.encode()) for name in QUEUE_HEADERS]
    target = http_target(method, path)
    return ClientHead(
        target,
        RequestHead(method, path, passed_on, length),
        to_us,
        queue=tuple(None if value is None else value.decode("latin-1").strip() for value in queue),
        idempotent=to_us.get(IDEMPOTENT.encode()),
        expects_continue=to_us.get(b"expect", b"").lower() == b"100-continue",
        encoding=inflating(encodings) if encodings else b"",
        shares_memory=isinstance(target.operation, TritonOperation) and target.operation.shares_memory,
    )


def identified(plane: Plane, head: ClientHead) -> Identity | None:
    """Return the identity of the request's token; None where the operation needs no token. Raises Problem if
    the request is refused."""
    identity, operation = None, head.target.operation
    plane.callers.check_host(head.to_us.get(b"host", b""))
    if operation.scope is not None:
        authorization = head.to_us.get(b"authorization")
        identity = plane.authorize(operation.scope, operation.name, authorization)
    if head.shares_memory:
        raise no_shared_memory()
    if head.to_us.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
        raise Problem("unsupported-media-type", "the only Transfer-Encoding that is read is chunked")
    if head.encoding and head.encoding not in ENCODINGS:
        raise bad_encoding(head.encoding)
    if head.body_bytes is not None:
        check_size(plane, operation, head.body_bytes)
    return identity
