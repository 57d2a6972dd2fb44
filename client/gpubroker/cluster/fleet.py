"""What the service answers about devices, machines and the whole cluster; see `gpubroker.tasks.task`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpubroker.transport.decoding import Raw, each, filled, optional


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds memory on a device: what it leased and what was last measured."""

    kind: str
    id: str
    name: str
    priority: int = 0
    band: str = ""
    gpu_mb: int = 0
    context_mb: int = 0
    """Of `gpu_mb`, the process's own cost beyond what was asked for."""
    measured_mb: int | None = None
    overused_mb: int | None = None
    """What its run used when that was first found to be more than its lease."""
    state: str = ""
    stopping: bool = False
    quarantine: Mapping[str, Any] | None = None
    """Of one that nobody can confirm to be gone: `quarantined_at`, what it `awaits`, and a `message`."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Pledge:
    """Memory that is being freed for one waiting task; `arrived_mb` of it is free already."""

    task: str
    gpu_mb: int = 0
    arrived_mb: int = 0
    priority: int = 0
    deadline_at: datetime | None = None
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. All sizes in MiB. `free_mb` is what a new task could lease now."""

    key: str
    uuid: str
    node: str
    kind: str
    index: int = 0
    simulated: bool = False
    parent: str = ""
    """UUID of the GPU of which it is an instance."""
    split: bool = False
    """It has instances: they are leased, and it is not."""
    power: int = 0
    """Rank of its kind; more is stronger, 0 is not ranked."""
    context_mb: int = 0
    """What each process takes beyond what it asked for."""
    present: bool = True
    """False once its node no longer has it; it is shown while something is leased on it."""
    physical_mb: int = 0
    reserve_mb: int = 0
    leased_mb: int = 0
    used_mb: int = 0
    foreign_mb: int = 0
    """Used by processes that hold no lease."""
    unaccounted_mb: int = 0
    """Used beyond what holders and foreign processes explain."""
    pledged_mb: int = 0
    free_mb: int = 0
    stranded_mb: int = 0
    """Of what is free, what the usual demands cannot use, each counted by its share."""
    utilization: float | None = None
    """0 to 1."""
    sampled_at: datetime | None = None
    stale: bool = False
    holders: tuple[Holder, ...] = ()
    pledges: tuple[Pledge, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Gpu":
        return filled(
            cls, raw, holders=each(Holder, raw.get("holders")), pledges=each(Pledge, raw.get("pledges"))
        )


@dataclass(frozen=True, slots=True)
class Node:
    """One machine. `cpu`, `memory_mb` and `runs` hold what is used of what there is; `agent` its agent's
    `release`, whether that is `outdated`, and the `message` what to do about it; `silent_since` when that was
    last heard of, if not lately."""

    name: str
    ready: bool = True
    silent_since: datetime | None = None
    cordoned: bool = False
    incarnation: str = ""
    cpu: Mapping[str, float] = field(default_factory=dict)
    memory_mb: Mapping[str, int] = field(default_factory=dict)
    runs: Mapping[str, int] = field(default_factory=dict)
    gpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)
    agent: Mapping[str, Any] | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Node":
        return filled(cls, raw)


@dataclass(frozen=True, slots=True)
class Scattered:
    """What most of the waiting tasks ask for is free in sum, and nowhere in one piece."""

    gpus: int
    gpu_mb: int = 0
    waiting: int = 0
    free_mb: int = 0
    largest_mb: int = 0
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """Of the GPUs that take tasks now: what is free, and what of it the usual demands cannot use."""

    free_mb: int = 0
    stranded_mb: int = 0
    share: float | None = None
    """0 to 1; None if nothing is free."""
    kinds: tuple[Mapping[str, Any], ...] = ()
    scattered: Scattered | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Fragmentation":
        scattered = raw.get("scattered")
        return filled(
            cls,
            raw,
            kinds=tuple(raw.get("kinds") or ()),
            scattered=filled(Scattered, scattered) if scattered else None,
        )


@dataclass(frozen=True, slots=True)
class Tenant:
    """One of those who share the cluster. Sizes are MiB of GPU memory; `guaranteed_mb` None: no quota."""

    name: str
    cohort: str | None = None
    guaranteed_mb: int | None = None
    borrow_mb: int | None = None
    """None: as much as its cohort leaves."""
    held_mb: int = 0
    borrowed_mb: int = 0
    pledged_mb: int = 0
    """What is being freed for its tasks."""
    usage_mb_seconds: float = 0.0
    weight: float = 1.0
    fair_share: float = 0.0
    level: float = 0.0
    """What it has used and holds against its fair share; within a band the lowest goes first."""
    max_priority: int = 100
    pending: int = 0
    active: int = 0
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Tenant":
        return filled(cls, raw)


@dataclass(frozen=True, slots=True)
class ForecastsKept:
    """How true the first forecasts of starts came that rested on the same: stated, learned or guess."""

    basis: str
    n: int = 0
    median_error_seconds: float = 0.0
    within_p90: float = 0.0
    """The share that started by the p90; 0.9 is right."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts over the whole cluster: `tasks` by state."""

    gpu: Mapping[str, Any] = field(default_factory=dict)
    fragmentation: Fragmentation | None = None
    forecasts: tuple[ForecastsKept, ...] = ()
    tasks: Mapping[str, int] = field(default_factory=dict)
    executor: Mapping[str, Any] = field(default_factory=dict)
    leader: Mapping[str, Any] = field(default_factory=dict)
    detection: Mapping[str, Any] = field(default_factory=dict)
    """`state`, watching or paused; then also the silent `nodes` that are not given up, and the `message`."""
    model_servers: tuple[Mapping[str, Any], ...] = ()
    """Name, node and requests in flight of each; of `http` and `grpc` whether it is `up`, and the `fault`."""
    as_of: datetime | None = None
    age_seconds: float | None = None
    position: int = 0
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Stats":
        return filled(
            cls,
            raw,
            fragmentation=optional(Fragmentation, raw.get("fragmentation")),
            forecasts=each(ForecastsKept, raw.get("forecasts")),
        )
