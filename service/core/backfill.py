"""Who may start before a task that waits for room: only who cannot delay it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from service.core.departures import Departures, Supplies
from service.core.draft import Draft
from service.core.expectations import whole_run_seconds
from service.core.ground import Ground
from service.core.headroom import Headroom
from service.core.ordering import Kin, OrderKey
from service.core.policy import Policy
from service.core.ranks import asks_for_gpus, part_of
from service.core.task import Placement, Task, TaskState
from service.core.units import DeviceKey, Instant, NodeName, TaskId
from service.core.victims import stoppable_at


class Basis(StrEnum):
    """What a forecast rests on: the weakest of all it needs."""

    STATED = "stated"
    """On what submitters said, and on limits and notices."""
    LEARNED = "learned"
    """On runs like those that must end first."""
    GUESS = "guess"
    """On a run of which nobody knows how long it takes, or that has outlasted what was known."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where and when a task is expected to start. A plan, not a lease: it is made anew all the time."""

    task: TaskId
    places: tuple[Placement, ...]
    """One; of a gang one for each rank that it needs at least."""
    start_at: Instant
    """By then one in two."""
    p90_at: Instant
    """By then nine in ten."""
    end_at: Instant
    """When its run will be over, one in two; infinite if nobody knows how long it takes."""
    n: int
    """How many runs are known of the one of which fewest are; 0 if it rests on none."""
    basis: Basis
    keeps_room: bool = True
    """Nobody behind it takes what it needs. Of those that rest on a guess only the first does: it would
    be too much to leave idle for times that nobody knows."""


class Planned(NamedTuple):
    """What a forecast takes of one node."""

    forecast: Forecast
    task: Task
    node: NodeName
    parts: tuple[Task, ...]
    """What will run there, each rank as a task of its own."""
    devices: Mapping[DeviceKey, int]
    """MiB of each."""


def planned_of(forecast: Forecast, task: Task) -> Iterator[Planned]:
    """By node, in no particular order."""
    for node in {place.node for place in forecast.places}:
        yield Planned(forecast, task, node, *taken_on(node, task, forecast.places))


def taken_on(
    node: NodeName, task: Task, places: Sequence[Placement]
) -> tuple[tuple[Task, ...], dict[DeviceKey, int]]:
    """What a task takes of one of its nodes: the runs that it has there, and MiB of each device."""
    parts: list[Task] = []
    devices: dict[DeviceKey, int] = {}
    for rank, place in enumerate(places):
        if place.node == node:
            parts.append(part_of(task, rank) if task.demand.bundles else task)
            for device, mb in place.devices:
                devices[device] = devices.get(device, 0) + mb
    return tuple(parts), devices


class Leeway(NamedTuple):
    """What forecasts leave of a node to one who stands behind them."""

    room: Headroom | None = None
    """Beside its devices; None: all that there is."""
    devices: Mapping[DeviceKey, int] = MappingProxyType({})
    """MiB at most, of those that are needed."""

    def allows(self, device: DeviceKey, mb: int) -> bool:
        return mb <= self.devices.get(device, inf)

    def fits(self, parts: Iterable[Task]) -> bool:
        """Whether there is room for all of these together."""
        room = self.room
        for part in parts:
            if room is not None and not room.fits(part):
                return False
            room = room and room.with_room_of(part, -1)
        return True

    def clipped(self, ground: Ground) -> Ground:
        """The node with no more than this."""
        room = ground.room if self.room is None else _lesser(ground.room, self.room)
        free = {key: int(min(mb, self.devices.get(key, inf))) for key, mb in ground.free.items()}
        return replace(ground, room=room, free=free)


def _lesser(one: Headroom, other: Headroom) -> Headroom:
    """Of two views of the same node."""
    custom = tuple((name, min(a, b)) for (name, a), (_, b) in zip(one.custom, other.custom, strict=True))
    return Headroom(
        min(one.cpu, other.cpu),
        min(one.memory_mb, other.memory_mb),
        min(one.runs, other.runs),
        custom,
        one.node,
    )


