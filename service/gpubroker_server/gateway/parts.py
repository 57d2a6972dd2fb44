"""What the gateway is put together from. The composition root fills this in; nothing here reads settings."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from gpubroker_server.core.domain.device import GpuKind
from gpubroker_server.core.domain.leader_term import LeadershipStatus
from gpubroker_server.core.domain.policy import BAND_NAMES, Policy
from gpubroker_server.core.domain.units import Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.planning.asking import Asking
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.cluster.fragmentation import Pieces
from gpubroker_server.gateway.http.concurrency import Turns
from gpubroker_server.gateway.http.identity import Tokens
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.waiters import Waiters
from gpubroker_server.gateway.proxy.residency.residencies import Residencies
from gpubroker_server.gateway.proxy.residency.residency import ResidencyParts
from gpubroker_server.gateway.proxy.residency.server_rules import ServerRules
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.gateway.status.pending import PendingReasons
from gpubroker_server.gateway.submission.capacity import Capacity
from gpubroker_server.gateway.submission.gpu_size import GpuSize
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.store import BlobStore, Clock, Progress, TaskStore

PYTHON_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 8 * 1024 * 1024
    batch_body_bytes: int = 16 * 1024 * 1024
    object_bytes: int = 16 * 1024 * 1024
    """The largest object that may be uploaded, and the most that the objects of one inference have."""
    tenant_object_bytes: int = 4 * 1024**3
    tenant_objects: int = 10_000
    """All that a tenant has uploaded."""
    object_seconds: Seconds = Seconds(86400.0)
    """An uploaded object is kept so long after its last use."""
    inline_bytes: int = 64 * 1024
    """Arguments up to this size stay in the row; larger ones become blobs."""
    stale_seconds: Seconds = Seconds(30.0)
    """Overviews older than this are refused."""
    wait_seconds: Seconds = Seconds(60.0)
    """No answer is held back longer than this, whatever the client prefers."""
    settle_seconds: Seconds = Seconds(1.0)
    """How long an answer to cancel or change waits for the leader to carry it out."""
    page_items: int = 500
    """A page holds at most so many items; who asks for more gets so many."""


@dataclass(frozen=True, slots=True)
class ModelType:
    """What a submit of this model type gets where it says nothing; None: what every submit gets."""

    priority: int | None = None
    gpu_mb: GpuSize | None = None
    """Only for a submit that says nothing of GPUs."""
    cpu: float | None = None
    memory_mb: int | None = None
    timeout_seconds: float | None = None
    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a submit that leaves it out gets."""

    priority: int = BAND_NAMES["batch"]
    cpu: float = 1.0
    max_retries: int = 0
    grace_seconds: Seconds = Seconds(30.0)
    timeout_seconds: Seconds | None = None
    model_types: Mapping[str, ModelType] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatewayParts:
    store: TaskStore
    world: World
    """Kept up to date by the composition root, on the same event loop; only read here."""
    policy: Policy
    blobs: BlobStore
    clock: Clock
    limits: Limits
    defaults: Defaults
    identity: Tokens
    allowed_entrypoints: tuple[str, ...]
    """Patterns of `module:function` that tasks may name, such as `myteam.*:*`."""
    allowed_hosts: tuple[str, ...]
    """Names, besides loopback ones, under which clients may address the service."""
    progress: Mapping[TaskId, Progress]
    """The last word of each run about itself."""
    executor_status: Callable[[], Mapping[str, Any]]
    """As `Executor.status`."""
    age_seconds: Callable[[], float]
    """Seconds since the World was last known to stand at the head of the log."""
    shutdown: Callable[[bool], None]
    """Begin an orderly stop; True stops the local cluster as well. Returns at once."""
    why_stale: Callable[[], str] = str
    """What to do about an age that time does not mend; empty where it does."""
    term: Callable[[], Term | None] = lambda: None
    """The term of the leader in this process; None if it does not lead."""
    standing: Callable[[], LeadershipStatus] = LeadershipStatus
    """How this process stands to the lead."""
    paused: Callable[[], PausedDetection | None] = lambda: None
    """Which silent nodes the leader does not give up."""
    leader: Callable[[], LeaderSeen | None] = lambda: None
    """Whoever leads, here or elsewhere; None if nobody is known to."""
    has_executor: bool = True
    """Work is carried out from this process, so it is not ready without its executor."""
    forecasts: Callable[[], Sequence[Forecast]] = tuple
    """Those that hold now."""
    waiters: Waiters = field(default_factory=Waiters)
    """Fed with every batch of committed events by the composition root."""
    plans: Turns = field(default_factory=lambda: Turns("plans", most_waiting=0))
    answers: Turns = field(
        default_factory=lambda: Turns("explanations and simulations", most_waiting=16, on_the_loop=True)
    )
    """The leader shares the event loop, and is held up by one of them at most before it has its turn."""
    asking: Asking = field(default_factory=Asking)
    """What they keep of the World for one another."""
    batches: Turns = field(default_factory=lambda: Turns("batches", most_waiting=32))
    """One is taken in at a time, in small steps; the one before it is on its way to the disk meanwhile."""
    reads: Turns = field(default_factory=lambda: Turns("inferences on objects", most_waiting=64))
    """One has the objects that it names in memory at a time."""
    ids: Ids = field(default_factory=Ids)
    python: str = PYTHON_MINOR
    """The Python minor that runs pickled functions."""
    cloudpickle: str = version("cloudpickle")
    """What opens them there."""
    kinds: tuple[GpuKind, ...] = ()
    """Those that the operator has ranked, strongest first."""
    served: Sequence[tuple[ServerRules, ModelHost]] = ()
    """The servers whose models are held in the ledger."""
    servers: Sequence[Server] = ()
    """All servers of models, those included."""
    residencies: Residencies | None = field(init=False)
    capacity: Capacity = field(init=False)
    pending: PendingReasons = field(init=False)
    pieces: Pieces = field(init=False)

    def __post_init__(self) -> None:
        capacity = Capacity(self.world, self.policy)
        object.__setattr__(self, "capacity", capacity)
        residency_parts = ResidencyParts(
            self.world, self.policy, self.clock, self.store, self.ids, self.waiters, capacity, self.forecasts,
            self.limits.settle_seconds,
        )  # fmt: skip
        residencies = Residencies(residency_parts, self.served) if self.served else None
        object.__setattr__(self, "residencies", residencies)
        object.__setattr__(self, "pieces", Pieces(self.world, self.policy, self.clock))
        object.__setattr__(self, "pending", PendingReasons(self.world, self.policy, self.forecasts))
