"""Devices, nodes, tenants, policy and totals of the cluster, as the service answers them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpubroker.tasks.estimates import ForecastsKept
from gpubroker.transport.decoding import Answered


@dataclass(frozen=True, slots=True)
class Holder(Answered):
    """A holder of memory on a device: what it leased and what was last measured."""

    kind: str
    id: str
    name: str
    priority: int = 0
    band: str = ""
    gpu_mb: int = 0
    context_mb: int = 0
    """Part of `gpu_mb`: the process's own cost beyond the demand."""
    measured_mb: int | None = None
    overused_mb: int | None = None
    """What its run used when it first exceeded its lease."""
    state: str = ""
    stopping: bool = False
    quarantine: Mapping[str, Any] | None = None
    """If it is not confirmed gone: `quarantined_at`, the proofs it `awaits`, and a `message`."""


@dataclass(frozen=True, slots=True)
class Pledge(Answered):
    """Memory that is being freed for one waiting task; `arrived_mb` of it is already free."""

    task: str
    gpu_mb: int = 0
    arrived_mb: int = 0
    priority: int = 0
    deadline_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Gpu(Answered):
    """One device. All sizes in MiB. `free_mb` is what a new task could lease now."""

    key: str
    uuid: str
    node: str
    kind: str
    index: int = 0
    simulated: bool = False
    parent: str = ""
    """If it is an instance of a GPU: that GPU's UUID."""
    split: bool = False
    """It has instances; they are leased instead of it."""
    power: int = 0
    """Rank of its kind; higher is stronger, 0 is unranked."""
    context_mb: int = 0
    """What each process uses beyond its demand."""
    present: bool = True
    """False once its node no longer has it; it is listed while something is leased on it."""
    physical_mb: int = 0
    reserve_mb: int = 0
    leased_mb: int = 0
    used_mb: int = 0
    foreign_mb: int = 0
    """Used by processes that hold no lease."""
    unaccounted_mb: int = 0
    """Used, but not explained by holders and foreign processes."""
    pledged_mb: int = 0
    free_mb: int = 0
    stranded_mb: int = 0
    """Part of `free_mb` that the usual demands cannot use, weighted by their frequency."""
    idle_seconds: float | None = None
    """How long it has had nothing to do; None: it is not idle."""
    utilization: float | None = None
    """0 to 1."""
    health: Mapping[str, Any] | None = None
    """`power_watts`, `temperature_celsius`, `sm_clock_mhz`, `memory_clock_mhz`, `ecc_errors` and `xid`; None
    if it is simulated, an instance, or does not answer."""
    sampled_at: datetime | None = None
    stale: bool = False
    fault: str | None = None
    """Why its node's agent cannot measure it."""
    holders: tuple[Holder, ...] = ()
    pledges: tuple[Pledge, ...] = ()
    history: Mapping[str, Any] = field(default_factory=dict)
    """`values` by measure, one each `step_seconds` from `since` on; None where nothing was measured."""


@dataclass(frozen=True, slots=True)
class NodeDisk(Answered):
    """How full a node's disks are, and what of the operator's roots may go. Each of `disks` has `path`,
    `total_bytes`, `free_bytes` and `level`; each of `files` has `path`, `class`, `size_bytes` and
    `modified_at`."""

    node: str
    taken_at: datetime | None = None
    disks: tuple[Mapping[str, Any], ...] = ()
    roots: tuple[Mapping[str, Any], ...] = ()
    deleted: bool = False
    """Whether `files` are gone, or would go."""
    first_pass: bool = False
    """The first pass after a change of configuration deletes nothing."""
    files: tuple[Mapping[str, Any], ...] = ()
    freed_bytes: int = 0
    kept: Mapping[str, int] = field(default_factory=dict)
    """Why other files stay, and how many for each reason."""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Node(Answered):
    """One machine. `cpu`, `memory_mb`, `gpu_mb` and `runs` say what is held of the total. `agent` has the
    agent's `release`, whether it is `outdated`, a `message` if something has to be done, and `gpu_faults`:
    GPUs that it cannot use, and why."""

    name: str
    ready: bool = True
    silent_since: datetime | None = None
    """When its agent last answered; None if it answers."""
    cordoned: bool = False
    """Nothing new starts there; `cordon_reason` says why."""
    cordon_reason: str = ""
    disk_full: str | None = None
    """Which disk is too full for anything to start there."""
    drain: Mapping[str, Any] | None = None
    """While it is drained: `since`, `deadline_at`, how many holders are `left`, and whether it is `done`."""
    incarnation: str = ""
    cpu: Mapping[str, float] = field(default_factory=dict)
    memory_mb: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    gpus: int = 0
    gpu_mb: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, Any] | None = None
    """What all programs use: `cpu` (0 to 1), `memory_total_mb`, `memory_available_mb`,
    `memory_pressure`, `disks`, `received_bytes`, `sent_bytes`, `object_store`, `sampled_at`, `stale`."""
    holders: tuple[Mapping[str, Any], ...] = ()
    history: Mapping[str, Any] = field(default_factory=dict)
    """As of a Gpu."""
    devices: tuple[Gpu, ...] = ()
    """Of one node that was asked for by its name."""
    labels: Mapping[str, str] = field(default_factory=dict)
    agent: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Scattered(Answered):
    """The most frequent waiting demand, if it is free in total but nowhere in one piece."""

    gpus: int
    gpu_mb: int = 0
    waiting: int = 0
    free_mb: int = 0
    largest_mb: int = 0


@dataclass(frozen=True, slots=True)
class Fragmentation(Answered):
    """Of the GPUs that take tasks now: what is free, and which part the usual demands cannot use."""

    free_mb: int = 0
    stranded_mb: int = 0
    share: float | None = None
    """0 to 1; None if nothing is free."""
    kinds: tuple[Mapping[str, Any], ...] = ()
    scattered: Scattered | None = None


