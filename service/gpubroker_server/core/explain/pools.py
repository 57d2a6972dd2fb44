"""What counts beyond one node: pools that tasks name, and limits on running tasks."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gpubroker_server.core.domain.demand import Demand, Labels
from gpubroker_server.core.domain.policy import Policy, Pool
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import in_gib


def apply_pool(
    demand: Demand, pool: str, tenant: str, labels: Mapping[str, str], policy: Policy
) -> Demand | Refusal:
    """The demand with what its tenant, its labels and its pool add, or why the pool does not fit. Done once,
    at submit: a later change of a pool or a limit changes its amount, not which limits a task counts
    against."""
    slots = dict.fromkeys(_running_slots(tenant, labels, policy), 1.0)
    if not pool:
        return replace(demand, slots=tuple(sorted(slots.items()))) if slots else demand
    chosen = next((known for known in policy.pools if known.name == pool), None)
    if chosen is None:
        names = ", ".join(known.name for known in policy.pools) or "none"
        return Refusal("pool-mismatch", f"there is no pool {pool!r}; configured are: {names}", "pool")
    inside = []
    for part in demand.bundles or (demand,):
        refusal = _mismatch(part, chosen)
        if refusal is not None:
            return replace(refusal, field="bundles") if demand.bundles else refusal
        inside.append(_inside_pool(part, chosen))
        _count(slots, part, chosen)
    found = replace(demand, bundles=tuple(inside)) if demand.bundles else inside[0]
    return replace(found, pool=pool, slots=tuple(sorted(slots.items())))


def _count(slots: dict[str, float], part: Demand, pool: Pool) -> None:
    for field, amount in _amounts(part, pool):
        slot = f"pool:{pool.name}:{field}"
        slots[slot] = slots.get(slot, 0.0) + amount


def _inside_pool(demand: Demand, pool: Pool) -> Demand:
    where = demand.where
    kinds = where.kinds or (pool.kinds if demand.gpus else ())
    return replace(demand, where=replace(where, kinds=kinds, nodes=_merged(where.nodes, pool.nodes)))


def reapply_pool(demand: Demand, policy: Policy) -> Demand | Refusal:
    """The demand, whose sizes have changed, with what it now counts against its pool."""
    if not demand.pool:
        return demand
    chosen = next((known for known in policy.pools if known.name == demand.pool), None)
    if chosen is None:
        return Refusal("pool-mismatch", f"there is no pool {demand.pool!r} any more", "pool")
    slots = {name: amount for name, amount in demand.slots if not name.startswith("pool:")}
    for part in demand.bundles or (demand,):
        refusal = _mismatch(part, chosen)
        if refusal is not None:
            return refusal
        _count(slots, part, chosen)
    return replace(demand, slots=tuple(sorted(slots.items())))


def without_pool(demand: Demand, policy: Policy) -> tuple[Demand, dict[str, Any]]:
    """The demand without its pool, and the other fields that this changes, as a submit names them."""
    chosen = next((known for known in policy.pools if known.name == demand.pool), Pool(demand.pool))
    slots = tuple(slot for slot in demand.slots if not slot[0].startswith("pool:"))
    outside = replace(demand, pool="", slots=slots)
    if demand.bundles:
        found = [_outside_pool(part, chosen) for part in demand.bundles]
        change = {name: to for _, fields in found for name, to in fields.items()}
        bundles = tuple(part for part, _ in found)
        return replace(outside, bundles=bundles), {"bundles": change} if change else {}
    return _outside_pool(outside, chosen)


def _outside_pool(demand: Demand, pool: Pool) -> tuple[Demand, dict[str, Any]]:
    where, change = demand.where, dict[str, Any]()
    if pool.kinds and where.kinds == pool.kinds:
        where, change["kinds"] = replace(where, kinds=()), []
    nodes = tuple(wanted for wanted in where.nodes if wanted not in pool.nodes)
    if nodes != where.nodes:
        where, change["nodes"] = replace(where, nodes=nodes), {label: list(to) for label, to in nodes}
    return replace(demand, where=where), change


def _running_slots(tenant: str, labels: Mapping[str, str], policy: Policy) -> Iterable[str]:
    """The limits on running tasks that a task of this tenant with these labels counts against."""
    if not policy.custom_limits:
        return ()
    names = (f"tenant:{tenant}", *(f"label:{key}={value}" for key, value in labels.items()))
    return (name for name in names if policy.limit_of(name) is not None)


def _mismatch(demand: Demand, pool: Pool) -> Refusal | None:
    where = demand.where
    foreign = [kind for kind in where.kinds if pool.kinds and kind not in pool.kinds]
    if foreign:
        message = f"the pool {pool.name!r} has no {', '.join(foreign)}; its kinds are {', '.join(pool.kinds)}"
        return Refusal("pool-mismatch", message, "kinds")
    if any(not values for _, values in _merged(where.nodes, pool.nodes)):
        there_are = "; ".join(f"{label}={' or '.join(values)}" for label, values in pool.nodes)
        message = f"the pool {pool.name!r} has no such nodes; its nodes are {there_are}"
        return Refusal("pool-mismatch", message, "nodes")
    if demand.gpus and not demand.takes_whole_devices and not pool.fractions:
        message = f"the pool {pool.name!r} gives whole GPUs only; ask for gpus, or exclusive"
        return Refusal("pool-mismatch", message, "gpu_fraction" if demand.gpu_fraction else "gpu_mb")
    if pool.gpu_mb is not None and demand.gpus and demand.gpu_mb is None:
        message = (
            f"the pool {pool.name!r} has {in_gib(pool.gpu_mb)} of GPU memory, and whole GPUs and shares "
            "differ in size; state the size with gpu_mb"
        )
        return Refusal("pool-mismatch", message, "gpu_mb")
    return None


def _merged(wanted: Labels, had: Labels) -> Labels:
    """Both hold; a label on which they contradict each other has no values left."""
    merged = dict(had)
    for label, values in wanted:
        known = merged.get(label)
        merged[label] = values if known is None else tuple(value for value in values if value in known)
    return tuple(sorted(merged.items()))


def _amounts(demand: Demand, pool: Pool) -> Iterable[tuple[str, float]]:
    taken = {
        "cpu": demand.cpu,
        "gpus": float(demand.gpus),
        "gpu_mb": float(demand.gpus * (demand.gpu_mb or 0)),
        "memory_mb": float(demand.memory_mb),
        **{f"custom/{name}": amount for name, amount in demand.custom},
    }
    limited = dict(pool.amounts())
    return ((field, amount) for field, amount in taken.items() if field in limited and amount)
