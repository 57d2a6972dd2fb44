"""Sends answers, either through ASGI or with one write to the connection."""

from collections.abc import Mapping, Sequence
from typing import Final

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

JSON: Final = "application/json"
_JSON_HEADERS: Final = b"content-type: application/json\r\ncontent-length: %d\r\n%brequest-id: %b\r\n\r\n"
_COPIED_BYTES: Final = 64 * 1024
"""The longest body that is copied behind its head for one write. A longer body is sent through ASGI."""

Headers = Sequence[tuple[bytes, bytes]]


class ClientStalled(ClientDisconnect):
    """Raised in an answer whose client takes nothing. The connection is then closed at once: the rest of the
    answer would keep its memory for as long as the client likes."""


class Answering:
    """The `send` of an ASGI application. It adds the id of the request to the headers, records the status,
    and puts the prefix that a proxy has removed before the path in a Location header."""

    __slots__ = ("_prefix", "_request_id", "_send", "status")

    def __init__(self, send: Send, request_id: str, prefix: str = "") -> None:
        self._send = send
        self._prefix = prefix.encode()
        self._request_id = request_id.encode()
        self.status = 0
        """The status of the answer; 0 until it has begun."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = message["headers"]
            if self._prefix:
                headers = [(name, self._placed(name, value)) for name, value in headers]
            message["headers"] = [*headers, (b"request-id", self._request_id)]
        await self._send(message)

    def _placed(self, name: bytes, value: bytes) -> bytes:
        is_place = name.lower() == b"location" and value.startswith(b"/")
        return self._prefix + value if is_place else value

    def abort(self) -> bool:
        """Close the connection at once, and drop what the client has not taken of the answer. Return False if
        there is no connection of uvicorn."""
        cycle = getattr(self._send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle):
            return False
        cycle.transport.abort()
        return True

    def write_json(self, status: int, text: bytes, headers: Mapping[str, str] | None) -> bool:
        """Write the whole answer at once, and return True, or return False if that is not possible.

        uvicorn checks and writes header by header in two coroutines, which was a tenth of the time of an
        accepted task. One write has the same result if the client is connected, takes the answer now, and
        keeps its connection.
        """
        cycle = getattr(self._send, "__self__", None)
        if (
            self._prefix
            or type(cycle) is not RequestResponseCycle
            or cycle.response_started
            or cycle.disconnected
            or cycle.flow.write_paused
            or not cycle.keep_alive
            or cycle.scope["method"] == "HEAD"
            or len(text) > _COPIED_BYTES
        ):
            return False
        more = b""
        if headers:
            if not "".join(headers.values()).isprintable():
                return False  # uvicorn raises the error for such a header.
            more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode("latin-1")
        self.status = status
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        about = _JSON_HEADERS % (len(text), more, self._request_id)
        cycle.transport.write(
            b"".join((STATUS_LINE[status], _default_headers.text_of(cycle.default_headers), about, text))
        )
        cycle.message_event.set()
        cycle.on_response()
        return True


class JsonAnswer(Response):
    """An answer that is JSON text."""

    def __init__(self, text: bytes, status: int, headers: Mapping[str, str] | None) -> None:
        # Starlette's `__init__` is not called: it makes headers that `write_json` does not need.
        self.body = text
        self.status_code = status
        self.media_type = JSON
        self.background = None
        self._headers_given = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(send, Answering) and send.write_json(
            self.status_code, bytes(self.body), self._headers_given
        ):
            return
        self.init_headers(self._headers_given)
        await super().__call__(scope, receive, send)


class _DefaultHeaders:
    """Caches the text of the headers that every answer has. uvicorn makes a new list of them every second."""

    def __init__(self) -> None:
        self._known: Headers = []
        self._text = b""

    def text_of(self, headers: Headers) -> bytes:
        if headers is not self._known:
            self._text = b"".join([b"%b: %b\r\n" % header for header in headers])
            self._known = headers
        return self._text


_default_headers = _DefaultHeaders()
