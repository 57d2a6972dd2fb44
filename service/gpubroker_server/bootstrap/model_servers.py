"""Builds the clients of model servers from the settings: those of the gateway over HTTP, and those of the
leader for queued inferences."""

import ssl
from collections.abc import Sequence
from urllib.parse import urlsplit

from gpubroker_server.adapters.triton.http_backend import HttpBackend, TritonServer
from gpubroker_server.adapters.triton.inference_client import TritonInferenceClient
from gpubroker_server.bootstrap.start_checks import StartRefused
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.lane import LaneRules
from gpubroker_server.inference.lanes import LaneOptions
from gpubroker_server.inference.protocols.triton.checks import TRITON
from gpubroker_server.inference.servers import Server
from gpubroker_server.ports.inferences import InferenceClient
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.settings.loading import Settings
from gpubroker_server.settings.triton import TritonServerSettings


def servers_of(settings: Settings) -> list[Server]:
    """Return the model servers that the settings name. Raises StartRefused."""
    return [
        Server(given.name, HttpBackend(server_of(given)), TRITON, is_managed=bool(given.node))
        for given in settings.triton.servers
    ]


def lane_options_of(settings: Settings) -> LaneOptions:
    given, types = settings.triton, settings.model_types
    return LaneOptions(
        LaneRules(
            given.waiting,
            given.tenant_share,
            settings.policy.ageing_seconds_per_point,
            given.queue_seconds,
        ),
        given.priority,
        {name.encode(): slots for name, slots in given.slots.items()},
        {name: chosen.priority for name, chosen in types.items() if chosen.priority is not None},
        given.yields_to_tasks_seconds,
    )


def inference_clients_of(settings: Settings) -> list[InferenceClient]:
    """Return a client for each server. It opens its connections when it needs them. Raises StartRefused."""
    most_bytes = settings.limits.result_bytes
    return [TritonInferenceClient(server_of(given), most_bytes) for given in settings.triton.servers]


def served_of(settings: Settings, hosts: Sequence[ModelHost]) -> list[tuple[ServerRules, ModelHost]]:
    """Pair the servers of leased models with the hosts that `compose.hosts_of` made."""
    rules = [_rules_of(settings, given) for given in settings.triton.managed]
    return list(zip(rules, hosts, strict=True))


def _rules_of(settings: Settings, given: TritonServerSettings) -> ServerRules:
    triton = settings.triton
    return ServerRules(
        given.name,
        given.node,
        given.devices,
        tells_gpus=given.metrics_url is not None,
        tenant=triton.tenant,
        priority=triton.priority,
        grace_seconds=Seconds(settings.defaults.grace_seconds),
        base_mb=given.base_mb,
        least_mb=triton.least_mb,
        cold_seconds=triton.cold_seconds,
        wanted_seconds=triton.wanted_seconds,
        models=given.models,
    )


def server_of(given: TritonServerSettings, address: str = "") -> TritonServer:
    """Return the address of a server and how to connect to it. `address` replaces its `http_url`. The
    server's files are read. Raises StartRefused."""
    url = urlsplit(address or given.http_url)
    assert url.hostname is not None
    assert url.port is not None
    headers = headers_of(given)
    return TritonServer(
        name=given.name,
        host=url.hostname,
        port=url.port,
        authority=url.netloc.encode(),
        headers=tuple((name.encode(), value.encode()) for name, value in headers.items()),
        tls=trust_of(given) if url.scheme == "https" else None,
        connections=given.connections,
        connect_seconds=given.connect_seconds,
        silence_seconds=given.silence_seconds,
    )


def headers_of(given: TritonServerSettings) -> dict[str, str]:
    """Return the headers for the server, with its credentials. Raises StartRefused."""
    headers = dict(given.headers)
    if given.token_file is not None:
        headers["Authorization"] = f"Bearer {_token_in(given)}"
    return headers


def _token_in(given: TritonServerSettings) -> str:
    assert given.token_file is not None
    try:
        token = given.token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise StartRefused(f"triton.servers: cannot read the token_file of {given.name}: {fault}") from None
    if not token or not token.isprintable():
        raise StartRefused(
            f"triton.servers: the token_file of {given.name}, {given.token_file}, should hold one token"
        )
    return token


def trust_of(given: TritonServerSettings) -> ssl.SSLContext:
    """Return the TLS context of a server, from its certificate files. Raises StartRefused."""
    try:
        trust = ssl.create_default_context(cafile=given.ca_file)
    except OSError as fault:
        raise StartRefused(
            f"triton.servers: cannot use the ca_file of {given.name}, {given.ca_file}: {fault}"
        ) from None
    if given.cert_file is not None:
        try:
            trust.load_cert_chain(given.cert_file, given.key_file, _refuse_password)
        except (OSError, ValueError) as fault:
            raise StartRefused(
                f"triton.servers: cannot use the cert_file and key_file of {given.name}, {given.cert_file} "
                f"and {given.key_file}: {fault}; give PEM files without a password, of one pair"
            ) from None
    return trust


def _refuse_password() -> str:
    """Raise ValueError for a key with a password. Otherwise the library would ask for the password on the
    terminal."""
    raise ValueError("the key has a password")
