"""Values that processes publish to each other and that are no events: only the newest of each counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.serving.slots import Claim, Shares
from gpubroker_server.ports.executor import Progress


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """The leader, as it last published itself."""

    term: Term
    holder: str
    at: Instant
    executor: Mapping[str, Any]
    """As `Executor.status`."""
    paused: PausedDetection | None = None
    """The silent nodes that it does not give up."""
    silent: Mapping[NodeName, Instant] = field(default_factory=dict)
    """Nodes with a late heartbeat, and when it last came."""
    slots: Mapping[str, Shares] | None = None
    """By model, the slots that each gateway may claim; None if the leader divides none."""
    fleet: FleetSeen | None = None
    """What it makes of its measurements; None before its first look."""
    lease_seconds: Seconds = Seconds(0.0)
    """It may lead this long without another renewal."""
    release: str = ""
    """Of its software; empty: 0.2.0, which does not say it."""


@dataclass(frozen=True, slots=True)
class LastValues:
    """What a leader publishes: what changed since its last publication."""

    samples: Sequence[DeviceSample] = ()
    progress: Mapping[TaskId, Progress] = field(default_factory=dict)
    leader: LeaderSeen | None = None
    """With `fleet.idle` empty: a large fleet has much of it, and it changes once a minute ..."""
    idle: Sequence[Idle] | None = None
    """... so it is told by itself; None: it is as it was."""
    ended: Sequence[TaskId] = ()
    """Runs that have ended: remove their progress."""
    nodes: Sequence[NodeSample] = ()


def claim_name(task: TaskId, fence: Fence) -> str:
    """The key of a claim on a model in `Presence.let_go`."""
    return f"{task}:{fence}"


@dataclass(frozen=True, slots=True)
class Presence:
    """A gateway's sign of life, with the claims on leaving models that it does not use any more."""

    gateway: str
    at: Instant
    let_go: frozenset[str] = frozenset()
    """By `claim_name`: the gateway sends them no more requests, and all its requests are answered."""
    in_use: frozenset[str] = frozenset()
    """Models that have a request here, under way or waiting."""


PRESENT_SECONDS = Seconds(5.0)
"""A gateway without a sign of life for so long counts as gone."""


class PresenceStore(Protocol):
    """Gateways as the leader sees them. Lost rows are written again within a second."""

    async def present(self, presence: Presence) -> None:
        """Replaces the last one of this gateway. Raises StoreUnavailable."""

    async def absent(self, gateway: str) -> None:
        """Remove the presence of a gateway that ends. Raises StoreUnavailable."""

    async def presences(self) -> Sequence[Presence]:
        """The last one of each gateway, however old. Raises StoreUnavailable."""


class SlotStore(Protocol):
    """Claims of gateways on slots of models. Lost rows are written again within a second."""

    async def claim_slots(self, claim: Claim) -> None:
        """Replaces the last claim of this gateway. Raises StoreUnavailable."""

    async def slot_claims(self) -> Sequence[Claim]:
        """The last claim of each gateway, however old. Raises StoreUnavailable."""

    async def drop_slots(self, gateway: str) -> None:
        """Remove the claim of a gateway. Raises StoreUnavailable."""


class LastValueStore(Protocol):
    """What the leader publishes to other processes. Lost rows are written again within a second."""

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        """`number` counts the publications of a term, from 1. The first deletes those of older terms. Raises
        StoreUnavailable."""

    async def published(self, after: int) -> tuple[int, LastValues]:
        """What was published since, and the `after` of the next call; 0 reads all. Raises
        StoreUnavailable."""
