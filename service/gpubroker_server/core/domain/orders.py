"""Orders from the leader to a node agent, and the agent's reports. Plain values, both ways.

Every order names the holder, its fence and rank, the leader's term and the agent's incarnation as the leader
knew it when it decided. An agent refuses lower terms, other incarnations and any (holder, fence, rank) that
it has already started.
"""

from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.device import DeviceSample, DiskReport, Node, NodeSample
from gpubroker_server.core.domain.environment import EnvironmentState
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
"""A range of items of an array: the number of the first item, and the number after the last."""
MOST_HELD = 20_000
"""The most items of an array that one run holds."""


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
    """The priority of the task. Starts that wait on the node are served by priority, highest first, then in
    order of arrival."""
    world_size: int = 1
    barrier: bool = False
    """True if the process is to import or unpickle the user code, report Ready, and begin at the GoOrder."""
    memory_mb: Mib = Mib(0)
    """The host memory in MiB that the processes of the run may use together. With 0 the task asked for none,
    and the node's limit holds for each process."""
    shares: tuple[tuple[Mib, float], ...] = ()
    """For each device, the MiB and the share of its memory that libraries may allocate beside the CUDA
    context; empty if they may allocate all."""
    cpu: float = 0.0
    custom: tuple[tuple[str, float], ...] = ()
    """(name, amount) of the custom resources of this rank."""


class GoOrder(_RunOrder, frozen=True):
    """Let the run leave its barrier: all ranks are ready. The order has no effect on a run that has begun."""

    rank_zero_address: str
    """`ip:port` that rank 0 offered; the port was free then."""
    rank: int = 0


class WorldOrder(_RunOrder, frozen=True):
    """Tell a rank of a running gang that other ranks have joined or left."""

    ranks: tuple[int, ...]
    """The ranks at work."""
    rank: int = 0
    number: int | None = None
    """The number of the order: the order with the higher number is the newer one. None while no rank has
    joined: then the order with fewer ranks is the newer one."""


class WatchOrder(_RunOrder, frozen=True):
    """Watch an external holder's process on these devices: attribute the memory use of the process to the
    holder, and report Gone when the process ends. The order starts nothing; a repeated one has no effect."""

    pid: int
    devices: tuple[tuple[DeviceKey, Mib], ...]
    rank: int = 0


class ItemsOrder(_RunOrder, frozen=True):
    """Answer an ItemsReported: its results are durable, and the run now holds the items in `held`. The newest
    answer counts."""

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
    """Drop everything that the agent keeps about the run, because the outcome of the run is durable."""

    rank: int = 0


Order = StartOrder | GoOrder | WorldOrder | WatchOrder | ItemsOrder | StopOrder | StackOrder | ForgetOrder


class PrepareOrder(Struct, frozen=True):
    """Prepare an environment on a node. Dispatch adds its definition, which it reads from the specification
    of `task`. A repeated order changes nothing."""

    node: NodeName
    incarnation: str
    key: str
    task: TaskId
    """A waiting task with this environment."""
    tenant: str


class RunReport(Struct, frozen=True):
    task: TaskId
    fence: Fence
    at: Instant


