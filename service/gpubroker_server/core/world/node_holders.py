"""Who holds something of a node: what a drain waits for."""

from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.lease import HolderKind
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.world.world import World


def still_on(world: World, node: NodeName) -> set[str]:
    """Return the holders that a drain waits for: runs, models and leases, also if their memory is only not
    yet proven free. A node is drained when no holder is left."""
    holdings = (
        holding for key in world.by_node.get(node, ()) for holding in world.ledgers[key].holdings.values()
    )
    holders = {held.lease.holder for held in holdings if held.lease.holder_kind is not HolderKind.SERVER}
    return holders | {name for name in world.runs.get(node, ()) if not is_server(world.tasks[name])}


def is_server(task: Task) -> bool:
    """Return True for the base cost of a model server, which the broker cannot end."""
    return isinstance(task.holder, Model) and not task.holder.model
