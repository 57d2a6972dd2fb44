"""Whom to ask again about what is in quarantine: the word that ends it may have been lost on its way."""

from gpubroker_server.core.domain.units import NodeName, Seconds, Ticks
from gpubroker_server.core.lifecycle.quarantine import answers, is_watched
from gpubroker_server.core.world.world import World

ASK_SECONDS = Seconds(60.0)
"""An agent that finds a process gone says so by itself, once; to be asked costs it a look at its machine, and
the orders on their way to it."""


class Inquiry:
    """What one leader has asked, in its memory. `at` is in seconds on a clock that nobody sets."""

    def __init__(self) -> None:
        self._since: dict[NodeName, Ticks] = {}
        """When a node with such leases was first noticed, or last asked."""

    def due(self, world: World, at: Ticks) -> list[NodeName]:
        """The nodes to ask now, which are those that answer: what becomes of the others is known when an
        agent of theirs answers again."""
        self._since = {node: self._since.get(node, at) for node in _in_doubt(world)}
        due = sorted(node for node, since in self._since.items() if at - since >= ASK_SECONDS)
        self._since |= dict.fromkeys(due, at)
        return due


def _in_doubt(world: World) -> set[NodeName]:
    holders = world.unconfirmed.quarantined.values()
    quarantined = [lease for leases in holders for lease in leases.values()]
    nodes = {world.books[lease.device].device.node for lease in quarantined if is_watched(world, lease)}
    return {node for node in nodes if answers(world, node)}
