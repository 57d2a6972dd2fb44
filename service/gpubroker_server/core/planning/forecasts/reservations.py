"""Who may start before a task that waits for room: only who cannot delay it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import asks_for_gpus, part_of
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.future_capacity import Departures, Later, Supplies
from gpubroker_server.core.planning.forecasts.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.gangs.gang_nodes import Ground
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import ahead_of_priority, stoppable_at
from gpubroker_server.core.planning.tenants.guarantees import Claims
from gpubroker_server.core.world.queue import OrderKey, reserves_before


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
    """One; of a gang one for each rank that it needs at least; none while it waits for a limit or a quota."""
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
    first_in: frozenset[str] = frozenset()
    """Limits and quotas (`line_of_quota`) for which it is among the first who wait: nobody behind it takes
    anything of them, unless it is gone by then."""
    as_of: Instant | None = None
    """When it was made: the runs ahead of it are expected to end as they were then. None: as they are."""


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
    """By node, in the order of the ranks."""
    for node in dict.fromkeys(place.node for place in forecast.places):
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


class _Bound(NamedTuple):
    """What one forecast leaves of a node to one who would delay it."""

    later: Later
    """When it is to begin."""
    ahead: tuple[Planned, ...]
    """What takes of that: itself, and others that stand ahead of him and will be there then."""
    devices: frozenset[DeviceKey]
    """Those it needs."""

    def parts(self) -> Iterator[Task]:
        return (part for planned in self.ahead for part in planned.parts)

    def mb(self, device: DeviceKey) -> int:
        return sum(planned.devices.get(device, 0) for planned in self.ahead)


class Leeway:
    """What forecasts leave of a node to one who stands behind them."""

    def __init__(self, bounds: Sequence[_Bound]) -> None:
        self._bounds = bounds

    def allows(self, device: DeviceKey, mb: int) -> bool:
        return all(
            device not in bound.devices or bound.later.has_mb(device, mb + bound.mb(device))
            for bound in self._bounds
        )

    def fits(self, parts: Sequence[Task]) -> bool:
        """Whether there is room for all of these together."""
        return all(bound.later.has_room(bound.parts(), parts) for bound in self._bounds)

    def clipped(self, ground: Ground) -> Ground:
        """The node with no more than this."""
        room, free = ground.room, dict(ground.free)
        for bound in self._bounds:
            left = bound.later.room()
            for part in bound.parts():
                left = left.with_room_of(part, sign=-1)
            room = room.at_most(left)
            for device in free.keys() & bound.devices:
                free[device] = min(free[device], bound.later.mb(device) - bound.mb(device))
        return replace(ground, room=room, free=free)


class Guards:
    """What forecasts keep from those who stand behind them, in one draft."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        claims: Claims,
        order: Callable[[Task], OrderKey],
        forecasts: Iterable[Forecast],
        kept_away: int = 0,
    ) -> None:
        """`order`: a task's place in the queue now. `kept_away`: in this cycle, so many tasks were."""
        self._draft = draft
        self._policy = policy
        self._now = now
        self._claims = claims
        self._order = order
        self.forecasts = tuple(forecasts)
        as_of = max((f.as_of for f in self.forecasts if f.as_of is not None), default=now)
        self._departures = Departures(draft, policy, now, as_of)
        self._supplies = Supplies(self._departures, for_plans=False, spared_from=claims.spared_from)
        self.on: dict[NodeName, list[Planned]] = {}
        """Node -> the forecasts that keep room there, the first in order first."""
        self.kept_away = kept_away
        """So many tasks were kept away so far: they may only take what would delay somebody."""
        self._keys: dict[TaskId, OrderKey] = {}
        """Of the tasks with forecasts, as they stand since that revision of changes."""
        self._keys_at = -1
        self._kinds: list[str] | None = None
        self._lengths: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        """Of tasks that differ in nothing by which run times are told."""
        for forecast in self.forecasts:
            task = draft.world.tasks.get(forecast.task)
            if forecast.keeps_room and task is not None and task.state is TaskState.PENDING:
                for planned in planned_of(forecast, task):
                    self.on.setdefault(planned.node, []).append(planned)

    def started(self, task: TaskId) -> None:
        """The task is admitted: its forecast keeps nothing any more. Its nodes count as grown."""
        for node, planned in list(self.on.items()):
            left = [one for one in planned if one.task.id != task]
            if len(left) < len(planned):
                self.on = {**self.on, node: left} if left else {n: p for n, p in self.on.items() if n != node}
                self._draft.changes.mark(node)
                self._draft.growth.mark(node)

    @property
    def is_tired(self) -> bool:
        """So many were kept away that nobody else is tried on the nodes of forecasts in this cycle."""
        return self.kept_away >= self._policy.backfill_depth

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

    def closed_to(self, task: Task, like: Task | None = None) -> frozenset[NodeName]:
        """Where it may have nobody stopped: somebody who stands ahead of it with a forecast there could not
        stop it, or one `like` this, in turn."""
        mine, run = self._order(task), like or task
        return frozenset(
            node
            for node, planned in self.on.items()
            if not all(self._gives_way(run, one) for one in planned if self._binds(one, mine))
        )

    def off_limits(self, task: Task) -> frozenset[NodeName]:
        """The same, and wherever nobody is tried any more."""
        return frozenset(self.on) if self.is_tired else self.closed_to(task)

    def stands_behind_all(self, task: Task) -> bool:
        """Whether nobody with a forecast stands behind the task."""
        mine = self._order(task)
        return all(
            self._binds(one, mine) or one.task.id == task.id
            for planned in self.on.values()
            for one in planned
        )

    def ahead_of(self, task: Task) -> frozenset[TaskId]:
        """Who stand ahead of the task, of those for whom room is kept."""
        mine = self._order(task)
        return frozenset(one.task.id for on in self.on.values() for one in on if self._binds(one, mine))

    def standing_of(self, task: Task) -> tuple[object, ...]:
        """What tells equal tasks apart: which reservations are ahead, and how it gives way to them."""
        if self.is_tired and not self._policy.has_quotas:
            return (True,)  # no task is tried any more on these nodes
        is_shielded = task.preemptions >= self._policy.preemption_budget
        return (
            self.is_tired,
            is_shielded,
            self._goes_before(task),
            self.ahead_of(task),
            self._lengths_of(task),
        )

    def _goes_before(self, task: Task) -> int:
        """The highest priority of the reservations before which it has its turn; 0 if there are none."""
        until = ahead_of_priority(task, self._policy, self._now)
        if until == task.priority:
            return 0
        planned = {one.task.priority for on in self.on.values() for one in on}
        return max((priority for priority in planned if task.priority < priority <= until), default=0)

    def _lengths_of(self, task: Task) -> tuple[Seconds, ...]:
        """By kind of device on the nodes with reservations: nine in ten of its runs take no longer."""
        if self._kinds is None:
            self._kinds = sorted(
                {book.device.kind for node in self.on for book in self._draft.books_on(node)}
            )
        said = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        likes = task.tenant, task.subject, asks_for_gpus(task.demand), *said
        if likes not in self._lengths:
            kinds = self._kinds if asks_for_gpus(task.demand) else [""]
            sketches, policy = self._draft.world.learned.sketches, self._policy
            self._lengths[likes] = tuple(
                whole_run_seconds(task, sketches, policy, (kind,))[1] for kind in kinds
            )
        return self._lengths[likes]

    def _binds(self, planned: Planned, key: OrderKey) -> bool:
        """A task that stands at this place of the queue."""
        return reserves_before(self._key_of(planned), key)

    def _key_of(self, planned: Planned) -> OrderKey:
        """Worked out once between two decisions: nothing else changes it."""
        if self._keys_at != self._draft.changes.revision:
            self._keys_at = self._draft.changes.revision
            self._keys.clear()
        task = planned.task
        key = self._keys.get(task.id)
        if key is None:
            key = self._keys[task.id] = self._order(task)
        return key

    def leeway(self, task: Task, node: NodeName, *, everybody: bool) -> Leeway:
        """What the task may take of the node without delaying anybody ahead of it, or anybody at all."""
        bounds: list[_Bound] = []
        for delayed in self.delayed_by(task, node, everybody=everybody):
            at = max(self._now, delayed.forecast.start_at)
            ahead = tuple(self._there(task, node, at, delayed))
            later = self._supplies.later(node, delayed.task, at)
            bounds.append(_Bound(later, ahead, frozenset(delayed.devices)))
        return Leeway(bounds)

    def took(self, node: NodeName, since: int, run: Task, place: Placement) -> None:
        """A place was given on the node, which stood at revision `since` before."""
        self._supplies.took(node, since, run, place)

    def _there(self, task: Task, node: NodeName, at: float, delayed: Planned) -> Iterator[Planned]:
        """That forecast, and the others ahead of the task that will have begun by then and not be over."""
        mine = self._order(task)
        for planned in self.on[node]:
            begun = planned.forecast.start_at <= at < planned.forecast.end_at
            if planned is delayed or (begun and self._binds(planned, mine)):
                yield planned

    def delayed_by(self, task: Task, node: NodeName, *, everybody: bool) -> list[Planned]:
        """The forecasts on the node that the task would outlast, and whose task may not stop it either."""
        mine = self._order(task)
        protected = [
            planned
            for planned in self.on[node]
            if planned.task.id != task.id and (everybody or self._binds(planned, mine))
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
        other = planned.task
        may_stop = self._policy.preemption and asks_for_gpus(other.demand)
        if not may_stop or self._claims.would_be_spared(task, other):
            return False
        return stoppable_at(task, other.priority, self._policy, self._now) <= planned.forecast.start_at

    def _longest_seconds(self, task: Task, node: NodeName) -> float:
        """Nine in ten of its runs are over by then; infinite if nobody knows."""
        sketches, kinds = self._draft.world.learned.sketches, self._draft.kinds_for(node, task)
        return whole_run_seconds(task, sketches, self._policy, kinds)[1]
