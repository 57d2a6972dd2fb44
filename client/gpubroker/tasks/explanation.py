"""Why a task waits and what would help, as light values; see `gpubroker.tasks.task`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpubroker.cluster.fleet import ForecastsKept
from gpubroker.tasks.estimates import Expected
from gpubroker.tasks.states import TaskState
from gpubroker.tasks.task import Inherited
from gpubroker.transport.decoding import Raw, each, filled, optional


@dataclass(frozen=True, slots=True)
class Run:
    """Somebody's run as another task sees it. `id` and `name` are empty for another tenant's."""

    id: str = ""
    name: str = ""
    priority: int = 0
    band: str = ""
    gpu_mb: int = 0
    node: str = ""
    lost_gpu_seconds: float = 0.0
    """Work that stopping it would throw away."""
    shield: str = ""
    """What keeps it from being stopped; a stable token."""
    stopping: bool = False
    quarantine: Raw | None = None
    """Nobody can confirm that it is gone: what that waits for."""
    ends: Expected | None = None
    """Expected; None if nobody can tell."""
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Run":
        return filled(cls, raw, ends=optional(Expected, raw.get("ends")))


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing in a task's way. `reason` is a stable token; a lower `tier` is more structural."""

    reason: str
    message: str
    tier: int = 0
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class DeviceVerdict:
    """What one device says to a waiting task. `need_mb` is None if it is too small even when empty."""

    key: str
    node: str
    kind: str
    verdict: str
    message: str
    index: int = 0
    need_mb: int | None = None
    free_mb: int = 0
    allocatable_mb: int = 0
    free_in: Expected | None = None
    """When it has enough, if nobody else takes that."""
    holders: tuple[Run, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "DeviceVerdict":
        free_in = optional(Expected, raw.get("free_in"))
        return filled(cls, raw, free_in=free_in, holders=each(Run, raw.get("holders")))


@dataclass(frozen=True, slots=True)
class RankVerdict:
    """One rank of a waiting gang, judged with those in their places that have room together; after the first
    that has none, each by itself."""

    rank: int
    message: str
    place: Raw | None = None
    """`node` and `devices`, where there is room for it."""
    reason: str | None = None
    """Why there is none; None as well for ranks that the gang can start without."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Quota:
    """How a task stands against the quota of its tenant, in MiB."""

    tenant: str
    cohort: str | None = None
    guaranteed_mb: int = 0
    used_mb: int = 0
    """What the tenant has, and what is being freed for its tasks."""
    borrowed_mb: int = 0
    """What of that is beyond its guarantee."""
    lent_mb: int = 0
    """What its cohort would lend it now, beyond what it has."""
    left_mb: int = 0
    """What it may still take."""
    counts_mb: int = 0
    """What the task would count."""
    raw: Raw = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that would do, found by planning the task anew with it."""

    message: str
    effect: str = ""
    """starts, preempts or starts_later."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """What to ask for instead, under `bundles` in every rank; empty: it is enough to wait."""
    places: tuple[Raw, ...] = ()
    """`node` and `devices`; of a gang one for each rank. None if runs must leave first."""
    victims: tuple[Run, ...] = ()
    after: Run | None = None
    """The run after whose end it starts."""
    within: Expected | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Remedy":
        return filled(
            cls,
            raw,
            victims=each(Run, raw.get("victims")),
            after=optional(Run, raw.get("after")),
            within=optional(Expected, raw.get("within")),
        )


@dataclass(frozen=True, slots=True)
class Preemption:
    """Why nobody is stopped for a task, or who would be. `why` is a stable token."""

    why: str
    message: str
    counts: Mapping[str, int] = field(default_factory=dict)
    """Runs on nodes that it could use, by what shields them."""
    runs: tuple[Run, ...] = ()
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Preemption":
        return filled(cls, raw, runs=each(Run, raw.get("runs")))


def told(raw: Raw) -> dict[str, Any]:
    """The fields that explanations and simulations share."""
    return {
        "start": optional(Expected, raw.get("start")),
        "start_record": optional(ForecastsKept, raw.get("start_record")),
        "preemption": optional(Preemption, raw.get("preemption")),
        "remedies": each(Remedy, raw.get("remedies")),
        "blockers": each(Blocker, raw.get("blockers")),
        "quota": optional(Quota, raw.get("quota")),
        "ranks": each(RankVerdict, raw.get("ranks")),
        "devices": each(DeviceVerdict, raw.get("devices")),
    }


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a task waits, or what it is doing. `reason` is the first blocker's; None if it does not wait."""

    id: str
    message: str
    state: TaskState
    reason: str | None = None
    evaluated_at: datetime | None = None
    position: int | None = None
    """1 is next."""
    queue_length: int = 0
    inherits: Inherited | None = None
    start: Expected | None = None
    """When it has room, unless somebody who waits as well takes that before; None if nobody can tell."""
    start_record: ForecastsKept | None = None
    """How true starts came that were foretold on the same basis; None if none was yet."""
    preemption: Preemption | None = None
    remedies: tuple[Remedy, ...] = ()
    """What would help, what changes least first."""
    blockers: tuple[Blocker, ...] = ()
    quota: Quota | None = None
    """None without GPUs, and for a tenant without a quota."""
    ranks: tuple[RankVerdict, ...] = ()
    """Of a gang that waits."""
    devices: tuple[DeviceVerdict, ...] = ()
    """For a gang, as its first rank without room finds them."""
    raw: Raw = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, raw: Raw) -> "Explanation":
        inherits = optional(Inherited, raw.get("inherits"))
        return filled(cls, raw, state=TaskState(raw.get("state", "")), inherits=inherits, **told(raw))


@dataclass(frozen=True, slots=True)
class Simulation:
    """What would become of a task if it were submitted now."""

    verdict: str
    """refused, starts (there is room), preempts (`victims` would be asked to leave) or waits."""
    message: str
    reason: str | None = None
    refusal: Raw | None = None
    """The problem with which a submit would be refused: `code`, `detail` and `errors`."""
    evaluated_at: datetime | None = None
    priority: int | None = None
    resources: Raw | None = None
    """With all defaults."""
    sizing: Raw | None = None
    """How `gpu_mb: learned` would be settled."""
    places: tuple[Raw, ...] = ()
    """Where it would start now: `node` and `devices`."""
    victims: tuple[Run, ...] = ()
    position: int | None = None
    queue_length: int = 0
    start: Expected | None = None
    start_record: ForecastsKept | None = None
    preemption: Preemption | None = None
    remedies: tuple[Remedy, ...] = ()
    blockers: tuple[Blocker, ...] = ()
    quota: Quota | None = None
    """None without GPUs, and for a tenant without a quota."""
    ranks: tuple[RankVerdict, ...] = ()
    """Of a gang that waits."""
    devices: tuple[DeviceVerdict, ...] = ()
    """For a gang, as its first rank without room finds them."""
    as_of: datetime | None = None
    age_seconds: float | None = None
    raw: Raw = field(default_factory=dict, repr=False)

    @property
    def starts(self) -> bool:
        """At once, or when its victims have left."""
        return self.verdict in ("starts", "preempts")

    @classmethod
    def of(cls, raw: Raw) -> "Simulation":
        return filled(cls, raw, victims=each(Run, raw.get("victims")), **told(raw))
