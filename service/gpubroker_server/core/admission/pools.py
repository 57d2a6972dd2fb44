"""Limits beyond one node: pools that tasks name, and limits on running tasks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand, Labels, need_mb
from gpubroker_server.core.domain.device import Device
from gpubroker_server.core.domain.policy import Policy, Pool
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.units import in_gib

ShareOf = Callable[[Demand], float]


def apply_pool(
    demand: Demand, pool: str, tenant: str, labels: Mapping[str, str], policy: Policy, share_of: ShareOf
) -> Demand | Refusal:
    """Return the demand with the limits of its tenant, its labels and its pool, and the constraints of its
    pool; or the refusal if the pool does not fit.

    This is done once, when a task is submitted. A later change of a pool or a limit changes amounts, but not
    the limits against which a task counts. `share_of` returns the share of a GPU that each GPU of a demand
    takes.
    """
    if not pool and not policy.custom_limits:
        return demand  # the usual case, on the way of each submit
    slots = dict.fromkeys(_running_slots(tenant, labels, policy), 1.0)
    if not pool:
        return replace(demand, slots=tuple(sorted(slots.items()))) if slots else demand
    chosen = next((candidate for candidate in policy.pools if candidate.name == pool), None)
    if chosen is None:
        names = ", ".join(candidate.name for candidate in policy.pools) or "none"
        return Refusal("pool-mismatch", f"there is no pool {pool!r}; configured are: {names}", "pool")
    inside = []
    for part in demand.bundles or (demand,):
        refusal = _mismatch(part, chosen)
        if refusal is not None:
            return replace(refusal, field="bundles") if demand.bundles else refusal
        inside.append(_inside_pool(part, chosen))
    placed = replace(demand, bundles=tuple(inside)) if demand.bundles else inside[0]
    return _counted(replace(placed, pool=pool, slots=tuple(slots.items())), chosen, share_of)


def _counted(demand: Demand, pool: Pool, share_of: ShareOf) -> Demand:
    """Return the demand with the amounts that it counts against its pool. Each rank of a gang has its own
    amounts, since the gang may run with fewer ranks; the gang itself has the sum for the ranks that it needs
    at least."""
    slots = dict(demand.slots)
    if not demand.bundles:
        slots |= _amounts(demand, pool, share_of)
        return replace(demand, slots=tuple(sorted(slots.items())))
    bundles = tuple(
        replace(part, slots=tuple(sorted(_amounts(part, pool, share_of).items()))) for part in demand.bundles
    )
    for name, amount in (slot for part in bundles[: demand.least_ranks] for slot in part.slots):
        slots[name] = round(slots.get(name, 0.0) + amount, 6)
    return replace(demand, bundles=bundles, slots=tuple(sorted(slots.items())))


def largest_share(demand: Demand, devices: Iterable[Device]) -> float:
    """Return the largest share of one of these devices that each GPU of the demand would take; 1 for whole
    devices, and if the demand may use none of the devices."""
    if not demand.gpus or demand.takes_whole_devices:
        return 1.0
    needs = ((need_mb(demand, device), device.allocatable_mb) for device in devices)
    return max((round(need / size, 6) for need, size in needs if need is not None), default=1.0)


def _inside_pool(demand: Demand, pool: Pool) -> Demand:
    where = demand.where
    kinds = where.kinds or (pool.kinds if demand.gpus else ())
    return replace(demand, where=replace(where, kinds=kinds, nodes=_merged(where.nodes, pool.labels)))


def reapply_pool(demand: Demand, policy: Policy, share_of: ShareOf) -> Demand | Refusal:
    """Return a demand whose sizes have changed with the amounts that it now counts against its pool, or the
    refusal if the pool does not fit any more."""
    if not demand.pool:
        return demand
    chosen = next((candidate for candidate in policy.pools if candidate.name == demand.pool), None)
    if chosen is None:
        return Refusal("pool-mismatch", f"there is no pool {demand.pool!r} any more", "pool")
    for part in demand.bundles or (demand,):
        refusal = _mismatch(part, chosen)
        if refusal is not None:
            return refusal
    others = tuple(slot for slot in demand.slots if not slot[0].startswith("pool:"))
    return _counted(replace(demand, slots=others), chosen, share_of)


def without_pool(demand: Demand, policy: Policy) -> tuple[Demand, dict[str, Any]]:
    """Return the demand without its pool, and the new values of the other fields that change, named as in a
    submission."""
    chosen = next(
        (candidate for candidate in policy.pools if candidate.name == demand.pool), Pool(demand.pool)
    )
    slots = tuple(slot for slot in demand.slots if not slot[0].startswith("pool:"))
    outside = replace(demand, pool="", slots=slots)
    if demand.bundles:
        parts = [_outside_pool(replace(part, slots=()), chosen) for part in demand.bundles]
        change = {name: to for _, fields in parts for name, to in fields.items()}
        bundles = tuple(part for part, _ in parts)
        return replace(outside, bundles=bundles), {"bundles": change} if change else {}
    return _outside_pool(outside, chosen)


def _outside_pool(demand: Demand, pool: Pool) -> tuple[Demand, dict[str, Any]]:
    where, change = demand.where, dict[str, Any]()
    if pool.kinds and where.kinds == pool.kinds:
        where, change["kinds"] = replace(where, kinds=()), []
    nodes = tuple(wanted for wanted in where.nodes if wanted not in pool.labels)
    if nodes != where.nodes:
        where, change["nodes"] = replace(where, nodes=nodes), {label: list(to) for label, to in nodes}
    return replace(demand, where=where), change


def _running_slots(tenant: str, labels: Mapping[str, str], policy: Policy) -> Iterable[str]:
    """Return the names of the limits on running tasks against which a task of this tenant with these labels
    counts."""
    names = (f"tenant:{tenant}", *(f"label:{key}={value}" for key, value in labels.items()))
    return (name for name in names if policy.limit_of(name) is not None)


def _mismatch(demand: Demand, pool: Pool) -> Refusal | None:
    where = demand.where
    foreign = [kind for kind in where.kinds if pool.kinds and kind not in pool.kinds]
    if foreign:
        message = f"the pool {pool.name!r} has no {', '.join(foreign)}; its kinds are {', '.join(pool.kinds)}"
        return Refusal("pool-mismatch", message, "kinds")
    if any(not values for _, values in _merged(where.nodes, pool.labels)):
        there_are = "; ".join(f"{label}={' or '.join(values)}" for label, values in pool.labels)
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
    """Return the labels that satisfy both `wanted` and `had`. A label on which they contradict each other has
    no values left."""
    merged = dict(had)
    for label, values in wanted:
        allowed = merged.get(label)
        merged[label] = values if allowed is None else tuple(value for value in values if value in allowed)
    return tuple(sorted(merged.items()))


def _amounts(demand: Demand, pool: Pool, share_of: ShareOf) -> dict[str, float]:
    """Return the amount that the demand counts against each limit of the pool. Amounts of 0 are left out."""
    limited = dict(pool.amounts())
    taken = {
        "cpu": demand.cpu,
        "gpus": round(demand.gpus * share_of(demand), 6) if demand.gpus and "gpus" in limited else 0.0,
        "gpu_mb": float(demand.gpus * (demand.gpu_mb or 0)),
        "memory_mb": float(demand.memory_mb),
        **{f"custom/{name}": amount for name, amount in demand.custom},
    }
    return {
        f"pool:{pool.name}:{field}": amount for field, amount in taken.items() if field in limited and amount
    }
