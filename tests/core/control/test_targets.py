"""Targets: what each part of the fleet shows, and since when that is inside."""

import pytest
from gpubroker_server.core.control.targets import (
    FleetScope,
    FleetTarget,
    Measure,
    Standing,
    follow,
    measured,
)
from gpubroker_server.core.domain.device import DiskSample, NodeSample
from gpubroker_server.core.domain.policy import Policy, Pool
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import GIB, NOW, a_device, a_node, a_sample, a_world

POLICY = Policy(
    pools=(
        Pool("big", kinds=("H100",)),
        Pool("east", nodes={"zone": ("east", "north")}),
    )
)
EVERYWHERE = FleetScope()


def a_node_sample(node: str, used: float = 0.5, *disks: float, at: float = NOW) -> NodeSample:
    full = tuple(DiskSample(f"/d{n}", 1000, int(1000 * (1 - share))) for n, share in enumerate(disks))
    return NodeSample(NodeName(node), Instant(at), 0.3, Mib(100), Mib(100 - round(100 * used)), disks=full)


def a_fleet() -> World:
    """An H100 that is busy, an A100 that is not, and one that has not been measured for a minute."""
    h100, a100 = a_device("gpu0", "n1", kind="NVIDIA H100"), a_device("gpu1", "n2", kind="NVIDIA A100")
    old = a_device("gpu2", "n2", kind="NVIDIA A100")
    world = a_world(
        a_node("n1", labels=(("zone", "east"),)),
        a_node("n2"),
        h100,
        a100,
        old,
        a_sample(h100.key, used_mb=60 * GIB, utilization=0.9),
        a_sample(a100.key, used_mb=20 * GIB, utilization=0.1),
    )
    world.ledgers[old.key].sample = a_sample(old.key, NOW - 60, used_mb=80 * GIB, utilization=1.0)
    for sample in (a_node_sample("n1", 0.5, 0.2, 0.7), a_node_sample("n2", 0.9, 0.4)):
        world.node_samples[sample.node] = sample
    return world


def values(world: World, scope: FleetScope) -> dict[str, float | None]:
    return {str(name): value for name, value in measured(world, [scope], POLICY, Instant(NOW))[scope].items()}


@pytest.mark.parametrize(
    ("scope", "utilization", "gpu_memory", "host_memory", "disk"),
    [
        (EVERYWHERE, 0.5, 0.5, 0.7, 0.7),
        (FleetScope("pool", "big"), 0.9, 0.75, 0.7, 0.7),
        (FleetScope("pool", "east"), 0.9, 0.75, 0.5, 0.7),
        (FleetScope("pool", "gone"), None, None, None, None),
        (FleetScope("label", "zone=east"), 0.9, 0.75, 0.5, 0.7),
        (FleetScope("node", "n2"), 0.1, 0.25, 0.9, 0.4),
    ],
)
def test_a_part_of_the_fleet_shows_what_is_measured_there(
    scope: FleetScope, utilization: float, gpu_memory: float, host_memory: float, disk: float
) -> None:
    found = values(a_fleet(), scope)
    expected = {
        "gpu_utilization": utilization,
        "gpu_memory": gpu_memory,
        "host_memory": host_memory,
        "disk": disk,
    }
    assert found == {
        name: value if value is None else pytest.approx(value) for name, value in expected.items()
    }


def test_what_is_old_or_missing_counts_nowhere() -> None:
    world = a_fleet()
    world.node_samples[NodeName("n1")] = a_node_sample("n1", 0.5, 0.2, at=NOW - 60)
    world.node_samples[NodeName("n2")] = replace(a_node_sample("n2"), memory_total_mb=Mib(0))
    found = values(world, EVERYWHERE)
    assert (found["host_memory"], found["disk"]) == (None, None)
    world.node_samples.clear()
    assert values(world, EVERYWHERE)["disk"] is None


def test_a_gpu_that_does_not_say_how_busy_it_is_counts_its_memory_only() -> None:
    device = a_device("gpu0")
    found = values(a_world(a_node(), device, a_sample(device.key, used_mb=40 * GIB)), EVERYWHERE)
    assert (found["gpu_utilization"], found["gpu_memory"]) == (None, 0.5)


TARGET = FleetTarget(Measure.GPU_UTILIZATION, 0.6, 0.8)


def stands(*steps: tuple[float, float | None]) -> Standing:
    standings: dict[FleetTarget, Standing] = {}
    for at, value in steps:
        shown = {EVERYWHERE: {Measure.GPU_UTILIZATION: value}}
        standings = follow(standings, [TARGET], shown, Instant(at))
    return standings[TARGET]


def test_a_target_says_whether_it_is_met_and_since_when() -> None:
    assert stands((1, 0.7)) == Standing(0.7, is_in=True, since=Instant(1.0))
    assert stands((1, 0.7), (2, 0.6)) == Standing(0.6, is_in=True, since=Instant(1.0))
    assert stands((1, 0.7), (2, 0.81)) == Standing(0.81, is_in=False, since=Instant(2.0))
    assert stands((1, 0.5), (2, 0.8)) == Standing(0.8, is_in=True, since=Instant(2.0))


def test_what_is_not_measured_stays_as_it_was() -> None:
    assert stands((1, None)) == Standing(None, is_in=True, since=Instant(1.0))
    assert stands((1, 0.5), (2, None)) == Standing(None, is_in=False, since=Instant(1.0))


def test_the_set_point_is_the_middle() -> None:
    assert TARGET.set_point == pytest.approx(0.7)


def test_scopes_have_names_for_people() -> None:
    assert [str(EVERYWHERE), str(FleetScope("label", "zone=east"))] == ["all", "label:zone=east"]


@pytest.mark.parametrize("text", ["all", "pool:lab", "label:zone=a", "node:n1"])
def test_a_scope_is_read_as_it_is_shown(text: str) -> None:
    assert str(FleetScope.of(text)) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rack", "'rack' is no part of the fleet; write all, pool:NAME, label:KEY=VALUE or node:NAME"),
        ("node:", "'node:' is no part of the fleet"),
        ("label:zone", "'label:zone' has no value; write label:KEY=VALUE"),
    ],
)
def test_a_scope_that_is_no_part_of_the_fleet_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        FleetScope.of(text)


def test_a_target_whose_least_is_not_below_its_most_is_refused() -> None:
    with pytest.raises(ValueError, match="min_percent 90 is not below max_percent 80"):
        FleetTarget(Measure.DISK, 0.9, 0.8)
