"""The port for calls over gRPC. Tokens are checked before any message is read. ADR 125 lists the bounds that
the library has and those that it lacks."""

from functools import partial
from typing import Final

import grpc

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.http.problems import Problem
from gpubroker_server.inference.plane import IDEMPOTENT, QUEUE_HEADERS, Plane, idempotent_in
from gpubroker_server.inference.protocols.triton.errors import no_shared_memory
from gpubroker_server.inference.protocols.triton.operations import UNKNOWN, grpc_operation
from gpubroker_server.inference.protocols.triton_grpc.calls import GrpcCall
from gpubroker_server.inference.protocols.triton_grpc.streams import IDLE_SECONDS, GrpcStream

_MAX_MESSAGE_BYTES: Final = 2**31 - 1
"""The largest bound on the size of messages that the library takes, which counts in 32 bits."""

_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    # With SO_REUSEPORT, a port that another process uses would be taken for a free one.
    ("grpc.so_reuseport", 0),
    # Without keepalive, calls of clients that are no longer there would stay for ever.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


_TO_US: Final = frozenset({"authorization", "user-agent", IDEMPOTENT, *QUEUE_HEADERS})
"""Keys of a call's metadata that are for the service. All others are passed on."""


class GrpcCalls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Handles each call before any of its messages is read: a refused client has sent nothing but a head."""

    def __init__(self, plane: Plane, idle_seconds: Seconds = IDLE_SECONDS) -> None:
        """`idle_seconds` is the time for which a stream keeps its slot after its last answer."""
        self._plane = plane
        self._idle_seconds = idle_seconds

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        metadata = [(name, value) for name, value in details.invocation_metadata if name not in _TO_US]
        to_us = {name: value for name, value in details.invocation_metadata if name in _TO_US}
        operation, token = grpc_operation(details.method), to_us.get("authorization")
        if operation is UNKNOWN:
            unknown = GrpcCall(self._plane, operation, details.method, metadata)
            return grpc.stream_stream_rpc_method_handler(unknown.unknown)
        # perf_analyzer sends the space after the colon, which HTTP/1.1 would have removed.
        authorization = None if token is None else token.strip().encode("latin-1", "replace")
        if operation.is_stream:
            call: GrpcCall = GrpcStream(
                self._plane, operation, details.method, metadata, authorization, self._idle_seconds
            )
        else:
            call = GrpcCall(self._plane, operation, details.method, metadata)
        try:
            if operation.scope is not None:
                call.identity = self._plane.authorize(operation.scope, operation.name, authorization)
                call.wish = self._plane.lanes.wish_in(call.identity, *map(to_us.get, QUEUE_HEADERS))
                if (idempotent := to_us.get(IDEMPOTENT)) is not None:
                    call.is_idempotent = idempotent_in(idempotent)
            if operation.shares_memory:
                raise no_shared_memory()
        except Problem as problem:
            return grpc.stream_stream_rpc_method_handler(partial(call.refused, problem))
        if operation.scope is None:
            return grpc.stream_stream_rpc_method_handler(call.unread)
        if isinstance(call, GrpcStream):
            return grpc.stream_stream_rpc_method_handler(call.stream)
        return grpc.unary_unary_rpc_method_handler(call.unary)


class GrpcPort:
    """A server that listens on the port. Raises OSError if the port cannot be had."""

    def __init__(
        self,
        calls: GrpcCalls,
        host: str,
        port: int,
        most_calls: int,
        most_message_bytes: int,
        limits: ServiceLimits,
    ) -> None:
        """`most_message_bytes` is the longest message; a longer one is refused with RESOURCE_EXHAUSTED before
        it is read."""
        options = (
            ("grpc.max_receive_message_length", min(most_message_bytes, _MAX_MESSAGE_BYTES)),
            ("grpc.max_metadata_size", limits.head_bytes),
            ("grpc.absolute_max_metadata_size", limits.head_bytes),
            ("grpc.max_allowed_incoming_connections", limits.connections),
            ("grpc.max_concurrent_streams", most_calls),
            ("grpc.server_handshake_timeout_ms", int(limits.head_seconds * 1000)),
            ("grpc.max_connection_idle_ms", limits.idle_seconds * 1000),
            *_OPTIONS,
        )
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=most_calls)
        self._server.add_generic_rpc_handlers((calls,))
        address = f"[{host}]" if ":" in host else host
        try:
            self.port: int = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as fault:
            raise OSError(str(fault)) from None

    async def begin(self) -> None:
        await self._server.start()

    async def close(self, most_seconds: float) -> None:
        """Refuse new calls. Calls under way may continue for `most_seconds`."""
        await self._server.stop(most_seconds)
