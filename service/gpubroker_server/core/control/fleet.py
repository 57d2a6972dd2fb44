"""Fleet control: the conclusions that a leader draws from its measurements, step by step. They are kept in
the leader's memory; the next leader continues from the values that this leader published."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import inf, nextafter
from typing import Annotated, Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.control.backpressure import Pressure, closed_below, tenant_of, threshold_name
from gpubroker_server.core.control.backpressure import follow as follow_pressure
from gpubroker_server.core.control.controller import Control, Gains, step, switch_on
from gpubroker_server.core.control.disk_guard import (
    DiskGuard,
    DiskLevel,
    DiskStanding,
    follow_disks,
    paths_by_disk,
)
from gpubroker_server.core.control.failing_gpus import FailingGpuRules, FailingGpus
from gpubroker_server.core.control.finding_dates import FindingDate
from gpubroker_server.core.control.idle import Idle, IdleRules, Reading, idle
from gpubroker_server.core.control.idle import follow as follow_idle
from gpubroker_server.core.control.idle_templates import IdleFill, TemplateSeen
from gpubroker_server.core.control.memory_failures import MemoryFailureCount, MemoryFailures
from gpubroker_server.core.control.node_watch import GONE_SECONDS, NodeWatch, Overload
from gpubroker_server.core.control.streams import steady_weights
from gpubroker_server.core.control.targets import FleetScope, FleetTarget, Measure, Standing, measured
from gpubroker_server.core.control.targets import follow as follow_targets
from gpubroker_server.core.control.throughput import ThroughputRules
from gpubroker_server.core.control.waiting_calls import WaitingCalls, waiting_calls
from gpubroker_server.core.domain.decisions import Notice
from gpubroker_server.core.domain.demand import may_use_device, may_use_node
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.gpu_faults import FailingGpu
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.orders import Loaded
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.setting_marks import ELSEWHERE, NonNegativeSeconds, PositiveSeconds
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.world.background import BackgroundRoom, gives_way, is_background, is_idle_work
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World

WELL_BELOW = 0.95
"""The share of a target's upper limit below which a reported value must fall before it is reported again."""


class FleetRules(Struct, frozen=True):
    """The operator's choices for fleet control. Shares are from 0 to 1."""

    targets: tuple[FleetTarget, ...] = ()
    constraint_seconds: NonNegativeSeconds = Seconds(60.0)
    """The time above its target after which a measured value is reported."""
    controller: bool = False
    """True to hold background work back so that GPU utilization stays inside its targets."""
    gains: Gains = field(default_factory=Gains)
    idle: Annotated[IdleRules, ELSEWHERE] = field(default_factory=IdleRules)
    idle_check_seconds: PositiveSeconds = Seconds(60.0)
    thresholds: Annotated[Mapping[str, Threshold], ELSEWHERE] = field(default_factory=dict)
    """Name of a value -> threshold of backpressure. `queue:*` holds for the queue of each tenant."""
    next_band_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(60.0)
    retry_after_seconds: Annotated[Seconds, ELSEWHERE] = Seconds(30.0)
    disk: DiskGuard = field(default_factory=DiskGuard)
    overload_thresholds: Annotated[Mapping[str, Threshold], ELSEWHERE] = field(default_factory=dict)
    """Measure -> threshold from which a node is overloaded."""
    throughput: ThroughputRules = field(default_factory=ThroughputRules)
    failing_gpus: FailingGpuRules = FailingGpuRules()


class TargetSeen(NamedTuple):
    """A target and its present state, as the leader publishes them."""

    scope: str
    measure: str
    least: float
    most: float
    value: float | None
    is_in: bool
    since: Instant
    share: float | None = None
    """The share of the target's scope that background work may take; None if the target is not controlled."""
    constrained_since: Instant | None = None
    """The time since which the event log has the target as a constraint; None if it does not."""


