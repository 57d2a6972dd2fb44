"""The settings of model servers. config.example.yaml explains each setting."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from gpubroker.wire.bounds import PositiveCount, Priority
from msgspec import Meta, Struct, field

from gpubroker_server.core.domain.models import ModelRules
from gpubroker_server.core.domain.policy import NO_SERVERS, InferenceServers, Policy
from gpubroker_server.core.domain.server_rules import ServerRules
from gpubroker_server.core.domain.setting_marks import NonNegativeMib, PositiveMib, PositiveSeconds, check
from gpubroker_server.core.domain.units import Seconds
from gpubroker_server.core.serving.batching import BatchRules
from gpubroker_server.core.serving.lane import LaneRules


def _has_a_size_on_several_gpus(model: ModelRules) -> ModelRules:
    if model.gpus > 1 and not model.gpu_mb:
        raise ValueError(
            f"gpus: {model.gpus} needs gpu_mb, the MiB that the model takes of each of them: loads on "
            "several GPUs are not measured"
        )
    return model


def _is_an_address(url: str) -> str:
    found = urlsplit(url)
    try:
        port = found.port
    except ValueError:
        port = None
    is_plain = not (found.path.strip("/") or found.query or found.fragment or found.username)
    if found.scheme not in ("http", "https") or not found.hostname or port is None or not is_plain:
        raise ValueError(
            f"{url!r} is not the address of a Triton server; write http://host:8000 or https://host:8000"
        )
    return url


def _can_be_sent(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not re.fullmatch(r"[\t -~]*", value):
            raise ValueError(
                f"{name!r} or its value cannot be an HTTP header; use ASCII without control characters"
            )
    return headers


Url = Annotated[str, check(_is_an_address)]


_RULES = ServerRules("", "")
_LANE = LaneRules()
"""The core's rules, whose values are the defaults of settings."""


class ServerConnections(Struct, frozen=True, kw_only=True):
    """The connection of the service to a model server over HTTP."""

    connections: Annotated[int, Meta(ge=1, le=10_000)] = 128
    connect_seconds: Annotated[Seconds, Meta(gt=0, le=300)] = Seconds(5.0)
    silence_seconds: Annotated[Seconds, Meta(gt=0, le=86_400)] = Seconds(300.0)


class TritonServerSettings(ServerConnections, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    http_url: Url
    grpc_url: Url | None = None
    metrics_url: Url | None = None
    repository: Path | None = None
    token_file: Path | None = None
    headers: Annotated[Mapping[str, str], check(_can_be_sent)] = field(default_factory=dict)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    node: str = ""
    loads_at_once: Annotated[int, Meta(ge=1, le=64)] = 4
    base_mb: NonNegativeMib = _RULES.base_mb
    devices: tuple[str, ...] = ()
    models: Mapping[str, Annotated[ModelRules, check(_has_a_size_on_several_gpus)]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        """Refuse a certificate without its key, and a key without its certificate. Raises ValueError."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(f"{self.name} has one of cert_file and key_file; set both, or neither")


class TritonSettings(Struct, frozen=True, kw_only=True):
    servers: Annotated[tuple[TritonServerSettings, ...], Meta(max_length=64)] = ()
    body_bytes: PositiveCount = 2**31 - 1
    grpc_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    cold_seconds: Annotated[Seconds, Meta(ge=0, le=3600)] = _RULES.cold_seconds
    wanted_seconds: PositiveSeconds = _RULES.wanted_seconds
    min_residency_seconds: Annotated[Seconds, Meta(ge=0, le=3600)] = Policy().min_residency_seconds
    yields_to_tasks_seconds: Annotated[Seconds, Meta(ge=0, le=86_400)] = Policy().yields_to_tasks_seconds
    priority: Priority = _RULES.priority
    tenant: str = _RULES.tenant
    least_mb: PositiveMib = _RULES.least_mb
    load_files: bool = False
    slots: Mapping[str, Annotated[int, Meta(ge=1, le=10_000)]] = field(default_factory=dict)
    waiting: Annotated[int, Meta(ge=1, le=100_000)] = _LANE.places
    waiting_bytes: PositiveCount = 2**30
    tenant_share: Annotated[float, Meta(gt=0, le=1)] = _LANE.tenant_share
    queue_seconds: Annotated[Seconds, Meta(gt=0, le=86_400)] = _LANE.queue_seconds
    queued_at_once: Annotated[int, Meta(ge=1, le=10_000)] = NO_SERVERS.at_once
    batch: Mapping[str, BatchRules] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse servers that share a name, or lack the address for calls. Raises ValueError."""
        names = [server.name for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several servers are named {twice[0]}; give each its own name")
        for server in self.managed:
            if server.grpc_url is None:
                raise ValueError(
                    f"{server.name} has a node, so the service loads and unloads its models over gRPC; "
                    "set its grpc_url, such as http://host:8001"
                )
        if self.grpc_port is not None and not any(server.grpc_url for server in self.servers):
            raise ValueError(
                f"grpc_port {self.grpc_port} has no server; set the grpc_url of one of triton.servers, such "
                "as http://host:8001"
            )

    @property
    def managed(self) -> tuple[TritonServerSettings, ...]:
        """The servers with a node. The leader loads and unloads their models."""
        return tuple(server for server in self.servers if server.node)

    @property
    def inference_servers(self) -> InferenceServers:
        """The servers that answer queued inferences."""
        return InferenceServers(
            ledger=tuple(server.name for server in self.managed),
            others=tuple(server.name for server in self.servers if not server.node),
            at_once=self.queued_at_once,
            priority=self.priority,
            body_bytes=self.body_bytes,
        )
