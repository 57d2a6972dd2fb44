"""The data plane over gRPC, between a bare client and a server that does what a test says."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Any

import grpc
from gpubroker_server.adapters.triton.grpc_backend import RpcBackend, TritonRpcServer
from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.http.identity import Callers, new_token
from gpubroker_server.inference.lanes import LaneOptions, Lanes
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.protocols.triton_grpc.port import GrpcCalls, GrpcPort
from gpubroker_server.inference.protocols.triton_grpc.streams import IDLE_SECONDS
from gpubroker_server.inference.servers import Fleet, Server
from gpubroker_server.ports.backends import Metadata
from gpubroker_server.ports.models import ModelHost

from tests.closed_ports import a_closed_port
from tests.gateway.harness import Gateway

SERVICE = "/inference.GRPCInferenceService/"
INFER = SERVICE + "ModelInfer"
STREAM = SERVICE + "ModelStreamInfer"
NAMES = ("main", "b", "c")
LIMITS = ServiceLimits()

Handler = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]
"""Of one call, whichever it is."""


class Stage:
    def __init__(
        self, gateway: Gateway, secret: str, address: str, channel: grpc.aio.Channel, fleet: Fleet
    ) -> None:
        self.fleet = fleet
        self.address = address
        self.gateway = gateway
        self.channel = channel
        self.own = (("authorization", f"Bearer {secret}"),)

    def ask(
        self,
        method: str,
        message: bytes = b"",
        metadata: Metadata | None = None,
        seconds: float | None = None,
    ) -> grpc.aio.UnaryUnaryCall:
        given = self.own if metadata is None else metadata
        return self.channel.unary_unary(method)(message, metadata=given, timeout=seconds)

    def open(
        self, method: str = STREAM, seconds: float | None = None, metadata: Metadata = ()
    ) -> grpc.aio.StreamStreamCall:
        """`metadata`: besides the token."""
        return self.channel.stream_stream(method)(metadata=(*self.own, *metadata), timeout=seconds)

    async def refusal(self, method: str, message: bytes = b"", **options: Any) -> grpc.aio.AioRpcError:
        try:
            await self.ask(method, message, **options)
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"{method} was answered")

    async def token(self, *scopes: str) -> Metadata:
        now = self.gateway.clock.now()
        name = f"only-{'-'.join(scopes)}"
        secret, row = new_token(name, tenant="default", scopes=scopes, max_priority=50, now=now)
        await self.gateway.store.put_token(row, by="test")
        await self.gateway.parts.tokens.load()
        return (("authorization", f"Bearer {secret}"),)


class _All(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, handle: Handler) -> None:
        async def handled(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            await handle(messages, context)

        self._handler = grpc.stream_stream_rpc_method_handler(handled)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return self._handler


@asynccontextmanager
async def a_stage(
    server: Handler | None,
    *,
    metadata: Metadata = (("authorization", "Bearer theirs"),),
    silence_seconds: float = 60.0,
    takes_files: bool = False,
    certificate: bytes | None = None,
    served: tuple[ServerRules, ModelHost] | None = None,
    lanes: Lanes | None = None,
    others: Sequence[Handler | None] = (),
    most_body_bytes: int = 10**9,
    most_waiting_bytes: int = 10**9,
    limits: ServiceLimits = LIMITS,
    tenant_requests: int = ServiceLimits().tenant_requests,
    idle_seconds: Seconds = IDLE_SECONDS,
    of_plane: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Stage]:
    """`server` is what stands for Triton; None: nobody. `others`: more. `certificate`: with its key."""
    async with Gateway() as gateway:
        if served is not None:
            gateway.change(served=[served])
        upstreams, servers = [], []
        for name, handler in zip(NAMES, (server, *others), strict=False):
            upstream, port = await _upstream(handler, certificate)
            upstreams.append(upstream)
            nowhere = HttpBackend(TritonServer(name, "localhost", 1, b"localhost:1"))
            servers.append(Server(name, nowhere, TRITON, is_managed=served is not None))
            servers[-1].calls = RpcBackend(
                TritonRpcServer(
                    name, f"localhost:{port}", metadata, certificate, silence_seconds=Seconds(silence_seconds)
                )
            )
        secret = await _own_token(gateway)
        telemetry = gateway.app.state.telemetry
        plane = Plane(
            callers=Callers(gateway.parts.tokens, gateway.parts.rules.allowed_hosts),
            ids=gateway.parts.ids,
            on_request=telemetry.on_request,
            on_call=telemetry.on_call,
            lanes=Lanes(LaneOptions()) if lanes is None else lanes,
            fleet=Fleet(servers, gateway.residencies),
            most_body_bytes=most_body_bytes,
            most_waiting_bytes=most_waiting_bytes,
            tenant_requests=tenant_requests,
            takes_files=takes_files,
            residencies=gateway.residencies,
            audit=gateway.store.audit,
            **of_plane,
        )
        door = GrpcPort(GrpcCalls(plane, idle_seconds), "127.0.0.1", 0, 64, most_body_bytes, limits)
        await door.begin()
        address = f"127.0.0.1:{door.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            yield Stage(gateway, secret, address, channel, plane.fleet)
        await door.close(0)
        for one in servers:
            await one.close()
        for upstream in upstreams:
            await _close(upstream)


async def _own_token(gateway: Gateway) -> str:
    now = gateway.clock.now()
    secret, row = new_token("me", tenant="default", scopes=["*"], max_priority=50, now=now)
    await gateway.store.put_token(row, by="test")
    await gateway.parts.tokens.load()
    return secret


async def _close(upstream: grpc.aio.Server | socket.socket) -> None:
    if isinstance(upstream, socket.socket):
        upstream.close()
    else:
        await upstream.stop(0)


async def _upstream(
    server: Handler | None, certificate: bytes | None
) -> tuple[grpc.aio.Server | socket.socket, int]:
    if server is None:
        closed = a_closed_port()
        return closed, closed.getsockname()[1]
    upstream = grpc.aio.server()
    if certificate is None:
        port = upstream.add_insecure_port("localhost:0")
    else:
        port = upstream.add_secure_port(
            "localhost:0", grpc.ssl_server_credentials([(certificate, certificate)])
        )
    upstream.add_generic_rpc_handlers((_All(server),))
    await upstream.start()
    return upstream, port


class Heard:
    """Keeps what it hears, and answers each message with itself."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str | bytes]] = []
        self.seconds: list[float | None] = []
        self.messages: list[bytes] = []
        self.cancelled = asyncio.Event()

    async def __call__(self, messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        self.metadata.append(dict(context.invocation_metadata()))
        self.seconds.append(context.time_remaining())
        await context.send_initial_metadata((("x-first", "1"),))
        context.set_trailing_metadata((("x-last-bin", b"\x00\xff"),))
        try:
            async for message in messages:
                self.messages.append(message)
                await context.write(message)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