class FleetSeen(Struct, frozen=True):
    """The plain values that a leader publishes about the fleet."""

    targets: tuple[TargetSeen, ...] = ()
    background_mb: dict[str, int] = field(default_factory=dict)
    """Scope -> MiB that background work may take from now on."""
    idle: tuple[Idle, ...] = ()
    """The idle devices, named by key, and the idle nodes, named by name."""
    pressures: tuple[Pressure, ...] = ()
    pressure_values: dict[str, float] = field(default_factory=dict)
    """Name -> the value that backpressure compares with a threshold. A single tenant is listed only while its
    alarm is on."""
    templates: tuple[TemplateSeen, ...] = ()
    memory_failures: tuple[MemoryFailures, ...] = ()
    """The tasks that failed for lack of memory again and again."""
    waiting_calls: tuple[WaitingCalls, ...] = ()
    stream_weights: dict[str, float] = field(default_factory=dict)
    """Work stream -> the weight by which every process orders the queue."""
    full_disks: dict[NodeName, str] = field(default_factory=dict)
    """Node on which nothing may start -> the disk that is too full."""
    low_disks: tuple[DiskStanding, ...] = ()
    """Disks that are above a level."""
    overloaded: tuple[Overload, ...] = ()
    done: dict[str, int] = field(default_factory=dict)
    """Component -> the number of items that it has processed since this leader began."""
    events: dict[str, int] = field(default_factory=dict)
    """Kind -> the number of events since this leader began."""
    idle_grace_seconds: Seconds = Seconds(300.0)
    """The time for which each device listed in `idle` has been idle at least."""
    dates: tuple[FindingDate, ...] = ()
    """The time at which this leader or an earlier one first saw each present finding."""
    at: Instant | None = None
    """The time of the leader's last step; None before the first."""
    failing: tuple[FailingGpu, ...] = ()
    """The devices on which runs fail quickly, one after the other."""


def disk_levels(seen: FleetSeen, samples: Iterable[NodeSample]) -> dict[tuple[NodeName, str], DiskLevel]:
    """Return the level of each watched disk, by node and path. BLOCK is returned only where it closes the
    node. A disk that does not answer now keeps its level."""
    levels = {(sample.node, disk.path): DiskLevel.ROOMY for sample in samples for disk in sample.disks}
    for disk in seen.low_disks:
        most = DiskLevel.BLOCK if disk.node in seen.full_disks else DiskLevel.CLEAN
        levels[disk.node, disk.path] = min(disk.level, most)
    return levels


