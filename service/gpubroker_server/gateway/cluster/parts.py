"""What the routes of the cluster need."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from gpubroker_server.core.control.history import FleetHistory
from gpubroker_server.core.domain.device import GpuKind
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.bodies import RequestLimits
from gpubroker_server.gateway.http.identity import Tokens
from gpubroker_server.gateway.http.routing import PARTS
from gpubroker_server.gateway.http.times import Freshness
from gpubroker_server.gateway.http.waiters import LeaderRequests, Leadership, OneAtATime
from gpubroker_server.gateway.proxy.residency.server_choice import Residencies
from gpubroker_server.gateway.proxy.servers import Server
from gpubroker_server.gateway.submission.demand import Defaults
from gpubroker_server.ports.store import BlobStore, Clock


@dataclass(frozen=True, slots=True)
class ClusterParts:
    world: World
    clock: Clock
    freshness: Freshness
    leadership: Leadership
    requests: LeaderRequests
    tokens: Tokens
    policy: Policy
    limits: RequestLimits
    defaults: Defaults
    kinds: tuple[GpuKind, ...]
    """The kinds of GPU that the operator has ranked, strongest first."""
    servers: tuple[Server, ...]
    residencies: Residencies | None
    disk_full: Callable[[], str]
    history: FleetHistory
    blobs: BlobStore
    first_seen: dict[tuple[str, str], Instant] = field(default_factory=dict)
    """Of the findings of the last diagnosis that this process made."""
    diagnoses: OneAtATime = field(
        default_factory=lambda: OneAtATime("diagnoses", max_waiting=4, on_the_loop=True)
    )

    def idle_seconds(self) -> dict[str, float]:
        """How long each device (by key) and node (by name) has been idle that is."""
        leader, now = self.leadership.leader(), self.clock.now()
        idle = () if leader is None or leader.fleet is None else leader.fleet.idle
        return {one.name: max(0.0, now - one.since) for one in idle}


Parts = Annotated[ClusterParts, PARTS]
