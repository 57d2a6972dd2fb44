"""What the composition root hands to the app, which gives each resource only its own part of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpubroker_server.core.control.history import FleetHistory
from gpubroker_server.core.domain.device import GpuKind
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.identity import Tokens
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.times import Follower
from gpubroker_server.gateway.http.waiters import Leadership, Waiters
from gpubroker_server.gateway.proxy.residency.residency import ResidencyParts
from gpubroker_server.gateway.proxy.residency.server_choice import Residencies
from gpubroker_server.gateway.proxy.residency.server_rules import ServerRules
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.gateway.status.log_readers import LogReaders
from gpubroker_server.gateway.submission.admission import Capacity, Permissions
from gpubroker_server.gateway.submission.demand import Defaults
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import BlobStore, TaskStore
from gpubroker_server.ports.worker_calls import WorkerCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRules:
    """What the operator has configured."""

    permissions: Permissions
    defaults: Defaults = field(default_factory=Defaults)
    limits: RequestLimits = field(default_factory=RequestLimits)
    kinds: tuple[GpuKind, ...] = ()
    """The kinds of GPU that the operator has ranked, strongest first."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides loopback ones, under which clients may address the service."""

    @property
    def policy(self) -> Policy:
        return self.permissions.policy


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    store: TaskStore
    blobs: BlobStore
    secrets: SecretStore
    follower: Follower
    leadership: Leadership
    tokens: Tokens
    rules: OperatorRules
    shutdown: Callable[[bool], None]
    """Begin an orderly stop; True also stops the local cluster. Returns at once."""
    has_executor: bool = True
    """Runs are started from this process, so it is not ready without its executor."""
    waiters: Waiters = field(default_factory=Waiters)
    """The composition root passes it every batch of committed events."""
    ids: Ids = field(default_factory=Ids)
    access_log: bool = False
    disk_full: Callable[[], str] = str
    """Of the local disks of this process: which is full, and why; or empty."""
    servers: Sequence[Server] = ()
    """All model servers."""
    served: Sequence[tuple[ServerRules, ModelHost]] = ()
    """Those with models in the ledger."""
    history: FleetHistory = field(default_factory=FleetHistory)
    """The composition root has it follow the World."""
    worker_calls: WorkerCalls | None = None
    """The way to workers of sets; None if this process has no Ray driver."""
    name: str = "gateway"
    """Of this process, unlike all others."""
    log_readers: LogReaders = field(init=False)
    capacity: Capacity = field(init=False)
    residencies: Residencies | None = field(init=False)

    def __post_init__(self) -> None:
        world, policy = self.follower.world, self.rules.policy
        capacity = Capacity(world, policy)
        readers = LogReaders(self.name, self.store, self.follower.clock)
        object.__setattr__(self, "log_readers", readers)
        residency = ResidencyParts(
            world, policy, self.follower.clock, self.store, self.ids, self.waiters, capacity,
            self.leadership.forecasts, self.rules.limits.settle_seconds,
        )  # fmt: skip
        object.__setattr__(self, "capacity", capacity)
        object.__setattr__(self, "residencies", Residencies(residency, self.served) if self.served else None)
