"""The operator's choices that decisions depend on, as one value."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from gpubroker_server.core.domain.demand import Labels
from gpubroker_server.core.domain.units import Instant, Mib, Position, Seconds


@dataclass(frozen=True, slots=True)
class Serving:
    """The servers by name, in the order in which they are configured."""

    ledger: tuple[str, ...] = ()
    """Their models are loaded and unloaded by the leader: who asks for one waits until it is there."""
    others: tuple[str, ...] = ()
    """They have what they have, and say so themselves."""
    at_once: int = 64
    """So many inferences of one model are with its server, or about to be."""

    @property
    def is_anywhere(self) -> bool:
        return bool(self.ledger or self.others)


NO_SERVERS = Serving()


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
    """The (name, lowest, highest) of the band a priority lies in."""
    for band in BANDS:
        if priority >= band[1]:
            return band
    raise ValueError(f"priority {priority} lies outside 0..100")


class CustomLimit(NamedTuple):
    """How much there is of a custom resource, and for whom."""

    name: str
    amount: float
    per_node: bool = False
    """Each node has so much of it; otherwise the cluster has, in all."""
    priority_threshold: int = 0
    """Tasks of lower priority are given none."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A part of the cluster that tasks name: some of its devices and nodes, some amounts of it, or both."""

    name: str
    kinds: tuple[str, ...] = ()
    nodes: Labels = ()
    fractions: bool = True
    """Parts of a GPU are given, not only whole ones."""
    cpu: float | None = None
    """Of this and the following, all tasks that name the pool have so much together; None is no limit."""
    gpus: int | None = None
    gpu_mb: Mib | None = None
    memory_mb: Mib | None = None
    custom: tuple[tuple[str, float], ...] = ()
    """Of custom resources, such as storage; sorted by name."""

    def amounts(self) -> Iterator[tuple[str, float]]:
        """`custom/NAME` and so much of a custom resource; of the rest by field."""
        for name in ("cpu", "gpus", "gpu_mb", "memory_mb"):
            amount = getattr(self, name)
            if amount is not None:
                yield name, float(amount)
        yield from ((f"custom/{name}", amount) for name, amount in self.custom)


@dataclass(frozen=True, slots=True)
class Maximum:
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
    """What a tenant may have, and how it stands beside others."""

    name: str
    """`*`: each tenant that is not listed."""
    cohort: str = ""
    """Of its members, those that need more borrow what the others' guarantees leave."""
    guaranteed_mb: Mib | None = None
    """Of GPU memory. None: no quota, neither guaranteed nor limited."""
    borrow_mb: Mib | None = None
    """So much beyond its guarantee at most; None: as much as its cohort leaves."""
    weight: float = 1.0
    """Twice the weight, twice the fair share."""
    max_priority: int = 100


DEFAULT_TENANT = TenantPolicy("*")


