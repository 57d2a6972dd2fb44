"""The data plane on a port of its own, between a raw client and a server that does what a test says.

The real Triton is in tests/triton; this one is for what that does not do when it is told to.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvicorn
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.http.connections import Connections
from gpubroker_server.http.identity import Callers, new_token
from gpubroker_server.inference.lanes import LaneOptions, Lanes
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.protocols.triton_http.connection import in_front_of
from gpubroker_server.inference.servers import Fleet, Server
from gpubroker_server.ports.models import ModelHost
from msgspec.structs import replace
from uvicorn.server import ServerState

from tests.closed_ports import a_closed_port
from tests.gateway.harness import Gateway
from tests.patience import PATIENCE_SECONDS

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

NAMES = ("main", "b", "c")
INFER = "/v2/models/any/infer"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Connection:
    """A client that says exactly what a test wants said."""

    def __init__(self, stage: "Stage", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._stage = stage
        self.reader = reader
        self.writer = writer
        assert isinstance(writer.transport, asyncio.Transport)
        self.transport = writer.transport

    def send(self, *parts: str | bytes) -> None:
        for part in parts:
            self.writer.write(part.encode("latin-1") if isinstance(part, str) else part)

    def ask(self, method: str = "GET", path: str = "/v2", body: bytes | None = None, **headers: str) -> None:
        """A whole request of somebody with a token; `Some_Name` stands for the header `Some-Name`."""
        self.send(self.head(method, path, len(body) if body is not None else None, **headers), body or b"")

    def head(self, method: str, path: str, length: int | None = None, **headers: str) -> str:
        given = {"Host": "localhost", "Authorization": f"Bearer {self._stage.secret}"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        if length is not None:
            given["Content-Length"] = str(length)
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n"

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The next one on the connection: status, headers by lowercase name, body."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.splitlines()[:-1]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            elif headers.get("transfer-encoding") == "chunked":
                body = b"".join([chunk async for chunk in self.chunks()])
            elif headers.get("connection") == "close":
                body = await self.reader.read()
            else:
                body = b""
            return int(first.split()[1]), headers, body

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def is_closed(self) -> bool:
        """The other side has closed it, and there was nothing more to read."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read() == b""
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Stage:
    def __init__(self, gateway: Gateway, port: int, secret: str, fleet: Fleet) -> None:
        self.gateway = gateway
        self.secret = secret
        self.fleet = fleet
        self._port = port
        self._connections: list[Connection] = []

    @property
    def backend(self) -> HttpBackend:
        """Of the first server."""
        backend = self.fleet.servers[0].backend
        assert isinstance(backend, HttpBackend)
        return backend

    async def connect(self) -> Connection:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections.append(Connection(self, reader, writer))
        return self._connections[-1]

    async def ask(self, *args: Any, **headers: Any) -> tuple[int, dict[str, str], bytes]:
        """On a connection of its own."""
        connection = await self.connect()
        connection.ask(*args, **headers)
        return await connection.answer()

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()

    async def token(self, *scopes: str) -> str:
        return f"Bearer {await a_token(self.gateway, '-'.join(('only', *scopes)), *scopes)}"

    async def of_tenant(self, tenant: str, max_priority: int = 50) -> str:
        secret = await a_token(self.gateway, tenant, "*", tenant=tenant, max_priority=max_priority)
        return f"Bearer {secret}"


async def a_token(
    gateway: Gateway, name: str, *scopes: str, tenant: str = "default", max_priority: int = 50
) -> str:
    now = gateway.clock.now()
    secret, row = new_token(name, tenant=tenant, scopes=scopes, max_priority=max_priority, now=now)
    await gateway.store.put_token(row, by="test")
    await gateway.parts.tokens.load()
    return secret


