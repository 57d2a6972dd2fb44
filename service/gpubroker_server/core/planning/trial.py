"""Whether one task would start if the planner looked at it now, and what that would take. Changes nothing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, NodeName
from gpubroker_server.core.lifecycle.model_lifecycle import in_time
from gpubroker_server.core.planning.backfill import Forecast, Guards, Planned
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.fair_share import Shares
from gpubroker_server.core.planning.gang_placement import Gang
from gpubroker_server.core.planning.gang_preemption import choose_for_gang
from gpubroker_server.core.planning.guarantees import Claims
from gpubroker_server.core.planning.lines import First, Lines
from gpubroker_server.core.planning.looks import Looks
from gpubroker_server.core.planning.memory import Found
from gpubroker_server.core.planning.node_room import Known, Outlooks
from gpubroker_server.core.planning.offers import Offers
from gpubroker_server.core.planning.placement import Places, worth_of
from gpubroker_server.core.planning.preemption import (
    Eviction,
    Search,
    could_make_room,
    is_coming,
    may_preempt,
)
from gpubroker_server.core.planning.quota import Quotas
from gpubroker_server.core.planning.reclaim import (
    evict_with_restraint,
    make_room_in_quota,
    reclaim,
    reclaim_for_gang,
)
from gpubroker_server.core.planning.victims import Together
from gpubroker_server.core.world.queue import OrderKey, order_key, own_key


@dataclass(frozen=True, slots=True)
class Trial:
    """At most one of the three is there; none: it waits, and nothing that is known is coming."""

    places: Gang | None = None
    """It starts here: one place, of a gang one for each rank."""
    eviction: Eviction | None = None
    """These would be asked to leave, and it starts when they have."""
    coming_on: tuple[NodeName, ...] = ()
    """Room is being given back on these nodes; nobody is stopped for it."""

    @property
    def is_way(self) -> bool:
        """It starts, at once or when the victims have left."""
        return self.places is not None or self.eviction is not None


class Planner:
    """Asks of one draft, as often as one likes, what the planner would make of it; what it works out about a
    node serves all questions until the draft changes there."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        forecasts: Sequence[Forecast] = (),
        known: Known | None = None,
    ) -> None:
        """`forecasts`: they keep room from those who stand behind them. `known`: of the nodes of this draft;
        what is found out is added."""
        self._draft = draft
        self._now = now
        order = _order_by(draft, policy, now)
        self._quotas = Quotas(draft, policy)
        self._claims = Claims(draft, policy, self._quotas)
        self._guards = Guards(draft, policy, now, self._claims, order, forecasts)
        self._lines = Lines(draft, policy, now, order, forecasts)
        outlooks = Outlooks(draft, policy, now, now, {} if known is None else known)
        worth = worth_of(draft.world, policy)
        self._places = Places(draft, policy, now, worth=worth, outlooks=outlooks)
        self._offers = Offers(draft, policy, now, outlooks=outlooks)
        self._rooms: dict[tuple[Demand, int], tuple[int, dict[NodeName, Found]]] = {}
        """What such tasks found on all nodes when the draft had changed so often."""

    def is_over_quota(self, task: Task) -> bool:
        """Its tenant may take no more for such a task now. Of one with pledges: not before those who were
        asked to leave have left, though the devices may have room already."""
        return self._quotas.is_short(task)

    def place(self, task: Task) -> Gang | None:
        """Where it would be put now."""
        return self.place_on(self._offers.nodes, task)

    def place_on(self, nodes: Iterable[NodeName], task: Task) -> Gang | None:
        """The same if it had only these nodes; a gang has all."""
        return self._beside(task, self._room(nodes, task))

    def kept_for(self, task: Task) -> Sequence[Planned | First]:
        """The forecasts that keep from it what it would take else, if there is a place and they do."""
        found = self._room(self._offers.nodes, task)
        if not found or self._beside(task, found) is not None:
            return ()
        if first := self._lines.ahead_of(task):
            return first
        on = sorted({one.node for one in _best(found)} & self._guards.on.keys())
        return tuple(one for node in on for one in self._guards.delayed_by(task, node, everybody=False))

    def _room(self, nodes: Iterable[NodeName], task: Task) -> dict[NodeName, Found] | Gang:
        """The best place on each node that has one, or of a gang; what forecasts keep counts as free."""
        if self.is_over_quota(task):
            return ()
        if task.demand.bundles:
            return self._places.gang(task) or ()
        if self._draft.short_of(task, self._offers.policy.custom_limits):
            return ()
        if nodes is not self._offers.nodes or self._draft.pledges_of(task.id):
            return {node: option for node in nodes if (option := self._places.on(node, task)) is not None}
        likes, changes = (task.demand, task.priority), self._draft.changes
        seen, found = self._rooms.get(likes, (None, {}))
        for node in nodes if seen is None else changes.since(seen):
            option = self._places.on(node, task)
            if option is not None:
                found[node] = option
            else:
                found.pop(node, None)
        self._rooms[likes] = changes.revision, found
        return found

    def _beside(self, task: Task, room: dict[NodeName, Found] | Gang) -> Gang | None:
        """The best of these places at which it delays no forecast; those behind it are spared if possible."""
        guards = self._guards
        if not room or self._draft.pledges_of(task.id):
            return _best(room) or None
        if self._lines.ahead_of(task):
            return None
        if not guards.on:
            return _best(room)
        if not isinstance(room, dict):
            return self._places.gang(task, guards) if guards.bars(task, room, everybody=False) else room
        [best] = _best(room)
        for everybody in (True, False):
            if not guards.bars(task, (best,), everybody=everybody):
                return (best,)
            found = [option for node, option in room.items() if node not in guards.on]
            for node in room.keys() & guards.on.keys():
                option = self._places.on_beside(guards, node, task, everybody=everybody)
                found += [] if option is None else [option]
            if found:
                return (min(found)[1],)
        return None

    def may_have(self, node: NodeName, task: Task) -> bool:
        """Whether the node has room for it, or could if everybody left who may be stopped for it; whatever
        its tenant may take."""
        if self._places.on(node, task) is not None:
            return True
        may_stop = task.demand.gpus > 0 and may_preempt(self._offers, task)
        return may_stop and could_make_room(self._offers, task, node)

    def steps(self, nodes: Iterable[NodeName]) -> set[int]:
        """The priorities from which on a task may have more on one of these nodes than below."""
        return {step + 1 for node in nodes for step in self._offers.outlooks.steps(node)}

    def could_start(self, task: Task) -> bool:
        """Whether `attempt` finds a place, or may find a way to one."""
        if task.demand.bundles:
            return self.attempt(task).is_way
        if self.is_over_quota(task):
            return self._claims.may_yield(task.tenant, task.priority)
        if may_preempt(self._offers, task) and any(
            could_make_room(self._offers, task, node) for node in self._offers.nodes
        ):
            return True
        return self.place(task) is not None or bool(self._claims.of(task))

    def attempt(self, task: Task, most_nodes: int | None = None) -> Trial:
        """What would be decided for this task, as one that waits and may be planned, of any id.

        The tasks ahead of it are taken to have been looked at and to wait on, as they do between two cycles.
        With `most_nodes`, victims are looked for on so many nodes only.
        """
        trial = self._attempt(task, most_nodes)
        if trial.eviction is not None and not in_time(task, trial.eviction.deadline_at):
            return Trial()
        return trial

    def _attempt(self, task: Task, most_nodes: int | None) -> Trial:
        room = self._room(self._offers.nodes, task)
        places = self._beside(task, room)
        if places is not None or self._draft.pledges_of(task.id) or self._lines.ahead_of(task):
            return Trial(places)
        if self.is_over_quota(task):
            return self._make_room_in_quota(task)
        if task.demand.bundles:
            return Trial() if room else self._make_room_for_gang(task)
        if not may_preempt(self._offers, task):
            return Trial()
        open_nodes = frozenset(self._offers.nodes) - self._guards.closed_to(task)
        if room:  # which is kept from it
            return self._search(task, open_nodes, most_nodes)
        if (taken_back := self._reclaim(task, open_nodes)) is not None:
            return Trial(eviction=taken_back)
        trial = self._search(task, self._offers.nodes, most_nodes)
        if trial.eviction is not None and trial.eviction.node not in open_nodes:
            return self._search(task, open_nodes, most_nodes)
        return trial

    def _make_room_in_quota(self, task: Task) -> Trial:
        lacks_mb, nodes = self._quotas.lacks_mb(task), self._offers.nodes - self._guards.closed_to(task)
        return Trial(eviction=make_room_in_quota(self._offers, task, lacks_mb, self._now, nodes))

    def _make_room_for_gang(self, task: Task) -> Trial:
        surplus, open_nodes = self._claims.of(task), self._offers.nodes - self._guards.closed_to(task)
        if surplus:
            back = reclaim_for_gang(self._offers, task, surplus, self._now, open_nodes)
            if isinstance(back, Eviction):
                return Trial(eviction=back)
        restraint = self._claims.restraint_on(task)
        together: Together = tuple if restraint is None else restraint.together
        nodes = self._offers.nodes - self._guards.off_limits(task)
        way = choose_for_gang(self._offers, task, self._now, nodes, together)
        if isinstance(way, Eviction):
            return Trial(eviction=way)
        return Trial(coming_on=way.nodes if way else ())

    def _search(self, task: Task, nodes: frozenset[NodeName], most_nodes: int | None) -> Trial:
        if most_nodes is not None:
            hopeful = (node for node in sorted(nodes) if could_make_room(self._offers, task, node))
            nodes = frozenset(islice(hopeful, most_nodes))
        search = Search(task, nodes)
        search.go_on(self._offers, Looks(inf))
        coming_on = () if search.coming_on is None else (search.coming_on,)
        found = search.eviction(self._offers, self._now)
        restraint = None if found is None else self._claims.restraint_on(task)
        if found is not None and restraint is not None and not restraint.allows(found.victims, found.surplus):
            found = evict_with_restraint(self._offers, task, restraint, self._now, nodes)
        return Trial(eviction=found, coming_on=coming_on)

    def _reclaim(self, task: Task, nodes: frozenset[NodeName]) -> Eviction | None:
        surplus = self._claims.of(task)
        if not surplus or any(is_coming(self._offers, task, node) for node in self._offers.nodes):
            return None
        return reclaim(self._offers, task, surplus, self._now, nodes)