@dataclass(frozen=True, slots=True)
class Policy:
    ageing_seconds_per_point: Seconds = Seconds(60.0)
    """A waiting task gains one point of order per so many seconds, at most to the top of its band.
    Ageing changes the order of the queue; it never grants the right to preempt."""
    placement: str = "stranded"
    """Where of several places a task goes: `stranded` and `fgd` (what is left over is of most use to what
    is usually asked for: the service's measure, the published one), `best_fit`, or `spread`."""
    preemption: bool = True
    preemption_budget: int = 3
    """After so many preemptions a task is shielded until its next checkpoint or so many
    `shield_seconds` of running. Critical tasks ignore the shield."""
    shield_seconds: Seconds = Seconds(600.0)
    """So long, too, who went first by age is not stopped for those of its band before whom it went."""
    pledge_patience_seconds: Seconds = Seconds(10.0)
    """How long after its victims' deadline a pledge is kept."""
    kill_patience_seconds: Seconds = Seconds(10.0)
    """How long after its stop deadline, or after its end, a run that nobody confirms to be gone keeps its
    leases out of quarantine."""
    sample_period_seconds: Seconds = Seconds(2.0)
    """A device whose sample is older than three periods takes nothing new."""
    beat_seconds: Seconds = Seconds(2.0)
    """So often each node's agent says that it is there."""
    beats_missed: int = 3
    """A node of which nothing was heard for so many beats is given up."""
    pause_share: float = 0.2
    pause_nodes: int = 2
    """When so many nodes or more, with more than that share of all runs, fall silent at once, none of them is
    given up."""
    gang_start_seconds: Seconds = Seconds(300.0)
    """How long after its admission all ranks of a gang must be ready; else it gives its place back."""
    retry_first_seconds: Seconds = Seconds(1.0)
    retry_factor: float = 2.0
    retry_cap_seconds: Seconds = Seconds(300.0)
    learned_margin: float = 0.15
    """A learned size is what 95 of 100 runs stayed below, and so much more of it."""
    learned_least_runs: int = 5
    """With fewer runs that were measured no size is learned."""
    overuse: str = "report"
    """`report` or `stop`: what becomes of a run that is measured above its lease."""
    overuse_tolerance: float = 0.05
    """So much more than its lease, as a share of it, a run may use."""
    forecasts: int = 8
    """For so many tasks, the first that wait for room, it is worked out when and where they will start, and
    nobody behind them takes what would delay that."""
    backfill_depth: int = 64
    """After so many tasks were kept away by forecasts in a cycle, the others are not tried there."""
    consolidation: int = 0
    """So many runs an hour may be moved at most, so that a task fits for which enough is free in sum but not
    in one piece; 0: none."""
    custom_limits: tuple[CustomLimit, ...] = ()
    """Sorted by name. Names with a colon are of slots: how many tasks may run at once (`tenant:NAME`,
    `label:KEY=VALUE`; `*` is each for itself) and what pools have (`pool:NAME:gpus`)."""
    pools: tuple[Pool, ...] = ()
    tenants: tuple[TenantPolicy, ...] = ()
    usage_half_life_seconds: Seconds = HALF_LIFE_SECONDS
    """What a tenant has used counts half as much after so long."""
    streams: tuple[tuple[str, float], ...] = ()
    """(name, weight) of work streams: between tasks of equal aged priority the heavier stream goes first."""
    min_run_seconds: Seconds = Seconds(0.0)
    """A run is left alone for so long after its start, except by critical tasks."""
    maximum: Maximum = Maximum()  # frozen
    serving: Serving = NO_SERVERS
    """Who answers queued inferences."""

    has_quotas: bool = field(init=False, repr=False, compare=False)
    _by_name: dict[str, TenantPolicy] = field(init=False, repr=False, compare=False)
    _cohorts: dict[str, int] = field(init=False, repr=False, compare=False)
    """Name -> what its members are guaranteed in all."""
    _limits: dict[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Work out what is looked up for every task that is examined."""
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
        """To its members in all."""
        return self._cohorts.get(cohort, 0)

    def weight_of(self, stream: str) -> float:
        """Of tasks in no stream, or in one that is no longer configured, 1."""
        if not self.streams:
            return 1.0
        return next((weight for name, weight in self.streams if name == stream), 1.0)

    def limit_of(self, slot: str) -> float | None:
        """How much there is of what a slot counts; None if nobody limits it."""
        found = self._limits.get(slot)
        return self._limits.get(each_of(slot)) if found is None else found


def each_of(slot: str) -> str:
    """The name of the limit that holds for each tenant, or each value of a label, by itself."""
    sign = "=" if "=" in slot else ":"
    return slot.partition(sign)[0] + sign + "*"


_LARGEST_EXPONENT = 32
"""Far beyond every cap; keeps the power within a float."""


def retry_delay_seconds(failures: int, policy: Policy) -> Seconds:
    """`retry_first_seconds` after the first failure, then `retry_factor` times longer each, up to the cap."""
    exponent = min(failures - 1, _LARGEST_EXPONENT)
    return Seconds(min(policy.retry_cap_seconds, policy.retry_first_seconds * policy.retry_factor**exponent))


def next_retry_at(failures: int, now: Instant, policy: Policy) -> Instant:
    """`failures` counts the attempts that used up a retry, the one that just failed included."""
    return Instant(now + retry_delay_seconds(failures, policy))


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """What ended, was submitted with a key or was noted before these instants may go."""

    finished: Instant
    keyed: Instant
    audited: Instant
    heard: Position
    """Events after it stay, whatever their age: who takes them out has yet to hear them. A clock that is set
    far ahead makes all of them old at once."""


@dataclass(frozen=True, slots=True)
class Retention:
    finished_seconds: Seconds
    """From a task's end on, with all that belongs to it; and for events, from when they happened."""
    idempotency_seconds: Seconds
    """A task that was submitted with a key stays at least so long, from its submit on."""
    audit_seconds: Seconds

    def cutoffs(self, now: Instant, heard: Position) -> Cutoffs:
        return Cutoffs(
            finished=Instant(now - self.finished_seconds),
            keyed=Instant(now - self.idempotency_seconds),
            audited=Instant(now - self.audit_seconds),
            heard=heard,
        )
