"""The operator's choices that decisions depend on, as one value."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Labels
from gpubroker_server.core.domain.units import Instant, Mib, Position, Seconds


@dataclass(frozen=True, slots=True)
class InferenceServers:
    """The model servers that answer queued inferences, by name, in the order of the settings."""

    ledger: tuple[str, ...] = ()
    """The leader loads and unloads the models of these: an inference waits until its model is loaded."""
    others: tuple[str, ...] = ()
    """Servers that choose their models themselves."""
    at_once: int = 64
    """The most inferences of one model that are sent and unanswered at a time."""

    @property
    def is_anywhere(self) -> bool:
        return bool(self.ledger or self.others)


NO_SERVERS = InferenceServers()


HALF_LIFE_SECONDS = Seconds(86_400.0)

BANDS: tuple[tuple[str, int, int], ...] = (
    ("critical", 90, 100),
    ("interactive", 70, 89),
    ("batch", 40, 69),
    ("background", 10, 39),
    ("idle", 0, 9),
)
"""(name, lowest, highest), highest band first."""

BAND_NAMES: dict[str, int] = {name: (low + high) // 2 for name, low, high in BANDS}
"""A band's name stands for its middle value wherever a priority is accepted."""


@cache
def band_of(priority: int) -> tuple[str, int, int]:
    """A model that makes room for any task has priority -1."""
    return next((band for band in BANDS if priority >= band[1]), BANDS[-1])


AGEING_SECONDS_PER_POINT = 60.0


def aged_priority(priority: int, waited_seconds: float, seconds_per_point: float) -> int:
    """One point more per `seconds_per_point`, at most up to the top of its band."""
    points = int(waited_seconds / seconds_per_point) if waited_seconds > 0 else 0
    return min(band_of(priority)[2], priority + points) if points else priority


@dataclass(frozen=True, slots=True)
class StreamRules:
    """How a work stream's weight follows from what clients tell of it."""

    velocity_gain: float = 0.01
    """How much the weight rises with each point of progress per hour."""
    least_velocity_factor: float = 0.5
    most_velocity_factor: float = 2.0
    velocity_seconds: Seconds = Seconds(3600.0)
    """Time constant with which the velocity forgets."""
    stale_seconds: Seconds = Seconds(3600.0)
    """For each such span that its data are old, a stream counts once more."""
    most_staleness_factor: float = 3.0
    least_quality_factor: float = 0.1
    """At quality 0."""
    least_share: float = 0.1
    """This share of all draws is given out evenly, so that no stream starves."""


class CustomLimit(NamedTuple):
    name: str
    amount: float
    per_node: bool = False
    """Each node has this much; otherwise the cluster has it in all."""
    priority_threshold: int = 0


@dataclass(frozen=True, slots=True)
class Pool:
    """A named part of the cluster: some of its devices and nodes, some amounts of it, or both."""

    name: str
    kinds: tuple[str, ...] = ()
    nodes: Labels = ()
    fractions: bool = True
    """Shares of a GPU are allowed, not only whole ones."""
    cpu: float | None = None
    """This and the following: limits on the sum over all tasks of the pool; None is no limit."""
    gpus: int | None = None
    gpu_mb: Mib | None = None
    memory_mb: Mib | None = None
    custom: tuple[tuple[str, float], ...] = ()
    """Of custom resources, such as storage; sorted by name."""

    def amounts(self) -> Iterator[tuple[str, float]]:
        """(name, amount) of each limit: `custom/NAME` for custom resources, else the field's name."""
        for name in ("cpu", "gpus", "gpu_mb", "memory_mb"):
            amount = getattr(self, name)
            if amount is not None:
                yield name, float(amount)
        yield from ((f"custom/{name}", amount) for name, amount in self.custom)


