"""The floor of `bench proxy`: what passes bytes on in both directions, reads none of them, and does no more.

Whatever in Python stands between clients and a server costs that much at least on this machine.
"""

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import psutil
import uvloop

from bench.processes import started, wait_for


class _End(asyncio.Protocol):
    """One of the two ends of a line; it writes to the other."""

    def __init__(self, other: "_End | None" = None) -> None:
        self.other = other
        self.transport: asyncio.Transport
        self._early: list[bytes] = []
        """Of a client, before there is a line to the server."""

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
    """In front of the server on this port, with a line to it for each client's."""
    loop = asyncio.get_running_loop()
    dialling: set[asyncio.Task[object]] = set()

    def on_client() -> _End:
        client = _End()
        dialled = loop.create_task(loop.create_connection(lambda: _End(client), "127.0.0.1", port))
        dialling.add(dialled)
        dialled.add_done_callback(dialling.discard)
        return client

    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(listener.getsockname()[1], flush=True)
    await (await loop.create_server(on_client, sock=listener)).serve_forever()


@contextmanager
def relay(port: int) -> Iterator[tuple[int, psutil.Popen]]:
    """(its port, its process), in front of the server on that port."""
    with tempfile.TemporaryDirectory(prefix="gpb-relay-") as folder:
        log = Path(folder) / "relay.log"
        with started([sys.executable, "-m", "bench.relay", str(port)], dict(os.environ), log) as process:
            yield int(wait_for(log.read_text, process, log)), process


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
