"""The Ray that runs tasks: a local one, or a cluster to join."""

from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from gpubroker_server.settings.sections import Section, Words

HomePath = Annotated[Path, AfterValidator(Path.expanduser)]
"""May begin with `~`."""


class RayTlsSettings(Section):
    """Of this machine; Ray checks both sides."""

    certificate: HomePath
    key: HomePath
    ca: HomePath


LOCAL_RAY_ONLY: Final = {
    "node_name": "a node of a cluster has the --node-name that its `ray start` gave it",
    "object_store_mb": "set --object-store-memory where `ray start` runs",
    "dashboard": "set --include-dashboard where `ray start --head` runs",
}
"""Settings without effect on a cluster that others run, and where it is decided there."""


def client_server_refused(address: str) -> str:
    """Why an address such as `ray://host:10001` is refused, and what to write."""
    host = address.partition("://")[2].partition("/")[0].rpartition(":")[0] or "host"
    return (
        f"{address!r} is the address of a Ray Client server, through which runs cannot be followed; write "
        f"that of the head itself: {host}:6379, if it was started with the usual port"
    )


class RaySettings(Section):
    address: str = ""
    token_file: HomePath | None = None
    tls: RayTlsSettings | None = None
    autoscale: bool = False
    node_name: str = "local"
    cluster: str = "local"
    spares: Annotated[int, Field(ge=0, le=64)] = 2
    warm_runners: Annotated[int, Field(ge=0, le=64)] = 1
    cpu: Annotated[float, Field(gt=0)] | None = None
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    max_runs: Annotated[int, Field(gt=0)] = 256
    process_memory_mb: Annotated[int, Field(gt=0)] = 81_920
    object_store_mb: Annotated[int, Field(ge=75)] = 128
    idle_stop_seconds: Annotated[float, Field(gt=0)] = 600.0
    dashboard: bool = False
    inherit_env: Words = Field(default_factory=list)

    @field_validator("cluster", "node_name")
    @classmethod
    def _name_has_no_slash(cls, name: str) -> str:
        if "/" in name:
            raise ValueError(
                f"{name!r} has a slash, which parts the keys of devices (cluster/node/uuid); leave it out"
            )
        return name

    @field_validator("address")
    @classmethod
    def _address_is_of_a_head(cls, address: str) -> str:
        if address.startswith("ray://"):
            raise ValueError(client_server_refused(address))
        host, _, port = address.rpartition(":")
        if address and (not host or "/" in host or not port.isdigit()):
            raise ValueError(f"{address!r} is not the address of a Ray head; write host:6379")
        return address

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> Self:
        if not self.address:
            for name in ("token_file", "tls", "autoscale"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for a cluster that is joined, and address is empty; a local "
                        "Ray has one node, on 127.0.0.1 alone, and a token of its own"
                    )
            return self
        for name, instead in LOCAL_RAY_ONLY.items():
            if name in self.model_fields_set:
                raise ValueError(
                    f"{name} has no effect on the cluster at {self.address}, which others started: "
                    f"{instead}; leave {name} out"
                )
        return self
