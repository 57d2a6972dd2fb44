"""What the executor is told at its start, and the part of it that travels to each node agent."""

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gpubroker_server.core.domain.orders import SeenDevice
from gpubroker_server.core.domain.units import Mib


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Raises ValueError for an address that is not `host:port`."""

    data_dir: Path
    address: str | None = None
    """`host:port` of the cluster to join; None starts a local head."""
    node_name: str = "local"
    """Name of the only node of a local head. Nodes of a joined cluster have names of their own."""
    cluster: str = "local"
    devices: tuple[SeenDevice, ...] | None = None
    """Simulated devices, the same on every node; None asks NVML."""
    spares: int = 2
    warm_runners: int = 1
    cpu: float | None = None
    """What a node offers; None: what it has."""
    memory_mb: int | None = None
    max_runs: int = 256
    process_memory_mb: int = 81_920
    """Host memory that each process of a run may take."""
    task_path: tuple[str, ...] = ()
    """Directories tasks import from; empty: where this process was started."""
    task_user: str = ""
    object_store_bytes: int = 128 * 2**20
    result_limit_bytes: int = 64 * 2**20
    checkpoint_limit_bytes: int = 16 * 2**20
    sample_period_seconds: float = 2.0
    beat_seconds: float = 2.0
    idle_stop_seconds: float = 600.0
    driver_patience_seconds: float = 15.0
    """A driver process that does not answer for so long is replaced."""
    inherit_env: tuple[str, ...] = ()
    """Names of this process's environment variables that tasks get too, besides locale and paths."""

    def __post_init__(self) -> None:
        if self.address is None:
            return
        if "://" in self.address:
            bare = self.address.partition("://")[2].partition(":")[0] or "host"
            raise ValueError(
                f"ray address {self.address!r} names a Ray client server, which cannot stream and does not "
                f"survive; give the address of the head itself, such as {bare}:6379"
            )
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"ray address {self.address!r} is not host:port, such as 10.0.0.5:6379")

    @property
    def is_local(self) -> bool:
        return self.address is None

    @property
    def home(self) -> str:
        """Names a local Ray; empty for one that is joined."""
        return f"{socket.gethostname()}:{self.data_dir.resolve()}" if self.is_local else ""

    @property
    def instance(self) -> str:
        """Names this broker among others on the same machines; marks everything its runs start."""
        where = str(self.data_dir.resolve()) if self.is_local else f"{self.address}/{self.cluster}"
        return hashlib.sha256(where.encode()).hexdigest()[:12]

    def agent_config(self, keepalive: str) -> "AgentConfig":
        devices = None
        if self.devices is not None:
            devices = tuple((d.uuid, d.kind, d.index, int(d.physical_mb), d.parent) for d in self.devices)
        runs = self.data_dir / "runs" if self.is_local else Path(tempfile.gettempdir())
        return AgentConfig(
            node=self.node_name,
            instance=self.instance,
            devices=devices,
            spares=self.spares,
            warm_runners=self.warm_runners,
            cpu=self.cpu,
            memory_mb=self.memory_mb,
            max_runs=self.max_runs,
            process_memory_mb=self.process_memory_mb,
            task_path=tuple(self.task_path) or (os.getcwd(),),
            task_user=self.task_user,
            run_dir=str(runs if self.is_local else runs / f"gpubroker-{self.instance}"),
            sample_period_seconds=self.sample_period_seconds,
            beat_seconds=self.beat_seconds,
            idle_stop_seconds=self.idle_stop_seconds,
            keepalive=keepalive,
        )


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Plain values only: it travels as JSON. An agent whose configuration differs is replaced.

    It may be read by software of another release, so a field that is added has a default.
    """

    node: str
    instance: str
    devices: tuple[tuple[str, str, int, int, str], ...] | None
    """(uuid, kind, index, MiB, parent's uuid) of simulated devices; None: NVML."""
    spares: int
    warm_runners: int
    cpu: float | None
    memory_mb: int | None
    max_runs: int
    process_memory_mb: int
    task_path: tuple[str, ...]
    task_user: str
    run_dir: str
    """Cards and logs of runs, on the node itself."""
    sample_period_seconds: float
    beat_seconds: float
    idle_stop_seconds: float
    keepalive: str
    """File that is touched while the node is of use to somebody; empty: the agent leaves by itself."""

    @property
    def namespace(self) -> str:
        """Ray namespace of our actors: other brokers may be guests of the same cluster."""
        return f"gpubroker-{self.instance}"

    def on_node(self, name: str) -> "AgentConfig":
        return replace(self, node=name)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "AgentConfig":
        told: Mapping[str, Any] = json.loads(text)
        given = {f.name: told[f.name] for f in fields(cls) if f.name in told}
        devices = given["devices"]
        return cls(
            **{
                **given,
                "devices": None if devices is None else tuple(tuple(device) for device in devices),
                "task_path": tuple(given["task_path"]),
            }
        )

    @property
    def simulated(self) -> tuple[SeenDevice, ...] | None:
        if self.devices is None:
            return None
        return tuple(
            SeenDevice(uuid, kind, index, Mib(mb), True, parent)
            for uuid, kind, index, mb, parent in self.devices
        )
