"""What a place is worth, for the naive planner: each sort of device by itself, each choice anew."""

from collections import Counter
from collections.abc import Mapping
from math import fsum
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.world.fragmentation_gradient import (
    FragmentationMeasure,
    Remainder,
    Shape,
    fgd,
    tasks_lost,
    typical_shapes,
)


def sort(device: Any) -> str:
    part = "part" if device.parent else "whole"
    return f"{device.kind}/{device.physical_mb}/{whole(device)}/{device.context_mb}/{device.power}/{part}"


def whole(device: Any) -> int:
    return device.physical_mb - device.reserve_mb - device.declared_foreign_mb if device.present else 0


def learn(naive: Any, edition: Mapping[Demand, int]) -> FragmentationMeasure | None:
    """What is usual, as tasks of these devices; None if there is nothing that could run."""
    if naive.policy.placement not in ("stranded", "fgd"):
        return None
    devices = [ledger.device for ledger in naive.ledgers if whole(ledger.device)]
    mix: Counter[Shape] = Counter()
    for demand, count in edition.items():
        amounts = {sort(device): naive.needs(demand, device) for device in devices}
        can = tuple(sorted((name, need) for name, need in amounts.items() if need is not None))
        if can:
            mix[Shape(demand.cpu, demand.gpus, can)] += count
    sizes = {sort(device): whole(device) for device in devices}
    counted = Counter(map(sort, devices))
    fleet = {name: (counted[name], size) for name, size in sizes.items()}
    if not mix:
        return None
    if naive.policy.placement == "fgd":
        return fgd(typical_shapes(mix), sum(map(whole, devices)) / len(devices))
    return tasks_lost(typical_shapes(mix), fleet)


def fullest(naive: Any, node: Any, task: Task) -> tuple[tuple[str, int], ...] | None:
    """Of those it wants most, the devices that have least to spare."""
    fitting = []
    for device in naive.devices(node.name):
        need = naive.needs(task.demand, device)
        if need is not None and naive.free(device, task) >= need:
            far = naive.unmet(node, [device], task) - naive.unmet(node, [], task)
            fitting.append((far, naive.free(device, task) - need, device.key, need))
    return tuple(sorted((key, need) for _, _, key, need in sorted(fitting)[: task.demand.gpus]))


def score(naive: Any, node: Any, task: Task, taken: Mapping[str, int]) -> int:
    """By what the node's devices, sort by sort, were good for and are good for afterwards."""
    assert naive.measure is not None
    cpu = max(0.0, naive.room(node, task)[0])
    before, behind = [], []
    for name in {sort(device) for device in naive.devices(node.name)}:
        alike = [device for device in naive.devices(node.name) if sort(device) == name]
        left = {device.key: max(0, naive.free(device, task)) for device in alike}
        after = tuple(mb - taken.get(key, 0) for key, mb in left.items())
        before.append(naive.measure.lost(Remainder(cpu, tuple(left.values()), name)))
        behind.append(naive.measure.lost(Remainder(round(cpu - task.demand.cpu, 6), after, name)))
    return naive.measure.rate(fsum(before) - fsum(behind))
