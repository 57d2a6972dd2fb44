"""Detection of silent nodes, and of the cases in which the leader may declare them lost.

The runs of a lost node are requeued and its memory goes into quarantine. Therefore no node is declared lost
by a leader that was itself not listening, nor while no node at all is heard, nor when too many nodes fall
silent at once: the network or the leader is then likelier at fault. Detection pauses until the nodes are
heard again, or until an operator resumes it.

The reports of the cluster's own control service are believed, because it hears the nodes by connections of
its own. A control service that was restarted knows no node at first. A silent node that has not joined it
again UNLISTED_SECONDS later is believed lost if another node has.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from math import inf

from gpubroker.wire.quarantine import HeldBack

from gpubroker_server.core.domain.orders import NodeLost
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.world.world import World

NODE_PATIENCE_SECONDS = 30.0
"""The time for which a new term waits for the agent of a node with runs before it declares the node lost. It
is long, because the agent may have to be started first."""

UNLISTED_SECONDS = 70.0
"""The time for which nodes may take to join a control service that came back. By Ray's defaults a node that
has lost the service ends itself after 60 s."""

LISTING_SECONDS = 15.0
"""The time after which a control service that is not heard counts as away."""

RECENT_SECONDS = 30.0
"""The time within which several lost nodes count as lost at once."""


class PausedDetection(HeldBack, frozen=True):
    since: Instant

    @property
    def summary(self) -> str:
        return f"paused: {', '.join(self.nodes)} silent"


class HeartbeatMonitor:
    """The signs of life that one leader has heard of its nodes. The monitor lives in the leader's memory.
    `at` is in seconds by a clock that never jumps and runs while the machine sleeps."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._patience = policy.beat_seconds * policy.beats_missed
        self._heard: dict[NodeName, float] = {}
        self._since: float | None = None
        self._checked_at = 0.0
        self._reported_dead: dict[NodeName, NodeLost] = {}
        """The nodes that are reported as lost, and not yet declared lost."""
        self._allowed: set[NodeName] = set()
        """The nodes that an operator allows to declare lost."""
        self._unlisted_since: dict[NodeName, float] = {}
        """Maps a known node that is not in the newest listing to the time since which it is not."""
        self._listing_since = self._listed_at = -inf
        """The time since which listings have come without a gap, and the time of the newest listing."""
        self._gone: list[tuple[float, NodeName, int]] = []
        """The nodes declared lost: the time, the node and its number of runs."""
        self.paused: PausedDetection | None = None

    def heard(self, node: NodeName, at: float) -> None:
        self._heard[node] = at
        self._reported_dead.pop(node, None)
        # An operator's permission applies to the silence that ends here, not to a later one.
        self._allowed.discard(node)

    def listed(self, nodes: Collection[NodeName], world: World, at: float) -> None:
        """Record that the control service answers and lists these nodes."""
        if at - self._listed_at > LISTING_SECONDS:
            self._listing_since = at
        self._listed_at = at
        unlisted = world.nodes.keys() - nodes
        self._unlisted_since = {name: self._unlisted_since.get(name, at) for name in unlisted}

    def resume(self, nodes: Iterable[NodeName]) -> None:
        """Allow declaring these nodes lost, however many they are."""
        self._allowed |= set(nodes)

    def report_dead(
        self, reports: Sequence[NodeLost], world: World, at: float, now: Instant
    ) -> list[NodeLost]:
        """Take reports that nodes are dead, and return the nodes declared lost now. An unconfirmed report is
        judged again at each check until the node is heard."""
        fresh = [report for report in reports if _is_current(world, report)]
        confirmed = [report for report in fresh if report.confirmed]
        for report in confirmed:
            self._allowed.discard(report.node)
            self._reported_dead.pop(report.node, None)
        others = [report for report in fresh if not report.confirmed]
        if not others:
            return confirmed
        self._reported_dead |= {report.node: report for report in others}
        return confirmed + self._judge([report.node for report in others], world, at, now)

    def check(self, world: World, at: float, now: Instant, *, listening: bool) -> list[NodeLost]:
        """Return the nodes declared lost now. Call this more often than agents send heartbeats: after a gap,
        or while not `listening`, the whole patience must pass again."""
        if self._since is None or not listening or at - self._checked_at > self._policy.beat_seconds:
            self._since = at
        self._checked_at = at
        self._reported_dead = {
            n: report for n, report in self._reported_dead.items() if _is_current(world, report)
        }
        late = [node for node, silence in self._silences(world, at) if silence >= self._patience]
        return self._judge([*late, *self._reported_dead], world, at, now)

    def late(self, world: World, at: float, now: Instant) -> dict[NodeName, Instant]:
        """Return the nodes that have answered this term and have been silent for more than two heartbeats,
        each with the instant at which it was last heard."""
        longest = 2 * self._policy.beat_seconds
        silences = self._silences(world, at)
        return {node: Instant(now - silence) for node, silence in silences if silence > longest}

    def _silences(self, world: World, at: float) -> Iterator[tuple[NodeName, float]]:
        """Yield how long each node that has answered this term and is not lost has been silent."""
        if self._since is not None:
            for name in sorted(world.nodes):
                if world.nodes[name].ready:
                    yield name, at - max(self._heard.get(name, self._since), self._since)

    def _judge(self, silent: Collection[NodeName], world: World, at: float, now: Instant) -> list[NodeLost]:
        names = sorted(set(silent))
        reason = self._why_paused(names, world, at)
        believed = self._allowed | self._not_back(world, at)
        lost = [name for name in names if reason is None or name in believed]
        held = tuple(name for name in names if name not in lost)
        self._note_pause(held, reason, world, at, now)
        return [self._declare_lost(name, world, at, now) for name in lost]

    def _why_paused(self, names: Sequence[NodeName], world: World, at: float) -> str | None:
        """Return the reason for which the nodes may not be at fault; None if there is none."""
        if not names:
            return None
        missed = self._missed(names, world, at)
        certain = {name for name in names if name in self._reported_dead}
        if certain != set(names) and not any(
            node.ready and node.name not in missed for node in world.nodes.values()
        ):
            return "no node is heard: the leader may be cut off"
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

    def _not_back(self, world: World, at: float) -> set[NodeName]:
        """Return the nodes that have not joined the control service again, though others have. A wrong
        declaration costs only work: the runs are fenced, and their memory stays in quarantine."""
        listed = world.nodes.keys() - self._unlisted_since.keys()
        is_joined = any(self._heard.get(name, -inf) > self._listing_since for name in listed)
        if at - self._listed_at > LISTING_SECONDS or not is_joined:
            return set()
        return {
            name
            for name, since in self._unlisted_since.items()
            if self._listed_at - max(since, self._listing_since) >= UNLISTED_SECONDS
        }

    def _missed(self, names: Sequence[NodeName], world: World, at: float) -> set[NodeName]:
        """Return these nodes and all others that are late. Nodes that fail at the same moment are missed
        within one interval."""
        late = {n for n, silence in self._silences(world, at) if silence > self._patience / 2}
        return late | set(names)

    def _recent(self, at: float) -> list[tuple[float, NodeName, int]]:
        self._gone = [gone for gone in self._gone if at - gone[0] <= RECENT_SECONDS]
        return self._gone

    def _note_pause(
        self, held: tuple[NodeName, ...], reason: str | None, world: World, at: float, now: Instant
    ) -> None:
        if not held or reason is None:
            self.paused = None
            return
        since = now if self.paused is None else self.paused.since
        recent = sum(runs for _at, _node, runs in self._recent(at))
        runs = sum(_runs_on(world, node) for node in held) + recent
        total = sum(_runs_on(world, node) for node in world.nodes) + recent
        message = f"{reason}; not given up: {', '.join(held)}"
        if at - self._listed_at <= LISTING_SECONDS and set(held) <= self._unlisted_since.keys():
            message += (
                f". The cluster's control service answers and does not have them: {UNLISTED_SECONDS:g} s "
                "after it came back they are given up, if any node is there then"
            )
        self.paused = PausedDetection(message, held, runs, total, since)

    def _declare_lost(self, node: NodeName, world: World, at: float, now: Instant) -> NodeLost:
        self._gone.append((at, node, _runs_on(world, node)))
        self._allowed.discard(node)
        report = self._reported_dead.pop(node, None)
        if report is not None:
            return report
        silence = dict(self._silences(world, at))[node]
        message = f"its agent was silent for {silence:.1f} s"
        return NodeLost(node, world.nodes[node].incarnation, now, message)