@asynccontextmanager
async def a_stage(
    server: Handler | None,
    *,
    most_body_bytes: int = 10**9,
    most_waiting_bytes: int = 10**9,
    silence_seconds: float = 60.0,
    connections: int = 4,
    certificate: Path | None = None,
    served: tuple[ServerRules, ModelHost] | None = None,
    also_served: Sequence[tuple[ServerRules, ModelHost]] = (),
    lanes: Lanes | None = None,
    others: Sequence[Handler | None] = (),
    plain: Collection[str] = (),
    tenant_requests: int = ServiceLimits().tenant_requests,
    of_plane: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Stage]:
    """`server` is called with each connection to what stands for Triton; None: there is nobody.

    `certificate`: with its key; the server shows it, and it is believed. `served`: its models are in
    the ledger; `also_served`: those of `others`. `others`: more servers, called as in NAMES. `plain`: those
    that show none all the same. `of_plane`: more that the plane is told.
    """
    async with Gateway() as gateway:
        if served is not None:
            gateway.change(served=[served, *also_served])
        upstreams, servers = [], []
        for name, handler in zip(NAMES, (server, *others), strict=False):
            upstream, behind = await _upstream(name, handler, None if name in plain else certificate)
            upstreams.append(upstream)
            behind = replace(behind, connections=connections, silence_seconds=Seconds(silence_seconds))
            servers.append(Server(name, HttpBackend(behind), TRITON, is_managed=served is not None))
        fleet = Fleet(servers, gateway.residencies)
        bounds = most_body_bytes, most_waiting_bytes, tenant_requests
        plane = _plane(gateway, fleet, lanes or Lanes(LaneOptions()), *bounds, of_plane)
        callers = Callers(gateway.parts.tokens, gateway.parts.rules.allowed_hosts)
        port = Connections(ServiceLimits(), callers, gateway.parts.ids)
        config = uvicorn.Config(gateway.app, http=in_front_of(plane, port), lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        door = await asyncio.get_running_loop().create_server(
            lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
            "127.0.0.1",
            0,
        )
        stage = Stage(gateway, door.sockets[0].getsockname()[1], await a_token(gateway, "me", "*"), fleet)
        try:
            yield stage
        finally:
            await stage.close()
            for one in servers:
                await one.close()
            door.close()
            for upstream in upstreams:
                upstream.close()
            await _all_over(state)


async def _all_over(state: ServerState) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while state.connections or state.tasks:  # noqa: ASYNC110  # turns of the loop
            await asyncio.sleep(0)


async def _upstream(
    name: str, server: Handler | None, certificate: Path | None
) -> tuple[asyncio.Server | socket.socket, TritonServer]:
    tls = None
    if certificate is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate)
    upstream: asyncio.Server | socket.socket
    if server is None:
        upstream = a_closed_port()
        port = upstream.getsockname()[1]
    else:
        upstream = await asyncio.start_server(_quietly(server), "127.0.0.1", 0, ssl=tls)
        port = upstream.sockets[0].getsockname()[1]
    trust = ssl.create_default_context(cafile=certificate) if certificate else None
    credentials = (
        (b"Authorization", b"Bearer theirs" if name == "main" else b"Bearer of-%b" % name.encode()),
    )
    return upstream, TritonServer(name, "127.0.0.1", port, b"triton:8000", credentials, trust)


def _plane(
    gateway: Gateway,
    fleet: Fleet,
    lanes: Lanes,
    most_body_bytes: int,
    most_waiting_bytes: int,
    tenant_requests: int,
    more: Mapping[str, Any],
) -> Plane:
    return Plane(
        callers=Callers(gateway.parts.tokens, gateway.parts.rules.allowed_hosts),
        ids=gateway.parts.ids,
        on_request=gateway.app.state.telemetry.on_request,
        on_call=gateway.app.state.telemetry.on_call,
        fleet=fleet,
        lanes=lanes,
        most_body_bytes=most_body_bytes,
        most_waiting_bytes=most_waiting_bytes,
        tenant_requests=tenant_requests,
        residencies=gateway.residencies,
        audit=lambda **note: gateway.store.audit(**note),
        **more,
    )


def _quietly(handle: Handler) -> Handler:
    async def handled(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await handle(reader, writer)
        writer.close()

    return handled


class Heard:
    """A server that keeps what it hears, and answers each whole request the same way."""

    def __init__(self, answer: bytes = OK) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.connections = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while True:
            head, body = await a_request(reader)
            self.heads.append(head)
            self.bodies.append(body)
            writer.write(self.answer)
            await writer.drain()


async def a_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Head and body; of a body in chunks the raw bytes."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().splitlines():
        if line.startswith(b"content-length:"):
            return head, await reader.readexactly(int(line.split()[1]))
        if line.startswith(b"transfer-encoding:"):
            return head, await reader.readuntil(b"\r\n0\r\n\r\n")
    return head, b""
