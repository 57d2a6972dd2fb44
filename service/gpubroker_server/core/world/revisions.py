"""The order in which nodes changed, so that answers about unchanged nodes stay valid."""

from collections.abc import Iterator

from gpubroker_server.core.domain.units import NodeName


class RevisionLog:
    """Numbers the changes of nodes; its size is the number of nodes."""

    __slots__ = ("by_node", "revision")

    def __init__(self) -> None:
        self.revision = 0
        """Number of the newest mark; 0 before the first."""
        self.by_node: dict[NodeName, int] = {}
        """Node -> revision of its newest mark, the newest last. Changed by `mark` only."""

    def mark(self, node: NodeName) -> None:
        self.revision += 1
        self.by_node.pop(node, None)
        self.by_node[node] = self.revision

    def at(self, node: NodeName) -> int:
        """The node's newest revision; 0 if none."""
        return self.by_node.get(node, 0)

    def newest_first(self) -> Iterator[tuple[NodeName, int]]:
        """Return the nodes and their newest revisions. Must not be read on after a mark."""
        return reversed(self.by_node.items())

    def since(self, revision: int) -> list[NodeName]:
        """The nodes marked after this revision, newest first."""
        found: list[NodeName] = []
        if revision < self.revision:
            for node, node_revision in reversed(self.by_node.items()):
                if node_revision <= revision:
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
