"""Find demands with which a task has room now: smaller ones, and ones with wider constraints."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.admission.pools import without_pool
from gpubroker_server.core.domain.demand import Demand, PlacementConstraints, may_use_device, need_mb
from gpubroker_server.core.domain.units import Mib, NodeName, in_gib
from gpubroker_server.core.explain.blockers import is_short, quota_of
from gpubroker_server.core.explain.remedy_planner import MIN_SHARE, Remedy, RemedyPlanner, first_step

ANY_DEVICE: dict[str, Any] = {"kinds": [], "min_power": 0, "min_device_mb": 0}


def smaller_gpu_memory(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to ask for the most GPU memory that has room and is within the quota."""
    demand = planner.task.demand
    asked = asked_mb(planner, demand)
    if not asked:
        return None
    most = max((_most_on(planner, node) for node in planner.nodes), default=0)
    quota = quota_of(planner.survey)
    if quota is not None:
        most = min(most, quota.left_mb // demand.gpus - _costliest_mb(planner, demand))
    if not MIN_SHARE * asked <= most < asked:
        return None
    change, smaller = with_memory(demand, most)
    return planner.placed(change, smaller, f"with gpu_mb at most {most} ({in_gib(most)})")


def with_memory(demand: Demand, most: int) -> tuple[dict[str, Any], Demand]:
    """Return the demand with `most` MiB of each device, after the change of fields that leads to it."""
    change: dict[str, Any] = {"gpu_mb": most}
    if demand.gpu_fraction is not None:
        change["gpu_fraction"] = None
    if demand.exclusive:
        change["exclusive"] = False
    return change, replace(demand, gpu_mb=Mib(most), gpu_fraction=None, exclusive=False)


def asked_mb(planner: RemedyPlanner, demand: Demand) -> int:
    """Return the MiB that the demand asks for per device; for whole devices and fractions, the MiB on the
    largest device."""
    if not demand.gpus or demand.gpu_mb is not None:
        return demand.gpu_mb or 0
    ledgers = planner.draft.world.ledgers.values()
    return max((need_mb(demand, ledger.device) or 0 for ledger in ledgers), default=0)


def _most_on(planner: RemedyPlanner, node: NodeName) -> int:
    """Return the most MiB that each of the task's devices could have on this node now; 0 if the node lacks
    room for the task."""
    task, survey = planner.task, planner.survey
    if not planner.draft.headroom(node, task=task.id, priority=task.priority).fits(task):
        return 0
    free = sorted(
        (
            min(ledger.free_mb(task=task.id, priority=task.priority), ledger.unallocated_mb())
            - ledger.device.context_mb
            for ledger in planner.draft.usable_ledgers(node, survey.policy, survey.now)
            if may_use_device(task.demand, ledger.device)
        ),
        reverse=True,
    )
    gpus = task.demand.gpus
    return free[gpus - 1] if len(free) >= gpus else 0


def _costliest_mb(planner: RemedyPlanner, demand: Demand) -> int:
    """Return the largest `context_mb` of the devices that the demand may use. Quotas count the context."""
    ledgers = planner.draft.world.ledgers.values()
    usable = (
        ledger.device for ledger in ledgers if ledger.device.present and may_use_device(demand, ledger.device)
    )
    return max((device.context_mb for device in usable), default=0)


def fewer_gpus(planner: RemedyPlanner) -> Remedy | None:
    demand = planner.task.demand
    if demand.gpus < 2:
        return None
    fewer = range(demand.gpus - 1, 0, -1)
    gpus = first_step(fewer, lambda gpus: planner.has_place(replace(demand, gpus=gpus)))
    if gpus is None:
        return None
    return planner.placed({"gpus": gpus}, replace(demand, gpus=gpus), f"with gpus at most {gpus}")


def cheaper_kind(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to ask for a kind on which the task counts less against its quota. Kinds on which it
    counts most are tried first."""
    task, quota = planner.task, quota_of(planner.survey)
    if quota is None or not is_short(quota):
        return None
    parts = task.demand.bundles or (task.demand,)
    counts: dict[str, int] = {}
    for ledger in planner.draft.world.ledgers.values():
        needs = [need_mb(part, ledger.device) or 0 for part in parts if part.gpus]
        if min(needs) and ledger.device.present:
            counts[ledger.device.kind] = max(*needs, counts.get(ledger.device.kind, 0))
    for kind in sorted(counts, key=lambda kind: (-counts[kind], kind)):
        change, narrower = with_constraints(task.demand, {"kinds": [kind]}, kinds=(kind,))
        if (remedy := planner.placed(change, narrower, f"on {kind} only")) is not None:
            return remedy
    return None


def wider_constraints(planner: RemedyPlanner) -> Iterator[Remedy | None]:
    """Yield the demand without its device or node constraints, or without its pool; the smallest change
    first."""
    demand = planner.task.demand
    wheres = [part.where for part in demand.bundles or (demand,)]
    kinds = {name: to for name, to in ANY_DEVICE.items() if any(getattr(where, name) for where in wheres)}
    nodes: dict[str, Any] = {"nodes": {}} if any(where.nodes for where in wheres) else {}
    any_device = {"kinds": (), "min_power": 0, "min_device_mb": Mib(0)}
    remedies: list[Remedy | None] = []
    if kinds:
        change, wider = with_constraints(demand, kinds, **any_device)
        remedies.append(planner.placed(change, wider, f"on any GPU (without {', '.join(kinds)})"))
    if nodes:
        change, wider = with_constraints(demand, nodes, nodes=())
        remedies.append(planner.placed(change, wider, "on any node"))
    if kinds and nodes and not any(remedies):
        change, wider = with_constraints(demand, {**kinds, **nodes}, **any_device, nodes=())
        remedies.append(planner.placed(change, wider, "on any GPU of any node"))
    yield from remedies
    if demand.pool:
        outside, change = without_pool(demand, planner.survey.policy)
        yield planner.placed({"pool": "", **change}, outside, f"without the pool {demand.pool}")


def with_constraints(demand: Demand, change: dict[str, Any], **where: Any) -> tuple[dict[str, Any], Demand]:
    """Return the change of fields, and the demand with these constraints. In a gang each rank gets them."""
    if not demand.bundles:
        return change, replace(demand, where=replace(demand.where, **where))
    bundles = tuple(replace(part, where=_of_rank(part, where)) for part in demand.bundles)
    return {"bundles": change}, replace(demand, bundles=bundles)


def _of_rank(part: Demand, where: dict[str, Any]) -> PlacementConstraints:
    """Return the constraints of one rank of a gang. A rank without a GPU gets only the constraints on
    nodes."""
    return replace(part.where, **(where if part.gpus else {k: v for k, v in where.items() if k == "nodes"}))


def smaller_cpu_and_memory(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to ask for the CPU and the host memory that are left on a node whose devices have
    room."""
    task, demand = planner.task, planner.task.demand
    if not (demand.cpu or demand.memory_mb):
        return None
    bare = replace(task, demand=replace(demand, cpu=0.0, memory_mb=Mib(0)))
    best: tuple[float, int, NodeName] | None = None
    for node in planner.nodes:
        room = planner.draft.headroom(node, task=task.id, priority=task.priority)
        short = room.cpu < demand.cpu or room.memory_mb < demand.memory_mb
        if short and planner.what_if.places_on({node}, bare) is not None:
            left = (min(room.cpu, demand.cpu), min(room.memory_mb, demand.memory_mb), node)
            best = left if best is None else max(best, left)
    if best is None:
        return None
    cpu, memory_mb = floor(best[0] * 100) / 100, best[1]
    if cpu < MIN_SHARE * demand.cpu or memory_mb < MIN_SHARE * demand.memory_mb:
        return None
    change: dict[str, Any] = {}
    if cpu < demand.cpu:
        change["cpu"] = cpu
    if memory_mb < demand.memory_mb:
        change["memory_mb"] = memory_mb
    smaller = replace(demand, cpu=cpu, memory_mb=Mib(memory_mb))
    words = " and ".join(f"{name} at most {value:g}" for name, value in change.items())
    return planner.placed(change, smaller, f"with {words}") if change else None


STEPS = 64
"""The number of steps into which the size of a rank is divided when smaller ranks are tried."""

NOT_STRICT = {"strict_pack": "pack", "strict_spread": "spread"}


def fewer_ranks(planner: RemedyPlanner) -> Remedy | None:
    demand = planner.task.demand
    fewer = range(demand.least_ranks - 1, ceil(MIN_SHARE * demand.least_ranks) - 1, -1)
    ranks = first_step(fewer, lambda ranks: planner.has_place(_needing(demand, ranks)))
    if ranks is None:
        return None
    text = f"with min_ranks at most {ranks}"
    return planner.placed({"min_ranks": ranks}, _needing(demand, ranks), text)


def _needing(demand: Demand, ranks: int) -> Demand:
    """Return the demand of the gang as it would be if the gang needed this many ranks."""
    custom: dict[str, float] = {}
    for name, amount in (pair for part in demand.bundles[:ranks] for pair in part.custom):
        custom[name] = custom.get(name, 0.0) + amount
    return replace(demand, min_ranks=ranks, custom=tuple(sorted(custom.items())))


def smaller_ranks(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to ask for at most a given amount of GPU memory in each rank."""
    demand = planner.task.demand
    asked = max(asked_mb(planner, part) for part in demand.bundles)
    steps = sorted({asked * step // STEPS for step in range(ceil(MIN_SHARE * STEPS), STEPS)}, reverse=True)
    most = first_step(steps, lambda mb: mb > 0 and planner.has_place(_capped(planner, mb)))
    if most is None:
        return None
    change = {"bundles": {"gpu_mb": most}}
    text = f"with gpu_mb at most {most} ({in_gib(most)}) in each rank"
    return planner.placed(change, _capped(planner, most), text)


def _capped(planner: RemedyPlanner, most: int) -> Demand:
    demand = planner.task.demand
    bundles = tuple(
        with_memory(part, most)[1] if part.gpus and asked_mb(planner, part) > most else part
        for part in demand.bundles
    )
    return replace(demand, bundles=bundles)


def looser_strategy(planner: RemedyPlanner) -> Remedy | None:
    """Return the remedy to ask for the form of the task's strategy that is not strict; None if the task does
    not have a strict strategy, or if that does not help."""
    demand = planner.task.demand
    strategy = NOT_STRICT.get(demand.strategy)
    if strategy is None:
        return None
    return planner.placed(
        {"strategy": strategy}, replace(demand, strategy=strategy), f"with strategy {strategy}"
    )
