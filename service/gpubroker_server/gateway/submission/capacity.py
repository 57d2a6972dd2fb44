"""Whether a demand could ever run here. Answers are cached: a large cluster is not searched per submit."""

from collections.abc import Mapping

from gpubroker_server.core.domain.demand import Demand, interned
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.reasons import Refusal
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.explain.admission import check_demand, check_priority, check_times
from gpubroker_server.core.explain.pools import running_slots, settled
from gpubroker_server.core.planning.tenants.quota import Needs, check_quota
from gpubroker_server.core.world.world import World
from gpubroker_server.gateway.http.problems import Fault, Problem

MAX_CACHED = 4096
"""Distinct demands. When it is full, the cache is emptied."""


class Capacity:
    def __init__(self, world: World, policy: Policy) -> None:
        self._world = world
        self._policy = policy
        self._refusals: dict[Demand, Refusal | None] = {}
        """Valid for one version of the inventory of nodes and devices."""
        self._inventory_version = -1
        self._settled: dict[tuple[Demand, str, tuple[str, ...]], Demand | Refusal] = {}
        """(demand as asked for, pool, limits of running tasks) -> demand to store."""
        self._needs = Needs()

    def settled(
        self, demand: Demand, pool: str, tenant: str, labels: Mapping[str, str], *, at: str = "/resources"
    ) -> Demand:
        """The demand with what its pool and its limits add. Raises Problem if the pool does not fit it.

        `at` points to the demand in the body.
        """
        key = demand, pool, tuple(running_slots(tenant, labels, self._policy))
        found = self._settled.get(key)
        if found is None:
            if len(self._settled) >= MAX_CACHED:
                self._settled.clear()
            found = settled(demand, pool, tenant, labels, self._policy)
            found = self._settled[key] = found if isinstance(found, Refusal) else interned(found)
        if isinstance(found, Refusal):
            raise _problem(found, f"{at}/{found.field}")
        return found

    def check(self, demand: Demand, priority: int, tenant: str, *, at: str = "/resources") -> None:
        """Raises Problem if the demand could never be satisfied at all, at this priority, or for this
        tenant."""
        refusal = self._refusal(demand) or check_priority(demand, priority, self._policy)
        if refusal is None and self._policy.has_quotas and (demand.gpus or demand.bundles):
            counts = self._needs.of(self._world, demand)
            refusal = check_quota(demand, counts, tenant, self._policy)
        if refusal is not None:
            raise _problem(refusal, f"{at}/{refusal.field}")

    def check_times(self, task: Task) -> None:
        """Raises Problem if the timeout, the retries or the grace period exceed the operator's maximum."""
        refusal = check_times(task, self._policy)
        if refusal is not None:
            raise _problem(refusal, f"/{refusal.field}")

    def check_priority(self, demand: Demand, priority: int) -> None:
        """Raises Problem for a priority at which a task would never get what it asks for."""
        refusal = check_priority(demand, priority, self._policy)
        if refusal is not None:
            raise _problem(refusal, "/priority")

    def _refusal(self, demand: Demand) -> Refusal | None:
        world = self._world
        if self._inventory_version != world.inventory_version or len(self._refusals) >= MAX_CACHED:
            self._refusals.clear()
            self._inventory_version = world.inventory_version
        try:
            return self._refusals[demand]
        except KeyError:
            devices = [book.device for book in world.books.values()]
            refusal = check_demand(demand, devices, world.nodes.values(), self._policy)
            self._refusals[demand] = refusal
            return refusal


def _problem(refusal: Refusal, pointer: str) -> Problem:
    fault = Fault(pointer=pointer, detail=refusal.message, code=refusal.code)
    return Problem(refusal.code, refusal.message, errors=[fault])
