"""Why a task waits, what would help, and what would become of a task if it were submitted."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gpubroker.tasks.estimates import Expected, ForecastsKept
from gpubroker.tasks.task import Inherited, TaskState
from gpubroker.transport.decoding import Answered, Raw


@dataclass(frozen=True, slots=True)
class Run(Answered):
    """A run as the submitter of another task sees it. `id` and `name` are empty for another tenant's run."""

    id: str = ""
    name: str = ""
    priority: int = 0
    band: str = ""
    gpu_mb: int = 0
    node: str = ""
    lost_gpu_seconds: float = 0.0
    """Work that is lost if it is stopped."""
    shield: str = ""
    """What protects it from preemption; a stable token."""
    stopping: bool = False
    quarantine: Raw | None = None
    """If it is not confirmed gone: which proof that waits for."""
    ends: Expected | None = None
    """None if its end cannot be estimated."""


@dataclass(frozen=True, slots=True)
class Blocker(Answered):
    """One thing that keeps a task waiting. `reason` is a stable token; a lower `tier` is more structural."""

    reason: str
    message: str
    tier: int = 0


@dataclass(frozen=True, slots=True)
class DeviceVerdict(Answered):
    """Why a waiting task cannot use a device. `need_mb` is None if even the empty device is too small."""

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
    """When it has enough free memory, if no other task takes it."""
    holders: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True)
class RankVerdict(Answered):
    """Whether there is room for one rank of a waiting gang.

    Ranks are placed in order, each beside those before it; after the first that does not fit, each is judged
    alone.
    """

    rank: int
    message: str
    place: Raw | None = None
    """`node` and `devices`, if there is room."""
    reason: str | None = None
    """Why there is no room; None also for ranks that the gang can start without."""


@dataclass(frozen=True, slots=True)
class Quota(Answered):
    """How a task stands against its tenant's quota, in MiB."""

    tenant: str
    cohort: str | None = None
    guaranteed_mb: int = 0
    used_mb: int = 0
    """What the tenant holds, and what is being freed for its tasks."""
    borrowed_mb: int = 0
    """Part of `used_mb`: what exceeds the guarantee."""
    lent_mb: int = 0
    """What the cohort would lend now, beyond `used_mb`."""
    left_mb: int = 0
    """What the tenant may still take."""
    counts_mb: int = 0
    """What the task would count."""


@dataclass(frozen=True, slots=True)
class Remedy(Answered):
    """One change that would let the task start, found by planning it again with that change."""

    message: str
    effect: str = ""
    """starts, preempts or starts_later."""
    change: Mapping[str, Any] = field(default_factory=dict)
    """What to ask for instead, under `bundles` in every rank; empty if waiting is enough."""
    places: tuple[Raw, ...] = ()
    """`node` and `devices`, for a gang one per rank. Empty if runs must leave first."""
    victims: tuple[Run, ...] = ()
    after: Run | None = None
    """The run that must end first."""
    within: Expected | None = None


@dataclass(frozen=True, slots=True)
class Preemption(Answered):
    """Which runs would be preempted for a task, or why none is. `why` is a stable token."""

    why: str
    message: str
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of runs on usable nodes, by what protects them."""
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook(Answered):
    """Of a task that waits, or would. `reason` is the first blocker's; None if it does not wait."""

    message: str
    reason: str | None = None
    evaluated_at: datetime | None = None
    position: int | None = None
    """1 is next."""
    queue_length: int = 0
    start: Expected | None = None
    """When there is room, unless another waiting task takes it first; None if it cannot be estimated."""
    start_record: ForecastsKept | None = None
    """How accurate past forecasts with the same basis were; None if there were none."""
    preemption: Preemption | None = None
    remedies: tuple[Remedy, ...] = ()
    """What would help; the smallest change first."""
    blockers: tuple[Blocker, ...] = ()
    quota: Quota | None = None
    """None without GPUs, and for a tenant without a quota."""
    ranks: tuple[RankVerdict, ...] = ()
    """For a gang that waits."""
    devices: tuple[DeviceVerdict, ...] = ()
    """For a gang: for its first rank without room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(Outlook):
    """Why a task waits, or what it is doing."""

    id: str
    state: TaskState
    name: str = ""
    inherits: Inherited | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Outlook):
    """What would become of a task if it were submitted now."""

    verdict: str
    """refused, starts (there is room), preempts (`victims` would be asked to leave) or waits."""
    refusal: Raw | None = None
    """The problem that a submit would be refused with: `code`, `detail` and `errors`."""
    priority: int | None = None
    resources: Raw | None = None
    """With all defaults."""
    sizing: Raw | None = None
    """How `gpu_mb: learned` would be settled."""
    places: tuple[Raw, ...] = ()
    """Where it would start now: `node` and `devices`."""
    victims: tuple[Run, ...] = ()
    as_of: datetime | None = None
    age_seconds: float | None = None

    @property
    def starts(self) -> bool:
        """At once, or as soon as its victims have left."""
        return self.verdict in ("starts", "preempts")
