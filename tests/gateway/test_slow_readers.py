"""Event streams over real connections whose clients take nothing."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from gpubroker_server.bootstrap.gateway_role import QuietServer
from gpubroker_server.gateway.events import stream
from gpubroker_server.http.connections import Connections, limited_by
from gpubroker_server.http.identity import Callers

from tests.gateway.harness import Client, Gateway, until
from tests.patience import PATIENCE_SECONDS


@asynccontextmanager
async def served(gateway: Gateway) -> AsyncIterator[int]:
    """Serve the gateway on a port, with small buffers in the kernel, and yield the port."""
    parts = gateway.parts
    callers = Callers(parts.tokens, parts.rules.allowed_hosts)
    connection = limited_by(Connections(parts.limits, callers, parts.ids))
    app: Any = gateway.app
    config = uvicorn.Config(app, http=connection, lifespan="off", log_config=None)
    server = QuietServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            await serving


def _read_all(client: socket.socket) -> bytes:
    taken = b""
    with suppress(ConnectionResetError):
        while data := client.recv(65536):
            taken += data
    return taken


async def test_reader_that_takes_nothing_is_disconnected(
    gateway: Gateway, api: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream, "STALL_SECONDS", 0.5)
    request = (
        "GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n"
        f"Authorization: {api.headers['authorization']}\r\n\r\n"
    )
    async with served(gateway) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(request.encode())
            await until(lambda: len(gateway.parts.subscriptions) == 1)
            tasks = [{"run": {"entrypoint": "myteam.training:train"}, "labels": {"a": "b" * 200}}] * 500
            assert (await api.post("/tasks/batch", json={"tasks": tasks})).status_code == 207
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(gateway.parts.subscriptions):  # noqa: ASYNC110  # the stall takes real time
                    await asyncio.sleep(0.05)
            client.settimeout(PATIENCE_SECONDS)
            taken = await asyncio.to_thread(_read_all, client)
    assert not taken.endswith(b"0\r\n\r\n"), "the client learns that it was cut off"
    assert not [record for record in caplog.records if record.levelname == "ERROR"], caplog.text
