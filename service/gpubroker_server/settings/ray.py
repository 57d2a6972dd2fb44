"""The settings of the Ray that runs tasks, which is a local one or a cluster to join."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Final

from gpubroker.wire.bounds import PositiveCount
from msgspec import Meta, Struct

from gpubroker_server.core.domain.setting_marks import (
    HOME,
    WORDS,
    PositiveAmount,
    PositiveMib,
    PositiveSeconds,
    check,
    prepare,
)
from gpubroker_server.core.domain.units import Mib, Seconds

HomePath = Annotated[Path, HOME]


class RayTls(Struct, frozen=True):
    """The files by which this machine and Ray's machines identify themselves to each other."""

    certificate: HomePath
    key: HomePath
    ca: HomePath


LOCAL_RAY_ONLY: Final = {
    "node_name": "a node of a cluster has the --node-name that its `ray start` gave it",
    "object_store_mb": "set --object-store-memory where `ray start` runs",
    "dashboard": "set --include-dashboard where `ray start --head` runs",
}
"""The settings without effect on a joined cluster, each with the place where it is decided there."""


def client_server_refused(address: str) -> str:
    """Return a message that says why an address such as `ray://host:10001` is refused and what to write."""
    host = address.partition("://")[2].partition("/")[0].rpartition(":")[0] or "host"
    return (
        f"{address!r} is the address of a Ray Client server, through which runs cannot be followed; write "
        f"that of the head itself: {host}:6379, if it was started with the usual port"
    )


def _gpu_words(given: object) -> object:
    """Return GPUs as a list of words. They may be written as one text, an index, or a list of both."""
    if isinstance(given, str):
        return [word.strip() for word in given.split(",") if word.strip()]
    gpus = given if isinstance(given, list | tuple) else [given]
    is_plain = all(isinstance(gpu, str | int) and not isinstance(gpu, bool) for gpu in gpus)
    return [str(gpu) for gpu in gpus] if is_plain else given


def _name_has_no_slash(name: str) -> str:
    if "/" in name:
        raise ValueError(
            f"{name!r} has a slash, which parts the keys of devices (cluster/node/uuid); leave it out"
        )
    return name


def _address_is_of_a_head(address: str) -> str:
    if address.startswith("ray://"):
        raise ValueError(client_server_refused(address))
    host, _, port = address.rpartition(":")
    if address and (not host or "/" in host or not port.isdigit()):
        raise ValueError(f"{address!r} is not the address of a Ray head; write host:6379")
    return address


class RaySettings(Struct, frozen=True, kw_only=True):
    address: Annotated[str, check(_address_is_of_a_head)] = ""
    """The `host:port` of the cluster to join; if empty, a local head is started."""
    token_file: HomePath | None = None
    """The token file of a joined cluster; None if the environment decides (RAY_AUTH_MODE)."""
    tls: RayTls | None = None
    """The TLS files of a joined cluster; None if the environment decides (RAY_USE_TLS)."""
    autoscale: bool = False
    node_name: Annotated[str, check(_name_has_no_slash)] = "local"
    """The name of the only node of a local head. Nodes of a joined cluster have names of their own."""
    cluster: Annotated[str, check(_name_has_no_slash)] = "local"
    spares: Annotated[int, Meta(ge=0, le=64)] = 2
    warm_runners: Annotated[int, Meta(ge=0, le=64)] = 1
    cpu: PositiveAmount | None = None
    """The number of CPUs that a node offers; None for all that it has."""
    memory_mb: PositiveMib | None = None
    max_runs: PositiveCount = 256
    process_memory_mb: PositiveMib = Mib(81_920)
    """The host memory that each process of a run may take."""
    object_store_mb: Annotated[Mib, Meta(ge=75)] = Mib(128)
    idle_stop_seconds: PositiveSeconds = Seconds(600.0)
    dashboard: bool = False
    """True if a local head starts its dashboard."""
    work_dir: str = ""
    """The directory on each node for uploaded directories and the copies that runs work in; empty: below the
    temporary directory."""
    upload_cache_mb: PositiveMib = Mib(10_240)
    """The most MiB of uploaded directories that a node keeps for later runs."""
    gpus: Annotated[tuple[str, ...] | None, prepare(_gpu_words)] = None
    """The GPUs of a node to use, as in CUDA_VISIBLE_DEVICES; None if that variable decides."""
    gpu_memory_mb: PositiveMib | None = None
    """The memory that a GPU without memory of its own offers; None: nine tenths of the machine's memory."""
    inherit_env: Annotated[tuple[str, ...], WORDS] = ()
    """The environment variables of a node that tasks inherit, besides locale and paths."""

    def check_given(self, given: Collection[str]) -> None:
        """Raise ValueError for a setting that has no effect on this Ray, even if it was given its default."""
        if not self.address:
            for name in ("token_file", "tls", "autoscale"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} is for a cluster that is joined, and address is empty; a local "
                        "Ray has one node, on 127.0.0.1 alone, and a token of its own"
                    )
            return
        for name, advice in LOCAL_RAY_ONLY.items():
            if name in given:
                raise ValueError(
                    f"{name} has no effect on the cluster at {self.address}, which others started: "
                    f"{advice}; leave {name} out"
                )
