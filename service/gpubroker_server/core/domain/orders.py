"""Orders from the leader to a node agent, and the agent's reports. Plain values, both ways.

Every order names the holder, its fence and rank, the leader's term and the agent's incarnation as the leader
knew it when it decided. An agent refuses lower terms, other incarnations and any (holder, fence, rank) that
it has already started.
"""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.device import DeviceSample, DiskReport, Node, NodeSample
from gpubroker_server.core.domain.lease import Proof
from gpubroker_server.core.domain.model_orders import ServerReport
from gpubroker_server.core.domain.task import StopReason
from gpubroker_server.core.domain.units import (
    DeviceKey,
    Fence,
    Instant,
    Lineage,
    Mib,
    NodeName,
    Seconds,
    TaskId,
    Term,
)

RunId = tuple[TaskId, Fence, int]
ItemRange = tuple[int, int]
"""Numbers of items of an array: the first, and the one after the last."""
MOST_HELD = 20_000
"""Items of an array that one run holds."""


class LogName(NamedTuple):
    """One stream of the output of one run."""

    task: TaskId
    fence: Fence
    rank: int
    stream: str
    """`stdout` or `stderr`."""


class _RunOrder(Struct, frozen=True):
    task: TaskId
    fence: Fence
    node: NodeName
    incarnation: str


class StartOrder(_RunOrder, frozen=True):
    """Start one run. Dispatch adds the payload (entrypoint, arguments, checkpoint)."""

    devices: tuple[tuple[DeviceKey, Mib], ...]
    shareable: bool
    rank: int = 0
    priority: int = 0
    """Starts that wait on the node are served by priority, highest first, then in order of arrival."""
    world_size: int = 1
    barrier: bool = False
    """The process imports or unpickles, reports Ready, and begins user code at the GoOrder."""
    memory_mb: Mib = Mib(0)
    """Host memory it asked for: one of its processes may use this much, whatever others may."""
    shares: tuple[tuple[Mib, float], ...] = ()
    """MiB, and share of each device's memory, that libraries may allocate beside the context; empty: all."""


class GoOrder(_RunOrder, frozen=True):
    """All ranks are ready: the run leaves its barrier. Void for a run that has begun."""

    rank_zero_address: str
    """`ip:port` that rank 0 offered; the port was free then."""
    rank: int = 0


class WorldOrder(_RunOrder, frozen=True):
    """Ranks have joined a running gang, or have left it."""

    ranks: tuple[int, ...]
    """The ranks at work."""
    rank: int = 0
    number: int | None = None
    """The higher of two orders is the newer. None while none has joined: then the one with fewer ranks is."""


class WatchOrder(_RunOrder, frozen=True):
    """Watch an external holder's process on these devices: attribute its use to it, and report Gone when it
    ends. Starts nothing; repeating it is void."""

    pid: int
    devices: tuple[tuple[DeviceKey, Mib], ...]
    rank: int = 0


class ItemsOrder(_RunOrder, frozen=True):
    """Answers a report of items: its results are durable, and the run holds these. The newest counts."""

    number: int
    held: tuple[ItemRange, ...]
    is_over: bool
    """True if nothing is left for the worker."""
    rank: int = 0


class StopOrder(_RunOrder, frozen=True):
    """Give notice; kill what is left after `grace_seconds` (0: kill at once)."""

    reason: StopReason
    grace_seconds: Seconds
    rank: int = 0


class StackOrder(_RunOrder, frozen=True):
    """Read the stacks of the run's Python threads while they go on, and report them as a Stacked."""

    request: str
    """The request that the stacks answer."""
    rank: int = 0


class ForgetOrder(_RunOrder, frozen=True):
    """The outcome of this run is durable: the agent may drop what it keeps of it."""

    rank: int = 0


Order = StartOrder | GoOrder | WorldOrder | WatchOrder | ItemsOrder | StopOrder | StackOrder | ForgetOrder


class RunReport(Struct, frozen=True):
    task: TaskId
    fence: Fence
    at: Instant


