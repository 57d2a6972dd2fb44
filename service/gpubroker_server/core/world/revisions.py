"""The order in which nodes changed, so that answers about unchanged nodes stay valid."""

from collections.abc import Iterator

from gpubroker_server.core.domain.units import NodeName


class RevisionLog:
    """Numbers the changes of nodes. Its size is proportional to the number of nodes."""

    __slots__ = ("by_node", "revision")

    def __init__(self) -> None:
        self.revision = 0
        """The number of the newest mark; 0 before the first."""
        self.by_node: dict[NodeName, int] = {}
        """Maps a node to the revision of its newest mark; the newest is last. Only `mark` changes it."""

    def mark(self, node: NodeName) -> None:
        self.revision += 1
        self.by_node.pop(node, None)
        self.by_node[node] = self.revision

    def at(self, node: NodeName) -> int:
        """Return the node's newest revision; 0 if it has none."""
        return self.by_node.get(node, 0)

    def newest_first(self) -> Iterator[tuple[NodeName, int]]:
        """Return an iterator over the nodes and their newest revisions. The next `mark` makes it invalid."""
        return reversed(self.by_node.items())

    def since(self, revision: int) -> list[NodeName]:
        """Return the nodes marked after this revision, the newest first."""
        nodes: list[NodeName] = []
        if revision < self.revision:
            for node, node_revision in reversed(self.by_node.items()):
                if node_revision <= revision:
                    break
                nodes.append(node)
        return nodes


class WorldRevisions:
    __slots__ = ("changes", "growth")

    def __init__(self) -> None:
        self.changes = RevisionLog()
        self.growth = RevisionLog()
        """The changes after which a task may find room that it did not find before."""

    def mark(self, node: NodeName, *, grows: bool = True) -> None:
        self.changes.mark(node)
        if grows:
            self.growth.mark(node)
