"""An hour of means, one each ten seconds, in bounded memory."""

from gpubroker_server.core.control.history import POINTS, FleetHistory, History, step_of
from gpubroker_server.core.domain.device import DiskSample, GpuHealth, NodeSample
from gpubroker_server.core.domain.units import Instant, Mib, NodeName
from gpubroker_server.core.world.world import World

from tests.builders import NOW, a_device, a_node, a_sample, a_world, key

N1 = NodeName("n1")


def test_each_step_has_the_mean_of_its_values() -> None:
    history = History()
    for at, value in ((0, 0.25), (2, 0.75), (12, 0.5)):
        history.add(value, Instant(at))
    assert history.means(range(2)) == [0.5, 0.5]
    assert history.means(range(1, 2)) == [0.5]


def test_steps_without_a_value_have_none() -> None:
    history = History()
    assert history.means(range(-1, 1)) == [None, None]
    history.add(1.0, Instant(0.0))
    history.add(0.0, Instant(50.0))
    assert history.means(range(7)) == [1.0, None, None, None, None, 0.0, None]


def test_it_keeps_an_hour_and_no_more() -> None:
    history = History()
    for step in range(2 * POINTS):
        history.add(float(step), Instant(step * 10.0))
    means = history.means(range(2 * POINTS))
    assert means == [None] * POINTS + [float(step) for step in range(POINTS, 2 * POINTS)]
    history.add(7.0, Instant(1e6))
    assert history.means(range(step_of(Instant(1e6)) - POINTS + 1, step_of(Instant(1e6)) + 1)) == [
        *[None] * (POINTS - 1),
        7.0,
    ]


def test_a_value_from_before_the_newest_step_is_dropped() -> None:
    history = History()
    history.add(1.0, Instant(100.0))
    history.add(0.0, Instant(50.0))
    assert history.means(range(5, 11)) == [None] * 5 + [1.0]


def measure(world: World, at: float, cpu: float, utilization: float | None) -> None:
    health = {"gpu0": GpuHealth(power_watts=300.0, temperature_celsius=50.0)}
    disks = (DiskSample("/", 100, 25),)
    node = NodeSample(N1, Instant(at), cpu, Mib(100), Mib(40), disks=disks, gpus=health)
    samples = [a_sample(name, at, utilization=utilization, used_mb=7) for name in ("gpu0", "gpu1")]
    world.measure(samples, [node])


def follow(history: FleetHistory, world: World) -> None:
    for _ in history.follow(world):
        pass


def test_the_history_of_a_fleet_has_each_sample_once() -> None:
    world, history = a_world(a_device("gpu0"), a_device("gpu1")), FleetHistory()
    for at, cpu in ((NOW, 0.2), (NOW + 2, 0.4)):
        measure(world, at, cpu, cpu)
        follow(history, world)
        follow(history, world)  # with nothing new
    now = range(step_of(NOW), step_of(NOW) + 1)
    assert {name: round(value or 0, 3) for name, [value] in history.means("n1", now).items()} == {
        "cpu": 0.3,
        "memory_used_mb": 60.0,
        "disk": 0.75,
    }
    assert {name: round(value or 0, 3) for name, [value] in history.means(key("gpu0"), now).items()} == {
        "used_mb": 7.0,
        "utilization": 0.3,
        "power_watts": 300.0,
        "temperature_celsius": 50.0,
    }
    assert sorted(history.means(key("gpu1"), now)) == ["used_mb", "utilization"]


def test_things_never_measured_or_gone_have_no_history() -> None:
    world, history = a_world(a_node("n2"), a_device("gpu0"), a_device("gpu1")), FleetHistory()
    world.ledgers[key("gpu1")].sample = None
    world.measure([a_sample("gpu0", NOW + 1)])
    follow(history, world)
    now = range(step_of(NOW), step_of(NOW) + 1)
    assert history.means("n2", now) == history.means("n1", now) == history.means(key("gpu1"), now) == {}
    assert history.means(key("gpu0"), now) == {"used_mb": [0.0]}
    del world.ledgers[key("gpu0")]
    world.by_node[N1].remove(key("gpu0"))
    follow(history, world)
    assert history.means(key("gpu0"), now) == {}
