"""What demands come to, what a fleet has left, and what it lacks: in GPUs, MiB, CPUs and host memory."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gpubroker_server.core.domain.demand import Demand, may_use_device, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.units import DeviceKey, Mib
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.world.world import World


@dataclass(frozen=True, slots=True)
class Totals:
    gpus: int
    """Devices that are used, whole or in part, one for each part."""
    whole_gpus: int
    gpu_mb: int
    """Of those that are not whole."""
    cpu: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class OfKinds:
    """GPUs that are missing, of those who insist on the same kinds."""

    kinds: tuple[str, ...]
    """As asked for; empty: any."""
    whole_gpus: int
    gpu_mb: int
    """For those that need not be whole."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What is asked for without a place, less what is left. All zero: enough is left, but in pieces."""

    gpus: tuple[OfKinds, ...]
    cpu: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class LeftOver:
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """(device, MiB left of it), of those with anything left."""
    cpu: float
    memory_mb: int


def totals_of(wanted: Iterable[tuple[Demand, int]]) -> Totals:
    """Of so many tasks of each demand; of gangs with all their ranks."""
    gpus = whole = gpu_mb = memory_mb = 0
    cpu = 0.0
    for part, count in _parts(wanted).items():
        gpus += count * part.gpus
        whole += count * part.gpus * part.takes_whole_devices
        gpu_mb += count * part.gpus * (0 if part.takes_whole_devices else part.gpu_mb or 0)
        cpu += count * part.cpu
        memory_mb += count * part.memory_mb
    return Totals(gpus, whole, gpu_mb, round(cpu, 6), memory_mb)


def left_over(draft: Draft) -> LeftOver:
    """What nobody has and nothing is kept of, on nodes that can be used."""
    devices: list[tuple[DeviceKey, Mib]] = []
    cpu, memory_mb = 0.0, 0
    for node in sorted(draft.usable_nodes()):
        room = draft.headroom(node)
        cpu += max(0.0, room.cpu)
        memory_mb += max(0, room.memory_mb)
        for book in draft.books_on(node):
            if book.device.offers and (free := book.free_mb()) > 0:
                devices.append((book.device.key, Mib(free)))
    return LeftOver(tuple(devices), round(cpu, 6), memory_mb)


def missing_of(unplaced: Iterable[tuple[Demand, int]], left: LeftOver, world: World) -> Missing:
    """At least so much more would be needed, whatever lies where."""
    wanted = _parts(unplaced)
    known = [book.device for book in world.books.values()]
    usable = {part: [one for one in known if may_use_device(part, one)] for part in wanted if part.gpus}
    free = dict(left.devices)
    gpus: dict[tuple[str, ...], tuple[int, int]] = {}
    # Whoever may use the fewest devices is given what is left of those before others are.
    for part, mine in sorted(usable.items(), key=lambda item: len(item[1])):
        whole, mb = _taken_from(free, part, wanted[part] * part.gpus, mine)
        before = gpus.get(part.where.kinds, (0, 0))
        gpus[part.where.kinds] = before[0] + whole, before[1] + mb
    cpu = sum(count * part.cpu for part, count in wanted.items())
    memory_mb = sum(count * part.memory_mb for part, count in wanted.items())
    return Missing(
        tuple(OfKinds(kinds, *amounts) for kinds, amounts in sorted(gpus.items()) if any(amounts)),
        round(max(0.0, cpu - left.cpu), 6),
        max(0, memory_mb - left.memory_mb),
    )


def _taken_from(free: dict[DeviceKey, Mib], part: Demand, count: int, mine: list[Device]) -> tuple[int, int]:
    """Take so many devices, or their MiB, out of what is free; (devices, MiB) that are not there."""
    if part.takes_whole_devices:
        whole = [one.key for one in mine if free.get(one.key, 0) >= max(1, one.allocatable_mb)][:count]
        for key in whole:
            del free[key]
        return count - len(whole), 0
    each = max((need_mb(part, one) or 0 for one in mine), default=0) or part.gpu_mb or 0
    lacking = count * each
    for device in mine:
        taken = min(lacking, free.get(device.key, 0))
        if taken:
            free[device.key] = Mib(free[device.key] - taken)
            lacking -= taken
    return 0, lacking


def _parts(wanted: Iterable[tuple[Demand, int]]) -> Counter[Demand]:
    """Ranks one by one, as tasks of their own."""
    parts: Counter[Demand] = Counter()
    for demand, count in wanted:
        for part in demand.bundles or (demand,):
            parts[part] += count
    return parts
