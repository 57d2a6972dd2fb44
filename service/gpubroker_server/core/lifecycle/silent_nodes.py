"""Which nodes have fallen silent, and whether the leader may give them up.

A node that is given up loses its runs to other nodes, and its memory to quarantine. So nobody is given up by
a leader that was itself not listening, nor while no node at all is heard of, nor when too many go at once:
then it is likelier that the network is at fault, or the leader. That pauses until they are heard of again, or
until an operator lets it go on.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.world.world import World

NODE_PATIENCE_SECONDS = 30.0
"""How long a new term waits for the agent of a node with runs before it gives the node up: one may have to be
started there first."""

RECENT_SECONDS = 30.0
"""Nodes that go within so long go at once."""


@dataclass(frozen=True, slots=True)
class PausedDetection:
    """Nodes that would be given up, and are not."""

    since: Instant
    nodes: tuple[NodeName, ...]
    """In order of their names."""
    runs: int
    """On these, and on those that were given up just before."""
    of_runs: int
    message: str


class HeartbeatMonitor:
    """What one leader has heard, in its memory. `at` is in seconds on a clock that nobody sets and that goes
    on while the machine sleeps."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._patience = policy.beat_seconds * policy.beats_missed
        self._heard: dict[NodeName, float] = {}
        self._since: float | None = None
        """Since when it has listened without a gap."""
        self._looked_at = 0.0
        self._accused: dict[NodeName, NodeLost] = {}
        """Told to be lost, and not given up."""
        self._allowed: set[NodeName] = set()
        """An operator has said that these may be given up."""
        self._gone: list[tuple[float, NodeName, int]] = []
        """When which node was given up, and with how many runs."""
        self.paused: PausedDetection | None = None

    def hear(self, node: NodeName, at: float) -> None:
        """Its agent has said something."""
        self._heard[node] = at
        self._accused.pop(node, None)
        self._allowed.discard(node)

    def resume(self, nodes: Iterable[NodeName]) -> None:
        """These may be given up, however many they are."""
        self._allowed |= set(nodes)

    def accuse(self, told: Sequence[NodeLost], world: World, at: float, now: Instant) -> list[NodeLost]:
        """The nodes that the cluster says are dead: those that are given up now. The others are looked at
        again until they are heard of."""
        fresh = [report for report in told if _is_current(world, report)]
        if not fresh:
            return []
        self._accused |= {report.node: report for report in fresh}
        return self._judge([report.node for report in fresh], world, at, now)

    def look(self, world: World, at: float, now: Instant, *, listening: bool) -> list[NodeLost]:
        """The nodes that are given up now. To be called more often than agents say something: whoever comes
        later, or was not `listening`, has to listen for the whole patience first."""
        if self._since is None or not listening or at - self._looked_at > self._policy.beat_seconds:
            self._since = at
        self._looked_at = at
        self._accused = {n: told for n, told in self._accused.items() if _is_current(world, told)}
        late = [node for node, silence in self._silences(world, at) if silence >= self._patience]
        return self._judge([*late, *self._accused], world, at, now)

    def late(self, world: World, at: float, now: Instant) -> dict[NodeName, Instant]:
        """Of the nodes that answer, those of which nothing was heard for more than two beats, with when it
        was last."""
        longest = 2 * self._policy.beat_seconds
        silences = self._silences(world, at)
        return {node: Instant(now - silence) for node, silence in silences if silence > longest}

    def _silences(self, world: World, at: float) -> Iterator[tuple[NodeName, float]]:
        """How long nothing was heard of each node that has answered this term and is not given up."""
        if self._since is not None:
            for name in sorted(world.nodes):
                if world.nodes[name].ready:
                    yield name, at - max(self._heard.get(name, self._since), self._since)

    def _judge(self, doomed: Collection[NodeName], world: World, at: float, now: Instant) -> list[NodeLost]:
        """Of these nodes, those that may be given up."""
        names = sorted(set(doomed))
        why = self._doubt(names, world, at)
        given_up = [name for name in names if why is None or name in self._allowed]
        held = tuple(name for name in names if name not in given_up)
        self._note_pause(held, why, world, at, now)
        return [self._give_up(name, world, at, now) for name in given_up]

    def _doubt(self, names: Sequence[NodeName], world: World, at: float) -> str | None:
        """Why it may not be the nodes that are at fault; None if nothing speaks for that."""
        if not names:
            return None
        missed = self._missed(names, world, at)
        certain = {name for name in names if name in self._accused}
        if certain != set(names) and not any(
            node.ready and node.name not in missed for node in world.nodes.values()
        ):
            return "no node is heard of: the leader may be cut off"
        recent = {node: runs for _at, node, runs in self._recent(at)}
        runs = {node: _runs_on(world, node) for node in missed} | recent
        total = sum(_runs_on(world, node) for node in world.nodes) + sum(recent.values())
        share = self._policy.pause_share
        if len(runs) < self._policy.pause_nodes or sum(runs.values()) <= share * total:
            return None
        return (
            f"{len(runs)} nodes with {sum(runs.values())} of {total} runs fell silent at once, which is more "
            f"than {share:.0%}: the network may be at fault"
        )

    def _missed(self, names: Sequence[NodeName], world: World, at: float) -> set[NodeName]:
        """With them, those that are late too: what goes at one moment is missed within an interval."""
        late = {n for n, silence in self._silences(world, at) if silence > self._patience / 2}
        return late | set(names)

    def _recent(self, at: float) -> list[tuple[float, NodeName, int]]:
        self._gone = [gone for gone in self._gone if at - gone[0] <= RECENT_SECONDS]
        return self._gone

    def _note_pause(
        self, held: tuple[NodeName, ...], why: str | None, world: World, at: float, now: Instant
    ) -> None:
        if not held or why is None:
            self.paused = None
            return
        since = now if self.paused is None else self.paused.since
        recent = sum(runs for _at, _node, runs in self._recent(at))
        runs = sum(_runs_on(world, node) for node in held) + recent
        total = sum(_runs_on(world, node) for node in world.nodes) + recent
        self.paused = PausedDetection(since, held, runs, total, f"{why}; not given up: {', '.join(held)}")

    def _give_up(self, node: NodeName, world: World, at: float, now: Instant) -> NodeLost:
        self._gone.append((at, node, _runs_on(world, node)))
        self._allowed.discard(node)
        told = self._accused.pop(node, None)
        if told is not None:
            return told
        silence = dict(self._silences(world, at))[node]
        why = f"nothing was heard of its agent for {silence:.1f} s"
        return NodeLost(node, world.nodes[node].incarnation, now, why)


def nodes_without_answer(world: World, since: Instant, now: Instant) -> list[NodeLost]:
    """Nodes with runs whose agent has not answered this term, though others have; `since` when the leader has
    listened without a gap.

    While no agent at all answers, it is the leader that is cut off, and giving up runs would free nothing.
    """
    if now < since + NODE_PATIENCE_SECONDS or not any(node.ready for node in world.nodes.values()):
        return []
    nodes = (world.nodes[name] for name in sorted(world.runs) if world.runs[name])
    return [
        NodeLost(node.name, node.incarnation, now, "its agent has not answered")
        for node in nodes
        if not node.ready
    ]


def _is_current(world: World, told: NodeLost) -> bool:
    """Of an agent that another one has taken the place of it says nothing."""
    node = world.nodes.get(told.node)
    return node is not None and node.incarnation == told.incarnation


def _runs_on(world: World, node: NodeName) -> int:
    return len(world.runs.get(node, ()))
