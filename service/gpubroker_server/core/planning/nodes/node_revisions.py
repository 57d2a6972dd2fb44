"""Revisions of nodes, which tell which nodes have changed since the last plan, by the log or with time."""

from collections.abc import Iterable
from math import inf

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.holders import Model
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.planning.nodes.shields import (
    ahead_of_priority,
    is_shielded,
    shield_seconds_of,
    turn_protection_ends_at,
)
from gpubroker_server.core.planning.nodes.victims import is_old_enough
from gpubroker_server.core.world.revisions import RevisionLog
from gpubroker_server.core.world.world import World

EARLY_SECONDS = 0.001
"""The time by which a node whose state changes with time is probed again early rather than late."""


class NodeRevisions:
    """Revisions of the nodes of one World, for all that the planner remembers about a node.

    Marks come from the World, from drafts that share `changes` and `growth`, and from the clock: a sample
    goes stale, the shield of a run ends, or a run admitted in the last cycle becomes a possible victim.
    """

    def __init__(self, world: World, policy: Policy) -> None:
        self.changes = RevisionLog()
        self.growth = RevisionLog()
        """The nodes on which a task may now find room or victims that it did not find before."""
        self._world = world
        self._policy = policy
        self._now = self._cycle_at = Instant(-inf)
        self._world_changes = self._world_growth = 0
        """The revisions of the World's marks that are included."""
        self._opened = 0
        """The revision of `changes` when the last slice began."""
        self._decided: tuple[Decision, ...] = ()
        self._due: dict[NodeName, Instant] = {}
        """Maps a node to the instant at which its state next changes with time."""
        self._turned: dict[NodeName, frozenset[str]] = {}
        """Maps a node to the devices that were stale and the runs that were shielded there."""
        self._young: dict[NodeName, Instant] = {}
        """Maps a node to the admission of its newest run that was too young to be a victim."""

    def are_of(self, world: World, policy: Policy, now: Instant) -> bool:
        """Return True if these revisions are of this World and policy, and of no later instant."""
        return world is self._world and policy == self._policy and now >= self._now

    def close(self, decisions: Iterable[Decision]) -> None:
        """Remember what a slice decided; the next `open` checks whether it was committed."""
        self._decided = tuple(decisions)

    def open(self, now: Instant, cycle_at: Instant) -> tuple[frozenset[NodeName], frozenset[NodeName]]:
        """Mark the nodes that changed since the last slice, and return them and those of them that grew.
        `cycle_at` is the instant at which the cycle began."""
        world = self._world
        grown = set(world.marks.growth.since(self._world_growth))
        if cycle_at != self._cycle_at:
            grown |= {node for node, at in self._young.items() if at < cycle_at}
        self._now, self._cycle_at = now, cycle_at
        grown |= {node for node, due_at in self._due.items() if due_at <= now and self._has_turned(node)}
        # A dropped decision took room in the draft only, so that room is still there.
        if not all(_is_committed(world, decision) for decision in self._decided):
            grown |= set(self.changes.since(self._opened))
        changed = grown | set(world.marks.changes.since(self._world_changes))
        probed = changed - grown
        grown |= {node for node in probed if self._lets_go(node)}
        self._world_changes, self._world_growth = world.marks.changes.revision, world.marks.growth.revision
        self._decided = ()
        for node in sorted(changed):
            self.changes.mark(node)
            if node in grown:
                self.growth.mark(node)
            if node not in probed:
                self._look_ahead(node)
        self._opened = self.changes.revision
        return frozenset(changed), frozenset(grown)

    def _has_turned(self, node: NodeName) -> bool:
        before = self._turned.get(node)
        self._look_ahead(node)
        return self._turned[node] != before

    def _lets_go(self, node: NodeName) -> bool:
        """Return True if something on the node is no longer stale or shielded. This also happens without the
        clock, since a start may be reported late."""
        before = self._turned.get(node, frozenset())
        self._look_ahead(node)
        return not before <= self._turned[node]

    def _look_ahead(self, node: NodeName) -> None:
        """Note what is stale or shielded on a node, and when that may change."""
        world = self._world
        period, turn_at = self._policy.sample_period_seconds, inf
        turned: list[str] = []
        for key in world.by_node.get(node, ()):
            ledger = world.ledgers[key]
            if ledger.device.closure is not None and ledger.device.is_closed:
                continue  # no sample opens a closed device
            if ledger.sample is None or ledger.is_stale(self._now, period):  # a sample may come at any time
                turned.append(key)
                turn_at = self._now
            else:
                turn_at = min(turn_at, ledger.sample.at + 3 * period)  # the limit of `is_stale`
        self._young.pop(node, None)
        for run in self._time_matters_to(node):
            if not is_old_enough(run, self._cycle_at):
                self._young[node] = max(self._young.get(node, Instant(0.0)), run.admitted_at or Instant(0.0))
            if is_shielded(run, self._policy, self._cycle_at):
                turned.append(run.id)
                if run.started_at is not None:
                    turn_at = min(turn_at, run.started_at + shield_seconds_of(run, self._policy))
            if self._has_its_turn(run):
                turned.append(f"turn of {run.id}")
                turn_at = min(turn_at, turn_protection_ends_at(run, self._policy))
        self._due[node] = Instant(turn_at - EARLY_SECONDS)
        self._turned[node] = frozenset(turned)

    def _time_matters_to(self, node: NodeName) -> list[Task]:
        """Return the runs that may be too young or shielded, which are few of the thousands that a node may
        have."""
        least, budget = self._policy.min_run_seconds, self._policy.preemption_budget
        runs = []
        for name in self._world.runs.get(node, ()):
            run = self._world.tasks[name]
            match run.holder:
                case Model():
                    runs.append(run)
                case _ if (
                    run.preemptions >= budget
                    or run.started_at is None
                    or self._cycle_at - run.started_at < least
                    or not is_old_enough(run, self._cycle_at)
                    or self._has_its_turn(run)
                ):
                    runs.append(run)
        return runs

    def _has_its_turn(self, run: Task) -> bool:
        """Return True if the run has its turn before some task of its band whose priority is higher."""
        is_early = self._cycle_at < turn_protection_ends_at(run, self._policy)
        return is_early and ahead_of_priority(run, self._policy, self._cycle_at) > run.priority


def _is_committed(world: World, decision: Decision) -> bool:
    """Return True if the World shows the decision. A decision that only ended pledges counts as not
    committed."""
    return bool(decision.tasks) and all(world.tasks.get(w.task.id) == w.task for w in decision.tasks)