class FleetControl:
    def __init__(self, rules: FleetRules, policy: Policy, before: FleetSeen | None = None) -> None:
        """`before` is the state that the last leader published. Its `templates` are dropped, because tasks of
        them may have been submitted since."""
        self.seen = before = FleetSeen() if before is None else replace(before, templates=())
        self.fill = IdleFill(policy.sample_period_seconds)
        self._rules = rules
        self._policy = policy
        targets_before = [
            (target, seen)
            for target in rules.targets
            for seen in before.targets
            if seen[:4] == _about(target)
        ]
        self._standings = {
            target: Standing(seen.value, seen.is_in, seen.since) for target, seen in targets_before
        }
        self._constrained = {
            target: Alarm(True, seen.constrained_since)
            for target, seen in targets_before
            if seen.constrained_since is not None
        }
        self._controls: dict[FleetTarget, Control] = {}
        self._quiet = {resource.name: resource for resource in before.idle}
        self._idle = list(before.idle)
        self._idle_pace = Interval(rules.idle_check_seconds)
        self._filled: dict[str, Instant] = {}
        """Device or node -> the time at which it was last seen with only idle work."""
        self._alarms = {pressure.name: Alarm(True, pressure.since) for pressure in before.pressures}
        self._disks = {(disk.node, disk.path): disk for disk in before.low_disks}
        self._stepped_at: Instant | None = None
        self.memory_failures = MemoryFailureCount()
        self.failing_gpus = FailingGpus(rules.failing_gpus)
        self.loads: dict[TaskId, Loaded] = {}
        """Worker of a set -> the load that it last reported."""
        self.nodes = NodeWatch(
            rules.overload_thresholds, Seconds(policy.sample_period_seconds), before.overloaded
        )

    def step(self, world: World, pressures: Mapping[str, float | None], now: Instant) -> list[Notice]:
        """Look at the whole fleet once. Return the notices for the event log. `pressures` has the values that
        backpressure compares, by name."""
        rules, gone = self._rules, self.nodes.gone(world, now)
        scopes = [target.scope for target in rules.targets]
        values = measured(world, scopes, self._policy, now)
        self._standings = follow_targets(self._standings, rules.targets, values, now)
        notices = [*self._constraints(now)]
        background_mb = self._follow_controls(world, now)
        notices += self._follow_idle(world, now, gone)
        notices += self._follow_pressures(pressures, now)
        notices += self._follow_disks(world, now, gone)
        notices += self.nodes.follow(world, now, gone)
        self._stepped_at = now
        self.seen = FleetSeen(
            tuple(self._target_seen(target) for target in rules.targets),
            background_mb,
            tuple(self._idle),
            tuple(self._pressures_seen(pressures, now)),
            self._pressure_values(pressures),
            self.fill.seen,
            self.memory_failures.often(now),
            tuple(waiting_calls(world, self.loads)),
            steady_weights(self.seen.stream_weights, world.streams, self._policy, now),
            self._full_disks(),
            tuple(disk for disk in self._disks.values() if disk.level),
            self.nodes.overloaded,
            idle_grace_seconds=rules.idle.grace_seconds,
            at=now,
            failing=self.failing_gpus.failing(now),
        )
        return notices

    def is_idle_check_due(self, now: Instant) -> bool:
        """Return True if the next step looks for idle resources, and takes changed templates over."""
        return self._idle_pace.is_due(now)

    def _target_seen(self, target: FleetTarget) -> TargetSeen:
        control, constraint = self._controls.get(target), self._constrained[target]
        share = None if control is None else control.share
        since = constraint.since if constraint.is_on else None
        return TargetSeen(*_about(target), *self._standings[target], share, since)

    def _constraints(self, now: Instant) -> Iterator[Notice]:
        """Yield a notice for each target whose value has now been above its upper limit for
        `constraint_seconds`. The next notice about it needs a fall below WELL_BELOW first."""
        for target, standing in self._standings.items():
            alarm_before, most = self._constrained.get(target, Alarm()), target.most
            threshold = Threshold(nextafter(most, inf), most * WELL_BELOW, self._rules.constraint_seconds)
            self._constrained[target] = alarm = alarm_before.follow(standing.value, threshold, now)
            if alarm.is_on and not alarm_before.is_on:
                about = {"measure": target.measure.value, "value": standing.value, "threshold": most}
                yield Notice("fleet.RESOURCE_CONSTRAINT", str(target.scope), about)

    def _follow_controls(self, world: World, now: Instant) -> dict[str, int]:
        """Step the controllers. Return, by scope, the MiB that are left for background work."""
        left_mb: dict[str, int] = {}
        for target in self._rules.targets if self._rules.controller else ():
            value = self._standings[target].value
            if target.measure is not Measure.GPU_UTILIZATION:
                continue
            total_mb, used_mb = _background_use(world, target.scope, self._policy)
            control_before = self._controls.get(target)
            if control_before is None and value is not None and total_mb:
                share = min(1.0, used_mb / total_mb)
                self._controls[target] = switch_on(share, value, target.set_point, self._rules.gains)
            elif control_before is not None and value is not None and self._stepped_at is not None:
                seconds = Seconds(now - self._stepped_at)
                if seconds > 0:
                    self._controls[target] = step(
                        control_before, value, target.set_point, seconds, self._rules.gains
                    )
            if (control := self._controls.get(target)) is not None:
                left_mb[str(target.scope)] = int(control.share * total_mb) - used_mb
        return left_mb

    def _follow_idle(self, world: World, now: Instant, gone: Collection[NodeName]) -> Iterator[Notice]:
        rules = self._rules.idle
        self._quiet = follow_idle(self._quiet, self._readings(world, now, gone), now, rules)
        names_before = {resource.name for resource in self._idle}
        if self._idle_pace.is_due(now):
            self._idle_pace.done(now)
            self._idle = idle(self._quiet, now, rules)
            self.fill.find(world, [resource.name for resource in self._idle])
        self.fill.look(world, self._quiet.keys(), now)
        for resource in self._idle:
            if resource.name not in names_before:
                about: dict[str, Any] = {
                    "utilization": resource.utilization,
                    "idle_seconds": now - resource.since,
                    "threshold": rules.below,
                }
                yield Notice("fleet.IDLE_RESOURCE_DETECTED", resource.name, about)

    def _readings(self, world: World, now: Instant, gone: Collection[NodeName]) -> Iterator[Reading]:
        """Yield the utilization of all devices that take work, and of the CPUs of all nodes."""
        period = self._policy.sample_period_seconds
        for key, ledger in world.ledgers.items():
            device = ledger.device
            if device.offers and not device.is_closed and device.node not in gone:
                stale = ledger.is_stale(now, period)
                use = None if stale or ledger.sample is None else ledger.sample.utilization
                yield self._reading(key, use, now, is_filled=_is_filled(ledger))
        for name, sample in world.node_samples.items():
            use = None if sample.is_stale(now, period) else sample.cpu
            if name not in gone:
                yield self._reading(name, use, now, is_filled=_runs_idle_work(world, name))

    def _reading(self, name: str, utilization: float | None, now: Instant, *, is_filled: bool) -> Reading:
        """Return the reading of one device or node. It counts as filled by idle work until three sample
        periods after the end of that work, because the last samples of the work arrive late."""
        if is_filled:
            self._filled[name] = now
        elif now - self._filled.get(name, now) > 3 * self._policy.sample_period_seconds:
            del self._filled[name]
        return Reading(name, utilization, fills_itself=name in self._filled)

    def _follow_pressures(self, values: Mapping[str, float | None], now: Instant) -> Iterator[Notice]:
        thresholds = self._rules.thresholds
        before, self._alarms = self._alarms, follow_pressure(self._alarms, values, thresholds, now)
        for name, alarm in self._alarms.items():
            if alarm.is_on is not before.get(name, Alarm()).is_on:
                threshold = thresholds[threshold_name(name, thresholds)]
                limit = threshold.high if alarm.is_on else threshold.low
                change = "ACTIVATED" if alarm.is_on else "RELEASED"
                about = {"value": values[name], "threshold": limit}
                yield Notice(f"fleet.BACKPRESSURE_{change}", name, about, tenant_of(name))

    def _follow_disks(self, world: World, now: Instant, gone: Collection[NodeName]) -> Iterator[Notice]:
        """Yield a notice for each disk whose level has risen. A disk that is not measured now keeps its
        level, because a full disk may be slow to answer. It is forgotten if its node is gone, or is measured
        without it for GONE_SECONDS."""
        before, samples = self._disks, world.node_samples
        nodes_left = world.nodes.keys() - gone
        fresh = [
            (node, samples[name])
            for name, node in world.nodes.items()
            if name in samples and now - samples[name].at <= 3 * self._policy.sample_period_seconds
        ]
        nodes_measured = {node.name for node, _ in fresh}
        self._disks = {
            (node, path): disk
            for (node, path), disk in before.items()
            if node in nodes_left and (node not in nodes_measured or now - disk.at <= GONE_SECONDS)
        }
        measured_now = {
            (standing.node, standing.path): standing
            for standing in follow_disks(before, self._rules.disk, fresh)
        }
        self._disks |= measured_now
        for node, sample in fresh:
            for paths in paths_by_disk(sample.disks):
                standings_before = [before[key] for path in paths if (key := (node.name, path)) in before]
                level_before = max((standing.level for standing in standings_before), default=DiskLevel.ROOMY)
                standing = measured_now[node.name, paths[0]]
                if standing.level > level_before:
                    about = {"value": standing.used_share, "threshold": standing.threshold}
                    place = {"path": ", ".join(paths), "level": standing.level.name.lower()}
                    yield Notice("fleet.DISK_SPACE_LOW", standing.node, about | place)

    def _full_disks(self) -> dict[NodeName, str]:
        full_disks = [disk for disk in self._disks.values() if disk.level is DiskLevel.BLOCK]
        return {
            disk.node: f"{disk.path} ({disk.used_share:.0%} used, {disk.threshold:.0%} allowed)"
            for disk in sorted(full_disks, key=lambda disk: disk.used_share)
        }

    def _pressures_seen(self, values: Mapping[str, float | None], now: Instant) -> Iterator[Pressure]:
        thresholds = self._rules.thresholds
        for name, alarm in sorted(self._alarms.items()):
            if alarm.is_on:
                below = closed_below(alarm, now, self._rules.next_band_seconds)
                high = thresholds[threshold_name(name, thresholds)].high
                retry_after_seconds = self._rules.retry_after_seconds
                yield Pressure(name, alarm.since, values.get(name), high, below, retry_after_seconds)

    def _pressure_values(self, values: Mapping[str, float | None]) -> dict[str, float]:
        shown = (
            name for name, alarm in self._alarms.items() if alarm.is_on or name in self._rules.thresholds
        )
        return {name: value for name in shown if (value := values[name]) is not None}


