"""Values that processes publish to each other. They are not events: only the newest value of each kind
counts."""

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
    """The leader's state, as the leader last published it."""

    term: Term
    holder: str
    at: Instant
    executor: Mapping[str, Any]
    """The mapping that `Executor.status` returns."""
    paused: PausedDetection | None = None
    """The silent nodes that the leader does not give up; None if detection of silent nodes is not paused."""
    silent: Mapping[NodeName, Instant] = field(default_factory=dict)
    """Node with a late heartbeat -> the time of its last heartbeat."""
    slots: Mapping[str, Shares] | None = None
    """Model -> the slots that each gateway may claim; None if the leader divides none."""
    fleet: FleetSeen | None = None
    """The leader's picture of the fleet; None before its first look."""
    lease_seconds: Seconds = Seconds(0.0)
    """The time that the leader may lead without another renewal."""
    release: str = ""
    """The release of the leader's software; empty for release 0.2.0, which does not publish it."""


class LastValues(Struct, frozen=True):
    """The values that a leader publishes: those that changed since its last publication."""

    samples: Sequence[DeviceSample] = ()
    progress: Mapping[TaskId, Progress] = field(default_factory=dict)
    leader: LeaderSeen | None = None
    """The leader, with `fleet.idle` empty. Idle devices are in `idle`, because a large fleet has many of them
    and they change only once a minute."""
    idle: Sequence[Idle] | None = None
    """The idle devices; None if they have not changed."""
    ended: Sequence[TaskId] = ()
    """Runs that have ended, and whose progress is removed."""
    nodes: Sequence[NodeSample] = ()


class Presence(Struct, frozen=True):
    """A gateway's sign of life, with the claims on leaving models that it does not use any more."""

    gateway: str
    at: Instant
    let_go: frozenset[str] = frozenset()
    """Claims (`mark_of`) to which the gateway sends no more requests, and of which all requests are
    answered."""
    in_use: frozenset[str] = frozenset()
    """Models that have a request at this gateway, under way or waiting."""
    recent: frozenset[str] = frozenset()
    """Models that had a request at this gateway within `triton.yields_to_tasks_seconds`."""


PRESENT_SECONDS = Seconds(5.0)
"""Time after its last sign of life from which a gateway counts as gone."""


class PresenceStore(Protocol):
    """Gateways as the leader sees them. Lost rows are written again within a second."""

    async def present(self, presence: Presence) -> None:
        """Replace the last presence of this gateway. Raises StoreUnavailable."""

    async def absent(self, gateway: str) -> None:
        """Remove the presence of a gateway that ends. Raises StoreUnavailable."""

    async def presences(self) -> Sequence[Presence]:
        """Return the last presence of each gateway, however old. Raises StoreUnavailable."""


class SlotStore(Protocol):
    """Claims of gateways on slots of models. Lost rows are written again within a second."""

    async def claim_slots(self, claim: Claim) -> None:
        """Replace the last claim of this gateway. Raises StoreUnavailable."""

    async def slot_claims(self) -> Sequence[Claim]:
        """Return the last claim of each gateway, however old. Raises StoreUnavailable."""

    async def drop_slots(self, gateway: str) -> None:
        """Remove the claim of a gateway. Raises StoreUnavailable."""


class LastValueStore(Protocol):
    """Stores the values that the leader publishes to other processes. Lost rows are written again within a
    second."""

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        """Publish values. `number` counts the publications of a term, from 1. The first publication deletes
        those of older terms. Raises StoreUnavailable."""

    async def published(self, after: int) -> tuple[int, LastValues]:
        """Return the `after` of the next call, and the values that were published after `after`; 0 reads all
        of them. Raises StoreUnavailable."""
