"""The amounts that background and idle work may still take of the fleet. Fleet control sets the amounts, and
starts of such work use them up."""

from collections.abc import Iterator, Mapping

from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.policy import BAND_NAMES, band_of
from gpubroker_server.core.domain.units import NodeName, node_of

IDLE_TOP = band_of(BAND_NAMES["idle"])[2]
BACKGROUND_TOP = band_of(BAND_NAMES["background"])[2]
"""The highest priority of background work; idle work is below it."""


def gives_way(priority: int) -> bool:
    """Return True for the priority of a model that makes room for all work at once. Such a model is neither
    background nor idle work."""
    return priority < 0


def is_background(priority: int) -> bool:
    return 0 <= priority <= BACKGROUND_TOP


def is_idle_work(priority: int) -> bool:
    return 0 <= priority <= IDLE_TOP


class BackgroundRoom:
    """The MiB that are left for background work in each scope, which is a part of the fleet with a target.
    The last start in a scope may take more than is left, because otherwise a large task would never start."""

    __slots__ = ("left_mb", "scopes")

    def __init__(
        self,
        left_mb: Mapping[str, int] | None = None,
        scopes: Mapping[NodeName, tuple[str, ...]] | None = None,
    ) -> None:
        """`scopes` maps a node to the scopes that it is in. A node that is in no scope is open."""
        self.left_mb = dict(left_mb or {})
        self.scopes = scopes or {}

    def copy(self) -> "BackgroundRoom":
        return BackgroundRoom(self.left_mb, self.scopes)

    def is_closed(self, node: NodeName) -> bool:
        """Return True if nothing is left for background work in one of the node's scopes."""
        return any(self.left_mb[scope] <= 0 for scope in self.scopes.get(node, ()))

    def closed(self) -> Iterator[NodeName]:
        return filter(self.is_closed, self.scopes)

    def take(self, lease: Lease) -> list[NodeName]:
        """Count a new lease, and return the nodes that this has closed."""
        if not is_background(lease.priority):
            return []
        closed = []
        for scope in self.scopes.get(node_of(lease.device), ()):
            before = self.left_mb[scope]
            self.left_mb[scope] -= lease.mb
            if before > 0 >= self.left_mb[scope]:
                closed += [node for node, scopes in self.scopes.items() if scope in scopes]
        return closed
