"""Which nodes changed and in which order, so that what was found on the others need not be found again."""

from gpubroker_server.core.domain.units import NodeName


class Changes:
    """Counts marks. Costs no more than there are nodes, however often they change."""

    __slots__ = ("_at", "revision")

    def __init__(self) -> None:
        self.revision = 0
        """Of the newest mark; 0 before the first."""
        self._at: dict[NodeName, int] = {}
        """Node -> revision of its newest mark, the newest last."""

    def mark(self, node: NodeName) -> None:
        self.revision += 1
        self._at.pop(node, None)
        self._at[node] = self.revision

    def at(self, node: NodeName) -> int:
        """The revision at which the node was marked last; 0 if never."""
        return self._at.get(node, 0)

    def since(self, revision: int) -> list[NodeName]:
        """The nodes marked after this revision, the last one first."""
        found: list[NodeName] = []
        if revision < self.revision:
            for node, at in reversed(self._at.items()):
                if at <= revision:
                    break
                found.append(node)
        return found


class Marks:
    """Of the nodes of one World."""

    __slots__ = ("changes", "growth")

    def __init__(self) -> None:
        self.changes = Changes()
        self.growth = Changes()
        """Those of them on which a task may now find what it did not find before."""

    def mark(self, node: NodeName, *, grows: bool = True) -> None:
        self.changes.mark(node)
        if grows:
            self.growth.mark(node)
