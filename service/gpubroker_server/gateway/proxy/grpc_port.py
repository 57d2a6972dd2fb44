"""The port for calls over gRPC. ADR 125 says what the library bounds, and what it does not."""

from typing import Final

import grpc

from gpubroker_server.gateway.http.connections import ConnectionLimits
from gpubroker_server.gateway.proxy.calls import GrpcCalls

_MOST_MESSAGE_BYTES: Final = 2**31 - 1
"""The library counts in 32 bits."""

_OPTIONS: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # or a port in use would be taken for a free one
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),  # of clients with calls that are no longer there
)


class GrpcPort:
    """Listens. Raises OSError if the port cannot be had."""

    def __init__(
        self,
        calls: GrpcCalls,
        host: str,
        port: int,
        most_calls: int,
        most_message_bytes: int,
        limits: ConnectionLimits,
    ) -> None:
        """`most_message_bytes`: a longer one is refused before it is read, with RESOURCE_EXHAUSTED."""
        options = (
            ("grpc.max_receive_message_length", min(most_message_bytes, _MOST_MESSAGE_BYTES)),
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
        """Take no more calls; those under way may go on for so long."""
        await self._server.stop(most_seconds)
