"""Answers the questions of admission about the fleet from the World. Refusals are cached until the inventory
of nodes and devices changes."""

from gpubroker.wire.forecasts import Sizing

from gpubroker_server.core.admission.feasibility import new_nodes_could_take
from gpubroker_server.core.admission.pools import largest_share
from gpubroker_server.core.admission.sizing import learned_size
from gpubroker_server.core.domain.demand import Demand, may_use_device
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.explain.possible import check_demand
from gpubroker_server.core.planning.tenants.quota import QuotaNeeds
from gpubroker_server.core.world.world import World

MAX_CACHED = 4096
"""The largest number of distinct demands in the cache. A full cache is emptied."""


class Capacity:
    """The FleetLookup of this process."""

    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._refusals: dict[Demand, Refusal | None] = {}
        """Demand -> its refusal, valid for `_inventory_version` only."""
        self._inventory_version = -1
        self._needs = QuotaNeeds()

    def refusal(self, demand: Demand) -> Refusal | None:
        """Return why no node could ever satisfy this demand, or None."""
        world = self._world
        if self._inventory_version != world.inventory_version or len(self._refusals) >= MAX_CACHED:
            self._refusals.clear()
            self._inventory_version = world.inventory_version
        try:
            return self._refusals[demand]
        except KeyError:
            devices = [ledger.device for ledger in world.ledgers.values()]
            refusal = check_demand(demand, devices, world.nodes.values(), self._policy)
            self._refusals[demand] = refusal
            return refusal

    def lacks_node(self, demand: Demand) -> bool:
        """Return True if no present node could take the demand, and an autoscaler may add a node that can."""
        policy = self._policy
        return self.refusal(demand) is not None and new_nodes_could_take(demand, policy)

    def waiting_for_nodes(self, tenant: str) -> int:
        """Return the number of the tenant's waiting tasks that no present node could take."""
        queue = self._world.queue
        outside = (*queue.held, *queue.awaiting, *queue.delayed, *queue.paused)
        tasks = (self._world.tasks[name] for name in outside)
        in_groups = sum(
            len(group)
            for group in queue.groups.values()
            if group.tenant == tenant and self.lacks_node(group.demand)
        )
        return in_groups + sum(task.tenant == tenant and self.lacks_node(task.demand) for task in tasks)

    def counted_mb(self, demand: Demand) -> int:
        """Return how many MiB the demand counts against a quota."""
        return self._needs.of(self._world, demand)

    def gpu_share(self, demand: Demand) -> float:
        """Return the largest share of a GPU that each GPU of this demand may take."""
        devices = (ledger.device for ledger in self._world.ledgers.values() if ledger.device.present)
        return largest_share(demand, devices)

    def python_of(self, environment: str) -> str:
        """Return the minor version of Python that nodes have found in this environment; empty if none has
        told it."""
        found = (node.environment(environment) for node in self._world.nodes.values())
        return next((known.python for known in found if known is not None and known.python), "")

    def learned_size(self, demand: Demand, tenant: str, subject: str) -> Sizing:
        """Return what earlier runs used of the devices that this demand may use."""
        ledgers = self._world.ledgers.values()
        devices = [ledger.device for ledger in ledgers if may_use_device(demand, ledger.device)]
        return learned_size(self._world.learned.sketches, tenant, subject, devices, self._policy)
