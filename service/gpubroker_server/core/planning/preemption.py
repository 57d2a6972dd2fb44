"""Whom to stop so that a task of higher priority can run: the node, the devices and the victims."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from gpubroker_server.core.domain.demand import need_mb
from gpubroker_server.core.domain.ranks import asks_for_gpus, stop_deadline_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId
from gpubroker_server.core.planning.draft import Draft
from gpubroker_server.core.planning.looks import Looks
from gpubroker_server.core.planning.offers import Offer, Offers, Site
from gpubroker_server.core.planning.victims import (
    EXACT_LIMIT,
    NO_COST,
    WITHOUT_LIMIT,
    Candidate,
    Cost,
    Suffices,
    after,
    cheapest,
    cost_of,
    filled_back,
    named,
)

CLOSE_LOOK = 10
"""A look at all who may be stopped on a node costs as much as so many at what the node has at most."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """Runs to stop, and the room that will then be there for the preemptor."""

    node: NodeName
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """(device, the whole need on it), in key order."""
    victims: tuple[Task, ...]
    """In id order."""
    deadline_at: Instant
    """When the last of the victims, and of those who leave anyway and are counted on, must be gone."""
    ranks: Mapping[DeviceKey, tuple[int, ...]] = field(default_factory=dict)
    """Which ranks of a gang will have a device."""
    surplus: Mapping[TaskId, tuple[int, ...]] = field(default_factory=dict)
    """Of victims that go on without them, the ranks that leave."""


Target = tuple[Site, Mib]
"""A device that the preemptor might get, and its need there."""


@dataclass(frozen=True, slots=True)
class Option:
    offer: Offer
    targets: tuple[Target, ...]
    victims: tuple[Candidate, ...]
    cost: Cost


class _Way(NamedTuple):
    least: Cost
    """It costs no less to make room there."""
    node: NodeName
    is_close: bool
    """That comes of a close look."""


def may_preempt(offers: Offers, task: Task) -> bool:
    """Only demands for GPUs preempt, because freed memory can be kept for the preemptor and a freed CPU
    cannot; and nobody is stopped for a task that a limit of the whole cluster keeps from running."""
    policy = offers.policy
    if not policy.preemption or not asks_for_gpus(task.demand):
        return False
    return not offers.draft.short_of(task, policy.custom_limits)


def is_coming(offers: Offers, task: Task, node: NodeName) -> bool:
    """Whether the task could run there if only those left who are leaving."""
    return node in offers.nodes and offers.outlooks.soon(node, task.priority).fits(task)


def could_make_room(offers: Offers, task: Task, node: NodeName) -> bool:
    """Whether it could if everybody left who is leaving or may be stopped for it."""
    return node in offers.nodes and offers.outlooks.most(node, task.priority).fits(task)


class Search:
    """For the eviction that costs least: lost GPU-seconds, number of victims, then node and devices.

    Only runs of strictly lower priority are named, and only if the task fits once they have left. What is
    leaving anyway and is promised to nobody counts first: if that alone will do, the task waits.

    Nodes are looked at in the order of what stopping somebody there costs at least, until no other can be
    better. The search can be left at any time, and gone on with when nodes have changed.
    """

    def __init__(self, task: Task, nodes: Iterable[NodeName]) -> None:
        """`nodes`: the others need offer nothing."""
        self.task = task
        self.coming_on: NodeName | None = None
        """A node that will have room without anybody being asked; then the search is over."""
        self._nodes = set(nodes)
        self._unseen = sorted(self._nodes, reverse=True)
        self._ways: list[_Way] = []
        """A heap."""
        self._best: Option | None = None

    def look_again(self, nodes: Iterable[NodeName]) -> None:
        """Something changed there since the search was left."""
        again = set(nodes)
        self._nodes |= again
        if self._best is not None and self._best.offer.node in again:
            again = self._nodes
            self._best = None
        self._unseen = sorted({*self._unseen, *again}, reverse=True)
        self._ways = [way for way in self._ways if way.node not in again]
        heapify(self._ways)

    def go_on(self, offers: Offers, looks: Looks) -> bool:
        """Whether the search has come to its end."""
        while self._step(offers, looks):
            if looks.call_for_a_pause:
                return False
        return True

    def _step(self, offers: Offers, looks: Looks) -> bool:
        """False if there is nothing more to do."""
        if self._unseen:
            self._look_at(offers, self._unseen.pop(), looks)
            return self.coming_on is None
        if not self._ways or self._is_settled(self._ways[0]):
            return False
        self._try(offers, heappop(self._ways), looks)
        return True

    def eviction(self, offers: Offers, now: Instant) -> Eviction | None:
        """What was found, at the end."""
        if self._best is None or self.coming_on is not None:
            return None
        return eviction_of(self._best, offers.draft, now)

    def _look_at(self, offers: Offers, node: NodeName, looks: Looks) -> None:
        looks.taken += 1
        if could_make_room(offers, self.task, node):
            if is_coming(offers, self.task, node):
                self.coming_on = node
            else:
                heappush(self._ways, _Way((0.0, 0, 1), node, False))

    def _is_settled(self, way: _Way) -> bool:
        """Neither this way nor one that costs more is better than what was found."""
        return self._best is not None and way[:2] >= (self._best.cost, self._best.offer.node)

    def _try(self, offers: Offers, way: _Way, looks: Looks) -> None:
        task, best, node = self.task, self._best, way.node
        offer = offers.of(node, task.priority)
        looks.taken += CLOSE_LOOK
        if not way.is_close:
            heappush(self._ways, _Way(_least_cost(offer, task), node, True))
            return
        below = WITHOUT_LIMIT
        if best is not None:  # of two that cost the same, the one whose node comes first by name
            below = best.cost if best.offer.node < node else (*best.cost[:2], best.cost[2] + 1)
        find = _on_one if task.demand.gpus == 1 else _on_several
        self._best = find(offer, task, below) or best


def eviction_of(best: Option, draft: Draft, now: Instant) -> Eviction:
    victims, surplus = named(best.victims)
    deadlines = [now + victim.grace_seconds for victim in victims]
    for site, need in best.targets:
        if site.after_mb(best.victims) - site.soon_mb + site.free_mb < need:
            deadlines += deadlines_of_leavers(draft, site.device.key)
    devices = sorted((site.device.key, need) for site, need in best.targets)
    return Eviction(best.offer.node, tuple(devices), victims, Instant(max(deadlines)), surplus=surplus)


def best_of(offer: Offer, task: Task, best: Option | None, may_leave: Suffices) -> Option | None:
    """The better of the best so far and the cheapest way on this node with such victims only."""
    targets = _targets(offer, task)
    if len(targets) < task.demand.gpus:
        return best
    below = WITHOUT_LIMIT if best is None else best.cost
    victims = cheapest(offer.found, _suffices(offer, task, targets), below, may_leave)
    return best if victims is None else _option(offer, task, targets, victims)


def _least_cost(offer: Offer, task: Task) -> Cost:
    """No way to make room on this node costs less: at least so many devices have to be cleared one by one."""
    costs = sorted(site.least_cost(need - site.soon_mb) for site, need in _targets(offer, task))
    least = NO_COST if offer.room.fits(task) else cost_of(offer.found[:1])
    return max(least, costs[task.demand.gpus - 1])


def _targets(offer: Offer, task: Task) -> list[Target]:
    return [
        (site, need)
        for site in offer.sites
        if (need := need_mb(task.demand, site.device)) is not None and need <= site.most_mb
    ]


def _on_one(offer: Offer, task: Task, below: Cost) -> Option | None:
    """The best way to one device of this node; None if there is none that costs less than this."""
    best: Option | None = None
    has_room = offer.room.fits(task)
    for target in _targets(offer, task):
        site, need = target
        victims: Sequence[Candidate] | None = None
        if not has_room:
            victims = cheapest(offer.found, _suffices(offer, task, [target]), below)
        elif site.least_cost(need - site.soon_mb) < below:
            victims = cheapest(site.holders, partial(_clears, site, need), below)
        if victims is not None:
            best, below = _option(offer, task, [target], victims), cost_of(victims)
    return best


def _on_several(offer: Offer, task: Task, below: Cost) -> Option | None:
    """The same for several devices: exact for few candidates; above, device by device and filled back."""
    targets = _targets(offer, task)
    if len(offer.found) <= EXACT_LIMIT:
        victims = cheapest(offer.found, _suffices(offer, task, targets), below)
    else:
        targets, order = _cheapest_devices(targets, task.demand.gpus, offer.found)
        suffices = _suffices(offer, task, targets)
        victims = filled_back(order, suffices) if suffices(order) else None
    if victims is None or cost_of(victims) >= below:
        return None
    return _option(offer, task, targets, victims)


def _suffices(offer: Offer, task: Task, targets: Sequence[Target]) -> Suffices:
    """Whether the task fits on as many of these devices as it asks for once such candidates have left."""

    def suffices(gone: Sequence[Candidate]) -> bool:
        roomy = sum(site.after_mb(gone) >= need for site, need in targets)
        return roomy >= task.demand.gpus and after(offer.room, offer.node, gone).fits(task)

    return suffices


def _option(offer: Offer, task: Task, targets: Sequence[Target], victims: Sequence[Candidate]) -> Option:
    """To stop these; of the devices that are then free, the fullest."""
    left = [(site.after_mb(victims) - need, site.device.key, (site, need)) for site, need in targets]
    roomy = sorted(option for option in left if option[0] >= 0)
    chosen = tuple(target for _, _, target in roomy[: task.demand.gpus])
    return Option(offer, chosen, tuple(victims), cost_of(victims))


def _cheapest_devices(
    targets: Sequence[Target], gpus: int, found: Sequence[Candidate]
) -> tuple[list[Target], list[Candidate]]:
    """The devices that are cheapest to clear one by one, and all candidates, those who must leave first."""
    priced = []
    for site, need in targets:
        victims = cheapest(site.holders, partial(_clears, site, need))
        assert victims is not None, "a device that cannot be cleared is no target"
        priced.append((cost_of(victims), site.device.key, (site, need), victims))
    priced.sort(key=lambda price: price[:2])
    wanted = {victim.key for *_, victims in priced[:gpus] for victim in victims}
    first = [candidate for candidate in found if candidate.key in wanted]
    # Beyond them somebody must leave only if CPU, host memory or run slots are short as well.
    rest = [candidate for candidate in found if candidate.key not in wanted]
    rest.sort(key=lambda one: (one.lost, one.rank is None, -one.task.demand.cpu, one.key))
    return [target for _, _, target, _ in priced[:gpus]], first + rest


def _clears(site: Site, need: Mib, gone: Sequence[Candidate]) -> bool:
    return site.after_mb(gone) >= need


def deadlines_of_leavers(draft: Draft, device: DeviceKey) -> Iterator[Instant]:
    """Until when they must be gone who are leaving a device anyway."""
    for holding in draft.book(device).leaving():
        run = draft.holder(holding.lease)
        until = None if run is None else stop_deadline_of(run, holding.lease.rank)
        if until is not None:
            yield until
