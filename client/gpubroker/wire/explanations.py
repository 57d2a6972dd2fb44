"""The reasons why a task waits, what would help, and what would become of a task if it were submitted."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from gpubroker.wire.answered import Answered, Time
from gpubroker.wire.forecasts import Expected, ForecastsKept, Sizing
from gpubroker.wire.problems import Fault
from gpubroker.wire.quarantine import Awaited
from gpubroker.wire.tasks import Demand, Inherited, TaskState


class Blocker(Answered, frozen=True):
    """A reason that keeps a task waiting."""

    reason: Annotated[str, Meta(description="A stable token.")]
    tier: Annotated[int, Meta(description="Lower is more structural.")]
    message: str


class PlacedDevice(Answered, frozen=True):
    key: str
    index: int
    gpu_mb: int


class Place(Answered, frozen=True):
    """The place where a task, or a rank of one, would run."""

    node: str
    devices: tuple[PlacedDevice, ...]


class MemoryHolder(Answered, frozen=True):
    """A holder of memory, as the submitter of a task sees it. `id` and `name` are null for another tenant's
    holder, unless the token is an admin's."""

    id: str | None
    name: str | None
    priority: int
    band: str
    gpu_mb: int


class DeviceHolder(MemoryHolder, frozen=True):
    """A holder of memory on one device. `id` and `name` are null for another tenant's holder, unless the
    token is an admin's."""

    stopping: bool
    quarantine: Annotated[Awaited | None, Meta(description="The proofs that end its quarantine; else null.")]
    ends: Annotated[Expected | None, Meta(description="The expected end; null if unknown.")]


class OtherRun(MemoryHolder, frozen=True):
    """A run that would be stopped, or would not be. `id` and `name` are null for another tenant's run."""

    node: str | None
    lost_gpu_seconds: Annotated[float, Meta(description="The work that is lost if it is stopped.")]


class ProtectedRun(OtherRun, frozen=True):
    """A run, and what protects it from a preemption for one task."""

    shield: Annotated[
        str,
        Meta(
            description="A stable token: none, would_not_help, young, budget, turn, guaranteed, priority or "
            "leaving."
        ),
    ]


class PreemptionCounts(Answered, frozen=True):
    """The reason why no run is stopped for a task, or the statement that some runs would be stopped."""

    why: Annotated[str, Meta(description="A stable token, such as all_shielded or not_enough.")]
    message: str
    counts: Annotated[
        Mapping[str, int], Meta(description="The number of runs on nodes that it may use, by their shield.")
    ]


class Preemption(PreemptionCounts, frozen=True):
    """The reason why no run is stopped for a task, or the runs that would be stopped."""

    runs: Annotated[
        tuple[ProtectedRun, ...], Meta(description="The most relevant of these runs, at most 20.")
    ]


class Remedy(Answered, frozen=True):
    """A change that would help, found by planning the task again with it."""

    change: Annotated[
        Mapping[str, Any],
        Meta(
            description="The fields to ask for instead, under `bundles` in each rank (of `gpu_mb`: in ranks "
            "that ask for more); empty if waiting is enough."
        ),
    ]
    effect: Annotated[str, Meta(description="One of starts, preempts and starts_later.")]
    message: str
    places: Annotated[tuple[Place, ...], Meta(description="One per rank; none if runs must leave first.")]
    victims: tuple[OtherRun, ...]
    after: Annotated[OtherRun | None, Meta(description="The run whose end lets the task start.")]
    within: Annotated[Expected | None, Meta(description="The expected time of that end.")]


class Quota(Answered, frozen=True):
    """The quota of the task's tenant, in MiB."""

    tenant: str
    cohort: Annotated[str | None, Meta(description="Its members lend each other what they do not use.")]
    guaranteed_mb: int
    used_mb: Annotated[
        int, Meta(description="The memory that it holds, and that is being freed for its tasks.")
    ]
    borrowed_mb: Annotated[int, Meta(description="The part of it beyond its guarantee.")]
    lent_mb: Annotated[
        int, Meta(description="The memory that its cohort would lend it now, beyond what it holds.")
    ]
    left_mb: Annotated[int, Meta(description="The memory that it may still take, borrowed or not.")]
    counts_mb: Annotated[
        int,
        Meta(
            description="The memory that the task would count, on the largest GPUs that it may use. A gang "
            "counts the ranks that it needs at least."
        ),
    ]


