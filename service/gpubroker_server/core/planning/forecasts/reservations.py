"""Who may start before a task that waits for room: only who cannot delay it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import asks_for_gpus, part_of
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.future_capacity import CapacityAt, ExpectedEnds, FutureCapacity
from gpubroker_server.core.planning.forecasts.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import ahead_of_priority, stoppable_at
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
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
    reserves_room: bool = True
    """Nobody behind it takes what it needs. Of those that rest on a guess only the first does: it would
    be too much to leave idle for times that nobody knows."""
    first_in: frozenset[str] = frozenset()
    """Limits and quotas (`line_of_quota`) for which it is among the first who wait: nobody behind it takes
    anything of them, unless it is gone by then."""
    as_of: Instant | None = None
    """When it was made: the runs ahead of it are expected to end as they were then. None: as they are."""


class Reservation(NamedTuple):
    """What a forecast takes of one node."""

    forecast: Forecast
    task: Task
    node: NodeName
    parts: tuple[Task, ...]
    """What will run there, each rank as a task of its own."""
    devices: Mapping[DeviceKey, int]
    """MiB of each."""


def reservations_of(forecast: Forecast, task: Task) -> Iterator[Reservation]:
    """By node, in the order of the ranks."""
    for node in dict.fromkeys(place.node for place in forecast.places):
        yield Reservation(forecast, task, node, *usage_on(node, task, forecast.places))


def usage_on(
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


class _Constraint(NamedTuple):
    """What one forecast leaves of a node to one who would delay it."""

    capacity: CapacityAt
    """When it is to begin."""
    ahead: tuple[Reservation, ...]
    """What takes of that: itself, and others that stand ahead of him and will be there then."""
    devices: frozenset[DeviceKey]
    """Those it needs."""

    def parts(self) -> Iterator[Task]:
        return (part for planned in self.ahead for part in planned.parts)

    def mb(self, device: DeviceKey) -> int:
        return sum(planned.devices.get(device, 0) for planned in self.ahead)


class BackfillWindow:
    """What forecasts leave of a node to one who stands behind them."""

    def __init__(self, constraints: Sequence[_Constraint]) -> None:
        self._constraints = constraints

    def allows(self, device: DeviceKey, mb: int) -> bool:
        return all(
            device not in constraint.devices or constraint.capacity.has_mb(device, mb + constraint.mb(device))
            for constraint in self._constraints
        )

    def fits(self, parts: Sequence[Task]) -> bool:
        """Whether there is room for all of these together."""
        return all(
            constraint.capacity.has_room(constraint.parts(), parts) for constraint in self._constraints
        )

    def limit(self, gang_node: GangNode) -> GangNode:
        """The node with no more than this."""
        room, free = gang_node.room, dict(gang_node.free)
        for constraint in self._constraints:
            left = constraint.capacity.room()
            for part in constraint.parts():
                left = left.with_room_of(part, sign=-1)
            room = room.at_most(left)
            for device in free.keys() & constraint.devices:
                free[device] = min(free[device], constraint.capacity.mb(device) - constraint.mb(device))
        return replace(gang_node, room=room, free=free)


class Reservations:
    """What forecasts keep from those who stand behind them, in one draft."""

    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        guarantees: Guarantees,
        order: Callable[[Task], OrderKey],
        forecasts: Iterable[Forecast],
        refused_by_reservation: int = 0,
    ) -> None:
        """`order`: a task's place in the queue now. `kept_away`: in this cycle, so many tasks were."""
        self._draft = draft
        self._policy = policy
        self._now = now
        self._guarantees = guarantees
        self._order = order
        self.forecasts = tuple(forecasts)
        as_of = max((f.as_of for f in self.forecasts if f.as_of is not None), default=now)
        self._expected_ends = ExpectedEnds(draft, policy, now, as_of)
        self._capacity = FutureCapacity(
            self._expected_ends, for_plans=False, protected_tenants=guarantees.protected_tenants
        )
        self.on: dict[NodeName, list[Reservation]] = {}
        """Node -> the forecasts that keep room there, the first in order first."""
        self.refused_by_reservation = refused_by_reservation
        """So many tasks were kept away so far: they may only take what would delay somebody."""
        self._keys: dict[TaskId, OrderKey] = {}
        """Of the tasks with forecasts, as they stand since that revision of changes."""
        self._keys_at = -1
        self._kinds: list[str] | None = None
        self._lengths: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        """Of tasks that differ in nothing by which run times are told."""
        for forecast in self.forecasts:
            task = draft.world.tasks.get(forecast.task)
            if forecast.reserves_room and task is not None and task.state is TaskState.PENDING:
                for planned in reservations_of(forecast, task):
                    self.on.setdefault(planned.node, []).append(planned)

    def on_start(self, task: TaskId) -> None:
        """The task is admitted: its forecast keeps nothing any more. Its nodes count as grown."""
        for node, planned in list(self.on.items()):
            left = [one for one in planned if one.task.id != task]
            if len(left) < len(planned):
                self.on = {**self.on, node: left} if left else {n: p for n, p in self.on.items() if n != node}
                self._draft.changes.mark(node)
                self._draft.growth.mark(node)

    @property
    def is_depth_reached(self) -> bool:
        """So many were kept away that nobody else is tried on the nodes of forecasts in this cycle."""
        return self.refused_by_reservation >= self._policy.backfill_depth

    def refuses(self, task: Task, places: Sequence[Placement], *, all_reservations: bool) -> bool:
        """Whether the task would delay there somebody who stands ahead of it, or anybody at all."""
        nodes = {place.node for place in places} & self.on.keys()
        return bool(nodes) and (
            self.is_depth_reached
            or any(self._refuses_on(node, task, places, all_reservations=all_reservations) for node in nodes)
        )

    def _refuses_on(
        self, node: NodeName, task: Task, places: Sequence[Placement], *, all_reservations: bool
    ) -> bool:
        window = self.backfill_window(task, node, all_reservations=all_reservations)
        parts, devices = usage_on(node, task, places)
        return not (window.fits(parts) and all(window.allows(key, mb) for key, mb in devices.items()))

    def nodes_for_gang(self, task: Task, gang_nodes: Iterable[GangNode]) -> Iterator[GangNode]:
        """What is left for a gang of these nodes so that it delays nobody who stands ahead of it."""
        for gang_node in gang_nodes:
            node = gang_node.node.name
            if node not in self.on:
                yield gang_node
            elif not self.is_depth_reached:
                yield self.backfill_window(task, node, all_reservations=False).limit(gang_node)

    def nodes_closed_to(self, task: Task, like: Task | None = None) -> frozenset[NodeName]:
        """Where it may have nobody stopped: somebody who stands ahead of it with a forecast there could not
        stop it, or one `like` this, in turn."""
        mine, run = self._order(task), like or task
        return frozenset(
            node
            for node, planned in self.on.items()
            if not all(self._can_be_preempted_for(run, one) for one in planned if self._is_ahead(one, mine))
        )

    def off_limits(self, task: Task) -> frozenset[NodeName]:
        """The same, and wherever nobody is tried any more."""
        return frozenset(self.on) if self.is_depth_reached else self.nodes_closed_to(task)

    def is_behind_all(self, task: Task) -> bool:
        """Whether nobody with a forecast stands behind the task."""
        mine = self._order(task)
        return all(
            self._is_ahead(one, mine) or one.task.id == task.id
            for planned in self.on.values()
            for one in planned
        )

    def ahead_of(self, task: Task) -> frozenset[TaskId]:
        """Who stand ahead of the task, of those for whom room is kept."""
        mine = self._order(task)
        return frozenset(one.task.id for on in self.on.values() for one in on if self._is_ahead(one, mine))

    def equivalence_key(self, task: Task) -> tuple[object, ...]:
        """What tells equal tasks apart: which reservations are ahead, and how it gives way to them."""
        if self.is_depth_reached and not self._policy.has_quotas:
            return (True,)  # no task is tried any more on these nodes
        is_shielded = task.preemptions >= self._policy.preemption_budget
        return (
            self.is_depth_reached,
            is_shielded,
            self._highest_overtaken(task),
            self.ahead_of(task),
            self._lengths_of(task),
        )

    def _highest_overtaken(self, task: Task) -> int:
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
        stated = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        equivalence = task.tenant, task.subject, asks_for_gpus(task.demand), *stated
        if equivalence not in self._lengths:
            kinds = self._kinds if asks_for_gpus(task.demand) else [""]
            sketches, policy = self._draft.world.learned.sketches, self._policy
            self._lengths[equivalence] = tuple(
                whole_run_seconds(task, sketches, policy, (kind,))[1] for kind in kinds
            )
        return self._lengths[equivalence]

    def _is_ahead(self, planned: Reservation, key: OrderKey) -> bool:
        """A task that stands at this place of the queue."""
        return reserves_before(self._key_of(planned), key)

    def _key_of(self, planned: Reservation) -> OrderKey:
        """Worked out once between two decisions: nothing else changes it."""
        if self._keys_at != self._draft.changes.revision:
            self._keys_at = self._draft.changes.revision
            self._keys.clear()
        task = planned.task
        key = self._keys.get(task.id)
        if key is None:
            key = self._keys[task.id] = self._order(task)
        return key

    def backfill_window(self, task: Task, node: NodeName, *, all_reservations: bool) -> BackfillWindow:
        """What the task may take of the node without delaying anybody ahead of it, or anybody at all."""
        constraints: list[_Constraint] = []
        for delayed in self.delayed_by(task, node, all_reservations=all_reservations):
            at = max(self._now, delayed.forecast.start_at)
            ahead = tuple(self._held_at(task, node, at, delayed))
            capacity = self._capacity.capacity_at(node, delayed.task, at)
            constraints.append(_Constraint(capacity, ahead, frozenset(delayed.devices)))
        return BackfillWindow(constraints)

    def on_placement(self, node: NodeName, since: int, run: Task, place: Placement) -> None:
        """A place was given on the node, which stood at revision `since` before."""
        self._capacity.on_placement(node, since, run, place)

    def _held_at(self, task: Task, node: NodeName, at: float, delayed: Reservation) -> Iterator[Reservation]:
        """That forecast, and the others ahead of the task that will have begun by then and not be over."""
        mine = self._order(task)
        for planned in self.on[node]:
            begun = planned.forecast.start_at <= at < planned.forecast.end_at
            if planned is delayed or (begun and self._is_ahead(planned, mine)):
                yield planned

    def delayed_by(self, task: Task, node: NodeName, *, all_reservations: bool) -> list[Reservation]:
        """The forecasts on the node that the task would outlast, and whose task may not stop it either."""
        mine = self._order(task)
        protected = [
            planned
            for planned in self.on[node]
            if planned.task.id != task.id and (all_reservations or self._is_ahead(planned, mine))
        ]
        if not protected:
            return []
        ends_at = self._now + self._longest_seconds(task, node)
        return [
            planned
            for planned in protected
            if ends_at > planned.forecast.start_at and not self._can_be_preempted_for(task, planned)
        ]

    def _can_be_preempted_for(self, task: Task, planned: Reservation) -> bool:
        """Its run could be stopped for that one by the time it is to start."""
        other = planned.task
        may_stop = self._policy.preemption and asks_for_gpus(other.demand)
        if not may_stop or self._guarantees.would_be_protected(task, other):
            return False
        return stoppable_at(task, other.priority, self._policy, self._now) <= planned.forecast.start_at

    def _longest_seconds(self, task: Task, node: NodeName) -> float:
        """Nine in ten of its runs are over by then; infinite if nobody knows."""
        sketches, kinds = self._draft.world.learned.sketches, self._draft.kinds_for(node, task)
        return whole_run_seconds(task, sketches, self._policy, kinds)[1]
