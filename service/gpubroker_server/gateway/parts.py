"""The parts that the composition root hands to the app. Every route may ask for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from gpubroker.wire.policy import GpuKind
from msgspec import Struct

from gpubroker_server.core.admission.admit import AdmissionPolicy
from gpubroker_server.core.admission.defaults import Defaults
from gpubroker_server.core.admission.environments import EnvironmentPolicy
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
from gpubroker_server.http.subscriptions import Subscriptions
from gpubroker_server.http.times import Follower, Freshness
from gpubroker_server.http.waiters import LeaderRequests, Leadership, OneAtATime, Waiters
from gpubroker_server.ports.model_servers import KnownServer, ModelResidencies
from gpubroker_server.ports.secrets import SecretStore
from gpubroker_server.ports.store import BlobStore, Clock, TaskStore
from gpubroker_server.ports.worker_calls import WorkerCalls
from gpubroker_server.telemetry.table import ExtensionRow


class OperatorRules(Struct, frozen=True, kw_only=True):
    """The operator's configuration."""

    permissions: Permissions
    defaults: Defaults = Defaults()
    environments: EnvironmentPolicy = EnvironmentPolicy()
    limits: ServiceLimits = ServiceLimits()
    kinds: tuple[GpuKind, ...] = ()
    """The kinds of GPU that the operator has ranked, strongest first."""
    allowed_hosts: tuple[str, ...] = ()
    """The names under which clients may address the service, in addition to the loopback names."""
    task_user: str = ""
    """The system user that runs become."""
    trusted_proxies: tuple[str, ...] = ()
    """The addresses and networks of proxies whose headers name the client of a request."""
    root_path: str = ""
    """The path under which a proxy publishes the service."""

    @property
    def policy(self) -> Policy:
        return self.permissions.policy

    @property
    def admission(self) -> AdmissionPolicy:
        return AdmissionPolicy(self.permissions, self.defaults, self.environments)


@dataclass(frozen=True, kw_only=True)
class AppParts:
    """The parts of the app: those that the composition root hands over, and those that are made from them."""

    store: TaskStore
    blobs: BlobStore
    secrets: SecretStore
    follower: Follower
    leadership: Leadership
    tokens: Tokens
    rules: OperatorRules
    waiters: Waiters
    """The requests that wait. The composition root passes every batch of committed events to `on_events`."""
    shutdown: Callable[[bool], None]
    """Begins an orderly stop, which also stops the local cluster if the argument is True. It returns at
    once."""
    has_executor: bool = True
    """True if this process starts runs. It is then not ready without its executor."""
    ids: Ids = field(default_factory=Ids)
    access_log: bool = False
    disk_full: Callable[[], str] = str
    """Returns a text that says which local disk of this process is full, and why; empty if none is full."""
    extensions: Callable[[], Sequence[ExtensionRow]] = tuple
    """Returns what became of the events of each extension of this process."""
    servers: Sequence[KnownServer] = ()
    """All model servers."""
    residencies: ModelResidencies | None = None
    """The models of servers in the ledger; None if there is no such server."""
    history: FleetHistory = field(default_factory=FleetHistory)
    """The history of measured values. The composition root makes it follow the World."""
    database_log: LogWatch = field(default_factory=LogWatch)
    """The growth of the database log as this process has seen it. The composition root measures it."""
    worker_calls: WorkerCalls | None = None
    """Sends calls to workers of worker sets; None if this process has no Ray driver."""
    name: str = "gateway"
    """The name of this process, which no other process has."""

    surveys: SurveyCache = field(init=False, default_factory=SurveyCache)
    """Surveys of the World that one explanation keeps for the next."""
    findings_seen: dict[tuple[str, str], Instant] = field(init=False, default_factory=dict)
    """Finding of the last diagnosis by this process -> the time at which the finding was first seen."""

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
    def subscriptions(self) -> Subscriptions:
        """The open event streams. The composition root passes every batch of committed events to
        `on_events`."""
        return Subscriptions(self.limits.event_streams, self.limits.token_event_streams)

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
        """The lock of batches. One batch at a time is turned into tasks, in small steps, while the batch
        before it is stored."""
        return OneAtATime("batches", max_waiting=32)

    @cached_property
    def reads(self) -> OneAtATime:
        """The lock of inferences that read objects. One inference at a time has its objects in memory."""
        return OneAtATime("inferences on objects", max_waiting=64)

    @cached_property
    def plans(self) -> OneAtATime:
        return OneAtATime("plans", max_waiting=0)

    @cached_property
    def answers(self) -> OneAtATime:
        """The lock of explanations and simulations. Between two of them the event loop is free for as long as
        one took, because the leader may share the loop."""
        return OneAtATime("explanations and simulations", max_waiting=16, on_the_loop=True)

    @cached_property
    def diagnoses(self) -> OneAtATime:
        return OneAtATime("diagnoses", max_waiting=4, on_the_loop=True)


Parts = Annotated[AppParts, app_part(AppParts)]
