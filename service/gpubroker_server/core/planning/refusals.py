"""Whether there is still nothing for a demand: as long as no node has grown enough, nobody looks again."""

from collections.abc import Iterator, Mapping, Set

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import NodeName
from gpubroker_server.core.planning.looks import A_GLANCE, AN_ENTRY, Looks
from gpubroker_server.core.planning.node_room import Room
from gpubroker_server.core.planning.offers import Offers
from gpubroker_server.core.planning.preemption import is_coming
from gpubroker_server.core.planning.refused import Refusal, Refused, Since
from gpubroker_server.core.world.queue import Kin
from gpubroker_server.core.world.revisions import Changes


class Refusals:
    """What is known, as it stands in one draft."""

    def __init__(
        self,
        known: Refused,
        offers: Offers,
        policy: Policy,
        changes: Changes,
        growth: Changes,
        awaited: set[NodeName],
        looks: Looks,
        nodes: Set[NodeName],
    ) -> None:
        """`awaited`: to this is added where room is coming for somebody. `nodes`: all that is of concern."""
        self.nodes = nodes
        self._known = known
        self._offers = offers
        self._policy = policy
        self._changes = changes
        self._growth = growth
        self._awaited = awaited
        self._looks = looks
        self._up_to = -1
        """Revision of `growth` that has been compared with all that holds."""
        self._rooms: dict[tuple[int, int, bool], list[Room]] = {}
        self._rooms_at = 0

    def shut(self) -> Mapping[Kin, int]:
        """Demand -> the priority up to which a refusal holds; not to be changed."""
        if self._up_to != self._growth.revision:
            self._compare()
        return self._known.shut

    def _compare(self) -> None:
        """What has grown with what is lacking."""
        self._up_to = self._growth.revision
        for priority, stops, lot in self._known.lots():
            if lot.lacks and lot.since.grown != self._up_to:
                for room in self._rooms_since(lot.since.grown, priority, at_most=stops):
                    self._looks.taken += AN_ENTRY * len(lot.lacks)
                    for kin, refusal in list(lot.met_by(room)):
                        self._known.leave(kin, refusal, lot)
                        refusal.broken = self._changes.revision, priority
            lot.since.changed, lot.since.grown = self._changes.revision, self._up_to

    def has_nothing(self, kin: Kin, priority: int) -> bool:
        """Whether a refusal holds for such tasks, and for their likes of lower priority."""
        if self.shut().get(kin, -1) >= priority:
            return True
        for known in list(self._at_least(kin, priority)):
            if known.coming_on is None and self._holds_for(known, priority):
                self._refuse(kin, known.probe, priority, None)
                return True
        return False

    def is_waiting(self, kin: Kin, priority: int) -> bool:
        """Whether room is coming for tasks of just this priority."""
        for known in list(self._at_least(kin, priority)):
            if known.coming_on is not None and self._waits_for(kin, known, known.coming_on, priority):
                return True
        return False

    def coming_on(self, task: Task, kin: Kin) -> NodeName | None:
        """A node on which room is coming for this task as for its likes of higher priority."""
        nodes = (known.coming_on for known in self._at_least(kin, task.priority))
        return next((node for node in nodes if node and is_coming(self._offers, task, node)), None)

    def worth_a_look(self, task: Task, kin: Kin) -> Set[NodeName]:
        """The usable nodes without those that had nothing when they were last looked at."""
        ruled_out = self._ruled_out(kin, task.priority)
        if not ruled_out:
            return self.nodes
        return self.nodes & set(self._growth.since(ruled_out))

    def seen(self, task: Task, kin: Kin) -> int:
        """The revision of `changes` at which no node had room for it; 0 if that was never found."""
        return max((known.since.changed for known in self._at_least(kin, task.priority)), default=0)

    def refuse(self, task: Task, kin: Kin, coming_on: NodeName | None) -> None:
        """There is nothing for the task, unless room is coming for it."""
        self._refuse(kin, task, task.priority, coming_on)

    def _refuse(self, kin: Kin, probe: Task, priority: int, coming_on: NodeName | None) -> None:
        since = Since(self._changes.revision, self._growth.revision)
        refusal = Refusal(probe, priority, since, coming_on)
        if coming_on is not None:
            refusal.ruled_out_before = self._ruled_out(kin, priority)
            self._awaited.add(coming_on)
        self._known.put(kin, refusal)
        if coming_on is None:
            lot = self._known.lot(priority, stops=self._may_stop(probe), now=since)
            self._known.join(kin, refusal, lot)

    def _ruled_out(self, kin: Kin, priority: int) -> int:
        return max((known.ruled_out for known in self._at_least(kin, priority)), default=0)

    def _at_least(self, kin: Kin, priority: int) -> Iterator[Refusal]:
        """What was found at this and at higher priorities. Where these found no room, or nobody to stop,
        there was none at this one either."""
        for at, known in self._known.of(kin).items():
            if at >= priority:
                yield known

    def _may_stop(self, probe: Task) -> bool:
        return self._policy.preemption and probe.demand.gpus > 0

    def _holds_for(self, known: Refusal, priority: int) -> bool:
        """Whether what has grown since then has nothing for such a task of this priority."""
        if known.broken == (self._changes.revision, priority):
            return False
        at_most = self._may_stop(known.probe)
        return not self._fits_into_any(known, priority, at_most=at_most)

    def _waits_for(self, kin: Kin, known: Refusal, node: NodeName, priority: int) -> bool:
        """Whether the room that is coming will do for this priority as well, and there is none before."""
        changed, grown = self._changes.revision, self._growth.revision
        is_old = known.since.grown != grown or self._changes.at(node) > known.since.changed
        if known.priority == priority and not is_old:
            return True
        if known.broken == (changed, priority):
            return False
        soon = self._offers.outlooks.soon
        if node not in self.nodes or not soon(node, priority).fits(known.probe):
            known.broken = changed, priority
            return False
        if self._fits_into_any(known, priority, at_most=False):
            return False
        self._refuse(kin, known.probe, priority, node)
        return True

    def _fits_into_any(self, known: Refusal, priority: int, *, at_most: bool) -> bool:
        """Whether any node that has grown since then has enough, now or at most."""
        for room in self._rooms_since(known.since.grown, priority, at_most=at_most):
            self._looks.taken += A_GLANCE
            if room.fits(known.probe):
                known.broken = self._changes.revision, priority
                return True
        return False

    def _rooms_since(self, grown: int, priority: int, *, at_most: bool) -> list[Room]:
        """What the nodes that have grown since then have for such a task: at most, or now."""
        if self._rooms_at != self._changes.revision:
            self._rooms_at = self._changes.revision
            self._rooms.clear()
        rooms = self._rooms.get((grown, priority, at_most))
        if rooms is None:
            nodes = [node for node in self._growth.since(grown) if node in self.nodes]
            look = self._offers.outlooks.most if at_most else self._offers.outlooks.now
            self._looks.taken += len(nodes)
            rooms = self._rooms[grown, priority, at_most] = [look(node, priority) for node in nodes]
        return rooms
