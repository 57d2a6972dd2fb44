"""The operator's configuration, and each tenant's part of it.

The settings are read into `GpuKind`, `Pool`, `TaskMaximum`, `TenantPolicy` and `Profile`, so the bounds of
their fields are those of the settings.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from gpubroker.wire.answered import Answered, Overview
from gpubroker.wire.bounds import MOST_PRIORITY, Amount, Count, GraceSeconds, PositiveCount, Priority, Retries
from gpubroker.wire.queues import Paused


class Tenant(Answered, frozen=True):
    """A tenant: its quota, its holdings and its fair share."""

    name: str
    cohort: Annotated[str | None, Meta(description="Its members lend each other what they do not use.")]
    guaranteed_mb: Annotated[
        int | None, Meta(description="The guaranteed GPU memory, in MiB; null for no quota.")
    ]
    borrow_mb: Annotated[
        int | None, Meta(description="The most beyond its guarantee; null for what the cohort leaves.")
    ]
    held_mb: Annotated[int, Meta(description="The memory that is leased, until it is confirmed to be free.")]
    borrowed_mb: Annotated[int, Meta(description="The part of it beyond its guarantee.")]
    pledged_mb: Annotated[int, Meta(description="The memory that is being freed for its tasks.")]
    usage_mb_seconds: Annotated[
        float, Meta(description="Memory held, times seconds, decaying with policy.usage_half_life_seconds.")
    ]
    weight: float
    fair_share: Annotated[float, Meta(description="Its part of the weights of all known tenants, 0 to 1.")]
    level: Annotated[
        float,
        Meta(description="Usage and holding divided by fair share; in a band the lowest level goes first."),
    ]
    max_priority: int
    pending: int
    active: Annotated[int, Meta(description="The number of tasks that are admitted, running or stopping.")]
    paused: Annotated[Paused | None, Meta(description="Set while its queue starts nothing.")]


class Cohort(Struct, frozen=True):
    """The memory that the members of a cohort hold, and their guarantees together."""

    name: str
    guaranteed_mb: Annotated[int, Meta(description="The sum of its members' guarantees.")]
    held_mb: int
    message: Annotated[
        str | None, Meta(description="The reason why it holds more than that; null if it does not.")
    ]


class Tenants(Overview[Tenant], frozen=True):
    cohorts: Annotated[tuple[Cohort, ...], Meta(description="Empty without the scope cluster:read.")]


class Profile(Answered, frozen=True):
    """The defaults for tasks of a role or a model type; null stands for the default of all tasks."""

    name: str = ""
    priority: Priority | None = None
    gpus: Annotated[
        Count | None, Meta(description="The GPUs of a task that does not say how many; only roles have it.")
    ] = None
    gpu_mb: Annotated[
        PositiveCount | Literal["learned"] | None,
        Meta(description="The GPU memory of a task that does not mention GPUs."),
    ] = None
    cpu: Amount | None = None
    memory_mb: Count | None = None
    timeout_seconds: Annotated[float, Meta(gt=0)] | None = None
    max_retries: Retries | None = None
    environment: Annotated[
        str | None, Meta(description="The name of the operator's environment in which its tasks run.")
    ] = None
    max_concurrency: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="For the task's own code, in GPUBROKER_MAX_CONCURRENCY; a worker of a set answers so "
            "many calls at once. Only roles have it."
        ),
    ] = None


class Band(Answered, frozen=True):
    name: str
    lowest: int
    highest: int


class GpuKind(Struct, frozen=True, order=True):
    name: str
    power: Count = 0
    context_mb: Annotated[
        Count, Meta(description="The memory of a process's CUDA context, on top of what was asked for.")
    ] = 0


class Pool(Struct, frozen=True):
    """A named part of the cluster: some of its devices and nodes, some amounts of it, or both."""

    name: str
    kinds: tuple[str, ...] = ()
    nodes: Annotated[
        Mapping[str, tuple[str, ...]], Meta(description="Labels, each with the values that it may have.")
    ] = field(default_factory=dict)
    fractions: Annotated[
        bool, Meta(description="True if shares of a GPU are allowed, not only whole ones.")
    ] = True
    cpu: Annotated[
        Amount | None,
        Meta(
            description="The most CPUs of all tasks of the pool together; null for no limit. The following "
            "limits count in the same way."
        ),
    ] = None
    gpus: Count | None = None
    gpu_mb: Count | None = None
    memory_mb: Count | None = None
    custom: Annotated[
        Mapping[str, Amount], Meta(description="The limits of custom resources, such as storage.")
    ] = field(default_factory=dict)


class CustomLimit(Answered, frozen=True):
    name: str
    limit: float
    per: Annotated[
        str, Meta(description="One of `cluster` and `node`: with `node`, each node has this much.")
    ]
    priority_threshold: Annotated[int, Meta(description="Tasks of lower priority get none.")]


class RunningLimit(Answered, frozen=True):
    of: Annotated[str, Meta(description="`tenant:NAME` or `label:KEY=VALUE`; `*` is each one by itself.")]
    limit: float


class TaskMaximum(Struct, frozen=True):
    """The most that one task may ask for, whatever the cluster has; null stands for no limit."""

    gpus: Count | None = None
    gpu_mb: Annotated[PositiveCount | None, Meta(description="The most memory of one GPU.")] = None
    cpu: Amount | None = None
    memory_mb: Count | None = None
    timeout_seconds: Annotated[float, Meta(gt=0)] | None = None
    max_retries: Count | None = None
    grace_seconds: Annotated[float, Meta(ge=0)] | None = None


class TaskLimits(Struct, frozen=True):
    priority: Priority
    max_retries: Retries = 0
    grace_seconds: GraceSeconds = 30.0
    timeout_seconds: float | None = None


class TaskDefaults(TaskLimits, frozen=True):
    """The values for fields that a task leaves out."""

    cpu: Amount = 1.0


class TenantPolicy(Struct, frozen=True):
    name: Annotated[str, Meta(description="The tenant; `*` is each tenant that is not listed.")]
    cohort: Annotated[
        str | None,
        Meta(description="Its members borrow what the others' guarantees leave unused."),
    ] = None
    guaranteed_mb: Annotated[
        Count | None,
        Meta(description="The guaranteed GPU memory; null for no quota, neither guarantee nor limit."),
    ] = None
    borrow_mb: Annotated[
        Count | None,
        Meta(description="The most beyond its guarantee; null for as much as its cohort leaves."),
    ] = None
    weight: Annotated[float, Meta(gt=0, le=1_000_000)] = 1.0
    max_priority: Priority = MOST_PRIORITY


class PreemptionRules(Answered, frozen=True):
    enabled: bool
    budget: int
    shield_seconds: float
    min_run_seconds: float
    min_residency_seconds: float
    yields_to_tasks_seconds: float


class Policy(Answered, frozen=True):
    """The operator's configuration, as far as it concerns this token's tenant; with the scope cluster:read
    all of it."""

    bands: tuple[Band, ...]
    ageing_seconds_per_point: float
    placement: str
    preemption: PreemptionRules
    overuse: Annotated[
        str, Meta(description="One of `report` and `stop`: what is done to a run above its lease.")
    ]
    overuse_tolerance: float
    learned_margin: float
    kinds: tuple[GpuKind, ...]
    pools: tuple[Pool, ...]
    custom_limits: tuple[CustomLimit, ...]
    max_running: tuple[RunningLimit, ...]
    maximum: Annotated[TaskMaximum, Meta(description="The most that one task may ask for; null: no limit.")]
    defaults: TaskDefaults
    model_types: tuple[Profile, ...]
    tenants: tuple[TenantPolicy, ...]
    streams: Annotated[Mapping[str, float], Meta(description="The weights of work streams.")]
    body_bytes: int
    batch_body_bytes: Annotated[int, Meta(description="The most bytes of a body of `POST /tasks/batch`.")]
    upload_bytes: Annotated[int, Meta(description="The most of a directory that travels with a task.")] = (
        512 * 2**20
    )
    upload_files: Annotated[int, Meta(description="The most files and directories in it.")] = 20_000
