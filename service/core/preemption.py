"""Whom to stop so that a task of higher priority can run: the node, the devices and the victims."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from service.core.draft import Draft
from service.core.need import need_mb
from service.core.offers import Offer, Offers, Site
from service.core.task import Task
from service.core.units import DeviceKey, Instant, Mib, NodeName
from service.core.victims import EXACT_LIMIT, Candidate, Cost, Suffices, after, cheapest, cost_of, filled_back


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


Target = tuple[Site, Mib]
"""A device that the preemptor might get, and its need there."""


@dataclass(frozen=True, slots=True)
class _Option:
    offer: Offer
    targets: tuple[Target, ...]
    victims: tuple[Candidate, ...]
    cost: Cost


def plan_eviction(offers: Offers, task: Task, now: Instant) -> Eviction | None:
    """The eviction that is best for a task, of all nodes; None if there is none, or if it need only wait."""
    found = choose(offers, task, now, offers.nodes)
    return found if isinstance(found, Eviction) else None


def choose(offers: Offers, task: Task, now: Instant, nodes: Iterable[NodeName]) -> Eviction | NodeName | None:
    """The eviction that costs least: lost GPU-seconds, then number of victims, then node and device names.

    Only runs of strictly lower priority are named, and only if the task fits once they have left. What is
    leaving anyway and is promised to nobody counts first: if that alone will do, the task waits. Only
    demands for GPUs preempt, because freed memory can be kept for the preemptor and a freed CPU cannot.

    `nodes` in name order: the others need offer nothing. The name of a node says that it has room coming.
    """
    best = _best_option(offers, task, nodes)
    if best is None:
        return None
    if not best.victims:
        return best.offer.node
    victims = sorted((candidate.task for candidate in best.victims), key=lambda run: run.id)
    deadlines = [now + victim.grace_seconds for victim in victims]
    for site, need in best.targets:
        if site.after_mb(best.victims) - site.soon_mb + site.free_mb < need:
            deadlines += deadlines_of_leavers(offers.draft, site.device.key)
    devices = sorted((site.device.key, need) for site, need in best.targets)
    return Eviction(best.offer.node, tuple(devices), tuple(victims), Instant(max(deadlines)))


def could_make_room(offers: Offers, task: Task, node: NodeName) -> bool:
    """Whether the task could run on the node if everybody left who is leaving or may be stopped for it."""
    if not offers.policy.preemption or not task.demand.gpus or not offers.has_hope(node, task.priority):
        return False
    offer = offers.of(node, task.priority)
    if not (offer.most.may_fit(task.demand) and offer.most_room.fits(task)):
        return False
    targets = _targets(offer, task)
    return len(targets) >= task.demand.gpus and _suffices(offer, task, targets)(offer.found)


def _targets(offer: Offer, task: Task) -> list[Target]:
    return [
        (site, need)
        for site in offer.sites
        if (need := need_mb(task.demand, site.device)) is not None and need <= site.most_mb
    ]


def _best_option(offers: Offers, task: Task, nodes: Iterable[NodeName]) -> _Option | None:
    """Nodes and devices are looked at by name, and a later one must cost less: names decide ties."""
    policy = offers.policy
    if not policy.preemption or not task.demand.gpus:
        return None
    if offers.draft.short_of(task, policy.custom_limits):
        return None
    best: _Option | None = None
    for node in nodes:
        if not could_make_room(offers, task, node):
            continue
        offer = offers.of(node, task.priority)
        best = _on_one(offer, task, best) if task.demand.gpus == 1 else _on_several(offer, task, best)
        if best is not None and not best.victims:
            return best
    return best


def _on_one(offer: Offer, task: Task, best: _Option | None) -> _Option | None:
    """The best way to one device of this node, if it costs less than the best so far."""
    has_room = offer.room.fits(task)
    for site in offer.sites:
        need = need_mb(task.demand, site.device)
        if need is None or need > site.most_mb:
            continue
        target = (site, need)
        if has_room and need <= site.soon_mb:
            return _Option(offer, (target,), (), (0.0, 0))
        if has_room and site.least_cost(need - site.soon_mb) < _cost(best):
            victims = cheapest(site.holders, partial(_clears, site, need), _cost(best))
            best = _cheaper(best, offer, task, [target], victims)
        elif not has_room and _may_cost_less(offer.found, best):
            victims = cheapest(offer.found, _suffices(offer, task, [target]), _cost(best))
            best = _cheaper(best, offer, task, [target], victims)
    return best


def _on_several(offer: Offer, task: Task, best: _Option | None) -> _Option | None:
    """The same for several devices: exact for few candidates; above, device by device and filled back."""
    targets = _targets(offer, task)
    suffices = _suffices(offer, task, targets)
    if suffices(()):
        return _Option(offer, tuple(targets), (), (0.0, 0))
    if not _may_cost_less(offer.found, best):
        return best
    if len(offer.found) <= EXACT_LIMIT:
        return _cheaper(best, offer, task, targets, cheapest(offer.found, suffices, _cost(best)))
    targets, order = _cheapest_devices(targets, task.demand.gpus, offer.found)
    suffices = _suffices(offer, task, targets)
    return _cheaper(best, offer, task, targets, filled_back(order, suffices) if suffices(order) else None)


def _suffices(offer: Offer, task: Task, targets: Sequence[Target]) -> Suffices:
    """Whether the task fits on as many of these devices as it asks for once such candidates have left."""

    def suffices(gone: Sequence[Candidate]) -> bool:
        roomy = sum(site.after_mb(gone) >= need for site, need in targets)
        return roomy >= task.demand.gpus and after(offer.room, gone).fits(task)

    return suffices


def _may_cost_less(found: Sequence[Candidate], best: _Option | None) -> bool:
    """Whoever is stopped, it costs at least as much as the cheapest of them."""
    return bool(found) and (found[0].lost, 1) < _cost(best)


def _cost(best: _Option | None) -> Cost:
    return (inf, 0) if best is None else best.cost


def _cheaper(
    best: _Option | None,
    offer: Offer,
    task: Task,
    targets: Sequence[Target],
    victims: Sequence[Candidate] | None,
) -> _Option | None:
    """The better of the best so far and of stopping these; of the devices then free, the fullest."""
    if victims is None or cost_of(victims) >= _cost(best):
        return best
    left = [(site.after_mb(victims) - need, site.device.key, (site, need)) for site, need in targets]
    roomy = sorted(option for option in left if option[0] >= 0)
    chosen = tuple(target for _, _, target in roomy[: task.demand.gpus])
    return _Option(offer, chosen, tuple(victims), cost_of(victims))


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
    wanted = {victim.task.id for *_, victims in priced[:gpus] for victim in victims}
    first = [candidate for candidate in found if candidate.task.id in wanted]
    # Beyond them somebody must leave only if CPU, host memory or run slots are short as well.
    rest = [candidate for candidate in found if candidate.task.id not in wanted]
    rest.sort(key=lambda candidate: (candidate.lost, -candidate.task.demand.cpu, candidate.task.id))
    return [target for _, _, target, _ in priced[:gpus]], first + rest


def _clears(site: Site, need: Mib, gone: Sequence[Candidate]) -> bool:
    return site.after_mb(gone) >= need


def deadlines_of_leavers(draft: Draft, device: DeviceKey) -> Iterator[Instant]:
    """Until when they must be gone who are leaving a device anyway."""
    for holding in draft.book(device).leaving():
        run = draft.holder(holding.lease)
        if run is not None and run.stop_deadline_at is not None:
            yield run.stop_deadline_at
