"""Watch for nodes that join, leave, or are overloaded."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from gpubroker_server.core.control.alarm import Alarm, Threshold
from gpubroker_server.core.domain.decisions import Notice
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.world.world import World

ANSWER_SECONDS = Seconds(30.0)
"""The time in a new term after which nodes of the last term that have not answered count as gone, if other
nodes have answered."""
GONE_SECONDS = Seconds(600.0)
"""The time after which a silent node is gone, and counts neither as idle, full nor overloaded. After the same
time, a disk is gone that its node no longer measures."""


class Overload(NamedTuple):
    node: NodeName
    measure: str
    """`cpu` or `host_memory`, of which too large a share is in use."""


class NodeWatch:
    """Watches which nodes answer and how much they are used. It lives in the memory of one leader."""

    def __init__(
        self,
        thresholds: Mapping[str, Threshold],
        period_seconds: Seconds,
        overloaded: Iterable[Overload] = (),
    ) -> None:
        """`thresholds` maps a measure to its threshold. `period_seconds` is the time between two samples.
        `overloaded` has the overloads of the last term."""
        self._thresholds = thresholds
        self._period_seconds = period_seconds
        self._expected: set[NodeName] = set()
        """Nodes of the last term that have not answered in the present term yet."""
        self._present: set[NodeName] = set()
        self._since: Instant | None = None
        self._silent_since: dict[NodeName, Instant] = {}
        """Node that does not answer -> the time since which it is silent."""
        self._alarms = dict.fromkeys(overloaded, Alarm(is_on=True))

    def expect(self, nodes: Iterable[NodeName]) -> None:
        """Note the nodes of the last term, so that they are not reported as joined when they answer this
        leader."""
        self._expected.update(nodes)

    @property
    def overloaded(self) -> tuple[Overload, ...]:
        return tuple(about for about, alarm in self._alarms.items() if alarm.is_on)

    def gone(self, world: World, now: Instant) -> set[NodeName]:
        """Return the nodes that have not answered this leader for GONE_SECONDS."""
        silent = [name for name, node in world.nodes.items() if not node.ready]
        self._silent_since = {name: self._silent_since.get(name, now) for name in silent}
        return {name for name, since in self._silent_since.items() if now - since > GONE_SECONDS}

    def follow(self, world: World, now: Instant, gone: Collection[NodeName] = ()) -> Iterator[Notice]:
        yield from self._came_and_left(world, now)
        yield from self._overloads(world, now, gone)

    def _came_and_left(self, world: World, now: Instant) -> Iterator[Notice]:
        self._since = now if self._since is None else self._since
        present = {name for name, node in world.nodes.items() if node.ready}
        left, came = self._present - present, present - self._present - self._expected
        self._expected -= present
        if present and now - self._since >= ANSWER_SECONDS:
            left |= self._expected
            self._expected = set()
        self._present = present
        for change, names in (("JOINED", came), ("LEFT", left)):
            for name in sorted(names):
                gpus = sum(world.ledgers[key].device.offers for key in world.by_node.get(name, ()))
                yield Notice(f"fleet.NODE_{change}", name, {"gpus": gpus, "nodes": len(present)})

    def _overloads(self, world: World, now: Instant, gone: Collection[NodeName]) -> Iterator[Notice]:
        before, self._alarms = self._alarms, {}
        for node, sample in world.node_samples.items():
            if node in gone:
                continue
            values = {} if sample.is_stale(now, self._period_seconds) else _use(sample)
            for measure, threshold in self._thresholds.items():
                about, value = Overload(node, measure), values.get(measure)
                alarm_before = before.get(about, Alarm())
                self._alarms[about] = alarm = alarm_before.follow(value, threshold, now)
                if alarm.is_on and not alarm_before.is_on:
                    fields = {"measure": measure, "value": value, "threshold": threshold.high}
                    yield Notice("fleet.NODE_OVERLOADED", node, fields)


def _use(sample: NodeSample) -> Mapping[str, float]:
    used_mb = sample.memory_total_mb - sample.memory_available_mb
    return {"cpu": sample.cpu, "host_memory": used_mb / max(1, sample.memory_total_mb)}
