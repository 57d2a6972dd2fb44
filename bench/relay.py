"""The lower bounds of `bench proxy`: relays in Python that forward bytes, or calls, and read none of them."""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import grpc
import psutil
import uvloop

from bench.processes import started, wait_for


class _Peer(asyncio.Protocol):
    """One of the two connections of a client's stream, which writes to the other one."""

    def __init__(self, other: "_Peer | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport
        self._early: list[bytes] = []
        """The data that a client sent before the connection to the server was made."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.other is not None:
            self.other.other = self
            self.transport.writelines(self.other.taken())

    def taken(self) -> list[bytes]:
        early, self._early = self._early, []
        return early

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, _fault: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


async def serve(port: int) -> None:
    """Forward every connection to the server on this port."""
    loop = asyncio.get_running_loop()
    connecting: set[asyncio.Task[object]] = set()

    def on_client() -> _Peer:
        client = _Peer()
        connected = loop.create_task(loop.create_connection(lambda: _Peer(client), "127.0.0.1", port))
        connecting.add(connected)
        connected.add_done_callback(connecting.discard)
        return client

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listener.getsockname()[1], flush=True)
    await (await loop.create_server(on_client, sock=listener)).serve_forever()


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._known: dict[str, grpc.aio.UnaryUnaryMultiCallable] = {}

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        name = details.method
        ask = self._known.get(name) or self._known.setdefault(name, self._channel.unary_unary(name))

        async def pass_on(message: bytes, _context: grpc.aio.ServicerContext) -> bytes:
            answer: bytes = await ask(message)
            return answer

        return grpc.unary_unary_rpc_method_handler(pass_on)


async def serve_calls(port: int) -> None:
    """Pass every unary call over gRPC on to the server on this port."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Calls(channel),))
        mine = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(mine, flush=True)
        await server.wait_for_termination()


@contextmanager
def relay(port: int, what: str = "bytes") -> Iterator[tuple[int, psutil.Popen]]:
    """Run a relay in front of the server on this port, and yield its (port, process). `what` is bytes or
    calls."""
    with tempfile.TemporaryDirectory(prefix="gpb-relay-") as folder:
        log = Path(folder) / "relay.log"
        with started(
            [sys.executable, "-m", "bench.relay", str(port), what], dict(os.environ), log
        ) as process:
            yield int(wait_for(log.read_text, process, log)), process


if __name__ == "__main__":
    uvloop.run((serve_calls if sys.argv[2] == "calls" else serve)(int(sys.argv[1])))
