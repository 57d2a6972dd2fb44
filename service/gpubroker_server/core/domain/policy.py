"""The operator's choices that decisions depend on, as one value."""

from collections.abc import Iterator
from functools import cache, cached_property
from typing import Annotated, Literal

from gpubroker.wire.bounds import MAX_PRIORITY, Amount, Count, Priority
from gpubroker.wire.policy import Pool as ShownPool
from gpubroker.wire.policy import TaskMaximum
from gpubroker.wire.policy import TenantPolicy as ShownTenantPolicy
from msgspec import Meta, Struct

from gpubroker_server.core.domain.demand import Labels
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.setting_marks import (
    ELSEWHERE,
    NonNegativeSeconds,
    PositiveSeconds,
    by_name,
    written,
)
from gpubroker_server.core.domain.units import Instant, Position, Seconds

HALF_LIFE_SECONDS = Seconds(86_400.0)

BANDS: tuple[tuple[str, int, int], ...] = (
    ("critical", 90, MAX_PRIORITY),
    ("interactive", 70, 89),
    ("batch", 40, 69),
    ("background", 10, 39),
    ("idle", 0, 9),
)
"""(name, lowest, highest), highest band first."""

BAND_NAMES: dict[str, int] = {name: (low + high) // 2 for name, low, high in BANDS}
"""A band's name stands for its middle value wherever a priority is accepted."""

DIRECT_PRIORITY = BAND_NAMES["interactive"]
"""The priority of requests to models that state none, unless the operator says another."""


class InferenceServers(Struct, frozen=True):
    """The model servers that answer queued inferences, by name, in the order of the settings."""

    ledger: tuple[str, ...] = ()
    """Servers whose models the leader loads and unloads: an inference waits until its model is loaded."""
    others: tuple[str, ...] = ()
    """Servers that choose their models themselves."""
    at_once: int = 64
    """The most inferences of one model that are sent and not yet answered."""
    priority: int = DIRECT_PRIORITY
    """The priority of an inference that states none. Requests that are sent directly have the same
    default."""
    body_bytes: int = 2**31 - 1
    """The most bytes of an inference request. Requests that are sent directly have the same limit."""

    @property
    def is_anywhere(self) -> bool:
        return bool(self.ledger or self.others)


NO_SERVERS = InferenceServers()


PRIORITIES_IN_WORDS = f"0 to {MAX_PRIORITY} or one of {', '.join(BAND_NAMES)}"


def priority_of(text: str) -> int | None:
    """Return the priority that a number or the name of a band means; None for other text."""
    if text.isascii() and text.isdecimal() and len(text) <= 3 and int(text) <= MAX_PRIORITY:
        return int(text)
    return BAND_NAMES.get(text)


@cache
def band_of(priority: int) -> tuple[str, int, int]:
    """Return the band of a priority. The lowest band is also that of -1, the priority of a model that makes
    room for any task."""
    return next((band for band in BANDS if priority >= band[1]), BANDS[-1])


AGEING_SECONDS_PER_POINT = 60.0


def aged_priority(priority: int, waited_seconds: float, seconds_per_point: float) -> int:
    """Return the priority plus one point per `seconds_per_point`, at most up to the top of its band."""
    points = int(waited_seconds / seconds_per_point) if waited_seconds > 0 else 0
    return min(band_of(priority)[2], priority + points) if points else priority


class StreamRules(Struct, frozen=True):
    """Rules by which the weight of a work stream follows from the signals that clients report."""

    velocity_gain: Annotated[float, Meta(ge=0, le=1000)] = 0.01
    """The amount by which the weight rises with each point of progress per hour."""
    least_velocity_factor: Annotated[float, Meta(gt=0, le=1)] = 0.5
    most_velocity_factor: Annotated[float, Meta(ge=1, le=1000)] = 2.0
    velocity_seconds: PositiveSeconds = Seconds(3600.0)
    """Time constant with which the velocity fades after the last report of progress."""
    stale_seconds: PositiveSeconds = Seconds(3600.0)
    """The age of a stream's data that adds 1 to the staleness factor. Each further span of this length adds 1
    more."""
    most_staleness_factor: Annotated[float, Meta(ge=1, le=1000)] = 3.0
    least_quality_factor: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """The factor at quality 0."""
    least_share: Annotated[float, Meta(gt=0, le=1)] = 0.1
    """The share of all draws that is given out evenly, so that no stream starves."""


class CustomLimit(Struct, frozen=True, order=True):
    name: str
    amount: Annotated[Amount, written("limit", {})]
    per_node: Annotated[bool, written("per", {"cluster": False, "node": True})] = False
    """True if each node has this amount; otherwise it is the amount of the whole cluster."""
    priority_threshold: Priority = 0


class Pool(ShownPool, frozen=True, dict=True):
    """A named part of the cluster."""

    @cached_property
    def labels(self) -> Labels:
        """The labels of the pool's nodes, in the form in which a demand states labels."""
        return tuple((label, tuple(sorted(values))) for label, values in sorted(self.nodes.items()))

    def amounts(self) -> Iterator[tuple[str, float]]:
        """Yield (name, amount) of each limit. The name is `custom/NAME` for a custom resource, otherwise the
        name of the field."""
        for name in ("cpu", "gpus", "gpu_mb", "memory_mb"):
            amount = getattr(self, name)
            if amount is not None:
                yield name, float(amount)
        yield from ((f"custom/{name}", amount) for name, amount in sorted(self.custom.items()))


class TenantPolicy(ShownTenantPolicy, frozen=True):
    """The share and the limits of a tenant."""

    def __post_init__(self) -> None:
        """Refuse a cohort without a guarantee, and borrowing without a cohort. Raises ValueError."""
        if self.cohort and self.guaranteed_mb is None:
            raise ValueError(f"cohort {self.cohort!r} needs guaranteed_mb (0: the tenant only borrows)")
        if self.borrow_mb is not None and not self.cohort:
            raise ValueError(f"borrow_mb {self.borrow_mb} without a cohort; name the cohort to borrow from")


DEFAULT_TENANT = TenantPolicy("*")


class Policy(Struct, frozen=True, dict=True):
    ageing_seconds_per_point: PositiveSeconds = Seconds(60.0)
    """A pending task gains one point of order per this time, at most up to the top of its band. Ageing
    changes the order of the queue; it never allows preemption."""
    placement: Literal["stranded", "fgd", "best_fit", "spread"] = "stranded"
    """The rule for the choice between placements. `stranded` and `fgd` keep the remaining memory useful for
    typical demands, by our own measure or by the published one; the others are `best_fit` and `spread`."""
    preemption: bool = True
    preemption_budget: Count = 3
    """The number of preemptions after which a task is shielded until its next checkpoint or `shield_seconds`
    of running. Critical tasks ignore the shield."""
    shield_seconds: NonNegativeSeconds = Seconds(600.0)
    """The running time for which a task whose preemption budget is spent is shielded. For the same time, a
    task that was admitted ahead of others by age is not preempted by tasks of its band."""
    pledge_patience_seconds: PositiveSeconds = Seconds(600.0)
    """The time after its victims' deadline for which a pledge is kept, unless its task finds another way."""
    kill_patience_seconds: PositiveSeconds = Seconds(10.0)
    """The time after its stop deadline, or its end, for which the leases of an unconfirmed run stay out of
    quarantine."""
    sample_period_seconds: PositiveSeconds = Seconds(2.0)
    """A device with a sample older than three periods takes nothing new."""
    beat_seconds: Annotated[Seconds, Meta(ge=0.1, le=60)] = Seconds(2.0)
    beats_missed: Annotated[int, Meta(ge=2, le=1000)] = 3
    """A node is lost after this many missed heartbeats."""
    pause_share: Annotated[float, Meta(ge=0, le=1)] = 0.2
    pause_nodes: Annotated[int, Meta(ge=1)] = 2
    """The number of nodes at which the detection of lost nodes pauses: if at least this many nodes, with more
    than `pause_share` of all runs, fall silent at once, none of them is declared lost."""
    gang_start_seconds: PositiveSeconds = Seconds(300.0)
    """The time after its admission within which all ranks of a gang must be ready. A gang that is later is
    requeued."""
    retry_first_seconds: PositiveSeconds = Seconds(1.0)
    retry_factor: Annotated[float, Meta(ge=1)] = 2.0
    retry_cap_seconds: PositiveSeconds = Seconds(300.0)
    learned_margin: Annotated[float, Meta(ge=0, le=10)] = 0.15
    """The share that is added to the 95 % quantile of the measured sizes to get a learned size."""
    learned_least_runs: Annotated[int, Meta(ge=1, le=1000)] = 5
    """The number of measured runs below which no size is learned."""
    overuse: Literal["report", "stop"] = "report"
    """The reaction to a run that is measured above its lease: `report` it only, or `stop` the run."""
    overuse_tolerance: Annotated[float, Meta(ge=0, le=10)] = 0.05
    """The share of its lease by which a run may exceed it."""
    forecasts: Annotated[int, Meta(ge=0, le=1000)] = 8
    """The number of tasks that get a start forecast: the first in order of the tasks that wait for room. No
    task behind them may delay their forecast start."""
    backfill_depth: Annotated[int, Meta(ge=1)] = 64
    """The number of tasks, refused because of forecasts, after which a cycle tries no more of them."""
    consolidation: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The most runs per hour that are moved to make room for tasks that only fragmentation keeps waiting; 0:
    none."""
    autoscaler: Annotated[str, Meta(max_length=100)] = ""
    """The name of the autoscaler that adds nodes for waiting tasks; empty if there is none. With an
    autoscaler, tasks that no present node could take wait instead of being refused."""
    autoscaler_tasks: Annotated[int, Meta(ge=1)] = 1000
    """The most tasks of one tenant that may wait for the autoscaler to add a node that could take them."""
    custom_limits: Annotated[tuple[CustomLimit, ...], by_name(alone="limit")] = ()
    """Limits, sorted by name. A name with a colon is a limit that many tasks share: the number of tasks that
    may run at once (`tenant:NAME`, `label:KEY=VALUE`; with `*` the limit holds for each tenant or value by
    itself), or an amount of a pool (`pool:NAME:gpus`)."""
    pools: Annotated[tuple[Pool, ...], ELSEWHERE] = ()
    tenants: Annotated[tuple[TenantPolicy, ...], by_name()] = ()
    usage_half_life_seconds: PositiveSeconds = HALF_LIFE_SECONDS
    streams: tuple[tuple[str, Annotated[float, Meta(ge=1e-6, le=1e6)]], ...] = ()
    """(name, weight) of work streams. Of tasks with equal aged priority, those of the heavier stream go
    first. An operator may put another weight while the service runs."""
    stream_rules: Annotated[StreamRules, ELSEWHERE] = StreamRules()  # frozen
    min_run_seconds: NonNegativeSeconds = Seconds(0.0)
    """A run is not preempted for this long after its start, except by critical tasks."""
    min_residency_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(5.0)
    """The time after its load for which a model is not preempted, except by critical tasks; longer for a
    model that loads slowly. 0: no protection at all."""
    yields_to_tasks_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(30.0)
    """The time after its last request after which a model makes room for a task of lower priority."""
    maximum: TaskMaximum = TaskMaximum()  # frozen
    array_result_bytes: Annotated[int, ELSEWHERE] = ServiceLimits().array_result_bytes
    """The most bytes of the results of one array."""
    serving: Annotated[InferenceServers, ELSEWHERE] = NO_SERVERS

    @cached_property
    def has_quotas(self) -> bool:
        """True if any tenant has a guarantee."""
        return any(tenant.guaranteed_mb is not None for tenant in self.tenants)

    @cached_property
    def _by_name(self) -> dict[str, TenantPolicy]:
        return {tenant.name: tenant for tenant in self.tenants}

    @cached_property
    def _cohorts(self) -> dict[str | None, int]:
        """Cohort -> MiB guaranteed to its members."""
        cohorts: dict[str | None, int] = {}
        for tenant in self.tenants:
            cohorts[tenant.cohort] = cohorts.get(tenant.cohort, 0) + (tenant.guaranteed_mb or 0)
        return cohorts

    @cached_property
    def _limits(self) -> dict[str, float]:
        return {limit.name: limit.amount for limit in self.custom_limits}

    def tenant(self, name: str) -> TenantPolicy:
        return self._by_name.get(name) or self._by_name.get("*", DEFAULT_TENANT)

    def guaranteed_mb(self, cohort: str | None) -> int:
        return self._cohorts.get(cohort, 0)

    def most_mb(self, tenant: str) -> int | None:
        """Return the most that a tenant could ever hold, guaranteed and borrowed; None without a quota."""
        tenant_policy = self.tenant(tenant)
        if tenant_policy.guaranteed_mb is None or not tenant_policy.cohort:
            return tenant_policy.guaranteed_mb
        others = self.guaranteed_mb(tenant_policy.cohort) - tenant_policy.guaranteed_mb
        return tenant_policy.guaranteed_mb + (
            others if tenant_policy.borrow_mb is None else min(others, tenant_policy.borrow_mb)
        )

    def weight_of(self, stream: str) -> float:
        """Return the configured weight of a work stream; 1 for no stream and for one that is no longer
        configured."""
        if not self.streams:
            return 1.0
        return next((weight for name, weight in self.streams if name == stream), 1.0)

    def limit_of(self, slot: str) -> float | None:
        exact_limit = self._limits.get(slot)
        return self._limits.get(wildcard_limit(slot)) if exact_limit is None else exact_limit


def wildcard_limit(slot: str) -> str:
    """Return the name of the limit that applies to each tenant, or each value of a label, by itself."""
    sign = "=" if "=" in slot else ":"
    return slot.partition(sign)[0] + sign + "*"


_LARGEST_EXPONENT = 32
"""The largest exponent that counts. It is far beyond every cap and keeps the power within a float."""


def next_retry_at(failures: int, now: Instant, policy: Policy) -> Instant:
    """Return the time of the next attempt: `retry_first_seconds` after the first failure, then `retry_factor`
    times longer after each further one, up to the cap. `failures` counts the attempts that used up a retry,
    including the one that just failed."""
    factor = policy.retry_factor ** min(failures - 1, _LARGEST_EXPONENT)
    return Instant(now + min(policy.retry_cap_seconds, policy.retry_first_seconds * factor))


class Cutoffs(Struct, frozen=True):
    """The instants before which rows may be deleted: tasks by their end or, if submitted with a key, by their
    submission; audit rows by their time; objects by their expiry."""

    finished: Instant
    keyed: Instant
    audited: Instant
    expired: Instant
    heard: Position
    """Events after this position stay, whatever their age, because the pruner has not read them yet. Age
    alone is not enough: a clock that jumps far ahead makes all events old at once."""


class Retention(Struct, frozen=True):
    finished_seconds: PositiveSeconds = Seconds(7 * 86_400.0)
    """The time for which a finished task, with all that belongs to it, is kept after its end, and an event
    after its own time."""
    idempotency_seconds: PositiveSeconds = Seconds(86_400.0)
    """The time after its submission for which a task submitted with an idempotency key is kept at least."""
    audit_seconds: PositiveSeconds = Seconds(365 * 86_400.0)
    object_seconds: PositiveSeconds = Seconds(86_400.0)
    """The time for which an uploaded object is kept after its last use."""

    def cutoffs(self, now: Instant, heard: Position) -> Cutoffs:
        return Cutoffs(
            finished=Instant(now - self.finished_seconds),
            keyed=Instant(now - self.idempotency_seconds),
            audited=Instant(now - self.audit_seconds),
            expired=now,
            heard=heard,
        )
