"""The order in which nodes changed, so that answers about unchanged nodes stay valid."""

from gpubroker_server.core.domain.units import NodeName


class RevisionLog:
    """Numbers the changes of nodes; its size is the number of nodes."""

    __slots__ = ("_at", "revision")

    def __init__(self) -> None:
        self.revision = 0
        """Number of the newest mark; 0 before the first."""
        self._at: dict[NodeName, int] = {}
        """Node -> revision of its newest mark, the newest last."""

    def mark(self, node: NodeName) -> None:
        self.revision += 1
        self._at.pop(node, None)
        self._at[node] = self.revision

    def at(self, node: NodeName) -> int:
        """The node's newest revision; 0 if none."""
        return self._at.get(node, 0)

    def since(self, revision: int) -> list[NodeName]:
        """The nodes marked after this revision, newest first."""
        found: list[NodeName] = []
        if revision < self.revision:
            for node, at in reversed(self._at.items()):
                if at <= revision:
                    break
                found.append(node)
        return found


class WorldRevisions:
    __slots__ = ("changes", "growth")

    def __init__(self) -> None:
        self.changes = RevisionLog()
        self.growth = RevisionLog()
        """Changes after which a task may find room that it did not find before."""

    def mark(self, node: NodeName, *, grows: bool = True) -> None:
        self.changes.mark(node)
        if grows:
            self.growth.mark(node)
