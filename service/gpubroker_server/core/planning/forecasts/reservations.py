"""Backfill: a task may start before a task ahead of it only if it does not delay that task's reservation."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import needs_gpus, rank_task
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.forecasts.future_capacity import CapacityAt, ExpectedEnds, FutureCapacity
from gpubroker_server.core.planning.forecasts.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import (
    ahead_of_priority,
    preempts,
    stoppable_at,
    stops_below,
)
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.world.queue import OrderKey, reserves_before
from gpubroker_server.core.world.world import World


class Basis(StrEnum):
    """The basis of a forecast, which is that of its least certain input."""

    STATED = "stated"
    """The forecast rests on run times stated at submission, time limits and stop deadlines."""
    LEARNED = "learned"
    """The forecast rests on past runs like those that must end first."""
    GUESS = "guess"
    """The forecast rests on a run of unknown length, or on one that has outlasted its estimate."""


class Forecast(Struct, frozen=True):
    """The place and the time at which a task is expected to start. A forecast is recomputed every second and
    holds no memory."""

    task: TaskId
    places: tuple[Placement, ...]
    """The place of the task; of a gang, one place for each required rank. Empty while the task waits for a
    limit or a quota."""
    start_at: Instant
    """The median of the start."""
    p90_at: Instant
    """The 90th percentile of the start."""
    end_at: Instant
    """The median of the end of the run; infinite if the run's length is unknown."""
    n: int
    """The number of past runs behind the estimate that has the fewest; 0 if no estimate has any."""
    basis: Basis
    reserves_room: bool = True
    """True if tasks behind this one cannot take the room. Of the forecasts that are guesses only the first
    one reserves room: more reservations would leave too much memory idle."""
    first_in: frozenset[str] = frozenset()
    """Limits and quotas (`quota_line`) for which the task is among the first to wait. A task behind it may
    use them only if that task's run ends before `start_at`."""
    as_of: Instant | None = None
    """The instant at which the ends of runs were estimated; None for the present."""

    @property
    def reserves(self) -> bool:
        """True if the forecast binds tasks behind its own: it reserves room, or a limit or quota."""
        return bool(self.first_in) or (self.reserves_room and bool(self.places))


class QueuePlace(NamedTuple):
    """A task's place among the reservations and in the queue."""

    turn: float
    """The number of forecasts made before the task's own; infinite if nothing is reserved for it."""
    key: OrderKey


class BindingOrder:
    """Tells which tasks a reservation binds (`reserves_before`).

    Of two reservations that would bind each other's tasks only the one that was made first does so; the other
    one is planned around it. If both were binding, a start that is late by a moment would hold up both tasks,
    and their room would stay idle.
    """

    __slots__ = ("_order", "_turns")

    def __init__(
        self, world: World, order: Callable[[Task], OrderKey], forecasts: Iterable[Forecast]
    ) -> None:
        self._order = order
        self._turns: dict[TaskId, int] = {}
        for turn, forecast in enumerate(forecasts):
            task = world.tasks.get(forecast.task)
            if forecast.reserves and task is not None and task.state is TaskState.PENDING:
                self._turns[forecast.task] = turn

    def place_of(self, task: Task) -> QueuePlace:
        return QueuePlace(self._turns.get(task.id, inf), self._order(task))

    def binds(self, reserved: Task, other: QueuePlace) -> bool:
        """Return True if the reservation of the task `reserved` binds the task at the place `other`."""
        own_place = self.place_of(reserved)
        if own_place.turn == other.turn or not reserves_before(own_place.key, other.key):
            return False
        return own_place.turn < other.turn or not reserves_before(other.key, own_place.key)


class Reservation(NamedTuple):
    """The room that a forecast reserves on one node."""

    forecast: Forecast
    task: Task
    node: NodeName
    parts: tuple[Task, ...]
    """The task, or each of its ranks on the node as a task of its own."""
    devices: Mapping[DeviceKey, int]
    """Maps a device to the MiB reserved on it."""


def reservations_of(forecast: Forecast, task: Task) -> Iterator[Reservation]:
    """Yield one reservation for each node of the forecast, in rank order."""
    for node in dict.fromkeys(place.node for place in forecast.places):
        yield Reservation(forecast, task, node, *usage_on(node, task, forecast.places))


