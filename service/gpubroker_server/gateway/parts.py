"""What the composition root hands to the app, and every route may ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from gpubroker_server.core.control.history import FleetHistory
from gpubroker_server.core.domain.device import GpuKind
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.survey import SurveyCache
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.identity import Tokens
from gpubroker_server.gateway.http.ids import Ids
from gpubroker_server.gateway.http.leader_release import LeaderRelease
from gpubroker_server.gateway.http.routing import PARTS
from gpubroker_server.gateway.http.times import Follower, Freshness
from gpubroker_server.gateway.http.waiters import LeaderRequests, Leadership, OneAtATime, Waiters
from gpubroker_server.gateway.proxy.residency.residency import ResidencyParts
from gpubroker_server.gateway.proxy.residency.server_choice import Residencies
from gpubroker_server.gateway.proxy.residency.server_rules import ServerRules
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.gateway.status.log_readers import LogReaders
from gpubroker_server.gateway.status.pending import PendingReasons
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.admission import Capacity, Permissions
from gpubroker_server.gateway.submission.demand import Defaults
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.ports.models import ModelHost
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import BlobStore, Clock, TaskStore
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


@dataclass(frozen=True, kw_only=True)
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

    surveys: SurveyCache = field(init=False, default_factory=SurveyCache)
    """What one explanation keeps of the World for the next."""
    findings_seen: dict[tuple[str, str], Instant] = field(init=False, default_factory=dict)
    """Since when, of the findings of the last diagnosis that this process made."""

    @property
    def world(self) -> World:
        return self.follower.world

    @property
    def clock(self) -> Clock:
        return self.follower.clock

    @property
    def policy(self) -> Policy:
        return self.rules.policy

    @property
    def limits(self) -> RequestLimits:
        return self.rules.limits

    @property
    def outside(self) -> list[Server]:
        """The model servers outside the ledger."""
        return [server for server in self.servers if not server.is_managed]

    @cached_property
    def freshness(self) -> Freshness:
        return Freshness(self.follower, self.store, self.waiters, self.limits)

    @cached_property
    def log_readers(self) -> LogReaders:
        return LogReaders(self.name, self.store, self.clock)

    @cached_property
    def capacity(self) -> Capacity:
        return Capacity(self.world, self.policy)

    @cached_property
    def records(self) -> TaskRecords:
        pending = PendingReasons(self.world, self.policy, self.leadership)
        return TaskRecords(
            self.store, self.blobs, self.follower, self.freshness, self.waiters, pending,
            self.limits.page_items,
        )  # fmt: skip

    @cached_property
    def submissions(self) -> Submissions:
        limits = self.limits
        return Submissions(
            self.store, self.blobs, self.secrets, self.world, self.ids, self.clock, self.rules.defaults,
            self.capacity, self.rules.permissions, self.records, limits.inline_bytes,
            limits.tenant_pending_tasks, limits.tenant_pending_bytes, self._release, limits.object_seconds,
            self.leadership.last_fleet,
        )  # fmt: skip

    @cached_property
    def requests(self) -> LeaderRequests:
        seconds = self.limits.settle_seconds
        return LeaderRequests(self.store, self.ids, self.clock, self.waiters, seconds, self._release)

    @property
    def _release(self) -> LeaderRelease:
        return LeaderRelease(self.leadership.leader)

    @cached_property
    def residencies(self) -> Residencies | None:
        """None if no model server is in the ledger."""
        parts = ResidencyParts(
            self.world, self.policy, self.clock, self.store, self.ids, self.waiters, self.capacity,
            self.leadership.forecasts, self.limits.settle_seconds,
        )  # fmt: skip
        return Residencies(parts, self.served) if self.served else None

    @cached_property
    def batches(self) -> OneAtATime:
        """One batch is made into tasks at a time, in small steps, while the one before it is being stored."""
        return OneAtATime("batches", max_waiting=32)

    @cached_property
    def reads(self) -> OneAtATime:
        """One inference has its objects in memory at a time."""
        return OneAtATime("inferences on objects", max_waiting=64)

    @cached_property
    def plans(self) -> OneAtATime:
        return OneAtATime("plans", max_waiting=0)

    @cached_property
    def answers(self) -> OneAtATime:
        """The leader may share the event loop; between two answers it gets the loop for as long as one
        took."""
        return OneAtATime("explanations and simulations", max_waiting=16, on_the_loop=True)

    @cached_property
    def diagnoses(self) -> OneAtATime:
        return OneAtATime("diagnoses", max_waiting=4, on_the_loop=True)


Parts = Annotated[AppParts, PARTS]
