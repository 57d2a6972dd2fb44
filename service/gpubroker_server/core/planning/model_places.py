"""Tells whether a model could be loaded on GPUs soon, for the choice among servers that have it.

The planner answers for one holder at a time. Models that are idle make room only once another one waits, so
before there is a holder this is an estimate.
"""

from collections.abc import Iterable

from gpubroker_server.core.domain.demand import need_mb
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, model_of
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.model_turns import never_leaves, yields_to_tasks_at
from gpubroker_server.core.planning.nodes.shields import stoppable_at
from gpubroker_server.core.world.ledger import DeviceLedger, Holding
from gpubroker_server.core.world.world import World


def could_be_loaded(
    world: World, model: Task, gpus: Iterable[DeviceLedger], policy: Policy, now: Instant
) -> bool:
    """Return True if enough of these GPUs have the memory that the model needs, once the holders have left
    that make room for a request of the model's priority. `model` is a holder that waits, or would wait."""
    if not model.demand.gpus:
        return True  # It runs on CPUs, and leases nothing.
    suitable = (
        ledger
        for ledger in gpus
        if (need := need_mb(model.demand, ledger.device)) is not None
        and not ledger.device.is_closed
        and _reachable_mb(world, model, ledger, policy, now) >= need
    )
    return sum(1 for _ in suitable) >= model.demand.gpus


def _reachable_mb(world: World, model: Task, ledger: DeviceLedger, policy: Policy, now: Instant) -> int:
    free_mb = ledger.free_mb(task=model.id, priority=model.priority)
    return free_mb + sum(
        holding.occupied_mb
        for holding in ledger.holdings.values()
        if _makes_room(world, holding, model.priority, policy, now)
    )


def _makes_room(world: World, holding: Holding, priority: int, policy: Policy, now: Instant) -> bool:
    """Return True if the holder leaves for a model that a request of this priority asks for."""
    holder = world.tasks.get(TaskId(holding.lease.holder))
    if holder is None or holding.lease.state is LeaseState.QUARANTINED:
        return False
    if stoppable_at(holder, priority, policy, now) <= now:
        return True
    match holder.holder:
        case Model() if not never_leaves(holder):
            # A model in use takes turns with models of its priority, and leaves for no lower one.
            is_idle = now >= yields_to_tasks_at(world, holder, policy)
            return is_idle or priority >= model_of(holder).asked_priority
        case _:
            return False
