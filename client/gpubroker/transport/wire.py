"""The seam to httpx: steps are carried out, with a Call as a request, a response as an Answer, and a broken
connection as Unreachable."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, TypeVar

import httpx

from gpubroker.errors import BrokerError, Unreachable
from gpubroker.tasks.task import Page
from gpubroker.transport.connection import Connection
from gpubroker.transport.exchange import Answer, Call, Pause, Steps

T = TypeVar("T")
AskPage = Callable[[str | None], Steps[Page[T]]]
"""For the page at a cursor."""

_CONNECT_SECONDS = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class Wire:
    """One pooled connection to a service."""

    def __init__(
        self, connection: Connection, timeout_seconds: float, transport: httpx.BaseTransport | None
    ) -> None:
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._http = httpx.Client(transport=transport, **_client_settings(connection))

    def close(self) -> None:
        self._http.close()

    def carry_out(self, steps: Steps[T]) -> T:
        answer: Answer | None = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(answer) if failure is None else steps.throw(failure)
            except StopIteration as done:
                result: T = done.value
                return result
            answer = failure = None
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                continue
            if self._http.is_closed:
                failure = _closed()
                continue
            try:
                answer = _answer_of(self._http.request(**_request_of(step, self._timeout_seconds)))
            except httpx.TransportError as error:
                failure = _unreachable(self._connection, error)

    def items(self, ask: AskPage[T]) -> Iterator[T]:
        """Of all pages, each fetched when it is needed."""
        cursor: str | None = None
        while True:
            page = self.carry_out(ask(cursor))
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return


class AsyncWire:
    """`Wire` for asyncio."""

    def __init__(
        self, connection: Connection, timeout_seconds: float, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._connection = connection
        self._timeout_seconds = timeout_seconds
        self._http = httpx.AsyncClient(transport=transport, **_client_settings(connection))

    async def close(self) -> None:
        await self._http.aclose()

    async def carry_out(self, steps: Steps[T]) -> T:
        answer: Answer | None = None
        failure: Exception | None = None
        while True:
            try:
                step = steps.send(answer) if failure is None else steps.throw(failure)
            except StopIteration as done:
                result: T = done.value
                return result
            answer = failure = None
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                continue
            if self._http.is_closed:
                failure = _closed()
                continue
            try:
                answer = _answer_of(await self._http.request(**_request_of(step, self._timeout_seconds)))
            except httpx.TransportError as error:
                failure = _unreachable(self._connection, error)

    async def items(self, ask: AskPage[T]) -> AsyncIterator[T]:
        cursor: str | None = None
        while True:
            page = await self.carry_out(ask(cursor))
            for item in page.items:
                yield item
            cursor = page.next_cursor
            if cursor is None:
                return


def _client_settings(connection: Connection) -> dict[str, Any]:
    headers = {"Accept": "application/json", "User-Agent": "gpubroker-python"}
    if connection.token is not None:
        headers["Authorization"] = f"Bearer {connection.token}"
    url = httpx.URL(connection.url)
    return {
        "base_url": connection.url,
        "headers": headers,
        # A proxy named in the environment cannot reach a service on this machine's own loopback address.
        "trust_env": url.host not in _LOOPBACK,
        # To read whom to trust takes 25 ms, and where nothing is encrypted nobody is asked.
        "verify": url.scheme == "https",
    }


def _request_of(call: Call, timeout_seconds: float) -> dict[str, Any]:
    headers = dict(call.headers)
    if call.body is not None:
        headers.setdefault("Content-Type", "application/json")
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params or None,
        "content": call.body,
        "headers": headers,
        "timeout": httpx.Timeout(timeout_seconds + call.patience_seconds, connect=_CONNECT_SECONDS),
    }


def _answer_of(response: httpx.Response) -> Answer:
    return Answer(
        response.status_code,
        {name.lower(): text for name, text in response.headers.items()},
        response.content,
    )


def _unreachable(connection: Connection, error: httpx.TransportError) -> Unreachable:
    what = str(error) or type(error).__name__
    return Unreachable(
        f"no answer from {connection.url} ({connection.source}): {what}; is the service running? "
        "`gpubroker serve` starts one here",
        code="unreachable",
    )


def _closed() -> BrokerError:
    return BrokerError("this Broker is closed, and asks nothing any more; make another one", code="closed")
