"""The sections of the settings that are about servers of models: what each may hold, and its default."""

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from gpubroker_server.core.domain.policy import BAND_NAMES
from gpubroker_server.settings.sections import Section, band_value


class ModelSettings(Section):
    """What is known of one model of a server."""

    gpu_mb: Annotated[int, Field(ge=0)] | None = None
    """What it takes of one GPU; 0: none. Left out: 1.25 times its files, where they can be seen."""
    priority: Annotated[int, Field(ge=0, le=100)] | None = None
    """Of requests for it that name none."""
    load_seconds: Annotated[float, Field(ge=0)] = 0.0
    """How long its first load is expected to take; later that is known."""


class TritonServerSettings(Section):
    """A Triton Inference Server, and how it is spoken to."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$")]
    http_url: str
    """`http://host:port` or `https://host:port`, as the server itself is reached."""
    grpc_url: str | None = None
    """The same for its gRPC, which has a port of its own."""
    repository: Path | None = None
    """Where the service sees the server's models, if it does: how large their files are is the first guess
    at what they take."""
    token_file: Path | None = None
    """Holds a token that is sent as `Authorization: Bearer`, for what stands in front of the server."""
    headers: dict[str, str] = Field(default_factory=dict)
    """Sent with each request, such as the header of a restricted API."""
    ca_file: Path | None = None
    """Whose certificates are believed, besides those that the system believes."""
    connections: Annotated[int, Field(ge=1, le=10_000)] = 128
    connect_seconds: Annotated[float, Field(gt=0, le=300)] = 5.0
    silence_seconds: Annotated[float, Field(gt=0, le=86_400)] = 300.0
    """So long the server may say nothing while somebody waits for it, also between parts of an answer."""

    node: str = ""
    """The node on whose GPUs it runs: its models are loaded and unloaded by the service, which holds their
    memory in its ledger. Empty: it has what it has, and nobody counts it."""
    base_mb: Annotated[int, Field(ge=0)] = 0
    """What the server itself takes of each of `devices`, of one GPU if there are none: held as long as this
    says so, beside what its models take."""
    devices: list[str] = Field(default_factory=list)
    """UUIDs of the GPUs that it uses; all of the node if there are none."""
    models: dict[str, ModelSettings] = Field(default_factory=dict)

    @field_validator("http_url", "grpc_url")
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
                    f"{name!r} or its value cannot be sent as a header; use ASCII without control"
                )
        return headers


class BatchSettings(Section):
    """How queued inferences of one model are joined."""

    max_size: Annotated[int, Field(ge=1, le=65_536)] = 16
    """So many rows are sent together at most, and no more than the model's `max_batch_size`; 1: each
    inference alone."""
    delay_seconds: Annotated[float, Field(ge=0, le=60)] = 0.005
    """So long the first of a batch waits for others."""


class TritonSettings(Section):
    servers: Annotated[list[TritonServerSettings], Field(max_length=64)] = Field(default_factory=list)
    """A model is asked where it is. Without a server, there is nothing under /v2."""
    body_bytes: Annotated[int, Field(gt=0)] = 2**31 - 1
    """The largest body of a request to a model; Triton counts in 32 bits."""
    grpc_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Triton's gRPC protocol is spoken here, at the host of everything else; off without one."""
    cold_seconds: Annotated[float, Field(ge=0, le=3600)] = 55.0
    """So long a request waits for a model that is not in memory; then it is told when to come again."""
    wanted_seconds: Annotated[float, Field(gt=0)] = 300.0
    """So long after the last request for it a model is wanted: it waits for room, and keeps what it has."""
    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(band_value)] = BAND_NAMES["interactive"]
    """Of requests that name none in their header `x-priority`."""
    tenant: str = "default"
    """Whose quota models count in."""
    least_mb: Annotated[int, Field(gt=0)] = 512
    """A model of which nothing is known is taken to need so much."""
    load_files: bool = False
    """Whether who may load models may bring files of theirs (`file:`), which can be code."""
    slots: dict[str, Annotated[int, Field(ge=1, le=10_000)]] = Field(default_factory=dict)
    """By model: so many requests at once; of others as many as prove to be of use."""
    waiting: Annotated[int, Field(ge=1, le=100_000)] = 256
    """So many requests may wait for one model."""
    waiting_bytes: Annotated[int, Field(gt=0)] = 2**30
    """So much memory of one gateway requests may hold that wait for their models, all together."""
    tenant_share: Annotated[float, Field(gt=0, le=1)] = 0.75
    """One tenant may have so much of a model's waiting places, of `waiting_bytes`, and of a model's slots
    while others wait."""
    queue_seconds: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """So long a request may wait for its turn at a model."""
    queued_at_once: Annotated[int, Field(ge=1, le=10_000)] = 64
    """Of queued inferences of one model so many are with its server, or about to be."""
    batch: dict[str, BatchSettings] = Field(default_factory=dict)
    """By model; of others up to 16 rows are joined, where the model takes batches."""

    @model_validator(mode="after")
    def _servers_have_names_of_their_own(self) -> Self:
        names = [server.name for server in self.servers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several servers are called {twice[0]}; give each a name of its own")
        return self

    @model_validator(mode="after")
    def _models_are_managed_by_calls(self) -> Self:
        for server in self.servers:
            if server.node and server.grpc_url is None:
                raise ValueError(
                    f"{server.name} has a node, so that the service loads and unloads its models, which "
                    "is done over gRPC; give it its grpc_url, such as http://host:8001"
                )
        return self

    @model_validator(mode="after")
    def _calls_have_a_server(self) -> Self:
        if self.grpc_port is not None and not any(server.grpc_url for server in self.servers):
            raise ValueError(
                f"grpc_port {self.grpc_port} has no server behind it; give one of triton.servers its "
                "grpc_url, such as http://host:8001"
            )
        return self