class RankVerdict(Answered, frozen=True):
    """The verdict on one rank of a gang. Ranks are judged together until one finds no room; each rank after
    that is judged alone."""

    rank: int
    place: Annotated[Place | None, Meta(description="The place with room for it.")]
    reason: Annotated[str | None, Meta(description="Null also for a rank that can be missing.")]
    message: str


class DeviceVerdict(Answered, frozen=True):
    """The verdict on a device for a task."""

    key: str
    node: str
    index: int
    kind: str
    verdict: Annotated[str, Meta(description="A stable token, such as fits, no_room, too_small.")]
    message: str
    need_mb: int | None
    free_mb: Annotated[
        int, Meta(description="The memory that is free for this task: memory kept for it counts as free.")
    ]
    allocatable_mb: int
    free_in: Annotated[
        Expected | None,
        Meta(description="The time when it has enough, unless another task takes it first; null if unknown."),
    ]
    holders: tuple[DeviceHolder, ...]


class Outlook(Answered, frozen=True, kw_only=True):
    """The part that explanations and simulations share."""

    reason: Annotated[str | None, Meta(description="The reason of the most structural blocker, if it waits.")]
    message: str
    position: Annotated[int | None, Meta(description="Place in the queue; 1 is next.")]
    start: Annotated[
        Expected | None,
        Meta(
            description="The time when it has room, unless another waiting task takes it first; null if "
            "unknown."
        ),
    ]
    start_record: Annotated[
        ForecastsKept | None,
        Meta(description="The accuracy of earlier forecasts on the same basis; null if there were none."),
    ]
    preemption: Preemption | None
    remedies: Annotated[
        tuple[Remedy, ...], Meta(description="The changes that would help; the smallest change first.")
    ]
    blockers: tuple[Blocker, ...]
    quota: Annotated[Quota | None, Meta(description="Null without GPUs, or without a quota.")]
    ranks: Annotated[
        tuple[RankVerdict, ...] | None, Meta(description="The verdicts on the ranks of a gang that waits.")
    ]
    devices: Annotated[
        tuple[DeviceVerdict, ...],
        Meta(description="The verdicts on devices; for a gang, they are about its first rank without room."),
    ]
    evaluated_at: Time
    queue_length: int
    as_of: Time
    age_seconds: float
    log_position: Annotated[int, Meta(description="Position of the newest event behind this answer.")]


class Explanation(Outlook, frozen=True, kw_only=True):
    """The reasons why a task waits, or what the task is doing. `blockers` has everything that the task waits
    for, `remedies` the changes that would help, each found by planning the task again with that change."""

    id: str
    name: str
    state: TaskState
    worker: Annotated[
        str | None,
        Meta(
            description="The first waiting worker of an array or a worker set with several workers. All but "
            "the id, the state and the message is about it. Null for other tasks."
        ),
    ] = None
    inherits: Annotated[Inherited | None, Meta(description="Null if it has its own priority.")]


class Refusal(Answered, frozen=True):
    """The problem with which a submit would be refused."""

    code: str
    detail: str
    errors: tuple[Fault, ...]


class Simulation(Outlook, frozen=True, kw_only=True):
    """The outcome of planning a task as if it were submitted now."""

    verdict: Annotated[
        str,
        Meta(
            description="One of refused, starts (there is room), preempts (`victims` are stopped first) and "
            "waits."
        ),
    ]
    refusal: Refusal | None
    priority: int | None
    resources: Annotated[
        Demand | None, Meta(description="The resources with all defaults; null if refused early.")
    ]
    sizing: Annotated[
        Sizing | None, Meta(description="The way in which its size would be settled, if it states none.")
    ]
    places: Annotated[tuple[Place, ...], Meta(description="The places where it would start now.")]
    victims: Annotated[tuple[OtherRun, ...], Meta(description="The runs that would be asked to leave.")]

    @property
    def starts(self) -> bool:
        """True if the task would start at once, or as soon as its victims have left."""
        return self.verdict in ("starts", "preempts")
