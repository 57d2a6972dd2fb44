"""What the leader asks of a node agent, and what the agent reports back. Plain values, both ways.

Every order names the holder, its fence and rank, the leader's term and the agent incarnation that the
leader knew when it decided. An agent refuses lower terms, other incarnations and any (holder, fence, rank)
it has already started.
"""

from dataclasses import dataclass
from enum import StrEnum

from gpubroker_server.core.domain.device import DeviceSample, Node
from gpubroker_server.core.domain.model_orders import ServerSeen
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib, NodeName, Seconds, TaskId
from gpubroker_server.core.domain.values import value

RunId = tuple[TaskId, Fence, int]
"""(task, fence, rank)"""


@value
class StartOrder:
    """Start one run. The payload (entrypoint, arguments, checkpoint) is attached by dispatch on its way."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    devices: tuple[tuple[DeviceKey, Mib], ...]
    shareable: bool
    rank: int = 0
    priority: int = 0
    """Starts that wait on the node are served by it, the highest first, then in order of arrival."""
    world_size: int = 1
    """How many ranks run together under this fence."""
    barrier: bool = False
    """The process gets ready (imports or unpickles), says so, and begins user code at the GoOrder."""
    memory_mb: Mib = Mib(0)
    """Host memory that it asked for: a process of it may take so much, whatever others may."""


@dataclass(frozen=True, slots=True)
class GoOrder:
    """All ranks are ready: a run that waits at its barrier begins. Repeated to one that began, it is void."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    rank_zero_address: str
    """`ip:port`, as rank 0 offered it; the port was free then."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WorldOrder:
    """Ranks have left a gang that goes on: what is left of it, for a run of it. Ranks never come back, so of
    two the smaller world is the newer one."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    ranks: tuple[int, ...]
    """Those that go on, in order."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WatchOrder:
    """The process of an external holder has these devices: what it uses is its own, and its end is told by
    a Gone. Repeated it is void, and it starts nothing."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    pid: int
    devices: tuple[tuple[DeviceKey, Mib], ...]
    rank: int = 0


@dataclass(frozen=True, slots=True)
class StopOrder:
    """Give notice; kill whatever is left after `grace_seconds` (0: kill at once)."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    reason: StopReason
    grace_seconds: Seconds
    rank: int = 0


@value
class ForgetOrder:
    """The outcome of this run is durable; the agent may drop what it kept of it."""

    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str
    rank: int = 0


Order = StartOrder | GoOrder | WorldOrder | WatchOrder | StopOrder | ForgetOrder


class Ending(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised, or what it returned cannot be carried. Uses up a retry."""
    STOPPED = "stopped"
    """It gave way to a stop notice."""
    LOST = "lost"
    """The process went away without a word: killed, crashed or out of memory. Uses up a retry unless a
    stop had been ordered or the whole node is gone."""
    NEVER_STARTED = "never_started"
    """The agent knows the order and refused it, or was asked about a run it has never seen."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run failed, for people. `traceback` is text, at most 64 KiB."""

    kind: str
    """Stable token: exception, unserializable_result, result_too_large, import_failed, exit_code, killed,
    out_of_memory, host_memory_exceeded, over_use, stopped_unasked, corrupt_order, malformed_report, timeout,
    start_timeout, dependency."""
    message: str
    traceback: str = ""


@value
class Started:
    task: TaskId
    fence: Fence
    at: Instant
    pid: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """A run with a barrier has imported or unpickled its user code and waits to begin."""

    task: TaskId
    fence: Fence
    at: Instant
    address: str
    """`ip:port` on its node where nobody listens yet; rank 0's is told to all."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Progressed:
    task: TaskId
    fence: Fence
    at: Instant
    fraction: float | None
    message: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """The run saved its state: `data` itself, or the `uri` of what was too large to travel."""

    task: TaskId
    fence: Fence
    at: Instant
    sequence: int
    digest: str
    """sha256 of `data`, lowercase hex, computed where the checkpoint was taken."""
    data: bytes | None
    uri: str | None
    rank: int = 0


@value
class Ended:
    """The outcome of a run. Its memory is not yet free: that takes a Gone."""

    task: TaskId
    fence: Fence
    at: Instant
    ending: Ending
    result: bytes | None = None
    result_format: str = "json"
    """`json` or `cloudpickle`; pickled bytes are opened by the SDK only."""
    failure: Failure | None = None
    log_tail: bytes = b""
    rank: int = 0


@value
class Gone:
    """Proof that no process of this run is left. `samples` were taken after that."""

    task: TaskId
    fence: Fence
    at: Instant
    proof: str
    """process_absent, boot_changed, agent_restarted (a later agent on that host found no trace of it),
    never_started, shared_process (nothing of its own to free), not_your_process (named by an external
    lease, and somebody else's)."""
    samples: tuple[DeviceSample, ...] = ()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """An agent answered this leader's term: its node, its devices, and every run it knows of.

    A run that is not named is proven absent. So the agent answers after every order that was sent to it
    before the question, names each run until its outcome is forgotten and its process is gone, and the
    answer keeps its place between its other reports.
    """

    node: Node
    devices: tuple["SeenDevice", ...]
    runs: tuple[RunId, ...]
    at: Instant
    release: str = ""
    """Of the agent's software; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class SeenDevice:
    uuid: str
    kind: str
    index: int
    physical_mb: Mib
    simulated: bool
    parent: str = ""
    """UUID of the GPU of which it is an instance."""
    split: bool = False
    """Only its instances can be used, even if it has none."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The cluster says that the node or its agent is dead. Its processes may still live."""

    node: NodeName
    incarnation: str
    at: Instant
    why: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Its agent is there, whatever else it is at; kept in memory, never an event."""

    node: NodeName
    at: Instant


@dataclass(frozen=True, slots=True)
class Sampled:
    """The newest samples; kept in memory, never an event."""

    node: NodeName
    at: Instant
    samples: tuple[DeviceSample, ...]


Report = (
    Started
    | Ready
    | Progressed
    | Checkpointed
    | Ended
    | Gone
    | NodeSeen
    | NodeLost
    | Heartbeat
    | Sampled
    | ServerSeen
)
"""`task`, `fence` and `rank` of the first six name the run; a report with a stale fence changes nothing."""
