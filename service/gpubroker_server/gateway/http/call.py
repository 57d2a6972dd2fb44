"""One request as a route sees it, and the answer."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from gpubroker_server.gateway.http.faults import InvalidPart
from gpubroker_server.gateway.http.identity import Identity
from gpubroker_server.gateway.http.problems import Fault

V = TypeVar("V")

JSON = "application/json"
JSON_LENGTH = "Inference-Header-Content-Length"
"""The header of Triton's protocol that gives the length of the JSON if binary data follows it."""
_encode = msgspec.json.Encoder().encode
"""Floats that JSON cannot express become null."""


class Call(Request):
    async def body(self) -> bytes:
        """All of it. Most bodies come in one message, for which Starlette's own stream is slow."""
        if not hasattr(self, "_whole_body"):
            message = await self.receive()
            chunks = [message.get("body", b"")]
            while message.get("more_body", False):
                message = await self.receive()
                chunks.append(message.get("body", b""))
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._whole_body = b"".join(chunks)
        return self._whole_body

    @property
    def identity(self) -> Identity:
        """The sender. Do not read it in routes that need no token."""
        identity: Identity = self.scope["state"]["identity"]
        return identity

    def header(self, name: bytes) -> str | None:
        """`name` in lower case, as ASGI has it."""
        value: bytes | None = self.scope["state"]["headers"].get(name)
        return None if value is None else value.decode("latin-1")

    def json_length(self, body: bytes) -> int | None:
        """How many bytes of the body are JSON; None if all are. Raises InvalidPart."""
        given = self.header(JSON_LENGTH.lower().encode())
        if given is None:
            return None
        if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) <= len(body)):
            detail = f'"{given[:30]}" is not the length of the JSON in a body of {len(body)} bytes'
            raise InvalidPart([Fault(pointer=f"header:{JSON_LENGTH}", detail=detail, code="bad-header")])
        return int(given)

    async def binary_data(self) -> bytes:
        """What follows the JSON of a BinaryBody."""
        body = await self.body()
        length = self.json_length(body)
        return b"" if length is None else body[length:]


def answer(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None, *, member: bytes = b""
) -> Response:
    """A JSON answer. `content` is plain dicts and lists; `member` is one more member, as JSON text."""
    body = _encode(content)
    if member:
        body = b"".join((body[:-1], b",", member, b"}"))
    return json_answer(body, status, headers)


def json_answer(text: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer that is JSON text already."""
    return Response(text, status, headers, JSON)


def view_of(view: type[V], source: object) -> V:
    """The TypedDict `view`, each of whose fields is an attribute of the source."""
    return cast(V, {name: getattr(source, name) for name in view.__annotations__})
