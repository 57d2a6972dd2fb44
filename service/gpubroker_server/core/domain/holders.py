"""Holders of GPU memory: the kinds of tasks, with the fields that only tasks of one kind have.

`Task.holder` is one of these values, and its class tells the kind. Code that treats the kinds differently
matches on the holder.
"""

from enum import StrEnum
from typing import assert_never

from gpubroker.wire.bounds import MAX_PRIORITY
from msgspec import Struct

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.models import NEVER_USED, ModelKey, ModelUsage
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId


class MemberState(StrEnum):
    PLACED = "placed"
    """The order is on its way, or the process is starting. Its agent's Ready moves it on; the gang's start
    limit stops it. One that joins a running gang stays so until all that join are ready."""
    READY = "ready"
    """The rank waits at the barrier. Once its task is RUNNING, the GoOrder has been sent to the rank. The
    rank's end moves it on."""
    SUCCEEDED = "succeeded"
    ENDED = "ended"
    """The rank failed, was stopped or lost, or never started."""
    LEAVING = "leaving"
    """The rank was asked to leave and the gang goes on without it: the rank's outcome does not count. Its
    end, or its stop deadline, moves it on."""
    LEFT = "left"
    """The rank has left, or was given up."""


class Member(Struct, frozen=True, array_like=True):
    """A rank of a claim. A rank that is `gone` (confirmed or given up) uses nothing of its node."""

    rank: int
    node: NodeName
    state: MemberState = MemberState.PLACED
    gone: bool = False
    address: str = ""
    freeing_for: TaskId | None = None
    """The preemptor for which the rank's memory is freed while the rank leaves."""
    stop_deadline_at: Instant | None = None
    """The instant by which a leaving rank must have left, or a joining rank must be ready. None for a rank
    that failed by itself."""
    bundle: int | None = None
    """The index of the rank's bundle in the demand, for a rank that was added to a running gang. None: the
    index is the rank's number."""

    @property
    def is_late(self) -> bool:
        """True if the member was added while its gang ran."""
        return self.bundle is not None

    @property
    def is_joining(self) -> bool:
        """True if the member was added to a running gang and is not at work yet."""
        return self.is_late and self.state is MemberState.PLACED

    @property
    def has_ended(self) -> bool:
        return self.state in (MemberState.SUCCEEDED, MemberState.ENDED, MemberState.LEFT)

    @property
    def has_finished(self) -> bool:
        """True if the member ended without being asked to leave, so that its outcome counts for the gang."""
        return self.state in (MemberState.SUCCEEDED, MemberState.ENDED)

    @property
    def changes_of_world(self) -> int:
        """The number of times that the member joined a running gang or left it.

        A member that joins and is never at work has no address.
        """
        joined = self.is_late and self.state is not MemberState.PLACED and bool(self.address)
        left = not self.takes_part and (joined or not self.is_late)
        return joined + left

    @property
    def takes_part(self) -> bool:
        """True if the gang goes on with the member."""
        return self.state not in (MemberState.LEAVING, MemberState.LEFT)


class Run(Struct, frozen=True):
    """A process on a node, which the node's agent starts and stops."""


class Gang(Struct, frozen=True):
    """A process for each bundle of the demand, started together. Node agents start and stop them."""

    members: tuple[Member, ...] = ()
    """The ranks of the newest claim, by rank; empty before the first claim. `Task.node` is the node of rank
    0."""


class WorkerSeat(Struct, frozen=True):
    """A run that works on the items of an array, one after another."""

    array: TaskId
    """The id of the array. Retries of its items are counted apart from those of the worker."""


class External(Struct, frozen=True):
    """A holder that acquires, renews and releases its devices by itself; no agent starts or stops it. It has
    its devices from its admission on."""

    ttl_seconds: Seconds
    """The time after the admission or the last renewal at which the holder is asked to leave."""
    pid: int | None = None
    """A process on the holder's node. Memory that the process and its children use counts as the holder's.
    Once the process is gone, the holder is gone."""


class Model(Struct, frozen=True):
    """A model that is wanted or loaded. Its server loads and unloads the model; node agents do not know it.

    With an empty `model` the holder is the server itself, with its base cost.
    """

    server: str
    model: str
    wanted_seconds: Seconds = Seconds(300.0)
    """The time for which the model stays wanted after each request. A wanted model waits for memory, and once
    loaded it stays with the priority of its requests."""
    asked_priority: int = 50
    asked_at: Instant = Instant(0.0)
    queued: bool = False
    """True if queued inferences want the model at `asked_priority`. The leader knows when they no longer want
    it."""
    pinned: bool = False
    yields: bool = False
    """True if waiting tasks may take the model's memory, because no request is under way or queued, or
    because the model's turn is over."""
    yields_to: int = MAX_PRIORITY
    """The lowest priority of tasks that may take the model's memory while `yields` is True. It is below the
    model's own priority only while the model is idle."""
    left_at: Instant | None = None
    """The instant at which the model last left for another holder. Its place in the queue is behind the tasks
    that waited then."""
    load_seconds: Seconds = Seconds(0.0)
    usage: ModelUsage = NEVER_USED
    steps: tuple[str, ...] = ()
    """The models that are loaded together with an ensemble. The size of the ensemble includes theirs."""
    versions: tuple[str, ...] = ()
    """The versions that were loaded when the model was last ready, sorted; empty if unknown."""
    measured: bool = False
    """True if the model is loaded to be measured. Its size is then all memory that it takes until it leaves,
    however late."""
    address: str = ""
    """The address at which the server is asked; empty if unknown. A server is identified by its address, or
    by its process, because its name may change."""
    process: str = ""
    """The server's process, as its machine knows it; empty where that cannot be seen."""
    sized: bool = False
    """True if the operator said how large the model is, or a load of it was measured. Otherwise the model is
    loaded alone on its device, so that its size can be measured."""

    @property
    def home(self) -> ModelKey:
        return ModelKey(self.server, self.model)

    def is_at(self, server: str, address: str, process: str) -> bool:
        """Return True if the model is on the server with this name, address and process. An equal process is
        enough; otherwise addresses are compared, or names if an address is missing."""
        if self.process and self.process == process:
            return True
        return self.address == address if self.address and address else self.server == server


class Inference(Struct, frozen=True):
    """A request that waits for its model and is then sent to the model's server.

    The model is named by `Demand.answered_by`, so requests to one model are equal in the queue.
    """


Holder = Run | Gang | WorkerSeat | External | Model | Inference
RUN, INFERENCE = Run(), Inference()


def holder_of(demand: Demand) -> Run | Gang | Inference:
    """Return the holder of a new task that is neither a model nor a worker of an array nor an external
    holder."""
    if demand.answered_by:
        return INFERENCE
    return Gang() if demand.bundles else RUN


def is_started_by_agent(holder: Holder) -> bool:
    """Return True if node agents start and stop the holder's processes. They do not for external holders,
    models and inferences."""
    match holder:
        case Run() | Gang() | WorkerSeat():
            return True
        case External() | Model() | Inference():
            return False
        case _:
            assert_never(holder)
