"""Builds the parts for Triton's gRPC protocol from the settings. This module is loaded only if the protocol
is used, because the library is large."""

import os
import ssl

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # otherwise it prints errors that the caller gets anyway
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # our child processes call exec

from pathlib import Path
from urllib.parse import urlsplit

from gpubroker_server.adapters.triton.grpc_backend import RpcBackend, TritonRpcServer
from gpubroker_server.bootstrap.model_servers import headers_of, trust_of
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.inference.plane import Plane
from gpubroker_server.inference.protocols.triton_grpc.port import GrpcCalls, GrpcPort
from gpubroker_server.settings.loading import Settings
from gpubroker_server.settings.triton import TritonServerSettings

CALLS_PER_CONNECTION = 16
"""The number of calls at once for each connection that a server may have. Further calls are refused."""


def grpc_port_of(settings: Settings, plane: Plane, host: str) -> GrpcPort:
    """Listen for calls of Triton's gRPC protocol. Raises StartRefused."""
    port = settings.triton.grpc_port
    assert port is not None
    with_grpc = {given.name: given for given in settings.triton.servers if given.grpc_url}
    for server in plane.fleet.servers:
        if server.name in with_grpc:
            server.calls = RpcBackend(rpc_server_of(with_grpc[server.name]))
    most_calls = CALLS_PER_CONNECTION * sum(given.connections for given in with_grpc.values())
    try:
        return GrpcPort(GrpcCalls(plane), host, port, most_calls, plane.most_body_bytes, settings.limits)
    except OSError as fault:
        raise StartRefused(
            f"cannot listen on {host}:{port} for gRPC: {fault}; is the port in use? "
            "stop that process, or choose another triton.grpc_port"
        ) from None


def rpc_server_of(given: TritonServerSettings) -> TritonRpcServer:
    """Return the address of a server over gRPC and how to connect to it. The server's files are read. Raises
    StartRefused."""
    assert given.grpc_url is not None
    url = urlsplit(given.grpc_url)
    is_encrypted = url.scheme == "https"
    if is_encrypted:
        trust_of(given)  # checks the files, because the library does not report a pair that does not fit
    return TritonRpcServer(
        name=given.name,
        address=url.netloc,
        metadata=tuple((name.lower(), value) for name, value in headers_of(given).items()),
        roots=_roots_of(given) if is_encrypted else None,
        key=given.key_file.read_bytes() if is_encrypted and given.key_file else None,
        chain=given.cert_file.read_bytes() if is_encrypted and given.cert_file else None,
        connect_seconds=given.connect_seconds,
        silence_seconds=given.silence_seconds,
    )


def _roots_of(given: TritonServerSettings) -> bytes:
    """Return the root certificates of the system, and those of the server's ca_file."""
    known = ssl.get_default_verify_paths().cafile
    try:
        files = [Path(known)] if known else []
        files += [given.ca_file] if given.ca_file else []
        return b"\n".join(file.read_bytes() for file in files)
    except OSError as fault:
        raise StartRefused(
            f"triton.servers: cannot use the ca_file of {given.name}, {given.ca_file}: {fault}"
        ) from None
