"""An answer written with one write reads as one that goes through ASGI."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from gpubroker_server.http.answering import Answering, JsonAnswer
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from tests.patience import PATIENCE_SECONDS

HEADERS = {"Location": "/tasks/task_1", "Idempotency-Replayed": "true"}
PLAIN = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
HEAD = b"HEAD / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Watched(Answering):
    sent: list[str]

    async def __call__(self, message: Message) -> None:
        self.sent.append(message["type"])
        await super().__call__(message)


class Answers:
    """An application whose every answer has this text and these headers, and what it has sent by ASGI."""

    def __init__(self, text: bytes, headers: dict[str, str] | None = None) -> None:
        self._text = text
        self._headers = HEADERS if headers is None else headers
        self.by_asgi: list[str] = []
        self.statuses: list[int] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = Watched(send, "req_1")
        answering.sent = self.by_asgi
        await JsonAnswer(self._text, 202, self._headers)(scope, receive, answering)
        self.statuses.append(answering.status)


@asynccontextmanager
async def served(app: Answers) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(app, http="httptools", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    state.default_headers = [(b"date", b"Thu, 01 Jan 2026 00:00:00 GMT")]
    make: Any = config.http_protocol_class
    loop = asyncio.get_running_loop()
    door = await loop.create_server(
        lambda: make(config=config, server_state=state, app_state={}), "127.0.0.1"
    )
    reader, writer = await asyncio.open_connection(*door.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        door.close()


async def asked(app: Answers, *requests: bytes) -> bytes:
    """All that comes until the connection is closed."""
    async with served(app) as (reader, writer), asyncio.timeout(PATIENCE_SECONDS):
        writer.write(b"".join(requests))
        return await reader.read()


def parts_of(answer: bytes) -> tuple[bytes, list[bytes], bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *headers = head.split(b"\r\n")
    return status, sorted(header.lower() for header in headers), body


@pytest.mark.parametrize("size", [0, 10, 100_000])
async def test_an_answer_is_the_same_by_both_ways(size: int) -> None:
    app = Answers(b"x" * size)
    both = await asked(app, PLAIN, LAST)
    first, second = both[: both.index(b"HTTP/1.1", 1)], both[both.index(b"HTTP/1.1", 1) :]
    of_last = parts_of(second)
    assert parts_of(first) == (
        of_last[0],
        [it for it in of_last[1] if it != b"connection: close"],
        of_last[2],
    )
    assert b"request-id: req_1" in of_last[1]
    assert of_last[2] == b"x" * size
    assert app.statuses == [202, 202]
    assert len(app.by_asgi) == (2 if size < 100_000 else 4)


async def test_the_head_alone_has_the_length_of_the_body() -> None:
    status, headers, body = parts_of(await asked(Answers(b"{}"), HEAD))
    assert (status, body) == (b"HTTP/1.1 202 Accepted", b"")
    assert b"content-length: 2" in headers


async def test_requests_in_a_row_are_answered_in_a_row() -> None:
    app = Answers(b"{}")
    found = await asked(app, *[PLAIN] * 20, LAST)
    assert found.count(b"HTTP/1.1 202 Accepted") == 21
    assert app.statuses == [202] * 21


async def test_a_header_that_would_end_the_head_is_refused() -> None:
    app = Answers(b"{}", {"Location": "/a\r\nSet-Cookie: b"})
    found = await asked(app, PLAIN)
    assert b"Set-Cookie" not in found
