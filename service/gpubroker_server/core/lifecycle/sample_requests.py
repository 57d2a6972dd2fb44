"""Which nodes are to measure their devices at once: memory was released there that must be seen free."""

from typing import NamedTuple

from gpubroker_server.core.domain.units import MonotonicSeconds, NodeName, Seconds
from gpubroker_server.core.world.world import World

AGAIN_SECONDS = Seconds(0.05)


class _Wait(NamedTuple):
    since: MonotonicSeconds
    again_at: float


class SampleRequests:
    """In one leader's memory; `at` is in seconds by a monotonic clock.

    A sample may be too old by a hair, as the database's clock and the node's are compared over a network:
    then the node is asked again, each time after twice the time. Samples come now and then anyway.
    """

    def __init__(self) -> None:
        self._waits: dict[NodeName, _Wait] = {}

    def due(self, world: World, at: MonotonicSeconds) -> list[NodeName]:
        nodes = {world.ledgers[key].device.node for key in world.unseen_releases}
        self._waits = {node: self._waits.get(node, _Wait(at, at)) for node in nodes}
        due = sorted(node for node, wait in self._waits.items() if at >= wait.again_at)
        for node in due:
            since = self._waits[node].since
            self._waits[node] = _Wait(since, at + max(AGAIN_SECONDS, at - since))
        return due
