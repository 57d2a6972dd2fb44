"""Nodes in the log: those that join, leave, or have had too much to do for a while."""

from collections.abc import Iterable
from typing import Any

from gpubroker_server.core.control.alarm import Threshold
from gpubroker_server.core.control.node_watch import ANSWER_SECONDS, NodeWatch, Overload
from gpubroker_server.core.domain.decisions import Notice
from gpubroker_server.core.domain.device import NodeSample
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW, a_device, a_node, a_world

N1, N2 = NodeName("n1"), NodeName("n2")
PERIOD = Seconds(2.0)


def a_watch(**thresholds: Threshold) -> NodeWatch:
    return NodeWatch(thresholds, PERIOD)


def answers(world: World, **nodes: bool) -> World:
    """Whether these nodes do."""
    for name, ready in nodes.items():
        world.add_node(replace(a_node(name), ready=ready))
    return world


def told(notices: Iterable[Notice]) -> list[tuple[str, str, int]]:
    return [(one.kind, one.key, one.fields["nodes"]) for one in notices]


def test_a_node_joins_when_it_answers_and_leaves_when_it_is_given_up() -> None:
    world, watch = a_world(a_node("n1"), a_device("gpu0", "n1"), a_node("n2")), a_watch()
    [first, second] = watch.follow(world, NOW)
    assert (first.kind, first.key, first.fields) == ("fleet.NODE_JOINED", "n1", {"gpus": 1, "nodes": 2})
    assert (second.key, second.fields["gpus"]) == ("n2", 0)
    assert told(watch.follow(world, NOW)) == []
    assert told(watch.follow(answers(world, n2=False), NOW)) == [("fleet.NODE_LEFT", "n2", 1)]
    assert told(watch.follow(answers(world, n2=True), NOW)) == [("fleet.NODE_JOINED", "n2", 2)]


def test_nodes_that_answer_the_next_leader_have_not_joined() -> None:
    world, watch = a_world(a_node("n1"), a_node("n2")), a_watch()
    watch.expect([N1, N2])
    assert told(watch.follow(answers(world, n1=False, n2=False), NOW)) == []
    assert told(watch.follow(answers(world, n1=True), NOW)) == []
    late = Instant(NOW + ANSWER_SECONDS)
    assert told(watch.follow(world, late)) == [("fleet.NODE_LEFT", "n2", 1)]
    assert told(watch.follow(answers(world, n2=True), late)) == [("fleet.NODE_JOINED", "n2", 2)]


def test_while_no_node_answers_none_has_left() -> None:
    world, watch = a_world(a_node("n1")), a_watch()
    watch.expect([N1])
    answers(world, n1=False)
    assert told(watch.follow(world, NOW)) == []
    assert told(watch.follow(world, Instant(NOW + 10 * ANSWER_SECONDS))) == []


def busy(world: World, at: float, cpu: float, used_mb: int = 10) -> Instant:
    """n1, which has 100 MiB."""
    world.node_samples[N1] = NodeSample(N1, Instant(at), cpu, Mib(100), Mib(100 - used_mb))
    return Instant(at)


def test_node_is_overloaded_after_a_while_and_until_it_is_well_below() -> None:
    world, watch = a_world(a_node("n1")), a_watch(cpu=Threshold(0.9, 0.7, Seconds(60.0)))
    list(watch.follow(world, NOW))
    heard: list[Any] = []
    for n in range(40):
        heard += watch.follow(world, busy(world, NOW + 2 * n, 0.95))
    [overload] = heard
    assert (overload.kind, overload.key) == ("fleet.NODE_OVERLOADED", "n1")
    assert overload.fields == {"measure": "cpu", "value": 0.95, "threshold": 0.9}
    for n in range(40, 80):
        assert list(watch.follow(world, busy(world, NOW + 2 * n, 0.8))) == []
    assert watch.overloaded == (Overload(N1, "cpu"),)
    for n in range(80, 120):
        assert list(watch.follow(world, busy(world, NOW + 2 * n, 0.6))) == []
    assert watch.overloaded == ()


def test_host_memory_is_watched_by_itself_and_old_samples_say_nothing() -> None:
    world = a_world(a_node("n1"))
    watch = a_watch(cpu=Threshold(0.9, 0.7), host_memory=Threshold(0.9, 0.8))
    list(watch.follow(world, NOW))
    list(watch.follow(world, busy(world, NOW, 0.1, used_mb=95)))
    assert watch.overloaded == (Overload(N1, "host_memory"),)
    busy(world, NOW, 0.99, used_mb=10)
    assert list(watch.follow(world, Instant(NOW + 4 * PERIOD))) == []
    assert watch.overloaded == (Overload(N1, "host_memory"),)
