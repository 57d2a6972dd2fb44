"""What a task could ask for instead so that it has room now: less, or elsewhere."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, floor
from typing import Any

from gpubroker_server.core.domain.demand import Demand, Where, may_use_device, need_mb
from gpubroker_server.core.domain.units import Mib, NodeName, in_gib
from gpubroker_server.core.explain.blockers import quota_of
from gpubroker_server.core.explain.pools import without_pool
from gpubroker_server.core.explain.remedy_planner import LEAST_SHARE, Remedy, Trials, first

ANY_DEVICE: dict[str, Any] = {"kinds": [], "min_power": 0, "min_device_mb": 0}


def less_memory(trials: Trials) -> Remedy | None:
    """The most GPU memory for which there is room, and which its quota leaves."""
    demand = trials.task.demand
    asked = asked_mb(trials, demand)
    if not asked:
        return None
    most = max((_most_on(trials, node) for node in trials.nodes), default=0)
    quota = quota_of(trials.seen)
    if quota is not None:
        most = min(most, quota.allowance.left_mb // demand.gpus - _costliest_mb(trials, demand))
    if not LEAST_SHARE * asked <= most < asked:
        return None
    change, less = with_memory(demand, most)
    return trials.placed(change, less, f"with gpu_mb at most {most} ({in_gib(most)})")


def with_memory(demand: Demand, most: int) -> tuple[dict[str, Any], Demand]:
    """The demand with so much of each device, and that as a change."""
    change: dict[str, Any] = {"gpu_mb": most}
    if demand.gpu_fraction is not None:
        change["gpu_fraction"] = None
    if demand.exclusive:
        change["exclusive"] = False
    return change, replace(demand, gpu_mb=Mib(most), gpu_fraction=None, exclusive=False)


def asked_mb(trials: Trials, demand: Demand) -> int:
    """Of each device; of whole ones and shares, what they come to at most."""
    if not demand.gpus or demand.gpu_mb is not None:
        return demand.gpu_mb or 0
    books = trials.draft.world.books.values()
    return max((need_mb(demand, book.device) or 0 for book in books), default=0)


def _most_on(trials: Trials, node: NodeName) -> int:
    """What each of as many devices of the node as are asked for could give it now."""
    task, seen = trials.task, trials.seen
    if not trials.draft.headroom(node, task=task.id, priority=task.priority).fits(task):
        return 0
    free = sorted(
        (
            min(book.free_mb(task=task.id, priority=task.priority), book.unheld_mb()) - book.device.context_mb
            for book in trials.draft.usable_books(node, seen.policy, seen.now)
            if may_use_device(task.demand, book.device)
        ),
        reverse=True,
    )
    gpus = task.demand.gpus
    return free[gpus - 1] if len(free) >= gpus else 0


def _costliest_mb(trials: Trials, demand: Demand) -> int:
    """What a process costs of itself where it costs most: as a quota counts it."""
    books = trials.draft.world.books.values()
    usable = (book.device for book in books if book.device.present and may_use_device(demand, book.device))
    return max((device.context_mb for device in usable), default=0)


def fewer_gpus(trials: Trials) -> Remedy | None:
    """The most GPUs of which there are enough on one node."""
    demand = trials.task.demand
    if demand.gpus < 2:
        return None
    fewer = range(demand.gpus - 1, 0, -1)
    gpus = first(fewer, lambda gpus: trials.has_place(replace(demand, gpus=gpus)))
    if gpus is None:
        return None
    return trials.placed({"gpus": gpus}, replace(demand, gpus=gpus), f"with gpus at most {gpus}")


def other_kind(trials: Trials) -> Remedy | None:
    """Of the kinds on which it counts less against its quota, the one on which it counts most."""
    task, quota = trials.task, quota_of(trials.seen)
    if quota is None or not quota.is_short:
        return None
    parts = task.demand.bundles or (task.demand,)
    counts: dict[str, int] = {}
    for book in trials.draft.world.books.values():
        needs = [need_mb(part, book.device) or 0 for part in parts if part.gpus]
        if min(needs) and book.device.present:
            counts[book.device.kind] = max(*needs, counts.get(book.device.kind, 0))
    for kind in sorted(counts, key=lambda kind: (-counts[kind], kind)):
        change, narrower = everywhere(task.demand, {"kinds": [kind]}, kinds=(kind,))
        if (found := trials.placed(change, narrower, f"on {kind} only")) is not None:
            return found
    return None


def elsewhere(trials: Trials) -> Iterator[Remedy | None]:
    """On devices or nodes that it does not ask for, or outside its pool; what drops least first."""
    demand = trials.task.demand
    wheres = [part.where for part in demand.bundles or (demand,)]
    kinds = {name: to for name, to in ANY_DEVICE.items() if any(getattr(where, name) for where in wheres)}
    nodes: dict[str, Any] = {"nodes": {}} if any(where.nodes for where in wheres) else {}
    any_device = {"kinds": (), "min_power": 0, "min_device_mb": Mib(0)}
    found: list[Remedy | None] = []
    if kinds:
        change, wider = everywhere(demand, kinds, **any_device)
        found.append(trials.placed(change, wider, f"on any GPU (without {', '.join(kinds)})"))
    if nodes:
        change, wider = everywhere(demand, nodes, nodes=())
        found.append(trials.placed(change, wider, "on any node"))
    if kinds and nodes and not any(found):
        change, wider = everywhere(demand, {**kinds, **nodes}, **any_device, nodes=())
        found.append(trials.placed(change, wider, "on any GPU of any node"))
    yield from found
    if demand.pool:
        outside, change = without_pool(demand, trials.seen.policy)
        yield trials.placed({"pool": "", **change}, outside, f"without the pool {demand.pool}")


def everywhere(demand: Demand, change: dict[str, Any], **where: Any) -> tuple[dict[str, Any], Demand]:
    """The demand that asks for such places, in all its ranks if it has some, and that as a change."""
    if not demand.bundles:
        return change, replace(demand, where=replace(demand.where, **where))
    bundles = tuple(replace(part, where=_of_rank(part, where)) for part in demand.bundles)
    return {"bundles": change}, replace(demand, bundles=bundles)


def _of_rank(part: Demand, where: dict[str, Any]) -> Where:
    """A rank without GPU asks for no kind."""
    return replace(part.where, **(where if part.gpus else {k: v for k, v in where.items() if k == "nodes"}))


def less_of_the_node(trials: Trials) -> Remedy | None:
    """With the CPU and the host memory that are left where its devices have room."""
    task, demand = trials.task, trials.task.demand
    if not (demand.cpu or demand.memory_mb):
        return None
    bare = replace(task, demand=replace(demand, cpu=0.0, memory_mb=Mib(0)))
    best: tuple[float, int, NodeName] | None = None
    for node in trials.nodes:
        room = trials.draft.headroom(node, task=task.id, priority=task.priority)
        short = room.cpu < demand.cpu or room.memory_mb < demand.memory_mb
        if short and trials.what_if.places_on({node}, bare) is not None:
            left = (min(room.cpu, demand.cpu), min(room.memory_mb, demand.memory_mb), node)
            best = left if best is None else max(best, left)
    if best is None:
        return None
    cpu, memory_mb = floor(best[0] * 100) / 100, best[1]
    if cpu < LEAST_SHARE * demand.cpu or memory_mb < LEAST_SHARE * demand.memory_mb:
        return None
    change: dict[str, Any] = {}
    if cpu < demand.cpu:
        change["cpu"] = cpu
    if memory_mb < demand.memory_mb:
        change["memory_mb"] = memory_mb
    less = replace(demand, cpu=cpu, memory_mb=Mib(memory_mb))
    words = " and ".join(f"{name} at most {value:g}" for name, value in change.items())
    return trials.placed(change, less, f"with {words}") if change else None


STEPS = 64
"""Smaller ranks are tried in so many steps of the size that is asked for."""

LOOSER = {"strict_pack": "pack", "strict_spread": "spread"}


def fewer_ranks(trials: Trials) -> Remedy | None:
    """The most of its first ranks that could start together."""
    demand = trials.task.demand
    fewer = range(demand.least_ranks - 1, ceil(LEAST_SHARE * demand.least_ranks) - 1, -1)
    ranks = first(fewer, lambda ranks: trials.has_place(replace(demand, min_ranks=ranks)))
    if ranks is None:
        return None
    said = f"with min_ranks at most {ranks}"
    return trials.placed({"min_ranks": ranks}, replace(demand, min_ranks=ranks), said)


def smaller_ranks(trials: Trials) -> Remedy | None:
    """The most GPU memory that each rank could ask for, of those that ask for more."""
    demand = trials.task.demand
    asked = max(asked_mb(trials, part) for part in demand.bundles)
    steps = sorted({asked * step // STEPS for step in range(ceil(LEAST_SHARE * STEPS), STEPS)}, reverse=True)
    most = first(steps, lambda mb: mb > 0 and trials.has_place(_capped(trials, mb)))
    if most is None:
        return None
    change = {"bundles": {"gpu_mb": most}}
    said = f"with gpu_mb at most {most} ({in_gib(most)}) in each rank"
    return trials.placed(change, _capped(trials, most), said)


def _capped(trials: Trials, most: int) -> Demand:
    demand = trials.task.demand
    bundles = tuple(
        with_memory(part, most)[1] if part.gpus and asked_mb(trials, part) > most else part
        for part in demand.bundles
    )
    return replace(demand, bundles=bundles)


def looser(trials: Trials) -> Remedy | None:
    """The strategy that asks for the same where that is possible, and no more."""
    demand = trials.task.demand
    strategy = LOOSER.get(demand.strategy)
    if strategy is None:
        return None
    return trials.placed(
        {"strategy": strategy}, replace(demand, strategy=strategy), f"with strategy {strategy}"
    )
