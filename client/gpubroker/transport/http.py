"""Carry out steps over httpx: a Call becomes a request, its response an Answer, a lost connection
Unreachable."""

import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.request import getproxies

import httpx

from gpubroker.errors import BrokerError, Unreachable
from gpubroker.transport.connection import LOOPBACK, Connection, find_service
from gpubroker.transport.exchange import Answer, Call, Pause, Steps, error_of
from gpubroker.transport.faults import check_scheme, trusted_certificates, unreachable
from gpubroker.transport.operations import AsyncCaller, Listed, Reading, SyncCaller

T = TypeVar("T")

_CONNECT_SECONDS = 5.0
_EVENT = b"data:"
"""The prefix with which Triton writes the refusal of a stream, as an event."""
_LOOK_SECONDS = 0.2


class SyncHttp(SyncCaller):
    """One pooled connection to the service, shared by threads."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.connection: Connection = find_service(url, token)
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self.is_direct = transport is None
        self._http = httpx.Client(transport=transport, **_client_settings(self.connection))

    def __repr__(self) -> str:
        return _named(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step)
                except BrokerError as fault:
                    step = steps.throw(fault)
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    def _perform(self, step: Call | Pause) -> Answer | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        _check_open(self._http)
        try:
            response = self._http.request(**_request_of(step, self._timeout_seconds))
        except httpx.TransportError as error:
            raise unreachable(self.connection, error) from error
        check_scheme(self.connection, response)
        return _answer_of(response)

    def _items(self, listed: Listed[T]) -> Iterator[T]:
        if isinstance(listed, Reading):
            while (call := self._carry_out(listed.next_call())) is not None:
                yield from self._read_on(listed, call)
            return
        try:
            cursor: str | None = None
            while True:
                page = self._carry_out(listed.fetch(cursor))
                yield from page.items
                cursor = page.next_cursor
                if cursor is None:
                    return
        except BaseException as fault:
            if listed.leave is not None and not isinstance(fault, Unreachable):
                with suppress(BrokerError):  # the fault that ended the iteration says more
                    self._carry_out(listed.leave())
            raise

    def _read_on(self, reading: Reading[T], call: Call) -> Iterator[T]:
        _check_open(self._http)
        fault: Unreachable | None = None
        try:
            with self._http.stream(**_request_of(call, self._timeout_seconds)) as response:
                if response.is_error:
                    response.read()
                    reading.refused(error_of(_answer_of(response, _EVENT)))
                    return
                for data in response.iter_bytes():
                    yield from reading.take(data)
        except httpx.TransportError as error:
            fault = unreachable(self.connection, error)
        yield from reading.end(fault)


class AsyncHttp(AsyncCaller):
    """One pooled connection to the service for asyncio, with the methods of `SyncHttp`."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_seconds: float = 30.0,
        retry_seconds: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.connection: Connection = find_service(url, token)
        self._timeout_seconds = timeout_seconds
        self._retry_seconds = retry_seconds
        self._http = httpx.AsyncClient(transport=transport, **_client_settings(self.connection))

    def __repr__(self) -> str:
        return _named(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _carry_out(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._perform(step)
                except BrokerError as fault:
                    step = steps.throw(fault)
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    async def _perform(self, step: Call | Pause) -> Answer | None:
        if isinstance(step, Pause):
            from asyncio import sleep  # this import takes 30 ms, which programs without asyncio save

            await sleep(step.seconds)
            return None
        _check_open(self._http)
        try:
            request = _request_of(step, self._timeout_seconds)
            if isinstance(request["content"], Iterator):
                request["content"] = _in_a_thread(request["content"])
            response = await self._http.request(**request)
        except httpx.TransportError as error:
            raise await _looked_at(self.connection, error) from error
        check_scheme(self.connection, response)
        return _answer_of(response)

    async def _items(self, listed: Listed[T]) -> AsyncIterator[T]:
        if isinstance(listed, Reading):
            while (call := await self._carry_out(listed.next_call())) is not None:
                async for line in self._read_on(listed, call):
                    yield line
            return
        try:
            cursor: str | None = None
            while True:
                page = await self._carry_out(listed.fetch(cursor))
                for item in page.items:
                    yield item
                cursor = page.next_cursor
                if cursor is None:
                    return
        except BaseException as fault:
            if listed.leave is not None and not isinstance(fault, Unreachable):
                with suppress(BrokerError):
                    await self._carry_out(listed.leave())
            raise

    async def _read_on(self, reading: Reading[T], call: Call) -> AsyncIterator[T]:
        _check_open(self._http)
        fault: Unreachable | None = None
        try:
            async with self._http.stream(**_request_of(call, self._timeout_seconds)) as response:
                if response.is_error:
                    await response.aread()
                    reading.refused(error_of(_answer_of(response, _EVENT)))
                    return
                async for data in response.aiter_bytes():
                    for item in reading.take(data):
                        yield item
        except httpx.TransportError as error:
            fault = await _looked_at(self.connection, error)
        for each in reading.end(fault):
            yield each


def _named(broker: SyncHttp | AsyncHttp) -> str:
    """Return the broker's class and address, without a user name and password that the address may
    contain."""
    url = httpx.URL(broker.connection.url).copy_with(username=None, password=None)
    return f"<{type(broker).__name__} {url}>"


def _client_settings(connection: Connection) -> dict[str, Any]:
    headers = {"Accept": "application/json", "User-Agent": "gpubroker-python"}
    if connection.token is not None:
        headers["Authorization"] = f"Bearer {connection.token}"
    url = httpx.URL(connection.url)
    return {
        "base_url": connection.url,
        "headers": headers,
        # A proxy named in the environment cannot reach a service on this machine's own loopback address.
        "trust_env": url.host not in LOOPBACK,
        # Loading the certificate authorities takes 25 ms, and only https needs them.
        "verify": trusted_certificates() if url.scheme == "https" else False,
    }


def _request_of(call: Call, timeout_seconds: float) -> dict[str, Any]:
    headers, body = dict(call.headers), call.body
    if body is not None:
        headers.setdefault("Content-Type", "application/json")
    if not isinstance(body, bytes | None):
        headers["Content-Length"] = str(body.size_bytes)
    return {
        "method": call.method,
        "url": call.path,
        "params": call.params or None,
        "content": body if isinstance(body, bytes | None) else body.parts(),
        "headers": headers,
        "timeout": httpx.Timeout(timeout_seconds + call.patience_seconds, connect=_CONNECT_SECONDS),
    }


async def _looked_at(connection: Connection, error: httpx.TransportError) -> Unreachable:
    """Return the explanation of a failed connection, found in a thread because it may take a second."""
    from asyncio import to_thread

    return await to_thread(unreachable, connection, error)


async def _in_a_thread(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts, each read in a thread, since reading a file may block."""
    from asyncio import to_thread

    while (part := await to_thread(next, parts, None)) is not None:
        yield part


def _answer_of(response: httpx.Response, prefix: bytes = b"") -> Answer:
    """Return the Answer for a response. `prefix` are bytes that may stand before its content."""
    return Answer(
        response.status_code,
        {name.lower(): text for name, text in response.headers.items()},
        response.content.removeprefix(prefix),
    )


def check_listening(http: SyncHttp) -> None:
    """Check that the address accepts connections at all. Raises Unreachable if it refuses them. An address
    that is reached through a proxy, or by a custom transport, is not checked."""
    connection = http.connection
    url = httpx.URL(connection.url)
    if http.is_direct and (url.host in LOOPBACK or not getproxies()):
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.host, port), timeout=_LOOK_SECONDS).close()
        except ConnectionRefusedError as error:
            raise unreachable(connection, error) from error
        except OSError:
            pass  # the following request explains the fault better


def _check_open(http: httpx.Client | httpx.AsyncClient) -> None:
    if http.is_closed:
        raise BrokerError("this Broker is closed; create another one", code="closed")
