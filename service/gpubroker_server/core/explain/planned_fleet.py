"""A fleet that need not exist."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpubroker_server.core.domain.device import Device, DeviceSample, GpuKind, Node, kind_of
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, device_key
from gpubroker_server.core.world.world import World

MOST_RUNS = 10_000
"""On one node: as many as one likes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node of a fleet that need not exist."""

    name: str
    cpu: float
    memory_mb: Mib
    gpus: tuple[tuple[str, Mib], ...] = ()
    """(kind, MiB that may be leased) of each."""
    labels: tuple[tuple[str, str], ...] = ()
    custom: tuple[tuple[str, float], ...] = ()
    """What it has of the resources that the operator named, sorted by name."""


def fleet_of(machines: Iterable[Machine], kinds: Iterable[GpuKind], now: Instant) -> World:
    """A World of these machines, empty and just measured."""
    world, known = World(), tuple(kinds)
    for machine in machines:
        node = NodeName(machine.name)
        size = machine.cpu, machine.memory_mb, MOST_RUNS
        world.add_node(Node(node, *size, "", "", labels=machine.labels, custom=machine.custom))
        for index, (reported, mb) in enumerate(machine.gpus):
            key, kind = device_key("plan", node, f"gpu{index}"), kind_of(reported, known)
            power, context_mb = (kind.power, kind.context_mb) if kind else (0, Mib(0))
            device = Device(key, node, f"gpu{index}", reported, index, mb, power=power, context_mb=context_mb)
            world.add_device(device)
            world.measure([DeviceSample(key, now, Mib(0))])
    return world
