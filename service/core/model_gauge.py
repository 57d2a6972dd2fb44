"""How large models are, seen by what a device has more in use once one is loaded there.

Of a load of which anything else on the device has changed meanwhile nothing is learned.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil
from statistics import median

from service.core.estimate import Lesson, Sketch, Topic, What
from service.core.lease import LeaseState
from service.core.ledger import NOISE_DIVISOR, Book
from service.core.plan import Decision, write_move
from service.core.task import Move, Task, TaskState
from service.core.units import DeviceKey, Fence, Instant, Mib, TaskId
from service.core.world import World


def topic_of(tenant: str, model: str, kind: str) -> Topic:
    """Of a model on a kind of device, on whichever server."""
    return Topic(tenant, f"model {model}", kind, What.GPU_MB)


def learned_mb(world: World, tenant: str, model: str, kinds: Collection[str], margin: float) -> Mib | None:
    """What to lease for it on any of these kinds, with so much more for its requests; None while nobody has
    seen it loaded on one."""
    sketches = (world.learned.sketch(topic_of(tenant, model, kind)) for kind in sorted(kinds))
    sizes = [size for sketch in sketches if (size := sketch.quantile(0.95)) is not None]
    return Mib(ceil((1 + margin) * max(sizes))) if sizes else None


@dataclass(frozen=True, slots=True)
class SizeRecord:
    """How true the sizes are that are leased for the models which a server has in memory, of those that were
    measured."""

    server: str
    ratio: float
    """Leased to measured, in the median of the models: 1 is right, 2 twice too much."""
    enough: float
    """Share of them (0 to 1) of which no more was measured than is leased."""


def size_records(world: World) -> list[SizeRecord]:
    """By server. A model is taken to need what it did in the median of its loads."""
    ratios: dict[str, list[float]] = {}
    for task in world.homes.live():
        leases = world.leases_of(task)
        if task.state is not TaskState.RUNNING or task.model is None or len(leases) != 1:
            continue
        kind = world.books[leases[0].device].device.kind
        measured_mb = world.learned.sketch(topic_of(task.tenant, task.model.model, kind)).quantile(0.5)
        if measured_mb:
            ratios.setdefault(task.model.server, []).append(leases[0].mb / measured_mb)
    return [
        SizeRecord(server, median(known), sum(ratio >= 1 for ratio in known) / len(known))
        for server, known in sorted(ratios.items())
    ]


@dataclass(frozen=True, slots=True)
class _Before:
    fence: Fence
    device: DeviceKey
    used_mb: int
    others: dict[str, int]
    """What each other lease of the device was measured to use."""


class Gauge:
    """Of one leader, in its memory: what it does not see from the beginning it does not learn from."""

    def __init__(self) -> None:
        self._before: dict[TaskId, _Before] = {}

    def look(self, world: World, now: Instant, but_not: Collection[str] = ()) -> list[Decision]:
        """What was learned since; `but_not`: tasks of which something else is decided at the moment."""
        known, self._before = self._before, {}
        decisions: list[Decision] = []
        sketches: dict[Topic, Sketch] = {}
        for task in world.homes.live():
            before = known.get(task.id)
            if before is None or before.fence != task.fence:
                before = _before(world, task)
            if before is None:
                continue
            if task.id not in but_not and _is_measured(world, task, before):
                decisions += _learned(world, task, before, sketches, now)
            elif task.state in (TaskState.ADMITTED, TaskState.RUNNING):
                self._before[task.id] = before
        return decisions


def _before(world: World, task: Task) -> _Before | None:
    """Measured before its room was given to it, with nobody else about to come or to go."""
    leases = world.leases_of(task)
    if task.state is not TaskState.ADMITTED or len(leases) != 1 or task.admitted_at is None:
        return None
    book = world.books[leases[0].device]
    others = _others(book, task)
    if book.sample is None or book.sample.at > task.admitted_at or others is None:
        return None
    return _Before(task.fence, leases[0].device, book.sample.used_mb, others)


def _others(book: Book, task: Task) -> dict[str, int] | None:
    """What each is measured to use; None unless all are there to stay."""
    others = {key: one for key, one in book.holdings.items() if one.lease.holder != task.id}
    if any(one.lease.state is not LeaseState.HELD or one.is_leaving for one in others.values()):
        return None
    return {key: one.measured_mb for key, one in others.items()}


def _is_measured(world: World, task: Task, before: _Before) -> bool:
    """Since it is there."""
    sample = world.books[before.device].sample
    if task.state is not TaskState.RUNNING or task.started_at is None or sample is None:
        return False
    return sample.at > task.started_at


def _learned(
    world: World, task: Task, before: _Before, sketches: dict[Topic, Sketch], now: Instant
) -> list[Decision]:
    """`sketches`: with what other decisions of the same look add; of each topic the last row stays."""
    book = world.books[before.device]
    assert book.sample is not None
    assert task.model is not None
    noise_mb = book.device.physical_mb // NOISE_DIVISOR
    others = _others(book, task)
    if others is None or others.keys() != before.others.keys():
        return []
    if others and book.sample.foreign_mb is None:
        return []  # nobody can tell whose it is
    more_mb = book.sample.used_mb - before.used_mb
    changes_mb = [abs(others[key] - mb) for key, mb in before.others.items()]
    if more_mb <= noise_mb or max(changes_mb, default=0) > noise_mb:
        return []
    topic = topic_of(task.tenant, task.model.model, book.device.kind)
    sketches[topic] = (sketches.get(topic) or world.learned.sketch(topic)).add(more_mb)
    lesson = Lesson(topic, more_mb, sketches[topic], now)
    return [Decision(task.id, "measured", tasks=(write_move(task, Move.CHANGED),), lessons=(lesson,))]
