"""What is no event and yet is to be seen from every process: of each thing only its newest word counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpubroker_server.core.domain.device import DeviceSample
from gpubroker_server.core.domain.units import Fence, Instant, NodeName, Seconds, TaskId, Term
from gpubroker_server.core.lifecycle.silent_nodes import PausedDetection
from gpubroker_server.core.serving.slots import Claim, Shares
from gpubroker_server.ports.store import Progress


@dataclass(frozen=True, slots=True)
class LeaderSeen:
    """Who leads, as far as this process knows, and what it last said of the executor."""

    term: Term
    holder: str
    at: Instant
    executor: Mapping[str, Any]
    """As `Executor.status`."""
    paused: PausedDetection | None = None
    """Which silent nodes it does not give up."""
    silent: Mapping[NodeName, Instant] = field(default_factory=dict)
    """Nodes of which it has heard nothing for more than two beats, and when it last did."""
    slots: Mapping[str, Shares] | None = None
    """By model what each gateway may claim of its slots; None of a leader that divides none."""


@dataclass(frozen=True, slots=True)
class LastValues:
    """What is no event: of each thing only the newest word counts, and nobody misses the ones before."""

    samples: Sequence[DeviceSample] = ()
    progress: Mapping[TaskId, Progress] = field(default_factory=dict)
    leader: LeaderSeen | None = None
    ended: Sequence[TaskId] = ()
    """Runs of whose progress nothing is to be kept."""


def claim_name(task: TaskId, fence: Fence) -> str:
    """Under which gateways tell that they have let go of a model."""
    return f"{task}:{fence}"


@dataclass(frozen=True, slots=True)
class Presence:
    """A gateway says that it is there, and of which models that are to leave it has let go."""

    gateway: str
    at: Instant
    let_go: frozenset[str] = frozenset()
    """Claims, as `claim_name` names them: it knows that they are to leave, sends them nothing more, and what
    it had sent is answered."""


PRESENT_SECONDS = Seconds(5.0)
"""A gateway that has said nothing for so long is waited for no longer."""


class PresenceStore(Protocol):
    """Where gateways tell the leader of themselves; losing it loses nothing but a second."""

    async def present(self, presence: Presence) -> None:
        """In place of what this gateway said before. Raises StoreUnavailable."""
        ...

    async def absent(self, gateway: str) -> None:
        """It is about to end. Raises StoreUnavailable."""
        ...

    async def presences(self) -> Sequence[Presence]:
        """What each gateway has last said, however long ago. Raises StoreUnavailable."""
        ...


class SlotStore(Protocol):
    """Where gateways claim slots of models. What is lost comes again within a second."""

    async def claim_slots(self, claim: Claim) -> None:
        """In place of what this gateway claimed before. Raises StoreUnavailable."""
        ...

    async def slot_claims(self) -> Sequence[Claim]:
        """What each gateway has last claimed, however long ago. Raises StoreUnavailable."""
        ...

    async def drop_slots(self, gateway: str) -> None:
        """It claims none any more. Raises StoreUnavailable."""
        ...


class LastValueStore(Protocol):
    """Where a leader lets other processes see what is no event. Losing it loses nothing but a second."""

    async def publish(self, term: Term, number: int, values: LastValues) -> None:
        """The leader's `number`-th word of its term, from 1; with the first all that older leaders said goes.
        Raises StoreUnavailable."""
        ...

    async def published(self, after: int) -> tuple[int, LastValues]:
        """What was said since, and what to ask for next. 0 asks for all. Raises StoreUnavailable."""
        ...
