"""The choice of node, devices and victims (the runs to stop) so that a single task can start."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from msgspec import Struct, field

from gpubroker_server.core.domain.demand import need_mb
from gpubroker_server.core.domain.ranks import stop_deadline_of
from gpubroker_server.core.domain.task import Placement, Task, members_of
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, TaskId, node_key
from gpubroker_server.core.planning.budget import PROBES_AT_A_TIME, Steps
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offer, Offers, Site
from gpubroker_server.core.planning.nodes.shields import preempts, stops_below
from gpubroker_server.core.planning.nodes.victims import (
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
from gpubroker_server.core.world.background import IDLE_TOP

CLOSE_LOOK = 10
"""The cost of looking at all possible victims of a node, in units of one quick capacity check."""


class Eviction(Struct, frozen=True):
    """Runs to stop, and the room that they free for the preemptor."""

    node: NodeName
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """The devices in key order, each with the MiB that the task needs on it; without GPUs the node itself."""
    victims: tuple[Task, ...]
    """The runs to stop, in id order."""
    deadline_at: Instant
    """The time by which the last victim, and the last leaving run that is counted on, must be gone."""
    ranks: Mapping[DeviceKey, tuple[int, ...]] = field(default_factory=dict)
    """Maps a device to the ranks of the preempting gang that get it."""
    surplus: Mapping[TaskId, tuple[int, ...]] = field(default_factory=dict)
    """Maps a victim gang that goes on to the ranks that leave."""


Target = tuple[Site, Mib]
"""A device that the preemptor might get, and the MiB that it needs there."""


class Option(Struct, frozen=True):
    offer: Offer
    targets: tuple[Target, ...]
    victims: tuple[Candidate, ...]
    cost: Cost


class RoomBeingFreed(Struct, frozen=True):
    """The answer that enough room is being given back, so that no run need be stopped."""

    nodes: tuple[NodeName, ...]


NO_LESS: Cost = (0.0, 0, 1)
"""The least cost that any victim has."""


class _NodeBound(NamedTuple):
    least: Cost
    """A lower bound of the cost."""
    newest: float
    """A lower bound of what `_newest` returns for the victims."""
    node: NodeName
    is_close: bool
    """True if the bound was found by looking at all possible victims."""


def may_preempt(offers: Offers, task: Task) -> bool:
    """Return True if runs may be preempted for the task. A task that a limit of the whole cluster holds back
    makes room in the limit first."""
    return preempts(task, offers.policy) and not offers.draft.short_of(task, offers.policy.custom_limits)


def is_coming(offers: Offers, task: Task, node: NodeName) -> bool:
    """Return True if the task fits on the node once all releases under way are done."""
    return node in offers.nodes and offers.rooms.soon(node, task.priority).fits(task)


def could_make_room(offers: Offers, task: Task, node: NodeName) -> bool:
    """Return True if the task fits on the node once all releases are done and all possible victims have
    left."""
    return node in offers.nodes and offers.rooms.most(node, task.priority, stops_below(task)).fits(task)


def offer_above(offers: Offers, task: Task, node: NodeName, floor: int) -> Offer:
    """Return what the node offers if only runs from this priority on may be preempted for the task."""
    runs = offers.rooms.leavers(node, stops_below(task))
    return offers.among(node, task.priority, [run for run in runs if run.task.priority >= floor])


def search_eviction(
    offers: Offers, task: Task, nodes: Iterable[NodeName], now: Instant
) -> Steps[Eviction | RoomBeingFreed | None]:
    """Return the eviction that costs least.

    The cost is the lost GPU-seconds, then the number of victims. Ties go to the rank that joined its gang
    last, then to node and device by name. Only runs of strictly lower priority are victims, and only if the
    task fits once they have left. If room that is being given back, and promised to no other task, is enough,
    no run is stopped. Nodes are tried in the order of a lower bound of their cost, until no other node can be
    better.
    """
    ways: list[_NodeBound] = []
    for number, node in enumerate(sorted(nodes), start=1):
        if could_make_room(offers, task, node):
            if is_coming(offers, task, node):
                return RoomBeingFreed((node,))
            ways.append(_NodeBound(NO_LESS, -inf, node, False))
        if number % PROBES_AT_A_TIME == 0:
            yield PROBES_AT_A_TIME
    best: Option | None = None
    while ways and not _is_settled(best, ways[0]):
        way = heappop(ways)
        offer = offers.of(way.node, task)
        if not way.is_close:
            bound = _NodeBound(_least_cost(offer, task), _newest(offer.found), way.node, True)
            heappush(ways, bound)
        else:
            best = _cheaper(offer, task, best)
        yield CLOSE_LOOK
    return None if best is None else eviction_of(best, offers.draft, now)


def _is_settled(best: Option | None, way: _NodeBound) -> bool:
    """Return True if neither this way nor a costlier one is better than the best option so far."""
    return best is not None and way[:3] >= _order(best)


def _order(option: Option) -> tuple[Cost, float, NodeName]:
    return option.cost, _newest(option.victims), option.offer.node


def _newest(victims: Iterable[Candidate]) -> float:
    """Return a number that is smaller the later the last of the victims joined its running gang; 0 if none
    did."""
    late = (
        victim.rank
        for victim in victims
        if victim.rank is not None and members_of(victim.task)[victim.rank].is_late
    )
    return -max(late, default=0)


def _cheaper(offer: Offer, task: Task, best: Option | None) -> Option | None:
    """Return the better of the best option so far and the best on this node. Of two that cost the same, the
    one with the newer rank is better, then the one whose node comes first by name."""
    # The limit is one more than the best cost, so that options of the same cost are found and `_order`
    # decides.
    below = WITHOUT_LIMIT if best is None else (*best.cost[:2], best.cost[2] + 1)
    find = _on_one if task.demand.gpus == 1 else _on_several  # several devices, or none
    options = [option for option in (find(offer, task, below), best) if option is not None]
    return min(options, key=_order, default=None)


def eviction_of(best: Option, draft: Draft, now: Instant) -> Eviction:
    victims, surplus = named(best.victims)
    deadlines = [now + victim.grace_seconds for victim in victims]
    for site, need in best.targets:
        # If free memory and that of the victims are too little together, the pledge must last until the runs
        # that are leaving anyway are gone.
        if site.after_mb(best.victims) - site.free_after_releases_mb + site.free_mb < need:
            deadlines += deadlines_of_leavers(draft, site.device.key)
    node = best.offer.node
    devices = sorted((site.device.key, need) for site, need in best.targets) or [(node_key(node), Mib(0))]
    return Eviction(node, tuple(devices), victims, Instant(max(deadlines)), surplus=surplus)


def clear_of_idle_work(offers: Offers, task: Task, place: Placement, now: Instant) -> Eviction | None:
    """Return the eviction of the idle work that is in the way at a place; None if there will be room without
    stopping any of it."""
    idle = offers.rooms.leavers(place.node, IDLE_TOP + 1)
    offer, chosen = offers.among(place.node, task.priority, idle), dict(place.devices)
    targets = [(site, chosen[site.device.key]) for site in offer.sites if site.device.key in chosen]
    victims = cheapest(offer.found, _suffices(offer, task, targets))
    return eviction_of(_option(offer, task, targets, victims), offers.draft, now) if victims else None


def best_of(offer: Offer, task: Task, best: Option | None, may_leave: Suffices) -> Option | None:
    """Return the better of the best option so far and the cheapest set of victims on this node that may
    leave."""
    targets = _targets(offer, task)
    if len(targets) < task.demand.gpus:
        return best
    below = WITHOUT_LIMIT if best is None else best.cost
    victims = cheapest(offer.found, _suffices(offer, task, targets), below, may_leave)
    return best if victims is None else _option(offer, task, targets, victims)


def _least_cost(offer: Offer, task: Task) -> Cost:
    """Return a lower bound of the cost of making room on this node: that of the costliest of the devices that
    must be cleared."""
    least = NO_COST if offer.room.fits(task) else cost_of(offer.found[:1])
    if not task.demand.gpus:
        return least
    costs = sorted(
        site.least_cost(need - site.free_after_releases_mb) for site, need in _targets(offer, task)
    )
    return max(least, costs[task.demand.gpus - 1])


def _targets(offer: Offer, task: Task) -> list[Target]:
    return [
        (site, need)
        for site in (offer.sites if task.demand.gpus else ())
        if (need := need_mb(task.demand, site.device)) is not None and need <= site.most_mb
    ]


def _on_one(offer: Offer, task: Task, below: Cost) -> Option | None:
    """Return the best way to one device of this node for less than `below`; None if there is none."""
    best: Option | None = None
    has_room = offer.room.fits(task)
    # A later device must cost less to replace the best one, so the device with the newer rank is tried first.
    for target in sorted(_targets(offer, task), key=lambda target: _newest(target[0].holders)):
        site, need = target
        victims: Sequence[Candidate] | None = None
        if not has_room:
            victims = cheapest(offer.found, _suffices(offer, task, [target]), below)
        elif site.least_cost(need - site.free_after_releases_mb) < below:
            victims = cheapest(site.holders, partial(_clears, site, need), below)
        if victims is not None:
            best, below = _option(offer, task, [target], victims), cost_of(victims)
    return best


def _on_several(offer: Offer, task: Task, below: Cost) -> Option | None:
    """Return the best way to several devices of this node for less than `below`. The search is exact for up
    to EXACT_LIMIT candidates; with more it goes device by device, with fill-back."""
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
    """Return a function that tells whether the task fits on enough of these devices once victims have
    left."""

    def suffices(removed: Sequence[Candidate]) -> bool:
        roomy = sum(site.after_mb(removed) >= need for site, need in targets)
        return roomy >= task.demand.gpus and after(offer.room, offer.node, removed).fits(task)

    return suffices


def _option(offer: Offer, task: Task, targets: Sequence[Target], victims: Sequence[Candidate]) -> Option:
    """Return the option with these victims. Of the devices that then have room, the fullest are taken."""
    left = [(site.after_mb(victims) - need, site.device.key, (site, need)) for site, need in targets]
    roomy = sorted(option for option in left if option[0] >= 0)
    chosen = tuple(target for _, _, target in roomy[: task.demand.gpus])
    return Option(offer, chosen, tuple(victims), cost_of(victims))


def _cheapest_devices(
    targets: Sequence[Target], gpus: int, found: Sequence[Candidate]
) -> tuple[list[Target], list[Candidate]]:
    """Return the devices that are cheapest to clear, each by itself, and all candidates, with the victims on
    these devices first."""
    priced = []
    for site, need in targets:
        victims = cheapest(site.holders, partial(_clears, site, need))
        assert victims is not None, "a device that cannot be cleared is no target"
        priced.append((cost_of(victims), site.device.key, (site, need), victims))
    priced.sort(key=lambda price: price[:2])
    wanted = {victim.key for *_, victims in priced[:gpus] for victim in victims}
    first = [candidate for candidate in found if candidate.key in wanted]
    # The other candidates leave only if CPU, host memory or run slots are short as well.
    rest = [candidate for candidate in found if candidate.key not in wanted]
    rest.sort(
        key=lambda candidate: (
            candidate.lost,
            candidate.rank is None,
            -candidate.task.demand.cpu,
            candidate.key,
        )
    )
    return [target for _, _, target, _ in priced[:gpus]], first + rest


def _clears(site: Site, need: Mib, removed: Sequence[Candidate]) -> bool:
    return site.after_mb(removed) >= need


def deadlines_of_leavers(draft: Draft, device: DeviceKey) -> Iterator[Instant]:
    """Yield the deadlines of the runs that are leaving the device."""
    for holding in draft.ledger(device).leaving():
        run = draft.holder(holding.lease)
        until = None if run is None else stop_deadline_of(run, holding.lease.rank)
        if until is not None:
            yield until