class Ending(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised, or its return value cannot be stored. Uses up a retry."""
    STOPPED = "stopped"
    """The run ended because of a stop notice."""
    LOST = "lost"
    """The process ended without a report. Uses up a retry unless it was to stop or its node is gone."""
    NEVER_STARTED = "never_started"
    """The agent refused the order, or does not know the run that it was asked about."""


class Failure(Struct, frozen=True):
    """The reason for which a run failed, for people. `traceback` is text, at most 64 KiB."""

    kind: str
    """Stable token: exception, unserializable_result, result_too_large, import_failed, exit_code, killed,
    out_of_memory, host_memory_exceeded, over_use, stopped_unasked, corrupt_order, malformed_report, timeout,
    start_timeout, dependency, entrypoint_not_allowed, secret_missing, array_import_failed, object_missing,
    object_unreadable, no_directory."""
    message: str
    traceback: str = ""


class Started(RunReport, frozen=True):
    pid: int
    rank: int = 0
    ordered_at: Instant | None = None
    """The time at which the agent had the order; None if the agent does not say."""


class Ready(RunReport, frozen=True):
    """A run with a barrier has imported or unpickled its user code and waits for the GoOrder."""

    address: str
    """A free `ip:port` on its node; rank 0's is sent to all."""
    rank: int = 0


class Progressed(RunReport, frozen=True):
    fraction: float | None
    message: str
    rank: int = 0


class Loaded(RunReport, frozen=True):
    """A worker of a set: its calls under way, waiting and answered so far, and per cent of one core."""

    running: int
    waiting: int
    cpu_percent: float
    rank: int = 0
    answered: int = 0


class Checkpointed(RunReport, frozen=True):
    """The run saved its state: `data`, or the `uri` of a checkpoint that is too large to send."""

    sequence: int
    digest: str
    """sha256 of `data`, lowercase hex, computed where the checkpoint was taken."""
    data: bytes | None
    uri: str | None
    rank: int = 0


class ItemResult(NamedTuple):
    """The end of one item of an array, with a result in the array's format, or with a failure."""

    number: int
    seconds: float
    tries: int
    result: bytes | None
    failure: Failure | None


class ItemsReported(RunReport, frozen=True):
    """A worker of an array: all results that were not answered yet, the items that it holds, and how many it
    would like to hold. It gives all of them back if it wants none."""

    number: int
    results: tuple[ItemResult, ...]
    held: tuple[ItemRange, ...]
    """The items that the worker holds, in ascending order and without overlaps; at most MOST_HELD items."""
    wanted: int
    rank: int = 0


class Ended(RunReport, frozen=True):
    """The outcome of a run. Its memory is freed by a Gone only."""

    ending: Ending
    result: bytes | None = None
    result_format: str = "json"
    """`json`, `cloudpickle` (opened by the SDK only), or `object`: JSON that names what it has become."""
    failure: Failure | None = None
    log_tail: bytes = b""
    rank: int = 0
    is_unproven: bool = False
    """An agent or a run process of an earlier release says that a command succeeded because it ended with
    exit code 0, which it may have done to obey a stop notice."""


class Stacked(RunReport, frozen=True):
    """The answer to a StackOrder."""

    request: str
    stack: str
    """The stacks as text; empty if there are none, and then `message` says why."""
    message: str
    rank: int = 0


class Logged(RunReport, frozen=True):
    """A part of what the run printed. An agent tells what is new when it is asked, and what is kept of the
    whole log before the Ended."""

    stream: str
    first_byte: int
    """The position of the part in the stream. Bytes between this part and the one before may be missing."""
    data: bytes
    """The new bytes; empty if nothing is new."""
    is_final: bool = False
    """True for the whole log: its first part begins at 0 and replaces all parts that were sent before."""
    rank: int = 0

    @property
    def log(self) -> LogName:
        return LogName(self.task, self.fence, self.rank, self.stream)

    @property
    def end_byte(self) -> int:
        return self.first_byte + len(self.data)


class Gone(RunReport, frozen=True):
    """Proof that no process of this run is left. `samples` were taken after that."""

    proof: Proof
    samples: tuple[DeviceSample, ...] = ()
    rank: int = 0


class NodeReport(Struct, frozen=True):
    """An agent answered this leader's term: its node, its devices, and every run that it knows.

    A run that is not named is proven absent. So the agent answers only after it has handled every earlier
    order, names each run until its outcome is forgotten and its process is gone, and keeps this answer in
    order with its other reports.
    """

    node: Node
    devices: tuple["ReportedDevice", ...]
    runs: tuple[RunId, ...]
    at: Instant
    release: str = ""
    """Release of the agent's software; empty if unknown."""
    faults: tuple[tuple[str, str], ...] = ()
    """GPUs that cannot be used: (UUID, or what people call it while that is unknown; why)."""
    complete: bool = True
    """True if devices that are not named are removed or lost, and unused. False while the agent does not know
    all its GPUs."""
    versions: tuple[tuple[str, str], ...] = ()
    """The versions of `python` and `ray` there; empty if unknown."""
    gpu_absence: str = ""
    """Why the machine shows no GPU; empty if it shows one, or if `faults` say why."""


class ReportedDevice(Struct, frozen=True):
    uuid: str
    kind: str
    index: int
    physical_mb: Mib
    simulated: bool
    parent: str = ""
    """The UUID of the GPU of which the device is a MIG instance; empty for a whole GPU."""
    split: bool = False
    """True if only the MIG instances of the GPU can be used, even if it has none."""


class NodeLost(Struct, frozen=True):
    """The node is dead, or its agent does not answer. Its processes may still run."""

    node: NodeName
    incarnation: str
    at: Instant
    why: str
    confirmed: bool = False
    """The cluster's own control service says that the node is dead."""


class NodesListed(Struct, frozen=True):
    """The cluster's own control service answers, and has these nodes. Kept in memory; not an event."""

    nodes: frozenset[NodeName]
    at: Instant


class TermRefused(Struct, frozen=True):
    """An agent takes no orders of this term: it knows a later one, perhaps one that the database has lost."""

    node: NodeName
    lineage: Lineage
    term: Term


class Heartbeat(Struct, frozen=True):
    """The agent is alive. Kept in memory; not an event."""

    node: NodeName
    at: Instant


class Sampled(Struct, frozen=True):
    """The newest samples. Kept in memory; not an event."""

    node: NodeName
    at: Instant
    samples: tuple[DeviceSample, ...]


Report = (
    Started
    | Ready
    | Progressed
    | Loaded
    | Checkpointed
    | ItemsReported
    | Ended
    | Stacked
    | Logged
    | Gone
    | NodeReport
    | NodeLost
    | NodesListed
    | Heartbeat
    | Sampled
    | NodeSample
    | DiskReport
    | ServerReport
)
"""`task`, `fence` and `rank` of the first nine name the run; a report with a stale fence changes nothing."""
