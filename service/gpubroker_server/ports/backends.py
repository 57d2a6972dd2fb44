"""The port of the data plane to the model servers: bytes in, bytes out, with back pressure both ways."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Final, NamedTuple, Protocol

Header = tuple[bytes, bytes]


class RequestHead(NamedTuple):
    """The parts of a request's head that are passed on. The backend adds what concerns its own connection:
    Host, the length of the body, and credentials."""

    method: bytes
    target: bytes
    """Path and query as they came, still encoded."""
    headers: Sequence[Header]
    body_bytes: int | None
    """The length of the body; None if it is not known before its end."""


class Trouble(StrEnum):
    """Reasons why a request has no answer, or only a part of one."""

    UNREACHABLE = "unreachable"
    """Nothing was sent: the very same request may be sent again."""
    BROKEN = "broken"
    """The connection was lost, or what came over it is no answer. The request may have been carried out."""
    SILENT = "silent"
    """The server sent nothing for longer than it may take. The request may have been carried out."""
    BUSY = "busy"
    """Too many requests already wait for a connection; nothing was sent."""
    TOO_LARGE = "too_large"
    """The head is longer than the server takes; nothing was sent."""
    UNAUTHORIZED = "unauthorized"
    """The server does not accept the service's own credentials; it did nothing."""


UNAUTHORIZED_STATUSES: Final = frozenset({401, 403, 407})
"""HTTP statuses with which a server refuses the service's own credentials, not the client's."""


class ResponseHandler(Protocol):
    """The request as the backend sees it. The backend reports head and end once each, or the trouble instead.

    All methods are called on the event loop's thread, and never before `ModelBackend.ask` has returned.
    """

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        """Report the head, with the headers as they came, without those that only concern the connection.
        `body_bytes` is None if the length is not known before the end."""

    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        """Report that nothing more comes."""

    def on_pause(self) -> None:
        """Report that nothing more has come for now, so that the client gets what has come."""
        return

    def pause_body(self) -> None:
        """Have the request write nothing for now: the server takes no more."""
        return

    def resume_body(self) -> None:
        return


class UpstreamRequest(Protocol):
    """One request on its way to a server."""

    def write(self, data: bytes) -> None:
        """Take the next bytes of the body. `flush` or `end` sends them, with the head or as one chunk. Bytes
        are also taken, and kept, while the body is paused."""

    def end(self) -> None:
        """Note that the body is complete, and send the rest of it."""

    def cancel(self) -> None:
        """Give up the answer. The connection is closed, which tells the server, and the handler is not called
        any more. Does nothing after the end."""

    def flush(self) -> None:
        return

    def pause_answer(self) -> None:
        """Read nothing more for now: the client takes no more."""
        return

    def resume_answer(self) -> None:
        return


class Fetched(NamedTuple):
    status: int
    headers: Sequence[Header]
    body: bytes


class NotFetched(Exception):
    def __init__(self, trouble: Trouble, detail: str) -> None:
        super().__init__(detail)
        self.trouble = trouble


class ModelBackend(Protocol):
    """One model server over HTTP."""

    @property
    def name(self) -> str: ...

    def ask(self, head: RequestHead, handler: ResponseHandler, *, is_check: bool = False) -> UpstreamRequest:
        """Begin a request to the server. `is_check`: True if it must not wait behind other requests for a
        connection."""

    async def fetch(
        self, head: RequestHead, body: bytes = b"", within_seconds: float = 10.0, *, is_check: bool = False
    ) -> Fetched:
        """Send a request of the service itself, over the same connections as clients' requests, and return
        the whole answer. Raises NotFetched."""

    async def close(self) -> None:
        """Close all connections. Requests on them end with a Trouble."""


Metadata = Sequence[tuple[str, str | bytes]]
"""The metadata of a call over gRPC: names in lowercase; those that end in `-bin` have bytes."""


class CallFailed(Exception):
    """Raised by a call that has failed. `detail` and `metadata` come from the server or from the library, as
    a client of the server would see them."""

    def __init__(
        self, code: int, detail: str, metadata: Metadata, trouble: Trouble | None = None, server: str = ""
    ) -> None:
        super().__init__(detail)
        self.server = server
        """The name of the server that was called."""
        self.code = code
        """The status code, as gRPC numbers it."""
        self.detail = detail
        self.metadata = metadata
        """The trailing metadata."""
        self.trouble = trouble
        """The trouble with the connection; None if the server itself has answered."""


class CallReply(NamedTuple):
    message: bytes
    first: Metadata
    last: Metadata


class CallStream(Protocol):
    """A stream of messages in both directions, until both sides have ended it. Each method may be
    cancelled."""

    async def write(self, message: bytes) -> None:
        """Write a message, and return once the server can take it."""

    async def end(self) -> None:
        """Tell the server that no more messages follow. The server may still answer."""

    async def first(self) -> Metadata: ...

    async def read(self) -> bytes | None:
        """Return the next message; None after the last one. Raises CallFailed."""

    async def last(self) -> Metadata: ...

    def cancel(self) -> None:
        """Give up the rest of the stream. Does nothing after the end."""


class CallBackend(Protocol):
    """One model server over gRPC. Messages pass as bytes."""

    @property
    def name(self) -> str: ...

    async def ask(self, method: str, message: bytes, metadata: Metadata, seconds: float | None) -> CallReply:
        """Send one message and return its answer, within `seconds`. Raises CallFailed."""

    def open(self, method: str, metadata: Metadata, seconds: float | None) -> CallStream: ...

    async def close(self) -> None: ...