@dataclass(frozen=True, slots=True)
class TaskMaximum:
    """The most that one task may ask for, whatever the cluster has; None is no limit."""

    gpus: int | None = None
    gpu_mb: Mib | None = None
    """Per GPU."""
    cpu: float | None = None
    memory_mb: Mib | None = None
    timeout_seconds: Seconds | None = None
    max_retries: int | None = None
    grace_seconds: Seconds | None = None


class TenantPolicy(NamedTuple):
    name: str
    """`*`: each tenant that is not listed."""
    cohort: str = ""
    """Members of a cohort borrow what the others' guarantees leave unused."""
    guaranteed_mb: Mib | None = None
    """GPU memory. None: no quota, neither guarantee nor limit."""
    borrow_mb: Mib | None = None
    """The most beyond its guarantee; None: as much as its cohort leaves."""
    weight: float = 1.0
    max_priority: int = 100


DEFAULT_TENANT = TenantPolicy("*")


@dataclass(frozen=True, slots=True)
class Policy:
    ageing_seconds_per_point: Seconds = Seconds(60.0)
    """A pending task gains one point of order per this time, at most up to the top of its band. Ageing
    changes the order of the queue; it never allows preemption."""
    placement: str = "stranded"
    """How to choose between placements: `stranded` and `fgd` (what is left over is of most use to typical
    demands, by our measure or the published one), `best_fit`, or `spread`."""
    preemption: bool = True
    preemption_budget: int = 3
    """After this many preemptions a task is shielded until its next checkpoint or `shield_seconds` of
    running. Critical tasks ignore the shield."""
    shield_seconds: Seconds = Seconds(600.0)
    """For this long, too, a task admitted ahead of others by age is not preempted by those of its band."""
    pledge_patience_seconds: Seconds = Seconds(600.0)
    """How long after its victims' deadline a pledge is kept, unless its task finds another way."""
    kill_patience_seconds: Seconds = Seconds(10.0)
    """How long after its stop deadline, or its end, an unconfirmed run's leases stay out of quarantine."""
    sample_period_seconds: Seconds = Seconds(2.0)
    """A device with a sample older than three periods takes nothing new."""
    beat_seconds: Seconds = Seconds(2.0)
    beats_missed: int = 3
    """A node is lost after this many missed heartbeats."""
    pause_share: float = 0.2
    pause_nodes: int = 2
    """If at least this many nodes, with more than that share of all runs, fall silent at once, none of them
    is declared lost."""
    gang_start_seconds: Seconds = Seconds(300.0)
    """How long after its admission all ranks of a gang must be ready; otherwise it is requeued."""
    retry_first_seconds: Seconds = Seconds(1.0)
    retry_factor: float = 2.0
    retry_cap_seconds: Seconds = Seconds(300.0)
    learned_margin: float = 0.15
    """A learned size is the 95 % quantile plus this share."""
    learned_least_runs: int = 5
    """With fewer measured runs no size is learned."""
    overuse: str = "report"
    """`report` or `stop`: what happens to a run that is measured above its lease."""
    overuse_tolerance: float = 0.05
    """How much more than its lease a run may use, as a share of it."""
    forecasts: int = 8
    """The number of tasks, first in order among those that wait for room, that get a start forecast, which no
    task behind them may delay."""
    backfill_depth: int = 64
    """After this many tasks were refused because of forecasts, a cycle tries no more of them."""
    consolidation: int = 0
    """The most runs to move per hour so that a task fits that is only kept out by fragmentation; 0: none."""
    custom_limits: tuple[CustomLimit, ...] = ()
    """Sorted by name. Names with a colon are slots: how many tasks may run at once (`tenant:NAME`,
    `label:KEY=VALUE`; `*` is each by itself), and a pool's amounts (`pool:NAME:gpus`)."""
    pools: tuple[Pool, ...] = ()
    tenants: tuple[TenantPolicy, ...] = ()
    usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS
    streams: tuple[tuple[str, float], ...] = ()
    """(name, weight) of work streams, until another weight is put: of tasks with equal aged priority the
    heavier stream goes first."""
    stream_rules: StreamRules = StreamRules()  # frozen
    min_run_seconds: Seconds = Seconds(0.0)
    """A run is not preempted for this long after its start, except by critical tasks."""
    min_residency_seconds: Seconds = Seconds(5.0)
    """The same for a model, from its load; longer for one that loads slowly. 0: no protection at all."""
    maximum: TaskMaximum = TaskMaximum()  # frozen
    array_result_bytes: int = 4 * 1024**3
    """What the results of one array may take."""
    serving: InferenceServers = NO_SERVERS

    has_quotas: bool = field(init=False, repr=False, compare=False)
    _by_name: dict[str, TenantPolicy] = field(init=False, repr=False, compare=False)
    _cohorts: dict[str, int] = field(init=False, repr=False, compare=False)
    """Cohort -> MiB guaranteed to its members."""
    _limits: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Compute what is looked up for every task that is examined."""
        cohorts: dict[str, int] = {}
        for tenant in self.tenants:
            cohorts[tenant.cohort] = cohorts.get(tenant.cohort, 0) + (tenant.guaranteed_mb or 0)
        object.__setattr__(self, "_by_name", {tenant.name: tenant for tenant in self.tenants})
        object.__setattr__(self, "_cohorts", cohorts)
        object.__setattr__(self, "_limits", {limit.name: limit.amount for limit in self.custom_limits})
        object.__setattr__(self, "has_quotas", any(t.guaranteed_mb is not None for t in self.tenants))

    def tenant(self, name: str) -> TenantPolicy:
        return self._by_name.get(name) or self._by_name.get("*", DEFAULT_TENANT)

    def guaranteed_mb(self, cohort: str) -> int:
        return self._cohorts.get(cohort, 0)

    def weight_of(self, stream: str) -> float:
        """1 for no stream, or one that is no longer configured."""
        if not self.streams:
            return 1.0
        return next((weight for name, weight in self.streams if name == stream), 1.0)

    def limit_of(self, slot: str) -> float | None:
        found = self._limits.get(slot)
        return self._limits.get(wildcard_limit(slot)) if found is None else found


def wildcard_limit(slot: str) -> str:
    """The name of the limit that applies to each tenant, or each value of a label, by itself."""
    sign = "=" if "=" in slot else ":"
    return slot.partition(sign)[0] + sign + "*"


_LARGEST_EXPONENT = 32
"""Far beyond every cap; keeps the power within a float."""


def next_retry_at(failures: int, now: Instant, policy: Policy) -> Instant:
    """`retry_first_seconds` after the first failure, then `retry_factor` times longer each, up to the cap.
    `failures`: the attempts that used up a retry, with the one that just failed."""
    factor = policy.retry_factor ** min(failures - 1, _LARGEST_EXPONENT)
    return Instant(now + min(policy.retry_cap_seconds, policy.retry_first_seconds * factor))


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """Rows that ended, were submitted with a key, were audited or expired before these instants may be
    deleted."""

    finished: Instant
    keyed: Instant
    audited: Instant
    expired: Instant
    heard: Position
    """Events after this position stay, whatever their age: the pruner has not read them yet. A clock that
    jumps far ahead makes all of them old at once."""


@dataclass(frozen=True, slots=True)
class Retention:
    finished_seconds: Seconds
    """From a task's end, with all that belongs to it; for events, from when they happened."""
    idempotency_seconds: Seconds
    """A task submitted with a key stays at least this long after its submit."""
    audit_seconds: Seconds

    def cutoffs(self, now: Instant, heard: Position) -> Cutoffs:
        return Cutoffs(
            finished=Instant(now - self.finished_seconds),
            keyed=Instant(now - self.idempotency_seconds),
            audited=Instant(now - self.audit_seconds),
            expired=now,
            heard=heard,
        )