def usage_on(
    node: NodeName, task: Task, places: Sequence[Placement]
) -> tuple[tuple[Task, ...], dict[DeviceKey, int]]:
    """Return the task's ranks on the node, or the task itself, and the MiB that it takes of each device."""
    parts: list[Task] = []
    devices: dict[DeviceKey, int] = {}
    for rank, place in enumerate(places):
        if place.node == node:
            parts.append(rank_task(task, rank) if task.demand.bundles else task)
            for device, mb in place.devices:
                devices[device] = devices.get(device, 0) + mb
    return tuple(parts), devices


class _Constraint(NamedTuple):
    """The room of a node that one reservation leaves to a task that would delay the reservation."""

    capacity: CapacityAt
    """The capacity at the start of the reservation."""
    ahead: tuple[Reservation, ...]
    """The reservation itself, and the other reservations that hold room when it starts."""
    devices: frozenset[DeviceKey]

    def parts(self) -> Iterator[Task]:
        return (part for planned in self.ahead for part in planned.parts)

    def mb(self, device: DeviceKey) -> int:
        return sum(planned.devices.get(device, 0) for planned in self.ahead)


class BackfillWindow:
    """The room of a node that reservations leave to a task that they bind."""

    def __init__(self, constraints: Sequence[_Constraint]) -> None:
        self._constraints = constraints

    def allows(self, device: DeviceKey, mb: int) -> bool:
        return all(
            device not in constraint.devices or constraint.capacity.has_mb(device, mb + constraint.mb(device))
            for constraint in self._constraints
        )

    def fits(self, parts: Sequence[Task]) -> bool:
        """Return True if all of these parts fit together."""
        return all(
            constraint.capacity.has_room(constraint.parts(), parts) for constraint in self._constraints
        )

    def limit(self, gang_node: GangNode) -> GangNode:
        """Return the node with its free room cut down to this window."""
        room, free = gang_node.room, dict(gang_node.free)
        for constraint in self._constraints:
            left = constraint.capacity.room()
            for part in constraint.parts():
                left = left.with_room_of(part, sign=-1)
            room = room.at_most(left)
            for device in free.keys() & constraint.devices:
                free[device] = min(free[device], constraint.capacity.mb(device) - constraint.mb(device))
        return replace(gang_node, room=room, free=free)


