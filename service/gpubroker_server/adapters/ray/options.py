"""The settings of the executor on Ray, and the part of them that is sent to each node agent."""

import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import NODEFAULT, Struct, field, to_builtins
from msgspec.structs import fields, replace

from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.orders import ReportedDevice
from gpubroker_server.core.domain.units import Mib
from gpubroker_server.core.domain.visible_gpus import VARIABLE
from gpubroker_server.settings.environments import BuildRules
from gpubroker_server.settings.ray import RaySettings

_LIMITS = ServiceLimits()


class RayOptions(RaySettings, frozen=True):
    """The operator's settings for Ray, and the further options of its executor."""

    data_dir: Path
    devices: tuple[ReportedDevice, ...] | None = None
    """The simulated devices, which are equal on every node; None if NVML lists the devices."""
    task_path: tuple[str, ...] = ()
    """The directories from which tasks import modules; if empty, the working directory of this process."""
    task_user: str = ""
    result_limit_bytes: int = _LIMITS.result_bytes
    checkpoint_limit_bytes: int = _LIMITS.checkpoint_bytes
    log_limit_bytes: int = _LIMITS.log_bytes
    upload_bytes: int = _LIMITS.upload_bytes
    upload_files: int = _LIMITS.upload_files
    output_bytes: int = _LIMITS.output_bytes
    output_files: int = _LIMITS.output_files
    sample_period_seconds: float = 2.0
    beat_seconds: float = 2.0
    driver_patience_seconds: float = 15.0
    """A driver process that does not answer within this time is replaced."""
    log_level: str = "INFO"
    log_format: Literal["console", "json"] = "console"
    task_env: Mapping[str, str] = field(default_factory=dict)
    """The environment variables that every task gets."""
    watched_directories: tuple[str, ...] = ()
    """The directories on each node whose file systems are sampled, besides that of Ray's session."""

    environments: BuildRules = BuildRules()
    """The way in which nodes prepare environments."""
    own_visible_gpus: str | None = None
    """The value of CUDA_VISIBLE_DEVICES in the service's environment; None if it is not set."""

    @property
    def is_local(self) -> bool:
        return not self.address

    @property
    def visible_gpus(self) -> tuple[str, str] | None:
        """The GPUs to use, and the name of the setting or variable that says so; None if neither does. The
        setting takes precedence. The service's variable does not apply to nodes of a joined cluster, which
        have their own."""
        if self.gpus is not None:
            return ",".join(self.gpus), "ray.gpus"
        if self.is_local and self.own_visible_gpus is not None:
            return self.own_visible_gpus, f"{VARIABLE} of the service"
        return None

    @property
    def home(self) -> str:
        """A text that identifies a local Ray; empty for a joined cluster."""
        return f"{socket.gethostname()}:{self.data_dir.resolve()}" if self.is_local else ""

    @property
    def instance(self) -> str:
        """A text that identifies this broker among others on the same machines. Every process of its runs is
        marked with it."""
        place = str(self.data_dir.resolve()) if self.is_local else f"{self.address}/{self.cluster}"
        return hashlib.sha256(place.encode()).hexdigest()[:12]

    @property
    def namespace(self) -> str:
        """The namespace of this service's actors in Ray. Other brokers may use the same cluster."""
        return f"gpubroker-{self.instance}"

    @property
    def launch_mode(self) -> str:
        return "local" if self.is_local else "cluster"

    def agent_config(self, keepalive: str) -> "AgentConfig":
        devices = None
        if self.devices is not None:
            devices = tuple((d.uuid, d.kind, d.index, int(d.physical_mb), d.parent) for d in self.devices)
        shared_dir = Path(tempfile.gettempdir()) / f"gpubroker-{self.instance}"
        own: dict[str, Any] = {
            "node": self.node_name,
            "devices": devices,
            "task_path": tuple(self.task_path) or (os.getcwd(),),
            "run_dir": str(self.data_dir / "runs" if self.is_local else shared_dir),
            "keepalive": keepalive,
            "visible_gpus": self.visible_gpus,
            "task_env": tuple(sorted({"LAUNCH_MODE": self.launch_mode, **self.task_env}.items())),
        }
        same = {f.name: getattr(self, f.name) for f in fields(AgentConfig) if f.name not in own}
        return AgentConfig(**own, **same)


