"""The operator's targets, and whether the measured values are inside them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple

from msgspec import Struct

from gpubroker_server.core.control.alarm import check_order
from gpubroker_server.core.domain.demand import (
    Demand,
    Labels,
    PlacementConstraints,
    may_use_device,
    may_use_node,
)
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.setting_marks import Share, text, written
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.world.ledger import DeviceLedger
from gpubroker_server.core.world.world import World


class Measure(StrEnum):
    """The measures of targets. Each value is a share, 0 to 1. The names are published."""

    GPU_UTILIZATION = "gpu_utilization"
    """The mean utilization of the devices."""
    GPU_MEMORY = "gpu_memory"
    """The used share of the memory of all devices together."""
    HOST_MEMORY = "host_memory"
    """The used share of the memory of all nodes together."""
    DISK = "disk"
    """The used share of the fullest watched disk."""


class FleetScope(NamedTuple):
    """A part of the fleet."""

    kind: str = "all"
    """`all`, `pool`, `label` or `node`."""
    name: str = ""
    """The name of the pool or node, or the label as `KEY=VALUE`."""

    @classmethod
    def of(cls, text: str) -> "FleetScope":
        """Return the part of the fleet that the text names. Raises ValueError if the text is invalid."""
        kind, _, name = text.partition(":")
        if text != "all" and not (kind in ("pool", "label", "node") and name):
            raise ValueError(
                f"{text!r} is no part of the fleet; write all, pool:NAME, label:KEY=VALUE or node:NAME"
            )
        if kind == "label" and "=" not in name:
            raise ValueError(f"{text!r} has no value; write label:KEY=VALUE")
        return cls(kind, name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def selector(self, policy: Policy) -> Demand | None:
        """Return a demand that may use only the nodes and devices of this part; None for a pool that is no
        longer configured."""
        match self.kind:
            case "node":
                return _on((("node", (self.name,)),))
            case "label":
                key, _, value = self.name.partition("=")
                return _on(((key, (value,)),))
            case "pool":
                pool = next((pool for pool in policy.pools if pool.name == self.name), None)
                return None if pool is None else _on(pool.labels, pool.kinds)
        return _on(())


def _on(nodes: Labels, kinds: tuple[str, ...] = ()) -> Demand:
    return Demand(gpus=1, where=PlacementConstraints(kinds=kinds, nodes=nodes))


class FleetTarget(Struct, frozen=True):
    """The range in which a measured value should be: from `least` to `most`, both included."""

    measure: Measure = Measure.GPU_UTILIZATION
    least: Annotated[Share, written("min_percent", {})] = 0.0
    most: Annotated[Share, written("max_percent", {})] = 1.0
    scope: Annotated[FleetScope, text(FleetScope.of)] = FleetScope()

    def __post_init__(self) -> None:
        """Check that `least` is below `most`. Raises ValueError."""
        check_order("min_percent", self.least * 100, "max_percent", self.most * 100)

    @property
    def set_point(self) -> float:
        return (self.least + self.most) / 2

    def __contains__(self, value: object) -> bool:
        return isinstance(value, float) and self.least <= value <= self.most


class Standing(NamedTuple):
    """The present state of a target."""

    value: float | None
    """The measured value; None if nothing in the target's scope is measured now."""
    is_in: bool
    since: Instant
    """The time since which the value has been inside the range, or outside it."""


@dataclass(slots=True)
class _Sums:
    """The sums of the measurements in one scope."""

    utilizations: list[float] = field(default_factory=list)
    gpu_total_mb: int = 0
    gpu_used_mb: int = 0
    host_total_mb: int = 0
    host_used_mb: int = 0
    disks: list[float] = field(default_factory=list)

    def add_node(self, sample: NodeSample) -> None:
        self.host_total_mb += sample.memory_total_mb
        self.host_used_mb += sample.memory_total_mb - sample.memory_available_mb
        if sample.disk_share is not None:
            self.disks.append(sample.disk_share)

    def add_device(self, ledger: DeviceLedger) -> None:
        assert ledger.sample is not None, "only what is measured counts"
        self.gpu_total_mb += ledger.device.physical_mb
        self.gpu_used_mb += ledger.sample.used_mb
        if ledger.sample.utilization is not None:
            self.utilizations.append(ledger.sample.utilization)

    def values(self) -> dict[Measure, float | None]:
        busy = self.utilizations
        return {
            Measure.GPU_UTILIZATION: sum(busy) / len(busy) if busy else None,
            Measure.GPU_MEMORY: _share(self.gpu_used_mb, self.gpu_total_mb),
            Measure.HOST_MEMORY: _share(self.host_used_mb, self.host_total_mb),
            Measure.DISK: max(self.disks, default=None),
        }


def _share(used: int, total: int) -> float | None:
    return used / total if total else None


def measured(
    world: World, scopes: Iterable[FleetScope], policy: Policy, now: Instant
) -> dict[FleetScope, dict[Measure, float | None]]:
    """Return the measured values of each scope. Samples older than three sample periods do not count."""
    measures: dict[FleetScope, dict[Measure, float | None]] = {}
    for scope in dict.fromkeys(scopes):
        sums, selector = _Sums(), scope.selector(policy)
        for node in world.nodes.values():
            if selector is not None and may_use_node(selector, node):
                sample = world.node_samples.get(node.name)
                if sample is not None and not sample.is_stale(now, policy.sample_period_seconds):
                    sums.add_node(sample)
                for ledger in _fresh(world, node.name, policy, now):
                    if may_use_device(selector, ledger.device):
                        sums.add_device(ledger)
        measures[scope] = sums.values()
    return measures


def _fresh(world: World, node: NodeName, policy: Policy, now: Instant) -> Iterator[DeviceLedger]:
    """Yield the node's devices with a recent sample. A GPU with MIG instances is left out; its instances are
    not."""
    for key in world.by_node.get(node, ()):
        ledger = world.ledgers[key]
        if ledger.device.offers and not ledger.is_stale(now, policy.sample_period_seconds):
            yield ledger


def follow(
    before: Mapping[FleetTarget, Standing],
    targets: Iterable[FleetTarget],
    values: Mapping[FleetScope, Mapping[Measure, float | None]],
    now: Instant,
) -> dict[FleetTarget, Standing]:
    """Return the present state of each target. A target that is not measured stays inside or outside its
    range, as it was."""
    after = {}
    for target in targets:
        value, standing = values[target.scope][target.measure], before.get(target)
        is_in = (standing is None or standing.is_in) if value is None else value in target
        is_same = standing is not None and standing.is_in is is_in
        after[target] = Standing(value, is_in, standing.since if standing is not None and is_same else now)
    return after
