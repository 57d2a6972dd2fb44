"""What all connections of the data plane share, and the decision what becomes of one request.

Everything that says whether, when and where a request goes is here.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from service.gateway.callers import Callers
from service.gateway.ids import Ids
from service.gateway.inference.aims import Aim
from service.gateway.problems import Problem
from service.model_ports import Answer, Asking, Header, ModelBackend, RequestHead

_TO_US = frozenset(
    {
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
"""Headers that concern the client's connection, or are for us. All others are passed on as they came."""

_PLAIN_CONNECTIONS = frozenset({b"", b"close", b"keep-alive"})


class OnRequest(Protocol):
    def __call__(self, method: str, route: str, status: int, seconds: float) -> None: ...


class Told(NamedTuple):
    """A request's headers, sorted by whom they are for."""

    to_us: Mapping[bytes, bytes]
    """By lowercase name."""
    passed_on: Sequence[Header]
    body_bytes: int | None
    """None: it comes in chunks, and nobody knows before its end. The parser has seen to the text."""


def sorted_out(headers: Sequence[Header]) -> Told:
    to_us: dict[bytes, bytes] = {}
    passed_on: list[Header] = []
    for header in headers:
        name = header[0].lower()
        if name in _TO_US:
            to_us[name] = header[1]
        else:
            passed_on.append(header)
    named = to_us.get(b"connection", b"").lower()
    if named not in _PLAIN_CONNECTIONS:
        dropped = {word.strip() for word in named.split(b",")}
        passed_on = [header for header in passed_on if header[0].lower() not in dropped]
    if b"transfer-encoding" in to_us:
        return Told(to_us, passed_on, None)
    return Told(to_us, passed_on, int(to_us.get(b"content-length", b"0")))


class Plane:
    def __init__(
        self,
        *,
        callers: Callers,
        ids: Ids,
        on_request: OnRequest,
        backend: ModelBackend,
        most_body_bytes: int,
    ) -> None:
        self.ids = ids
        self.on_request = on_request
        self.backend = backend
        self.most_body_bytes = most_body_bytes
        self._callers = callers

    def check(self, aim: Aim, told: Told) -> None:
        """Whoever asks may ask this. Raises Problem."""
        self._callers.check_host(told.to_us.get(b"host", b""))
        if aim.scope is not None:
            identity = self._callers.identify(told.to_us.get(b"authorization"))
            if not identity.may(aim.scope):
                raise Problem(
                    "forbidden",
                    f'token "{identity.name}" lacks the scope {aim.scope}, which {aim.route} needs; '
                    "ask an admin for a token that has it",
                )
        if aim.shares_memory:
            raise Problem("shared-memory-disabled", _NO_SHARED_MEMORY)
        if told.to_us.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise Problem("unsupported-media-type", "the only Transfer-Encoding that is read is chunked")
        if told.body_bytes is not None:
            self.check_size(told.body_bytes)

    def check_size(self, body_bytes: int) -> None:
        """Raises Problem."""
        if body_bytes > self.most_body_bytes:
            raise Problem(
                "payload-too-large",
                f"a request to a model may have {self.most_body_bytes} bytes and this one has "
                f"{body_bytes} or more; send less at once, or raise triton.body_bytes",
            )

    def send(self, head: RequestHead, answer: Answer) -> Asking:
        """All models are asked at the one server that there is, at once."""
        return self.backend.ask(head, answer)


_NO_SHARED_MEMORY = (
    "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
)
"""Triton's own words, which clients know."""