def _about(target: FleetTarget) -> tuple[str, str, float, float]:
    return str(target.scope), target.measure.value, target.least, target.most


def background_room(world: World, policy: Policy, left_mb: Mapping[str, int]) -> BackgroundRoom:
    """Return the MiB of each scope that are left for background work, with the scopes of each node."""
    scopes: dict[NodeName, tuple[str, ...]] = {}
    for name in left_mb:
        for node in sorted({node for node, _ in _devices(world, _scope(name), policy)}):
            scopes[node] = (*scopes.get(node, ()), name)
    return BackgroundRoom(left_mb, scopes)


def _scope(name: str) -> FleetScope:
    kind, _, subject = name.partition(":")
    return FleetScope(kind, subject)


def _devices(world: World, scope: FleetScope, policy: Policy) -> Iterator[tuple[NodeName, DeviceKey]]:
    selector = scope.selector(policy)
    for node in world.nodes.values():
        if selector is not None and may_use_node(selector, node):
            for key in world.by_node.get(node.name, ()):
                device = world.ledgers[key].device
                if device.offers and may_use_device(selector, device):
                    yield node.name, key


def _background_use(world: World, scope: FleetScope, policy: Policy) -> tuple[int, int]:
    """Return (all MiB, MiB leased to background work) of the devices in the scope."""
    total_mb = used_mb = 0
    for _, key in _devices(world, scope, policy):
        ledger = world.ledgers[key]
        total_mb += ledger.device.allocatable_mb
        leases = (holding.lease for holding in ledger.holdings.values())
        used_mb += sum(lease.mb for lease in leases if is_background(lease.priority))
    return total_mb, used_mb


def _is_filled(ledger: DeviceLedger) -> bool:
    """Return True if the device has leases of idle work, and apart from these only leases that give way."""
    priorities = [holding.lease.priority for holding in ledger.holdings.values()]
    remaining = [priority for priority in priorities if not gives_way(priority)]
    return bool(remaining) and all(map(is_idle_work, remaining))


def _runs_idle_work(world: World, node: NodeName) -> bool:
    runs = [world.tasks[id] for id in world.runs.get(node, ()) if id in world.tasks]
    return bool(runs) and all(is_idle_work(task.priority) for task in runs)
