"""Who may start before a task that waits for room: only who cannot delay it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from service.core.departures import Departures, Supplies
from service.core.draft import Draft
from service.core.expectations import whole_run_seconds
from service.core.ordering import Kin, OrderKey
from service.core.policy import Policy, band_of
from service.core.task import Placement, Task, TaskState
from service.core.units import DeviceKey, Instant, Mib, NodeName, TaskId


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
    node: NodeName
    devices: tuple[tuple[DeviceKey, Mib], ...]
    """In key order."""
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
    forecast: Forecast
    task: Task


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
                self.on.setdefault(forecast.node, []).append(Planned(forecast, task))

    def started(self, task: TaskId) -> bool:
        """The task is admitted: its forecast keeps nothing any more. Returns whether it did until now."""
        for node, planned in self.on.items():
            left = [other for other in planned if other.task.id != task]
            if len(left) < len(planned):
                self._barred.clear()
                self.on = {**self.on, node: left} if left else {n: p for n, p in self.on.items() if n != node}
                return True
        return False

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

    def bars(self, task: Task, placement: Placement, *, everybody: bool) -> bool:
        """Whether the task would delay there somebody who stands ahead of it, or anybody at all."""
        node = placement.node
        if node not in self.on:
            return False
        allowed = self.is_open(task, node, everybody=everybody) and all(
            self.allows(task, node, device, mb, everybody=everybody) for device, mb in placement.devices
        )
        return self.is_tired or not allowed

    def bars_gang(self, task: Task, places: Sequence[Placement]) -> bool:
        """Whether a gang would take anything of a device where somebody ahead of it has a forecast that it
        would delay."""
        return any(
            place.node in self.on
            and not all(self.allows(task, place.node, key, mb, everybody=False) for key, mb in place.devices)
            for place in places
        )

    def may_stop_runs(self, task: Task, node: NodeName) -> bool:
        """Whether the task may have room made for it on the node: whoever stands ahead of it with a forecast
        there may stop it in turn."""
        return node not in self.on or all(
            self._gives_way(task, planned.task)
            for planned in self.on[node]
            if self._order(planned.task) < self._order(task)
        )

    def is_open(self, task: Task, node: NodeName, *, everybody: bool) -> bool:
        """Whether what the task takes of the node beside its devices delays nobody."""
        for delayed in self.delayed_by(task, node, everybody=everybody):
            at = max(self._now, delayed.forecast.start_at)
            room = self._supplies.of(node, delayed.task).headroom(at)
            for planned in self._there(task, node, at, delayed):
                room = room.with_room_of(planned.task, -1)
            if not room.fits(task):
                return False
        return True

    def allows(self, task: Task, node: NodeName, device: DeviceKey, need_mb: int, *, everybody: bool) -> bool:
        """Whether the task delays nobody by taking so much of the device."""
        for delayed in self.delayed_by(task, node, everybody=everybody):
            if device not in dict(delayed.forecast.devices):
                continue
            at = max(self._now, delayed.forecast.start_at)
            left = self._supplies.of(node, delayed.task).mb(device, at)
            for planned in self._there(task, node, at, delayed):
                left -= dict(planned.forecast.devices).get(device, 0)
            if need_mb > left:
                return False
        return True

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
            if ends_at > planned.forecast.start_at and not self._gives_way(task, planned.task)
        ]

    def _gives_way(self, task: Task, other: Task) -> bool:
        """Its run could be stopped for that one, and is not shielded."""
        if not (self._policy.preemption and other.demand.gpus and task.priority < other.priority):
            return False
        spent = task.preemptions >= self._policy.preemption_budget
        return not spent or band_of(other.priority)[0] == "critical"

    def _longest_seconds(self, task: Task, node: NodeName) -> float:
        """Nine in ten of its runs are over by then; infinite if nobody knows."""
        sketches, kinds = self._draft.world.learned.sketches, self._draft.kinds_for(node, task)
        return whole_run_seconds(task, sketches, self._policy, kinds)[1]
