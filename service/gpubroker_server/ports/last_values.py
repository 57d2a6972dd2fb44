"""Values that processes publish to each other and that are no events: only the newest of each counts."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct, field

from gpubroker_server.core.control.fleet import FleetSeen
from gpubroker_server.core.control.idle import Idle
from gpubroker_server.core.domain.device import DeviceSample, NodeSample
from gpubroker_server.core.domain.progress import Progress
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.serving.slots import Claim, Shares


class LeaderSeen(Struct, frozen=True):
    """The leader, as it last published itself."""

    term: Term
    holder: str
    at: Instant
    executor: Mapping[str, Any]
    """The mapping that `Executor.status` returns."""
    paused: PausedDetection | None = None
    """The silent nodes that it does not give up."""
    silent: Mapping[NodeName, Instant] = field(default_factory=dict)
    """Nodes with a late heartbeat, and when it last came."""
    slots: Mapping[str, Shares] | None = None
    """Model -> the slots that each gateway may claim; None if the leader divides none."""
    fleet: FleetSeen | None = None
    """The leader's picture of the fleet; None before its first look."""
    lease_seconds: Seconds = Seconds(0.0)
    """The time that the leader may lead without another renewal."""
    release: str = ""
    """The release of its software; empty: 0.2.0, which does not say it."""


class LastValues(Struct, frozen=True):
    """The values that a leader publishes: those that changed since its last publication."""

    samples: Sequence[DeviceSample] = ()
    progress: Mapping[TaskId, Progress] = field(default_factory=dict)
    leader: LeaderSeen | None = None
    """The leader, with `fleet.idle` empty: a large fleet has much of it, and it changes once a minute."""
    idle: Sequence[Idle] | None = None
    """The idle devices, published by themselves; None if they are as they were."""
    ended: Sequence[TaskId] = ()
    """Runs that have ended: remove their progress."""
    nodes: Sequence[NodeSample] = ()


class Presence(Struct, frozen=True):
    """A gateway's sign of life, with the claims on leaving models that it does not use any more."""

    gateway: str
    at: Instant
    let_go: frozenset[str] = frozenset()
    """Claims (`mark_of`) to which the gateway sends no more requests, and of which all requests are
    answered."""
    in_use: frozenset[str] = frozenset()
    """Models that have a request here, under way or waiting."""
    recent: frozenset[str] = frozenset()
    """Models that had one here within `triton.yields_to_tasks_seconds`."""


PRESENT_SECONDS = Seconds(5.0)
"""A gateway without a sign of life for so long counts as gone."""


class PresenceStore(Protocol):
    """Gateways as the leader sees them. Lost rows are written again within a second."""

    async def present(self, presence: Presence) -> None:
        """Replace the last presence of this gateway. Raises StoreUnavailable."""

    async def absent(self, gateway: str) -> None:
        """Remove the presence of a gateway that ends. Raises StoreUnavailable."""

    async def presences(self) -> Sequence[Presence]:
        """The last one of each gateway, however old. Raises StoreUnavailable."""


class SlotStore(Protocol):
    """Claims of gateways on slots of models. Lost rows are written again within a second."""

    async def claim_slots(self, claim: Claim) -> None:
        """Replace the last claim of this gateway. Raises StoreUnavailable."""

    async def slot_claims(self) -> Sequence[Claim]:
        """The last claim of each gateway, however old. Raises StoreUnavailable."""

    async def drop_slots(self, gateway: str) -> None:
        """Remove the claim of a gateway. Raises StoreUnavailable."""


class LastValueStore(Protocol):
    """Stores the values that the leader publishes to other processes. Lost rows are written again within a
    second."""

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        """`number` counts the publications of a term, from 1. The first deletes those of older terms. Raises
        StoreUnavailable."""

    async def published(self, after: int) -> tuple[int, LastValues]:
        """Return what was published since, and the `after` of the next call; 0 reads all. Raises
        StoreUnavailable."""
