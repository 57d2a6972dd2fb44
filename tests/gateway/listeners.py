"""Readers of event streams, on the gateway's ASGI application: httpx's own transport gives an answer only
when it is whole."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode

from starlette.types import Message

from tests.gateway.harness import Client, Gateway, until
from tests.patience import PATIENCE_SECONDS


class Received(NamedTuple):
    """A message of a stream."""

    id: int | None
    event: str
    data: dict[str, Any]


class Listener:
    """An open stream. `bookmark` is the id that a client would send as `Last-Event-ID`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.bookmark: int | None = None
        self.beats = 0
        self.is_whole = False
        self.takes = asyncio.Event()
        self.takes.set()
        self.is_gone = asyncio.Event()
        self.is_answered = asyncio.Event()
        self._messages: asyncio.Queue[Received | None] = asyncio.Queue()
        self._has_asked = False
        self._unparsed = b""
        self.answer: asyncio.Task[None] | None = None

    async def receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.takes.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        self.body += message["body"]
        self._parse(message["body"])
        if not message.get("more_body", False):
            self.is_whole = True
            self._messages.put_nowait(None)
        self.is_answered.set()

    def _parse(self, data: bytes) -> None:
        *whole, self._unparsed = (self._unparsed + data).split(b"\n\n")
        for text in whole:
            lines = text.decode().split("\n")
            self.beats += sum(line.startswith(":") for line in lines)
            fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
            if "id" in fields:
                self.bookmark = int(fields["id"])
            if "data" in fields:
                id = int(fields["id"]) if "id" in fields else None
                self._messages.put_nowait(Received(id, fields["event"], json.loads(fields["data"])))

    async def next(self) -> Received:
        """Return the next message of the stream."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            message = await self._messages.get()
        assert message is not None, "the stream has ended"
        return message

    async def through(self, position: int) -> list[Received]:
        """Return the messages up to the event at this position, or all that came until the stream says that
        there is none."""
        messages: list[Received] = []
        await until(lambda: (self.bookmark or 0) >= position)
        while not self._messages.empty():
            message = self._messages.get_nowait()
            assert message is not None
            messages.append(message)
        return messages

    async def rest(self) -> list[Received]:
        """Return all messages to the end of the stream."""
        messages: list[Received] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (message := await self._messages.get()) is not None:
                messages.append(message)
        return messages

    async def ended(self) -> None:
        """Wait until the gateway has ended the stream, or given it up."""
        assert self.answer is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.wait([self.answer])


@asynccontextmanager
async def listening(
    gateway: Gateway,
    client: Client,
    path: str = "/events",
    *,
    resumes_at: int | None = None,
    **params: Any,
) -> AsyncIterator[Listener]:
    """Open a stream with the token of a client, and close it after the block."""
    listener = Listener()
    scope: Mapping[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(params).encode(),
        "root_path": "",
        "headers": [
            (b"host", b"127.0.0.1:8470"),
            (b"accept", b"text/event-stream"),
            (b"authorization", client.headers["authorization"].encode()),
            *([] if resumes_at is None else [(b"last-event-id", str(resumes_at).encode())]),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8470),
    }
    listener.answer = asyncio.create_task(gateway.app(dict(scope), listener.receive, listener.send))
    async with asyncio.timeout(PATIENCE_SECONDS):
        await listener.is_answered.wait()
    try:
        yield listener
    finally:
        listener.is_gone.set()
        listener.takes.set()
        await asyncio.wait([listener.answer])