@dataclass(eq=False)
class Reservations:
    """The reservations in one draft, which bind every task behind them in the queue."""

    draft: Draft
    policy: Policy
    now: Instant
    guarantees: Guarantees
    order: Callable[[Task], OrderKey]
    """Returns a task's present place in the queue."""
    forecasts: tuple[Forecast, ...]
    refused_by_reservation: int = 0
    """The number of tasks that reservations have refused so far in this cycle."""

    def __post_init__(self) -> None:
        as_of = max((f.as_of for f in self.forecasts if f.as_of is not None), default=self.now)
        self._expected_ends = ExpectedEnds(self.draft, self.policy, self.now, as_of)
        self._capacity = FutureCapacity(
            self._expected_ends, for_plans=False, protected_tenants=self.guarantees.protected_tenants
        )
        self._binding = BindingOrder(self.draft.world, self.order, self.forecasts)
        self.on: dict[NodeName, list[Reservation]] = {}
        """Maps a node to its reservations, in the order of the forecasts."""
        self._reserving: list[Task] = []
        """The tasks of the reservations in `on`."""
        self._kinds: list[str] | None = None
        self._lengths: dict[tuple[object, ...], tuple[Seconds, ...]] = {}
        """Maps everything that a run time estimate depends on to the answer of `_lengths_of`."""
        for forecast in self.forecasts:
            task = self.draft.world.tasks.get(forecast.task)
            if forecast.reserves_room and task is not None and task.state is TaskState.PENDING:
                for planned in reservations_of(forecast, task):
                    self.on.setdefault(planned.node, []).append(planned)
                self._reserving += [task] if forecast.places else []

    def on_start(self, task: TaskId) -> None:
        """Drop the reservation of a task that is admitted. Its nodes then offer more room."""
        self._reserving = [reserving for reserving in self._reserving if reserving.id != task]
        for node, planned in list(self.on.items()):
            left = [reservation for reservation in planned if reservation.task.id != task]
            if len(left) < len(planned):
                self.on = {**self.on, node: left} if left else {n: p for n, p in self.on.items() if n != node}
                self.draft.changes.mark(node)
                self.draft.growth.mark(node)

    @property
    def is_depth_reached(self) -> bool:
        """True if no further task is tried on nodes with reservations in this cycle."""
        return self.refused_by_reservation >= self.policy.backfill_depth

    def refuses(self, task: Task, places: Sequence[Placement], *, all_reservations: bool) -> bool:
        """Return True if the task would delay a reservation at these places: one of a task ahead of it, or
        with `all_reservations` any other."""
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

    def nodes_for_gang(
        self, task: Task, gang_nodes: Iterable[GangNode], *, all_reservations: bool
    ) -> Iterator[GangNode]:
        """Yield what a gang may use of each node without delaying a reservation ahead of it, or with
        `all_reservations` any other."""
        for gang_node in gang_nodes:
            node = gang_node.node.name
            if node not in self.on:
                yield gang_node
            elif not self.is_depth_reached:
                yield self.backfill_window(task, node, all_reservations=all_reservations).limit(gang_node)

    def nodes_closed_to(self, task: Task, like: Task | None = None) -> frozenset[NodeName]:
        """Return the nodes on which no run is preempted for the task.

        A task ahead of it has a reservation on such a node, and could not preempt the task in turn. If `like`
        is given, its run is the one that would have to be preempted.
        """
        own_place, run = self._binding.place_of(task), like or task
        return frozenset(
            node
            for node, planned in self.on.items()
            if not all(
                self._can_be_preempted_for(run, reservation)
                for reservation in planned
                if self._is_ahead(reservation, own_place)
            )
        )

    def victim_floors(self, task: Task) -> dict[NodeName, int]:
        """Return the nodes closed to the task on which some runs may be preempted for it nevertheless, each
        with the lowest priority of such runs.

        The tasks ahead that reserved such a node ask for no GPU, so they may not preempt runs from this
        priority on: their reservations only wait for those runs to end. Runs of a lower priority are left to
        these tasks. Nodes reserved for tasks that ask for GPUs stay closed, and so do all nodes once the
        depth is reached.
        """
        if self.is_depth_reached:
            return {}
        floors = {}
        for node in self.nodes_closed_to(task):
            closing = [reservation.task for reservation in self.closing(node, task)]
            if not any(needs_gpus(reserving.demand) for reserving in closing):
                floors[node] = max(map(stops_below, closing))
        return floors

    def closing(self, node: NodeName, task: Task) -> list[Reservation]:
        """Return the reservations that close the node to the task; empty if the node is open."""
        own_place = self._binding.place_of(task)
        return [
            reservation
            for reservation in self.on.get(node, ())
            if self._is_ahead(reservation, own_place) and not self._can_be_preempted_for(task, reservation)
        ]

    def off_limits(self, task: Task) -> frozenset[NodeName]:
        """Return the nodes that are closed to the task, as `nodes_closed_to` does; once the depth is reached,
        return all nodes with a reservation."""
        return frozenset(self.on) if self.is_depth_reached else self.nodes_closed_to(task)

    def is_behind_all(self, task: Task) -> bool:
        """Return True if all other reservations are ahead of the task."""
        own_place = self._binding.place_of(task)
        return all(
            reserving.id == task.id or self._binding.binds(reserving, own_place)
            for reserving in self._reserving
        )

    def ahead_of(self, task: Task) -> frozenset[TaskId]:
        """Return the tasks whose reservations bind this task."""
        own_place = self._binding.place_of(task)
        return frozenset(
            reserving.id for reserving in self._reserving if self._binding.binds(reserving, own_place)
        )

    def equivalence_key(self, task: Task) -> tuple[object, ...]:
        """Return a key such that reservations bind tasks with equal demands and equal keys alike."""
        if self.is_depth_reached and not self.policy.has_quotas:
            return (True,)  # no task is tried any more on these nodes
        is_shielded = task.preemptions >= self.policy.preemption_budget
        return (
            self.is_depth_reached,
            is_shielded,
            self._highest_overtaken(task),
            self.ahead_of(task),
            self._lengths_of(task),
        )

    def _highest_overtaken(self, task: Task) -> int:
        """Return the highest priority of the reservations that the task is ahead of by age; 0 if there are
        none."""
        higher = {reserving.priority for reserving in self._reserving if reserving.priority > task.priority}
        until = ahead_of_priority(task, self.policy, self.now) if higher else 0
        return max((priority for priority in higher if priority <= until), default=0)

    def _lengths_of(self, task: Task) -> tuple[Seconds, ...]:
        """Return the 90th percentiles of the task's run time, by kind of device on the nodes with
        reservations."""
        if self._kinds is None:
            self._kinds = sorted(
                {ledger.device.kind for node in self.on for ledger in self.draft.ledgers_on(node)}
            )
        stated = task.expected_seconds, task.timeout_seconds, task.grace_seconds
        equivalence = task.tenant, task.subject, needs_gpus(task.demand), *stated
        if equivalence not in self._lengths:
            kinds = self._kinds if needs_gpus(task.demand) else [""]
            sketches, policy = self.draft.world.learned.sketches, self.policy
            self._lengths[equivalence] = tuple(
                whole_run_seconds(task, sketches, policy, (kind,))[1] for kind in kinds
            )
        return self._lengths[equivalence]

    def _is_ahead(self, planned: Reservation, place: QueuePlace) -> bool:
        """Return True if the reservation binds a task at this place."""
        return self._binding.binds(planned.task, place)

    def backfill_window(self, task: Task, node: NodeName, *, all_reservations: bool) -> BackfillWindow:
        """Return what the task may use of the node without delaying a reservation ahead of it, or with
        `all_reservations` any other."""
        constraints: list[_Constraint] = []
        for delayed in self.delayed_by(task, node, all_reservations=all_reservations):
            at = max(self.now, delayed.forecast.start_at)
            ahead = tuple(self._held_at(task, node, at, delayed))
            capacity = self._capacity.capacity_at(node, delayed.task, at)
            constraints.append(_Constraint(capacity, ahead, frozenset(delayed.devices)))
        return BackfillWindow(constraints)

    def on_placement(self, node: NodeName, since: int, run: Task, place: Placement) -> None:
        """Record that a run was placed on the node, whose revision was `since` before."""
        self._capacity.on_placement(node, since, run, place)

    def _held_at(self, task: Task, node: NodeName, at: float, delayed: Reservation) -> Iterator[Reservation]:
        """Yield the delayed reservation, and the others ahead of the task that hold room at the instant
        `at`."""
        own_place = self._binding.place_of(task)
        for planned in self.on[node]:
            begun = planned.forecast.start_at <= at < planned.forecast.end_at
            if planned is delayed or (begun and self._is_ahead(planned, own_place)):
                yield planned

    def delayed_by(self, task: Task, node: NodeName, *, all_reservations: bool) -> list[Reservation]:
        """Return the reservations on the node that start before the task would end, and whose own task cannot
        preempt it by then."""
        own_place = self._binding.place_of(task)
        protected = [
            planned
            for planned in self.on[node]
            if planned.task.id != task.id and (all_reservations or self._is_ahead(planned, own_place))
        ]
        if not protected:
            return []
        ends_at = self.now + self._longest_seconds(task, node)
        return [
            planned
            for planned in protected
            if ends_at > planned.forecast.start_at and not self._can_be_preempted_for(task, planned)
        ]

    def _can_be_preempted_for(self, task: Task, planned: Reservation) -> bool:
        """Return True if the task's run could be preempted by the time the reservation starts."""
        other = planned.task
        may_stop = preempts(other, self.policy)
        if not may_stop or self.guarantees.would_be_protected(task, other):
            return False
        return stoppable_at(task, stops_below(other), self.policy, self.now) <= planned.forecast.start_at

    def _longest_seconds(self, task: Task, node: NodeName) -> float:
        """Return the 90th percentile of the task's run time; infinite if unknown."""
        sketches, kinds = self.draft.world.learned.sketches, self.draft.kinds_for(node, task)
        return whole_run_seconds(task, sketches, self.policy, kinds)[1]