class AgentConfig(Struct, frozen=True):
    """The configuration of a node agent. It contains plain values only, because it is sent as JSON. An agent
    with another configuration is replaced.

    An agent of another release may read it, so a field that is added has a default.
    """

    node: str
    instance: str
    devices: tuple[tuple[str, str, int, int, str], ...] | None
    """(UUID, kind, index, MiB, UUID of the parent) of each simulated device; None if NVML lists the
    devices."""
    spares: int
    warm_runners: int
    cpu: float | None
    memory_mb: int | None
    max_runs: int
    process_memory_mb: int
    task_path: tuple[str, ...]
    task_user: str
    run_dir: str
    """The directory on the node that holds the records and logs of runs."""
    sample_period_seconds: float
    beat_seconds: float
    idle_stop_seconds: float
    keepalive: str
    """The file that the agent touches while it has a broker or a run. If empty, an idle agent ends by
    itself."""
    log_level: str = "INFO"
    log_format: Literal["console", "json"] = "console"
    log_limit_bytes: int = _LIMITS.log_bytes
    """The most bytes that are kept of each stream of a run's output."""
    inherit_env: tuple[str, ...] = ()
    task_env: tuple[tuple[str, str], ...] = ()
    watched_directories: tuple[str, ...] = ()
    work_dir: str = ""
    """The directory of uploaded directories and their copies for runs. If empty, they are below the
    temporary directory."""
    upload_cache_mb: int = RaySettings().upload_cache_mb
    upload_bytes: int = _LIMITS.upload_bytes
    upload_files: int = _LIMITS.upload_files
    output_bytes: int = _LIMITS.output_bytes
    output_files: int = _LIMITS.output_files
    visible_gpus: tuple[str, str] | None = None
    """The GPUs to use, as in CUDA_VISIBLE_DEVICES, and the name of the setting or variable that says so.
    None means those of the environment in which the node was started."""
    environments: BuildRules = BuildRules()
    gpu_memory_mb: int | None = None
    """The memory that is assumed for GPUs that have no memory of their own."""

    @property
    def namespace(self) -> str:
        """The namespace of this service's actors in Ray. Other brokers may use the same cluster."""
        return f"gpubroker-{self.instance}"

    @property
    def host_memory_mb(self) -> int:
        """The memory that the node offers, which is all of its memory unless the operator sets less."""
        return self.memory_mb or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20

    def on_node(self, name: str, cpus: float | None = None) -> "AgentConfig":
        """Return the configuration for one node. Simulated devices get UUIDs with the node's name. `cpus` is
        the number of CPUs with which the node was started."""
        target_mark, own_mark = f"-sim-{self.node}-", f"-sim-{name}-"
        named = tuple(
            (uuid.replace(target_mark, own_mark), kind, index, mb, parent.replace(target_mark, own_mark))
            for uuid, kind, index, mb, parent in self.devices or ()
        )
        devices = None if self.devices is None else named
        return replace(self, node=name, devices=devices, cpu=self.cpu or cpus)

    def to_json(self) -> str:
        """Return the configuration as JSON. Fields with default values are left out, because an agent of an
        earlier release may not know them."""
        defaults = {
            field.name: to_builtins(field.default) for field in fields(self) if field.default is not NODEFAULT
        }
        given = {
            name: value
            for name, value in to_builtins(self).items()
            if name not in defaults or value != defaults[name]
        }
        return json.dumps(given, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "AgentConfig":
        return msgspec.json.decode(text, type=cls)

    @property
    def simulated(self) -> tuple[ReportedDevice, ...] | None:
        if self.devices is None:
            return None
        return tuple(
            ReportedDevice(uuid, kind, index, Mib(mb), True, parent)
            for uuid, kind, index, mb, parent in self.devices
        )