class Guards:
    """What forecasts keep from those who stand behind them, in one draft."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        order: Callable[[Task], OrderKey],
        forecasts: Sequence[Forecast],
        kept_away: int = 0,
    ) -> None:
        """`order`: a task's place in the queue now. `kept_away`: in this cycle, so many tasks were."""
        self._draft = draft
        self._policy = policy
        self._now = now
        self._order = order
        self._departures = Departures(draft, policy, now)
        self._supplies = Supplies(self._departures, for_plans=False)
        self.on: dict[NodeName, list[Planned]] = {}
        """Node -> the forecasts that keep room there, the first in order first."""
        self.kept_away = kept_away
        self._barred: dict[Kin, dict[int, tuple[int, int, NodeName | None]]] = {}
        """Demand -> priority of tasks that were kept away -> (growth and changes of which this tells, the
        node on which they wait for room)."""
        for forecast in forecasts:
            task = draft.world.tasks.get(forecast.task)
            if forecast.keeps_room and task is not None and task.state is TaskState.PENDING:
                for planned in planned_of(forecast, task):
                    self.on.setdefault(planned.node, []).append(planned)

    def started(self, task: TaskId) -> bool:
        """The task is admitted: its forecast keeps nothing any more. Returns whether it did until now."""
        if not any(one.task.id == task for planned in self.on.values() for one in planned):
            return False
        self._barred.clear()
        left = {node: [one for one in planned if one.task.id != task] for node, planned in self.on.items()}
        self.on = {node: planned for node, planned in left.items() if planned}
        return True

    @property
    def is_tired(self) -> bool:
        """So many were kept away that nobody else is tried on the nodes of forecasts in this cycle."""
        return self.kept_away >= self._policy.backfill_depth

    def keep_away(self, task: Task, kin: Kin, coming_on: NodeName | None = None) -> None:
        """The task may only take what would delay somebody. `coming_on`: unless it waits for room there."""
        self.kept_away += 1
        revisions = self._draft.growth.revision, self._draft.changes.revision
        if self.is_tired:
            self._barred.setdefault(kin, {})[task.priority] = *revisions, coming_on

    def is_barred(self, kin: Kin, priority: int) -> bool:
        """Whether it is known that such tasks, and their likes of lower priority, are kept away."""
        grown = self._draft.growth.revision
        return any(
            barred >= priority and then == grown and coming_on is None
            for barred, (then, _, coming_on) in self._barred.get(kin, {}).items()
        )

    def is_waiting(self, kin: Kin, priority: int) -> bool:
        """Whether it is known that tasks of just this priority are kept away, and wait for room elsewhere."""
        grown, changed, coming_on = self._barred.get(kin, {}).get(priority, (-1, 0, None))
        changes = self._draft.changes
        return grown == self._draft.growth.revision and (not coming_on or changes.at(coming_on) <= changed)

    def bars(self, task: Task, places: Sequence[Placement], *, everybody: bool) -> bool:
        """Whether the task would delay there somebody who stands ahead of it, or anybody at all."""
        nodes = {place.node for place in places} & self.on.keys()
        return bool(nodes) and (
            self.is_tired or any(self._bars_on(node, task, places, everybody=everybody) for node in nodes)
        )

    def _bars_on(self, node: NodeName, task: Task, places: Sequence[Placement], *, everybody: bool) -> bool:
        leeway = self.leeway(task, node, everybody=everybody)
        parts, devices = taken_on(node, task, places)
        return not (leeway.fits(parts) and all(leeway.allows(key, mb) for key, mb in devices.items()))

    def beside(self, task: Task, grounds: Iterable[Ground]) -> Iterator[Ground]:
        """What is left for a gang of these nodes so that it delays nobody who stands ahead of it."""
        for ground in grounds:
            node = ground.node.name
            if node not in self.on:
                yield ground
            elif not self.is_tired:
                yield self.leeway(task, node, everybody=False).clipped(ground)

    def may_stop_runs(self, task: Task, node: NodeName) -> bool:
        """Whether the task may have room made for it on the node: whoever stands ahead of it with a forecast
        there may stop it in turn."""
        return node not in self.on or all(
            self._gives_way(task, planned)
            for planned in self.on[node]
            if self._order(planned.task) < self._order(task)
        )

    def closed_to(self, task: Task) -> frozenset[NodeName]:
        """Where it may have nobody stopped."""
        return frozenset(node for node in self.on if not self.may_stop_runs(task, node))

    def leeway(self, task: Task, node: NodeName, *, everybody: bool) -> Leeway:
        """What the task may take of the node without delaying anybody ahead of it, or anybody at all."""
        leeway = Leeway()
        for delayed in self.delayed_by(task, node, everybody=everybody):
            at = max(self._now, delayed.forecast.start_at)
            supply = self._supplies.of(node, delayed.task)
            room = supply.headroom(at)
            left = {device: supply.mb(device, at) for device in delayed.devices}
            for planned in self._there(task, node, at, delayed):
                for part in planned.parts:
                    room = room.with_room_of(part, -1)
                for device in left.keys() & planned.devices.keys():
                    left[device] -= planned.devices[device]
            room = room if leeway.room is None else _lesser(leeway.room, room)
            least = {device: int(min(mb, leeway.devices.get(device, inf))) for device, mb in left.items()}
            leeway = Leeway(room, {**leeway.devices, **least})
        return leeway

    def _there(self, task: Task, node: NodeName, at: float, delayed: Planned) -> Iterator[Planned]:
        """That forecast, and the others ahead of the task that will have begun by then and not be over."""
        for planned in self.on[node]:
            begun = planned.forecast.start_at <= at < planned.forecast.end_at
            if planned is delayed or (begun and self._order(planned.task) < self._order(task)):
                yield planned

    def delayed_by(self, task: Task, node: NodeName, *, everybody: bool) -> list[Planned]:
        """The forecasts on the node that the task would outlast, and whose task may not stop it either."""
        protected = [
            planned
            for planned in self.on[node]
            if planned.task.id != task.id and (everybody or self._order(planned.task) < self._order(task))
        ]
        if not protected:
            return []
        ends_at = self._now + self._longest_seconds(task, node)
        return [
            planned
            for planned in protected
            if ends_at > planned.forecast.start_at and not self._gives_way(task, planned)
        ]

    def _gives_way(self, task: Task, planned: Planned) -> bool:
        """Its run could be stopped for that one by the time it is to start."""
        if not (self._policy.preemption and asks_for_gpus(planned.task.demand)):
            return False
        return stoppable_at(task, planned.task.priority, self._policy, self._now) <= planned.forecast.start_at

    def _longest_seconds(self, task: Task, node: NodeName) -> float:
        """Nine in ten of its runs are over by then; infinite if nobody knows."""
        sketches, kinds = self._draft.world.learned.sketches, self._draft.kinds_for(node, task)
        return whole_run_seconds(task, sketches, self._policy, kinds)[1]
