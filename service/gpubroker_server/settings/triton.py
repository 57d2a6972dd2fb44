"""The settings of servers of models. config.example.yaml explains each setting."""

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.settings.sections import PriorityValue, Section


class ModelSettings(Section):
    gpu_mb: Annotated[int, Field(ge=0)] | None = None
    priority: PriorityValue | None = None
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    gpus: Annotated[int, Field(ge=1, le=64)] = 1

    @model_validator(mode="after")
    def _has_a_size_on_several_gpus(self) -> Self:
        if self.gpus > 1 and not self.gpu_mb:
            raise ValueError(
                f"gpus: {self.gpus} needs gpu_mb, the MiB that the model takes of each of them: loads on "
                "several GPUs are not measured"
            )
        return self


class TritonServerSettings(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    http_url: str
    grpc_url: str | None = None
    metrics_url: str | None = None
    repository: Path | None = None
    token_file: Path | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    connections: Annotated[int, Field(ge=1, le=10_000)] = 128
    connect_seconds: Annotated[float, Field(gt=0, le=300)] = 5.0
    silence_seconds: Annotated[float, Field(gt=0, le=86_400)] = 300.0

    node: str = ""
    loads_at_once: Annotated[int, Field(ge=1, le=64)] = 4
    base_mb: Annotated[int, Field(ge=0)] = 0
    devices: list[str] = Field(default_factory=list)
    models: dict[str, ModelSettings] = Field(default_factory=dict)

    @field_validator("http_url", "grpc_url", "metrics_url")
    @classmethod
    def _is_an_address(cls, url: str | None) -> str | None:
        if url is None:
            return None
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

    @field_validator("headers")
    @classmethod
    def _can_be_sent(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, value in headers.items():
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or not re.fullmatch(r"[\t -~]*", value):
                raise ValueError(
                    f"{name!r} or its value cannot be an HTTP header; use ASCII without control characters"
                )
        return headers

    @model_validator(mode="after")
    def _shows_a_certificate_with_its_key(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(f"{self.name} has one of cert_file and key_file; set both, or neither")
        return self


class BatchSettings(Section):
    max_size: Annotated[int, Field(ge=1, le=65_536)] = 16
    delay_seconds: Annotated[float, Field(ge=0, le=60)] = 0.005


class TritonSettings(Section):
    servers: Annotated[list[TritonServerSettings], Field(max_length=64)] = Field(default_factory=list)
    body_bytes: Annotated[int, Field(gt=0)] = 2**31 - 1
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    cold_seconds: Annotated[float, Field(ge=0, le=3600)] = 55.0
    wanted_seconds: Annotated[float, Field(gt=0)] = 300.0
    min_residency_seconds: Annotated[float, Field(ge=0, le=3600)] = 5.0
    priority: PriorityValue = BAND_NAMES["interactive"]
    tenant: str = "default"
    least_mb: Annotated[int, Field(gt=0)] = 512
    load_files: bool = False
    slots: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = Field(default_factory=dict)
    waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    waiting_bytes: Annotated[int, Field(gt=0)] = 2**30
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    queue_seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    queued_at_once: Annotated[int, Field(ge=1, le=10_000)] = 64
    batch: dict[str, BatchSettings] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _servers_have_names_of_their_own(self) -> Self:
        names = [server.name for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several servers are named {twice[0]}; give each its own name")
        return self

    @model_validator(mode="after")
    def _models_are_managed_by_calls(self) -> Self:
        for server in self.servers:
            if server.node and server.grpc_url is None:
                raise ValueError(
                    f"{server.name} has a node, so the service loads and unloads its models over gRPC; "
                    "set its grpc_url, such as http://host:8001"
                )
        return self

    @model_validator(mode="after")
    def _calls_have_a_server(self) -> Self:
        if self.grpc_port is not None and not any(server.grpc_url for server in self.servers):
            raise ValueError(
                f"grpc_port {self.grpc_port} has no server; set the grpc_url of one of triton.servers, such "
                "as http://host:8001"
            )
        return self
