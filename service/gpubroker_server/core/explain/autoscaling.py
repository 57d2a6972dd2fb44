"""Compute the facts for autoscalers: the demand that waiting tasks lack, the demand of all tasks together,
and the idle nodes."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor, inf

from gpubroker.wire.fleet import Capacity, SpareNode, UnmetGroup
from msgspec import Struct
from msgspec.structs import asdict, replace

from gpubroker_server.core.domain.demand import Demand, may_use_node, need_mb
from gpubroker_server.core.domain.device import Device, is_of_kind
from gpubroker_server.core.domain.holders import Gang
from gpubroker_server.core.domain.policy import Policy, Pool
from gpubroker_server.core.domain.ranks import vacant_bundles
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import MIB_BYTES, Instant, NodeName, Seconds
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.quota import Quotas
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.queue import QueueGroup
from gpubroker_server.core.world.world import World

DIGITS = 3
"""Decimal digits of a number of CPUs."""


NOTHING = Capacity(0, 0, 0.0, 0)


def total_of(amounts: Iterable[Capacity]) -> Capacity:
    total = NOTHING
    for amount in amounts:
        total = plus(total, amount)
    return total


def plus(left: Capacity, right: Capacity) -> Capacity:
    cpu = round(left.cpu + right.cpu, DIGITS)
    return Capacity(left.gpus + right.gpus, left.gpu_mb + right.gpu_mb, cpu, left.memory_mb + right.memory_mb)


class AutoscalingDemand(Struct, frozen=True):
    unmet: tuple[UnmetGroup, ...]
    """The lacking demand, grouped by pool and kinds. A gang whose ranks differ in their kinds is in several
    groups."""
    tasks: int
    """The number of tasks that lack room."""
    limited_tasks: int
    """The number of tasks that wait for a quota or a limit, which no further node would raise."""
    used: Capacity
    """The GPUs that are held in whole or in part, with their leased MiB, and the CPU and host memory that
    runs use."""
    spare: tuple[SpareNode, ...]
    """Nodes that could be given back, in name order."""
    bundles: Mapping[tuple[float, float, int], int]
    """(GPUs, CPUs, MiB of host memory) -> the number of runs and of waiting tasks or ranks that ask for
    this."""

    def unmet_gpus(self) -> Mapping[str, float]:
        """Return the GPUs that waiting tasks lack, by pool. If nothing is lacking, that is 0 for the empty
        pool."""
        unmet = dict.fromkeys((group.pool for group in self.unmet), 0.0) or {"": 0.0}
        for group in self.unmet:
            unmet[group.pool] += group.gpus
        return unmet

    @property
    def lacking(self) -> Capacity:
        return total_of(self.unmet)


MAX_BUNDLES = 1000
"""The most bundles that are reported, because an autoscaler plans for each of them. One of each shape comes
first, then further ones of the shapes that most tasks have."""


def room_for_all(demand: AutoscalingDemand) -> list[dict[str, float]]:
    """Return the bundles that Ray's autoscaler should have room for: one for each run and each waiting task.
    Ray takes parts of one GPU only, so parts of several count as whole ones."""
    first: list[dict[str, float]] = []
    more: list[dict[str, float]] = []
    for (gpus, cpu, memory_mb), count in sorted(demand.bundles.items(), key=lambda item: (-item[1], item[0])):
        amounts = {
            "GPU": gpus if gpus <= 1 else float(ceil(gpus)),
            "CPU": cpu,
            "memory": memory_mb * MIB_BYTES,
        }
        bundle = {name: float(amount) for name, amount in amounts.items() if amount}
        if bundle:
            first.append(bundle)
            more += [bundle] * min(count - 1, MAX_BUNDLES - len(more))
    return [*first, *more][:MAX_BUNDLES]


class DemandScope(Struct, frozen=True):
    """The scope of an autoscaler's question: its pool, its kind of GPU, and the time for which tasks must
    have waited."""

    pool: str | None = None
    """The pool. None: all tasks; empty: tasks without a pool."""
    kind: str = ""
    """The kind of GPU; empty for all. A demand that may use several kinds counts for each of them; other
    nodes do not count."""
    waited_seconds: Seconds = Seconds(0.0)


EVERYTHING = DemandScope()


def autoscaling_demand(
    world: World, policy: Policy, now: Instant, scope: DemandScope = EVERYTHING
) -> AutoscalingDemand:
    """Return the demand for autoscalers. Held, delayed and dependent tasks do not count, nor do those for
    which memory is being freed. The ranks that running elastic gangs lack do count. Each waiting task counts
    in full, because the present free memory is of no use to it.

    The cost is one step per group of the queue, one per node and device, and for each idle node one per
    different demand.
    """
    draft = Draft(world)
    waiting = _Waiting(draft, policy, now, scope)
    for group in world.queue.groups.values():
        waiting.count(group)
    for gang in sorted(world.growable):
        waiting.count_missing_ranks(world.tasks[gang])
    pool = next((wanted_pool for wanted_pool in policy.pools if wanted_pool.name == scope.pool), None)
    nodes = [
        name
        for name in sorted(world.nodes)
        if _is_in_pool(world, name, pool)
        and (not scope.kind or any(True for _ in _present(draft, name, scope.kind)))
    ]
    used = total_of(_used_of(draft, name, scope.kind) for name in nodes)
    bundles = Counter(waiting.bundles)
    for name in nodes:
        for run in draft.active_on(name):
            for part in run.demand.bundles or (run.demand,):
                bundles[waiting.bundle_of(part)] += 1
    spare = tuple(_spare(draft, name) for name in nodes if _is_spare(draft, name, waiting.demands))
    return AutoscalingDemand(waiting.groups(), waiting.tasks, waiting.limited, used, spare, bundles)


@dataclass(slots=True)
class _Sum:
    tasks: int = 0
    since: float = inf
    gpus: Fraction = Fraction(0)
    amounts: Capacity = NOTHING


@dataclass(slots=True)
class _Waiting:
    draft: Draft
    policy: Policy
    now: Instant
    scope: DemandScope
    tasks: int = 0
    limited: int = 0
    bundles: Counter[tuple[float, float, int]] = field(default_factory=Counter)
    demands: set[Demand] = field(default_factory=set)
    """The demands of tasks that lack room; for gangs, those of their ranks."""
    _sums: dict[tuple[str, tuple[str, ...]], _Sum] = field(default_factory=dict)
    _taken: dict[str, float] = field(default_factory=dict)
    """Shared limit -> the amount that the tasks counted so far take."""
    _taken_mb: Counter[str] = field(default_factory=Counter)
    """Tenant -> MiB of the tenant's quota that the tasks counted so far take."""
    _devices: list[Device] = field(default_factory=list)
    _pledged: Counter[QueueGroup] = field(default_factory=Counter)
    _quotas: Quotas = field(init=False)

    def __post_init__(self) -> None:
        world = self.draft.world
        self._quotas = Quotas(self.draft, self.policy)
        devices = (ledger.device for ledger in world.ledgers.values() if ledger.device.present)
        self._devices = list({device.sort: device for device in devices}.values())
        self._pledged = Counter(world.queue.group_of(name) for name in world.pledges if name in world.queue)

    def count(self, group: QueueGroup) -> None:
        demand = group.demand
        if demand.answered_by or not self._is_in_scope(demand):
            return
        tasks = self._waited(group) - self._pledged[group]
        allowed = self._allowed(group, tasks)
        self.limited += max(0, tasks) - allowed
        if allowed <= 0:
            return
        parts = demand.bundles[: demand.least_ranks] or (demand,)
        self._add(demand.pool, parts, allowed, group.member(0)[0])

    def count_missing_ranks(self, gang: Task) -> None:
        """Count as many missing ranks of a running gang as its tenant's quota and the limits of its pool
        allow."""
        since = gang.started_at or self.now
        is_too_new = self.now - since < self.scope.waited_seconds
        if is_too_new or not self._is_in_scope(gang.demand) or self.draft.world.queue.pause_of(gang):
            return
        vacant = tuple(gang.demand.bundles[bundle] for bundle in vacant_bundles(gang))
        missing = replace(gang, demand=replace(gang.demand, bundles=vacant, min_ranks=0), holder=Gang())
        parts = vacant[: self.draft.ranks_within_limits(missing, self.policy.custom_limits)]
        quota = self._quotas.of(gang.tenant, gang.priority) if self.policy.has_quotas else None
        left_mb = inf if quota is None else quota.left_mb - self._taken_mb[gang.tenant]
        needs_mb = accumulate(map(self._quotas.need_mb, parts))
        allowed = parts[: sum(need_mb <= left_mb for need_mb in needs_mb)]
        self._taken_mb[gang.tenant] += sum(map(self._quotas.need_mb, allowed))
        self.limited += bool(vacant) and not allowed
        if allowed:
            self._add(gang.demand.pool, allowed, 1, since)

    def _add(self, pool: str, parts: Sequence[Demand], allowed: int, since: float) -> None:
        """Add the demand of `allowed` tasks that each consist of `parts`."""
        self.tasks += allowed
        for place, part in enumerate(parts):
            sums = self._sums.setdefault((pool, part.where.kinds), _Sum())
            is_first_of_kinds = all(part.where.kinds != other.where.kinds for other in parts[:place])
            sums.tasks += allowed if is_first_of_kinds else 0
            sums.since = min(sums.since, since)
            gpus, need = self._gpus_of(part)
            sums.gpus += allowed * gpus
            cpu, memory_mb = round(part.cpu * allowed, DIGITS), part.memory_mb * allowed
            sums.amounts = plus(sums.amounts, Capacity(0, need * allowed, cpu, memory_mb))
            self.bundles[self.bundle_of(part)] += allowed
            self.demands.add(part)

    def groups(self) -> tuple[UnmetGroup, ...]:
        return tuple(
            UnmetGroup(
                **asdict(replace(sums.amounts, gpus=ceil(sums.gpus))),
                tasks=sums.tasks,
                waiting_seconds=max(0.0, self.now - sums.since),
                pool=pool,
                kinds=kinds,
            )
            for (pool, kinds), sums in sorted(self._sums.items())
        )

    def bundle_of(self, part: Demand) -> tuple[float, float, int]:
        return round(float(self._gpus_of(part)[0]), DIGITS), part.cpu, part.memory_mb

    def _is_in_scope(self, demand: Demand) -> bool:
        if self.scope.pool is not None and demand.pool != self.scope.pool:
            return False
        parts = demand.bundles or (demand,)
        return not self.scope.kind or any(_may_use_kind(part, self.scope.kind) for part in parts)

    def _waited(self, group: QueueGroup) -> int:
        """Return the number of tasks that have waited for long enough."""
        latest = self.now - self.scope.waited_seconds
        return bisect_right(range(len(group)), latest, key=lambda index: group.member(index)[0])

    def _allowed(self, group: QueueGroup, tasks: int) -> int:
        """Return how many of the tasks may start by quotas and limits, beside all tasks that were counted
        before, and count these tasks too."""
        demand, world = group.demand, self.draft.world
        allowed: float = max(0, tasks)
        if not allowed:
            return 0
        first = world.tasks[group.member(0)[1]]
        left = self.draft.left_of(first, self.policy.custom_limits) if demand.counted else {}
        for name, amount in demand.counted:
            if amount and left[name] < inf:
                allowed = min(
                    allowed, max(0, floor(round((left[name] - self._taken.get(name, 0.0)) / amount, 6)))
                )
        need = self._quotas.need_mb(demand) if self.policy.has_quotas else 0
        quota = self._quotas.of(group.tenant, group.priority) if need else None
        if quota is not None:
            allowed = min(allowed, max(0, (quota.left_mb - self._taken_mb[group.tenant]) // need))
        for name, amount in demand.counted:
            self._taken[name] = self._taken.get(name, 0.0) + allowed * amount
        self._taken_mb[group.tenant] += int(allowed) * need
        return int(allowed)

    def _gpus_of(self, part: Demand) -> tuple[Fraction, int]:
        """Return (GPUs, MiB of GPU memory) that the demand takes, on the device where its share is smallest.
        Without a device that it may use, the demand counts in whole GPUs."""
        if not part.gpus:
            return Fraction(0), 0
        kind = self.scope.kind
        devices = [device for device in self._devices if not kind or is_of_kind(device.kind, kind)]
        shares = [
            (Fraction(1, device.allocatable_mb // need), int(need))
            for device in devices
            if (need := need_mb(part, device))
        ]
        share, mb = min(shares, default=(Fraction(1), int(part.gpu_mb or 0)))
        return part.gpus * share, part.gpus * mb


def _may_use_kind(part: Demand, kind: str) -> bool:
    wanted = part.where.kinds
    return part.gpus > 0 and (not wanted or any(is_of_kind(kind, name) for name in wanted))


def _is_in_pool(world: World, node: NodeName, pool: Pool | None) -> bool:
    """Return True if the node is in the pool. A pool without kinds and nodes has every node."""
    if pool is None:
        return True
    known_node = world.nodes[node]
    labels = {**dict(known_node.labels), "node": known_node.name}
    kinds = {world.ledgers[device].device.kind for device in world.by_node.get(node, ())}
    return all(labels.get(label) in values for label, values in pool.nodes.items()) and (
        not pool.kinds or any(is_of_kind(kind, name) for kind in kinds for name in pool.kinds)
    )


def _present(draft: Draft, node: NodeName, kind: str = "") -> Iterator[DeviceLedger]:
    """Yield the ledgers of the node's present GPUs of this kind. A GPU with MIG instances counts by its
    instances."""
    for ledger in draft.ledgers_on(node):
        device = ledger.device
        if device.present and not device.split and (not kind or is_of_kind(device.kind, kind)):
            yield ledger


def _used_of(draft: Draft, node: NodeName, kind: str) -> Capacity:
    held_devices = [ledger.held_mb() for ledger in _present(draft, node, kind) if ledger.holdings]
    use = draft.use(node)
    return Capacity(len(held_devices), sum(held_devices), use.cpu, use.memory_mb)


def _is_spare(draft: Draft, node: NodeName, waiting: Set[Demand]) -> bool:
    known_node = draft.world.nodes[node]
    ledgers = list(_present(draft, node))
    if not known_node.ready or draft.use(node).runs or any(ledger.holdings for ledger in ledgers):
        return False
    return not any(_could_use(draft, node, ledgers, part) for part in waiting)


def _could_use(draft: Draft, node: NodeName, ledgers: list[DeviceLedger], part: Demand) -> bool:
    known_node = draft.world.nodes[node]
    offered = ledgers if part.gpus else ()
    large_enough = sum(need_mb(part, ledger.device) is not None for ledger in offered)
    has_cpu_and_memory = known_node.cpu >= part.cpu and known_node.memory_mb >= part.memory_mb
    return (
        not known_node.cordoned
        and may_use_node(part, known_node)
        and has_cpu_and_memory
        and large_enough >= part.gpus
    )


def _spare(draft: Draft, node: NodeName) -> SpareNode:
    known_node = draft.world.nodes[node]
    devices = [ledger.device for ledger in _present(draft, node)]
    kinds = tuple(sorted({device.kind for device in devices}))
    gpu_mb = sum(device.allocatable_mb for device in devices)
    return SpareNode(len(devices), gpu_mb, known_node.cpu, known_node.memory_mb, node, kinds)
