"""GPUs: their leased, used and free memory, their holders, and recent measurements."""

from collections.abc import Mapping, Sequence
from typing import Annotated

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, Time
from gpubroker.wire.quarantine import Awaited
from gpubroker.wire.tasks import Overused


class History(Answered, frozen=True):
    """Means over intervals of `step_seconds`, the oldest first; null stands for an interval without a
    measurement."""

    since: Time
    step_seconds: float
    values: Annotated[
        Mapping[str, Sequence[float | None]],
        Meta(
            description="A GPU has `utilization` (0 to 1), `used_mb`, `power_watts` and "
            "`temperature_celsius`; a node has `cpu` and `disk` (0 to 1) and `memory_used_mb`. A value that "
            "was never measured is left out."
        ),
    ]


class Holder(Answered, frozen=True):
    """A holder of memory. `id` and `name` are null for other tenants' holders, unless the token is an
    admin's."""

    kind: str
    id: str | None
    name: str | None
    tenant: str
    priority: int
    band: str
    gpu_mb: int
    context_mb: Annotated[
        int, Meta(description="The part of `gpu_mb` that is the process's own cost beyond its demand.")
    ]
    measured_mb: int
    overused_mb: Overused
    state: str
    since: Time
    stopping: bool
    quarantine: Annotated[Awaited | None, Meta(description="Set while its state is quarantined.")]


class Pledge(Answered, frozen=True):
    """Memory that is being freed for one waiting task; `task` is null if the task is another tenant's."""

    task: str | None
    gpu_mb: int
    arrived_mb: Annotated[
        int, Meta(description="The part of it that is already free, and kept for the task.")
    ]
    priority: int
    deadline_at: Time


class GpuHealth(Struct, frozen=True):
    """The driver's values of a whole GPU besides its use; null where the driver has no value."""

    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    ecc_errors: Annotated[
        int | None, Meta(description="The number of uncorrected errors since the driver was loaded.")
    ] = None
    xid: Annotated[
        int | None, Meta(description="The last critical error that the driver told the agent.")
    ] = None
    fatal_xid: Annotated[
        int | None,
        Meta(
            description="The last of them that takes a reset; null again once the GPU was lost and is back."
        ),
    ] = None
    remap_pending: Annotated[
        bool | None, Meta(description="Rows or pages of its memory wait for a reset to be replaced.")
    ] = None
    recovery: Annotated[
        str | None,
        Meta(description="The action that the driver asks for, such as `reset`; empty: none."),
    ] = None


class ClosedGpu(Answered, frozen=True):
    """The reason why nothing new starts on a GPU. Runs on the GPU go on."""

    cause: Annotated[
        str,
        Meta(
            description="`xid`, `ecc`, `remap` or `recovery`: its driver says that it needs a reset; "
            "`failures`: runs failed there at once, one after the other; `operator`."
        ),
    ]
    reason: str
    since: Time
    by: Annotated[str, Meta(description="Name of the operator's token; empty for the service itself.")]


class Gpu(Answered, frozen=True, kw_only=True):
    """A device, its holders, and its free memory."""

    key: str
    uuid: str
    node: str
    kind: str
    index: int
    simulated: bool
    parent: Annotated[str, Meta(description="UUID of the GPU of which it is an instance; empty for GPUs.")]
    split: Annotated[bool, Meta(description="True if it has instances, which are leased instead of it.")]
    power: Annotated[int, Meta(description="The rank of its kind; more is stronger, 0 is not ranked.")]
    context_mb: Annotated[
        int, Meta(description="The memory that each process takes beyond what it asked for.")
    ]
    present: Annotated[bool, Meta(description="False if its node no longer has it; kept while leased.")] = (
        True
    )
    physical_mb: int
    reserve_mb: Annotated[int, Meta(description="The memory that is never leased.")]
    leased_mb: int
    used_mb: Annotated[int | None, Meta(description="The measured use; null before the first sample.")]
    foreign_mb: Annotated[int, Meta(description="The memory used by processes without a lease.")]
    unaccounted_mb: Annotated[
        int, Meta(description="The memory used beyond what holders and processes explain.")
    ]
    pledged_mb: int
    free_mb: Annotated[int, Meta(description="The memory that a task without a pledge could take now.")]
    stranded_mb: Annotated[int, Meta(description="The part of it that the usual demands cannot use.")]
    utilization: Annotated[float | None, Meta(description="The last measured value, 0 to 1.")]
    health: Annotated[
        GpuHealth | None,
        Meta(
            description="Null for a simulated device, for an instance, and while its driver does not answer."
        ),
    ]
    idle_seconds: Annotated[
        float | None, Meta(description="The time for which it has been idle; null if it is not.")
    ]
    sampled_at: Time | None
    stale: Annotated[bool, Meta(description="Not measured recently: takes nothing new.")]
    closed: Annotated[ClosedGpu | None, Meta(description="Nothing new starts on it, and why.")] = None
    fault: Annotated[str | None, Meta(description="Why its node's agent cannot measure it.")]
    holders: tuple[Holder, ...]
    pledges: tuple[Pledge, ...]
    history: History