def _best(room: dict[NodeName, Found] | Gang) -> Gang:
    if not isinstance(room, dict):
        return room
    return (min(room.values())[1],) if room else ()


def in_words(draft: Draft, places: Gang) -> str:
    """`n1`, `n1/gpu0,3`; of a gang all of them."""
    found: dict[NodeName, set[int]] = {}
    for one in places:
        indexes = {draft.book(device).device.index for device, _ in one.devices}
        found.setdefault(one.node, set()).update(indexes)
    return " and ".join(
        f"{node}/gpu{','.join(map(str, sorted(indexes)))}" if indexes else str(node)
        for node, indexes in found.items()
    )


def _order_by(draft: Draft, policy: Policy, now: Instant) -> Callable[[Task], OrderKey]:
    """A task's place in the queue now. Holds no planner, so that a question leaves nothing for the collector
    of cycles, which comes rarely: what is worked out for one answer takes megabytes."""
    shares: list[Shares] = []

    def key_of(task: Task) -> OrderKey:
        if not shares:
            shares.append(Shares(draft.world, policy, now))
        standing = draft.world.queue.standing_of(task)
        own = own_key(standing, task.stream, task.submitted_at, task.id, now, policy)
        return order_key(own, shares[0].rank(task.tenant))

    return key_of