class Ending(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """User code raised an exception, or its return value cannot be stored. This uses up a retry."""
    STOPPED = "stopped"
    """The run ended because of a stop notice."""
    LOST = "lost"
    """The process ended without a report. This uses up a retry unless the run was asked to stop or its node
    is gone."""
    NEVER_STARTED = "never_started"
    """The agent refused the order, or does not know the run that it was asked about."""


class Failure(Struct, frozen=True):
    """The reason for which a run failed, as people read it. `traceback` is text of at most 64 KiB."""

    kind: str
    """A stable token: exception, unserializable_result, result_too_large, import_failed, exit_code, killed,
    out_of_memory, host_memory_exceeded, over_use, stopped_unasked, corrupt_order, malformed_report, timeout,
    start_timeout, dependency, entrypoint_not_allowed, secret_missing, array_import_failed, object_missing,
    object_unreadable, no_directory, ray_failed, ray_unusable, environment."""
    message: str
    traceback: str = ""


class Started(RunReport, frozen=True):
    pid: int
    rank: int = 0
    ordered_at: Instant | None = None
    """The time at which the agent had received the order; None if the agent does not say."""


class Ready(RunReport, frozen=True):
    """A run with a barrier has imported or unpickled its user code and waits for the GoOrder."""

    address: str
    """A free `ip:port` on the run's node. The address of rank 0 is sent to all ranks."""
    rank: int = 0


class Progressed(RunReport, frozen=True):
    fraction: float | None
    message: str
    rank: int = 0


class Loaded(RunReport, frozen=True):
    """The load of a worker of a set: its calls under way, waiting and answered so far, and its CPU use in
    percent of one core."""

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
    """The state of a worker of an array: all results that no ItemsOrder has answered yet, the items that the
    worker holds, and the number of items that it would like to hold. A worker that wants none gives all its
    items back."""

    number: int
    results: tuple[ItemResult, ...]
    held: tuple[ItemRange, ...]
    """The items that the worker holds, in ascending order and without overlaps; at most MOST_HELD items."""
    wanted: int
    rank: int = 0


class Ended(RunReport, frozen=True):
    """The outcome of a run. Only a Gone frees the memory of the run."""

    ending: Ending
    result: bytes | None = None
    result_format: str = "json"
    """`json`; `cloudpickle`, which only the SDK opens; or `object`: JSON that names the object with the
    result."""
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
    """A part of the output of a run. An agent sends the new output when it is asked for, and the kept part of
    the whole log before the Ended."""

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
    """Proof that no process of this run is left. `samples` were taken after the processes had gone."""

    proof: Proof
    samples: tuple[DeviceSample, ...] = ()
    rank: int = 0


class NodeReport(Struct, frozen=True):
    """The answer of an agent to this leader's term: its node, its devices, and every run that it knows.

    A run that is not named is proven absent. So the agent answers only after it has handled every earlier
    order, names each run until the run's outcome is forgotten and its process is gone, and sends this answer
    in order with its other reports.
    """

    node: Node
    devices: tuple["ReportedDevice", ...]
    runs: tuple[RunId, ...]
    at: Instant
    release: str = ""
    """Release of the agent's software; empty if unknown."""
    faults: tuple[tuple[str, str], ...] = ()
    """(UUID, reason) of each GPU that cannot be used. While the UUID is unknown, the name that people use
    stands in its place."""
    complete: bool = True
    """True if `devices` is the whole list: a device that is not named has been removed or lost, and is
    unused. False while the agent does not know all its GPUs."""
    versions: tuple[tuple[str, str], ...] = ()
    """(name, version) of `python` and `ray` on the node; empty if unknown."""
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
    """True if the cluster's own control service says that the node is dead."""


class EnvironmentReported(Struct, frozen=True):
    """The state of an environment on a node."""

    node: NodeName
    at: Instant
    key: str
    state: EnvironmentState | None
    """The state; None if the node no longer has the environment."""
    step: str = ""
    python: str = ""
    message: str = ""


class NodesListed(Struct, frozen=True):
    """The nodes that the cluster's own control service lists. The report is kept in memory; it is no
    event."""

    nodes: frozenset[NodeName]
    at: Instant


class TermRefused(Struct, frozen=True):
    """An agent takes no orders of this term, because it knows a later term, perhaps one that the database has
    lost."""

    node: NodeName
    lineage: Lineage
    term: Term


class Heartbeat(Struct, frozen=True):
    """The agent is alive. The report is kept in memory; it is no event."""

    node: NodeName
    at: Instant


class Sampled(Struct, frozen=True):
    """The newest samples of a node's devices. The report is kept in memory; it is no event."""

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
    | EnvironmentReported
    | NodesListed
    | Heartbeat
    | Sampled
    | NodeSample
    | DiskReport
    | ServerReport
)
"""A report about a run names it by `task`, `fence` and `rank`. A report with a stale fence changes
nothing."""
