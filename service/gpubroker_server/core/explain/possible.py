"""Refuse tasks that could never run on the World's nodes. Gangs need the planner for this check."""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from gpubroker_server.core.admission.feasibility import check, check_priority, ranks_text, total_of
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.holders import Gang
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.planning.gangs.gang_nodes import empty_gang_nodes
from gpubroker_server.core.planning.gangs.gang_search import may_fit
from gpubroker_server.core.world.world import World

STRATEGY_TEXT = {
    "pack": "at once",
    "spread": "at once",
    "strict_pack": "on one node (strict_pack)",
    "strict_spread": "each on a node of its own (strict_spread)",
}


def check_task(task: Task, world: World, policy: Policy) -> Refusal | None:
    """Return the refusal of a task that could never run on the World's nodes, or never at its priority; or
    None."""
    devices = [ledger.device for ledger in world.ledgers.values()]
    refusal = check_demand(task.demand, devices, world.nodes.values(), policy)
    return refusal or check_priority(task.demand, task.priority, policy)


def check_demand(
    demand: Demand, devices: Iterable[Device], nodes: Iterable[Node], policy: Policy
) -> Refusal | None:
    """Return the refusal of a demand that could never run, or None. The refusal of a gang names the ranks."""
    device_list, node_list = list(devices), list(nodes)
    if not demand.bundles:
        return check(demand, device_list, node_list, policy)
    refusal = check(total_of(demand), (), (), policy)  # limits over all nodes
    if refusal is not None:
        return replace(refusal, message=f"all ranks together: {refusal.message}", field="bundles")
    for bundle in dict.fromkeys(demand.bundles):
        refusal = check(bundle, device_list, node_list, policy)
        if refusal is not None:
            ranks = ranks_text(demand, bundle)
            return replace(refusal, message=f"{ranks}: {refusal.message}", field="bundles")
    return _too_many(demand, device_list, node_list) if node_list else None


def _too_many(demand: Demand, devices: Sequence[Device], nodes: Sequence[Node]) -> Refusal | None:
    gang_nodes = empty_gang_nodes(nodes, devices)
    gang = Task(TaskId(""), "", "", 0, demand, Instant(0.0), holder=Gang())
    least = demand.least_ranks
    if may_fit(gang, least, gang_nodes):
        return None
    fit, too_many = 0, least
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        fit, too_many = (middle, too_many) if may_fit(gang, middle, gang_nodes) else (fit, middle)
    ranks = f"{least} ranks" if least == len(demand.bundles) else f"the {least} ranks it needs at least"
    message = (
        f"{ranks} never fit {STRATEGY_TEXT[demand.strategy]}: even when empty the cluster has room for "
        f"{fit}, and none for rank {fit} beside them; ask for fewer or smaller ranks, or for another strategy"
    )
    return Refusal("exceeds-capacity", message, "bundles")