@dataclass(frozen=True, slots=True)
class Tenant(Answered):
    """A tenant. Sizes are MiB of GPU memory; without a quota, `guaranteed_mb` is None."""

    name: str
    cohort: str | None = None
    guaranteed_mb: int | None = None
    borrow_mb: int | None = None
    """None: as much as its cohort has left."""
    held_mb: int = 0
    borrowed_mb: int = 0
    pledged_mb: int = 0
    """Being freed for its tasks."""
    usage_mb_seconds: float = 0.0
    weight: float = 1.0
    fair_share: float = 0.0
    level: float = 0.0
    """Its usage and holdings relative to its fair share; within a band the lowest goes first."""
    max_priority: int = 100
    pending: int = 0
    active: int = 0
    paused: Mapping[str, Any] | None = None
    """While its queue starts nothing: `since`, `by`, `reason` and how many tasks are `waiting`."""


@dataclass(frozen=True, slots=True)
class Profile(Answered):
    """What a task of this role gets for what it leaves out; None: the default of all tasks."""

    name: str
    cpu: float | None = None
    gpus: int | None = None
    gpu_mb: int | str | None = None
    memory_mb: int | None = None
    max_concurrency: int | None = None
    """A task finds it in GPUBROKER_MAX_CONCURRENCY; no other effect."""
    priority: int | None = None
    timeout_seconds: float | None = None
    max_retries: int | None = None


@dataclass(frozen=True, slots=True)
class Stats(Answered):
    """Counts over the whole cluster: `tasks` by state."""

    gpu: Mapping[str, Any] = field(default_factory=dict)
    fragmentation: Fragmentation | None = None
    forecasts: tuple[ForecastsKept, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    """total, ready, cordoned, draining."""
    worker_sets: Mapping[str, int] = field(default_factory=dict)
    """sets, and of their workers wanted and running."""
    executor: Mapping[str, Any] = field(default_factory=dict)
    leader: Mapping[str, Any] = field(default_factory=dict)
    detection: Mapping[str, Any] = field(default_factory=dict)
    """`state`, watching or paused; if paused, the silent `nodes` that are not given up, and a `message`."""
    paused: tuple[Mapping[str, Any], ...] = ()
    """Queues of tenants and work streams that start nothing."""
    disk_full: str = ""
    """Of the process that answered: `disk full: /data (...)`, or empty."""
    model_servers: tuple[Mapping[str, Any], ...] = ()
    """Name, node and requests in flight; for `http` and `grpc` whether it is `up`, and its `fault`."""
    as_of: datetime | None = None
    age_seconds: float | None = None
    position: int = 0


@dataclass(frozen=True, slots=True)
class Target(Answered):
    """Where a measure of a part of the fleet shall be. Shares are from 0 to 1."""

    scope: str
    measure: str
    least: float = 0.0
    most: float = 1.0
    value: float | None = None
    """As last measured; None if nothing of it is."""
    state: str = ""
    """`in` or `out`."""
    changed_at: datetime | None = None
    background_share: float | None = None
    """What background work may take of it; None if nothing holds it back."""
    background_left_mb: int | None = None


@dataclass(frozen=True, slots=True)
class Finding(Answered):
    """Something that is wrong with the fleet, or with a machine of it."""

    kind: str
    """A stable token; expect new ones."""
    subject: str
    """The device, node, task, model or part that it is about."""
    severity: str
    """`critical`, `warning` or `note`."""
    cause: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """What was measured."""
    remedy: str = ""
    """A command, or what to do where none helps."""
    first_seen_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class IdleTemplate(Answered):
    """A task that is submitted again and again as long as devices are idle."""

    name: str
    tenant: str = ""
    weight: int = 1
    max_running: int = 1
    made_by: str = ""
    """Name of the token that made it."""
    made_at: datetime | None = None
    running: int = 0
    waiting: int = 0
    stopped: str | None = None
    """Why nothing of it is submitted any more; None: it goes on."""


@dataclass(frozen=True, slots=True)
class AutoscalingDemand(Answered):
    """What waiting tasks lack (`unmet`), what all tasks need together (`needed`), and idle nodes
    (`spare`): each with `gpus`, `gpu_mb`, `cpu` and `memory_mb`."""

    unmet: Mapping[str, Any] = field(default_factory=dict)
    """Also how many `tasks`, and `waiting_seconds` of the one that has waited longest."""
    used: Mapping[str, Any] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    """`unmet` by `pool` and `kinds`."""
    limited_tasks: int = 0
    """Tasks that wait for a quota or a limit, which no node would raise."""
    spare: Mapping[str, Any] = field(default_factory=dict)
    """Also its `nodes`."""
    as_of: datetime | None = None
    age_seconds: float | None = None


Rows = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Policy(Answered):
    """What the operator has configured. Rows are mappings with the names of the HTTP API. `tenants` only has
    those that the token may see."""

    placement: str = ""
    bands: Rows = ()
    ageing_seconds_per_point: float = 0.0
    preemption: Mapping[str, Any] = field(default_factory=dict)
    overuse: str = ""
    """What becomes of a run that exceeds its lease: `report` or `stop`."""
    overuse_tolerance: float = 0.0
    learned_margin: float = 0.0
    kinds: Rows = ()
    pools: Rows = ()
    custom_limits: Rows = ()
    max_running: Rows = ()
    maximum: Mapping[str, Any] = field(default_factory=dict)
    """The most that one task may ask for; None is no limit."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    model_types: Rows = ()
    tenants: Rows = ()
    streams: Mapping[str, float] = field(default_factory=dict)
    body_bytes: int = 0
    batch_body_bytes: int = 0