def nodes_without_answer(world: World, since: Instant, now: Instant) -> list[NodeLost]:
    """Return the nodes with runs that have not answered this term, though others have. While no agent
    answers, the leader is cut off, and giving up runs would free nothing. `since` is the instant since which
    the leader has listened without a gap."""
    if now < since + NODE_PATIENCE_SECONDS or not any(node.ready for node in world.nodes.values()):
        return []
    nodes = (world.nodes[name] for name in sorted(world.runs) if world.runs[name])
    return [
        NodeLost(node.name, node.incarnation, now, "its agent has not answered")
        for node in nodes
        if not node.ready
    ]


def _is_current(world: World, report: NodeLost) -> bool:
    """Return True if the report is about the node's present agent. A report about a replaced agent says
    nothing."""
    node = world.nodes.get(report.node)
    return node is not None and node.incarnation == report.incarnation


def _runs_on(world: World, node: NodeName) -> int:
    return len(world.runs.get(node, ()))


def heard_nodes(world: World, silent: Collection[str]) -> dict[NodeName, bool]:
    """Return, for each node that is expected, whether the leader hears its agent. `silent` are the nodes that
    the leader misses."""
    expected = (node for node in world.nodes.values() if node.ready or node.draining_since is None)
    return {node.name: node.ready and node.name not in silent for node in expected}
