"""Requests of clients, which the leader carries out. A request for the stacks of a run is passed on to its
agent once, and the answer becomes a blob."""

import json

from gpubroker_server.broker.disk_passes import DISK_REQUESTS
from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.orders import Stacked, StackOrder
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.lifecycle.change_requests import STACK_SECONDS, carry_out_all
from gpubroker_server.core.world.world import World
from gpubroker_server.ports.store import BlobStore


class ClientRequests:
    """Carries out requests, and remembers those that were passed on to agents. The next leader passes them
    on again."""

    def __init__(self, world: World, policy: Policy, blobs: BlobStore) -> None:
        self._world = world
        self._policy = policy
        self._blobs = blobs
        self._asked: set[str] = set()
        """The requests that were passed on to an agent."""

    def carry_out(self, now: Instant) -> list[Decision]:
        """Return the decisions that carry out all requests, except those that an agent may still answer."""
        given_up = now - STACK_SECONDS
        requests = self._world.requests.values()
        due = [
            request
            for request in requests
            if request.what not in DISK_REQUESTS
            and (request.id not in self._asked or request.made_at < given_up)
        ]
        decisions = carry_out_all(self._world, due, now, self._policy)
        orders = (order for decision in decisions for order in decision.orders)
        asked = {order.request for order in orders if isinstance(order, StackOrder)}
        self._asked = (self._asked & self._world.requests.keys()) | asked
        return decisions

    async def answered(self, report: Stacked) -> list[Decision]:
        """Store an agent's answer as a blob, and return the decision that names it. No row names the blob:
        the client reads it at once, and it is swept some time later. Raises StoreUnavailable."""
        if report.request not in self._world.requests:
            return []
        stored = {"stack": report.stack, "message": report.message, "at": report.at}
        digest = await self._blobs.put(json.dumps(stored).encode(), owner=report.task)
        return [Decision(report.task, "stack", requests_done=(report.request,), answer=digest)]
