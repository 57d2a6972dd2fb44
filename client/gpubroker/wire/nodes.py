"""Nodes: their capacity, how much of it is held and measured, and how full their disks are."""

from collections.abc import Mapping
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from gpubroker.wire.answered import Answered, Time
from gpubroker.wire.devices import Gpu, History


class Amount(Answered, frozen=True):
    """An amount that a node has. `used` is the amount held by runs on the node, whatever they really use."""

    total: float
    used: float
    free: float


class MebibyteAmount(Answered, frozen=True):
    total: int
    used: int
    free: int


class RunAmount(Answered, frozen=True):
    limit: int
    used: int


class NodeAgent(Answered, frozen=True, kw_only=True):
    release: Annotated[str | None, Meta(description="The release of gpubroker; null if it does not say.")]
    protocol: Annotated[int, Meta(description="The version of its protocol with the leader.")]
    outdated: Annotated[bool, Meta(description="True if it is of an earlier release than the leader.")]
    message: Annotated[str | None, Meta(description="The text says what happens to it, and what to do.")]
    gpu_faults: Annotated[
        Mapping[str, str] | UnsetType,
        Meta(description="The GPUs that it cannot use, by UUID or else by number, and the reasons."),
    ] = UNSET
    python: Annotated[
        str | UnsetType, Meta(description="The version of Python there; `ray` is that of Ray.")
    ] = UNSET
    gpu_absence: Annotated[
        str | UnsetType | None,
        Meta(
            description="Why its machine shows no GPU at all; the driver is asked again about once a minute."
        ),
    ] = UNSET
    ray: str | UnsetType = UNSET
    clock_ahead_seconds: Annotated[
        int | UnsetType, Meta(description="The seconds by which the node's clock is ahead of the leader's.")
    ] = UNSET


class Drain(Answered, frozen=True):
    """The drain of a node, whose runs are asked to leave."""

    since: Time
    deadline_at: Annotated[
        Time | None,
        Meta(description="The time when everything that is left is ended, whatever its priority."),
    ]
    left: Annotated[
        int,
        Meta(description="The number of runs, models and leases that are there, or not proven to be gone."),
    ]
    done: Annotated[bool, Meta(description="True if nothing is left: the machine can be taken away.")]


class Disk(Answered, frozen=True):
    path: str
    total_mb: int
    free_mb: int


class ObjectStore(Answered, frozen=True):
    """The object store of Ray on this node."""

    total_mb: int
    spilled_mb: Annotated[
        int | None, Meta(description="The memory that was moved to disk for lack of room; null if unknown.")
    ]
    used_mb: Annotated[
        int | None,
        Meta(description="The memory that objects take, as Ray's head has told last; null if unknown."),
    ] = None


class MeasuredNode(Answered, frozen=True):
    """The machine as measured last, whichever programs use it."""

    sampled_at: Time
    stale: Annotated[bool, Meta(description="True if it was not measured recently.")]
    cpu: Annotated[float, Meta(description="The share of its CPUs that was busy: 0 to 1.")]
    memory_total_mb: int
    memory_available_mb: int
    memory_pressure: Annotated[
        float | None,
        Meta(
            description="The share of the last 10 s in which processes waited for memory (PSI); null if "
            "unknown."
        ),
    ]
    disks: Annotated[
        tuple[Disk, ...],
        Meta(description="The disks of Ray's session and of `fleet.watched_directories`, if they answer."),
    ]
    received_bytes: Annotated[
        int, Meta(description="The bytes that all interfaces but loopback received since it booted.")
    ]
    sent_bytes: int
    object_store: ObjectStore | None


class NodeHolder(Answered, frozen=True):
    """A holder on a node. `id` and `name` are null for other tenants' holders, unless the token is an
    admin's."""

    kind: str
    id: str | None
    name: str | None
    tenant: str
    gpus: Annotated[
        int,
        Meta(description="The number of devices on which it has a lease; 0 if it has CPU and memory only."),
    ]
    gpu_mb: int


class Node(Answered, frozen=True, kw_only=True):
    name: str
    ready: Annotated[bool, Meta(description="True if its agent has answered the leader.")] = True
    silent_since: Annotated[
        Time | None,
        Meta(
            description="The time of its agent's last heartbeat, if more than two are overdue; null "
            "otherwise."
        ),
    ]
    cordoned: Annotated[bool, Meta(description="An operator says that nothing new starts on it.")]
    cordon_reason: Annotated[str, Meta(description="In the operator's words; often empty.")]
    cordoned_by: Annotated[str, Meta(description="Name of the operator's token; empty if it is open.")] = ""
    cordoned_at: Time | None = None
    drain: Annotated[Drain | None, Meta(description="Null if it is not being drained.")]
    disk_full: Annotated[
        str | None,
        Meta(description="The disk that is too full, because of which nothing starts on the node."),
    ]
    incarnation: Annotated[str, Meta(description="A text that changes with each start of the node's agent.")]
    cpu: Amount
    memory_mb: MebibyteAmount
    runs: RunAmount
    gpus: int
    gpu_mb: Annotated[
        MebibyteAmount, Meta(description="The memory of its GPUs that take tasks; `used` is leased.")
    ]
    measured: Annotated[MeasuredNode | None, Meta(description="Null before the first sample.")]
    holders: tuple[NodeHolder, ...]
    history: History
    idle_seconds: Annotated[
        float | None, Meta(description="The time for which its CPUs have been idle; null if they are not.")
    ]
    labels: Mapping[str, str]
    task_user: Annotated[str, Meta(description="System user that runs become; empty: unknown.")] = ""
    agent: Annotated[NodeAgent | None, Meta(description="Null while it does not answer.")]


class NodeDetail(Node, frozen=True, kw_only=True):
    """A node with its devices."""

    devices: tuple[Gpu, ...]


class DiskUse(Answered, frozen=True):
    path: str
    total_bytes: int
    free_bytes: int
    level: Annotated[str, Meta(description="`roomy`, `warn`, `clean` or `block`.")]


class DiskRoot(Answered, frozen=True, rename={"file_class": "class"}):
    """A directory below which the guard may delete files."""

    path: str
    file_class: str


class CleanedFile(Answered, frozen=True, rename={"file_class": "class"}):
    path: str
    file_class: Annotated[str, Meta(description="`log`, `empty_database`, `checkpoint` or `redundant`.")]
    size_bytes: int
    modified_at: Time


class NodeDisk(Answered, frozen=True):
    """The disks of a node, and the files below the operator's roots that may be deleted."""

    node: str
    taken_at: Time
    disks: Annotated[tuple[DiskUse, ...], Meta(description="The disks that are watched, as last measured.")]
    roots: Annotated[
        tuple[DiskRoot, ...],
        Meta(description="The directories that the guard cleans; empty if it only reports."),
    ]
    deleted: Annotated[bool, Meta(description="True if `files` are gone; false if they would go.")]
    first_pass: Annotated[
        bool,
        Meta(description="True for the first pass after a change of configuration, which deletes nothing."),
    ]
    files: Annotated[
        tuple[CleanedFile, ...], Meta(description="The files in the order in which they go; at most 1000.")
    ]
    freed_bytes: int
    kept: Annotated[
        Mapping[str, int], Meta(description="The reasons why other files stay, and how many for each.")
    ]
    message: Annotated[str, Meta(description="The text says what went wrong; empty if nothing did.")]
