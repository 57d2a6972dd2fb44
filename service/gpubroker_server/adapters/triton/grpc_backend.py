"""A model server over gRPC, with one channel. The messages of calls are passed on as bytes."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

import grpc
from msgspec import Struct

from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.ports.backends import CallBackend, CallFailed, CallReply, CallStream, Metadata, Trouble


class TritonRpcServer(Struct, frozen=True):
    """The address of a server over gRPC, and how to connect to it."""

    name: str
    address: str
    """The `host:port` of the server."""
    metadata: Metadata = ()
    """The credentials, which only this server receives. They replace metadata of the client with equal
    names."""
    roots: bytes | None = None
    """The trusted certificates; None for a connection without TLS."""
    key: bytes | None = None
    chain: bytes | None = None
    """The certificates that the server gets if it asks for them. `key` is their private key."""
    connect_seconds: Seconds = Seconds(5.0)
    silence_seconds: Seconds = Seconds(300.0)


class RpcBackend(CallBackend):
    """Calls a server over gRPC. No call is sent twice, because the library's own retries are off."""

    def __init__(self, server: TritonRpcServer) -> None:
        self._server = server
        self._replaced = {name for name, _ in server.metadata}
        self._channel: grpc.aio.Channel | None = None
        self._asked: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}

    @property
    def name(self) -> str:
        return self._server.name

    async def ask(self, method: str, message: bytes, metadata: Metadata, seconds: float | None) -> CallReply:
        ask = self._asked.get(method) or self._asked.setdefault(method, self._open().unary_unary(method))
        most_seconds = self._server.silence_seconds
        is_ours = seconds is None or seconds > most_seconds
        call = ask(message, timeout=most_seconds if is_ours else seconds, metadata=self._with_own(metadata))
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error, is_ours) from None
        return CallReply(answer, await _first(call), await _last(call))

    def open(self, method: str, metadata: Metadata, seconds: float | None) -> CallStream:
        opened = self._open().stream_stream(method)(timeout=seconds, metadata=self._with_own(metadata))
        return _Stream(opened, self._failure)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        """Return the channel. The first call opens it, so that it belongs to the event loop that uses it."""
        if self._channel is None:
            server = self._server
            reconnect_ms = int(1000 * server.connect_seconds)
            options = (*_OPTIONS, ("grpc.min_reconnect_backoff_ms", reconnect_ms))
            if server.roots is None:
                self._channel = grpc.aio.insecure_channel(server.address, options)
            else:
                trust = grpc.ssl_channel_credentials(server.roots, server.key, server.chain)
                self._channel = grpc.aio.secure_channel(server.address, trust, options)
        return self._channel

    def _with_own(self, metadata: Metadata) -> Metadata:
        own = self._server.metadata
        if not own:
            return metadata
        return (*own, *(pair for pair in metadata if pair[0] not in self._replaced))

    def _failure(self, error: grpc.aio.AioRpcError, is_ours: bool = False) -> CallFailed:
        """Return the failure for an error. `is_ours` is True if the service set the deadline of the call,
        not the client."""
        code, detail = error.code(), error.details() or ""
        trouble = None
        if code is grpc.StatusCode.UNAVAILABLE and detail.startswith(_NOT_REACHED):
            trouble = Trouble.UNREACHABLE
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and is_ours:
            trouble, detail = Trouble.SILENT, f"nothing came for {self._server.silence_seconds:g} s"
        metadata: Any = error.trailing_metadata()
        return CallFailed(code.value[0], detail, tuple(metadata or ()), trouble, self.name)


_NOT_REACHED: Final = "failed to connect to all addresses"
"""The beginning of the library's message if it had no connection and sent nothing."""

_OVER: Final = (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError)

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class _Stream(CallStream):
    def __init__(
        self, call: grpc.aio.StreamStreamCall, failure: Callable[[grpc.aio.AioRpcError], CallFailed]
    ) -> None:
        self._call = call
        self._failure = failure
        self._answers = aiter(call)

    async def write(self, message: bytes) -> None:
        """Write a message. This has no effect on a call that is over; `read` raises the reason.

        On such a call, the library's own `write` would replace a server's status that has not arrived yet by
        an error of its own. So this calls the library's lower layer.
        """
        with contextlib.suppress(*_OVER):
            await self._call.wait_for_connection()
            await self._call._cython_call.send_serialized_message(message)

    async def end(self) -> None:
        with contextlib.suppress(*_OVER):
            await self._call.done_writing()

    async def first(self) -> Metadata:
        return await _first(self._call)

    async def read(self) -> bytes | None:
        try:
            return await anext(self._answers, None)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from None

    async def last(self) -> Metadata:
        return await _last(self._call)

    def cancel(self) -> None:
        self._call.cancel()


async def _first(call: grpc.aio.Call) -> Metadata:
    return tuple(await call.initial_metadata())


async def _last(call: grpc.aio.Call) -> Metadata:
    return tuple(await call.trailing_metadata())
