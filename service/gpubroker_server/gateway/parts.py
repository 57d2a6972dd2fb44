"""The parts that the composition root hands to the app, and that every route may ask for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from gpubroker.wire.policy import GpuKind
from msgspec import Struct

from gpubroker_server.core.admission.admit import AdmissionPolicy
from gpubroker_server.core.admission.defaults import Defaults
from gpubroker_server.core.admission.permissions import Permissions
from gpubroker_server.core.control.history import FleetHistory
from gpubroker_server.core.control.log_growth import LogWatch
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.explain.survey import SurveyCache
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.status.log_readers import LogReaders
from gpubroker_server.gateway.status.pending import PendingReasons
from gpubroker_server.gateway.status.records import TaskRecords
from gpubroker_server.gateway.submission.capacity import Capacity
from gpubroker_server.gateway.submission.submissions import Submissions
from gpubroker_server.http.identity import Tokens
from gpubroker_server.http.ids import Ids
from gpubroker_server.http.leader_release import LeaderRelease
from gpubroker_server.http.routing import app_part
from gpubroker_server.http.times import Follower, Freshness
from gpubroker_server.http.waiters import LeaderRequests, Leadership, OneAtATime, Waiters
from gpubroker_server.ports.model_servers import KnownServer, ModelResidencies
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import BlobStore, Clock, TaskStore
from gpubroker_server.ports.worker_calls import WorkerCalls


class OperatorRules(Struct, frozen=True, kw_only=True):
    """The operator's configuration."""

    permissions: Permissions
    defaults: Defaults = Defaults()
    limits: ServiceLimits = ServiceLimits()
    kinds: tuple[GpuKind, ...] = ()
    """The kinds of GPU that the operator has ranked, strongest first."""
    allowed_hosts: tuple[str, ...] = ()
    """Names, besides loopback ones, under which clients may address the service."""
    task_user: str = ""
    """The system user that runs become."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies that say where a request came from."""
    root_path: str = ""
    """The path below which a proxy has the service."""

    @property
    def policy(self) -> Policy:
        return self.permissions.policy

    @property
    def admission(self) -> AdmissionPolicy:
        return AdmissionPolicy(self.permissions, self.defaults)


@dataclass(frozen=True, kw_only=True)
class AppParts:
    store: TaskStore
    blobs: BlobStore
    secrets: SecretStore
    follower: Follower
    leadership: Leadership
    tokens: Tokens
    rules: OperatorRules
    waiters: Waiters
    """The composition root passes it every batch of committed events."""
    shutdown: Callable[[bool], None]
    """Begin an orderly stop; True also stops the local cluster. Returns at once."""
    has_executor: bool = True
    """Runs are started from this process, so it is not ready without its executor."""
    ids: Ids = field(default_factory=Ids)
    access_log: bool = False
    disk_full: Callable[[], str] = str
    """Says which local disk of this process is full, and why; empty if none is."""
    servers: Sequence[KnownServer] = ()
    """All model servers."""
    residencies: ModelResidencies | None = None
    """The models of servers in the ledger; None if there is no such server."""
    history: FleetHistory = field(default_factory=FleetHistory)
    """The composition root has it follow the World."""
    database_log: LogWatch = field(default_factory=LogWatch)
    """The composition root has it look at the database."""
    worker_calls: WorkerCalls | None = None
    """The way to workers of sets; None if this process has no Ray driver."""
    name: str = "gateway"
    """The name of this process, unlike all others."""

    surveys: SurveyCache = field(init=False, default_factory=SurveyCache)
    """The parts of the World that one explanation keeps for the next."""
    findings_seen: dict[tuple[str, str], Instant] = field(init=False, default_factory=dict)
    """Finding of the last diagnosis that this process made -> the time since which it is known."""

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
    def limits(self) -> ServiceLimits:
        return self.rules.limits

    @property
    def outside(self) -> list[KnownServer]:
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
        return Submissions(
            self.store, self.blobs, self.secrets, self.world, self.ids, self.clock, self.rules.admission,
            self.capacity, self.records, self.requests, self.limits, self._release,
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
    def batches(self) -> OneAtATime:
        """The turn of batches: one is made into tasks at a time, in small steps, while the one before it is
        stored."""
        return OneAtATime("batches", max_waiting=32)

    @cached_property
    def reads(self) -> OneAtATime:
        """The turn of inferences that read objects: one has its objects in memory at a time."""
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


Parts = Annotated[AppParts, app_part(AppParts)]
