"""Whom to stop so that a task of higher priority can run: the node, the devices and the victims."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from service.core.draft import Draft, Headroom
from service.core.ledger import Book
from service.core.need import need_mb
from service.core.placement import NoFit, no_fit
from service.core.policy import Policy
from service.core.task import Task
from service.core.units import DeviceKey, Instant, Mib, NodeName
from service.core.victims import (
    EXACT_LIMIT,
    Candidate,
    Cost,
    after,
    candidates,
    cheapest,
    cost_of,
    filled_back,
)


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


class _Target:
    """One device that the preemptor might get: its need, and what is free there once leavers are gone."""

    __slots__ = ("_free_mb", "_soon_mb", "key", "need_mb")

    def __init__(self, book: Book, need: Mib, task: Task) -> None:
        self.key = book.device.key
        self.need_mb = need
        self._free_mb = book.free_mb(task=task.id, priority=task.priority)
        self._soon_mb = book.soon_mb(task=task.id, priority=task.priority)

    def left_mb(self, gone: Sequence[Candidate]) -> int:
        """What would be left of it beside the preemptor, once these and whoever leaves anyway are gone."""
        return self._soon_mb - self.need_mb + _freed_mb(gone, self.key)

    def has_room(self, gone: Sequence[Candidate]) -> bool:
        return self.left_mb(gone) >= 0

    def counts_on_leavers(self, gone: Sequence[Candidate]) -> bool:
        return self._free_mb - self.need_mb + _freed_mb(gone, self.key) < 0


@dataclass(frozen=True, slots=True)
class _Option:
    node: NodeName
    targets: tuple[_Target, ...]
    victims: tuple[Candidate, ...]

    @property
    def rank(self) -> tuple[Cost, NodeName, tuple[DeviceKey, ...]]:
        return cost_of(self.victims), self.node, tuple(target.key for target in self.targets)


def choose_victims(draft: Draft, task: Task, policy: Policy, now: Instant) -> Eviction | NoFit:
    """The eviction that makes room for a task which fits nowhere now, or why there is none."""
    return plan_eviction(draft, task, policy, now) or no_fit(draft, task, policy, now)


def plan_eviction(draft: Draft, task: Task, policy: Policy, now: Instant) -> Eviction | None:
    """The eviction that costs least: lost GPU-seconds, then number of victims, then node and device names.

    Only runs of strictly lower priority are named, and only if the task fits once they have left. What is
    leaving anyway and is promised to nobody counts first: if that alone will do, the task waits. Only
    demands for GPUs preempt, because freed memory can be kept for the preemptor and a freed CPU cannot.
    """
    best = _best_option(draft, task, policy, now)
    if best is None or not best.victims:
        return None
    victims = sorted((candidate.task for candidate in best.victims), key=lambda run: run.id)
    deadlines = [now + victim.grace_seconds for victim in victims]
    for target in best.targets:
        if target.counts_on_leavers(best.victims):
            deadlines += _deadlines_of_leavers(draft, target.key)
    devices = sorted((target.key, target.need_mb) for target in best.targets)
    return Eviction(best.node, tuple(devices), tuple(victims), Instant(max(deadlines)))


def _best_option(draft: Draft, task: Task, policy: Policy, now: Instant) -> _Option | None:
    if not policy.preemption or not task.demand.gpus or draft.short_of(task, policy.custom_limits):
        return None
    nodes = sorted(draft.usable_nodes())
    if all(draft.lowest_priority(node) >= task.priority for node in nodes):
        return None
    return _best(_on_node(draft, node, task, policy, now) for node in nodes)


def _on_node(draft: Draft, node: NodeName, task: Task, policy: Policy, now: Instant) -> _Option | None:
    targets = [
        _Target(book, need, task)
        for book in draft.usable_books(node, policy, now)
        if (need := need_mb(task.demand, book.device)) is not None
    ]
    if len(targets) < task.demand.gpus:
        return None
    room = draft.headroom_soon(node, task)
    found = candidates(draft, node, task, policy, now)
    if task.demand.gpus == 1:
        return _best(_on_device(node, target, room, task, found) for target in targets)
    return _on_devices(node, targets, room, task, found)


def _on_device(
    node: NodeName, target: _Target, room: Headroom, task: Task, found: Sequence[Candidate]
) -> _Option | None:
    if room.fits(task):
        found = [candidate for candidate in found if target.key in candidate.frees]
    victims = cheapest(found, lambda gone: target.has_room(gone) and after(room, gone).fits(task))
    return None if victims is None else _Option(node, (target,), tuple(victims))


def _on_devices(
    node: NodeName, targets: Sequence[_Target], room: Headroom, task: Task, found: Sequence[Candidate]
) -> _Option | None:
    """Exact for few candidates; above, the devices that are cheapest one by one, then filled back."""
    gpus = task.demand.gpus

    def suffices(gone: Sequence[Candidate], among: Sequence[_Target] = targets) -> bool:
        roomy = sum(target.has_room(gone) for target in among)
        return roomy >= gpus and after(room, gone).fits(task)

    if len(found) <= EXACT_LIMIT:
        victims = cheapest(found, suffices)
    elif suffices(found):
        targets, union = _cheapest_devices(targets, gpus, found)
        # Beyond them somebody must leave only if CPU, host memory or run slots are short as well.
        rest = [candidate for candidate in found if candidate not in union]
        rest.sort(key=lambda candidate: (candidate.lost, -candidate.task.demand.cpu, candidate.task.id))
        victims = filled_back([*union, *rest], lambda gone: suffices(gone, targets))
    else:
        victims = None
    if victims is None:
        return None
    roomy = sorted((left, t.key, t) for t in targets if (left := t.left_mb(victims)) >= 0)
    return _Option(node, tuple(target for _, _, target in roomy[:gpus]), tuple(victims))


def _cheapest_devices(
    targets: Sequence[_Target], gpus: int, found: Sequence[Candidate]
) -> tuple[list[_Target], list[Candidate]]:
    """The devices that are cheapest to clear one by one, and whoever that would take, in order of cost."""
    priced = []
    for target in targets:
        there = [candidate for candidate in found if target.key in candidate.frees]
        victims = cheapest(there, target.has_room)
        if victims is not None:
            priced.append((cost_of(victims), target.key, target, victims))
    chosen = sorted(priced, key=lambda price: price[:2])[:gpus]
    wanted = {victim.task.id for _, _, _, victims in chosen for victim in victims}
    union = [candidate for candidate in found if candidate.task.id in wanted]
    return [target for _, _, target, _ in chosen], union


def _best(options: Iterable[_Option | None]) -> _Option | None:
    return min((o for o in options if o is not None), key=lambda option: option.rank, default=None)


def _freed_mb(gone: Sequence[Candidate], device: DeviceKey) -> int:
    return sum(candidate.frees.get(device, 0) for candidate in gone)


def _deadlines_of_leavers(draft: Draft, device: DeviceKey) -> Iterator[Instant]:
    for holding in draft.book(device).leaving():
        run = draft.holder(holding.lease)
        if run is not None and run.stop_deadline_at is not None:
            yield run.stop_deadline_at
