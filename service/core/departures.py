"""When the runs of a cluster are expected to have left, and what each node will then have."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from service.core.draft import Draft
from service.core.estimate import Sketch, Topic, What
from service.core.expectations import Remaining, remaining_seconds, run_seconds
from service.core.headroom import Headroom
from service.core.lease import LeaseState
from service.core.ledger import Book, Holding
from service.core.policy import Policy
from service.core.ranks import asks_for_gpus, part_of
from service.core.task import Task, TaskState
from service.core.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from service.core.victims import stoppable_at

LEAST_GUESS_SECONDS = 60.0
GUESS_P90 = 9.0
"""Of runs whose length may be anything, half of those that have lasted so long last as long again, and nine
in ten at most nine times as long (a Pareto distribution of exponent 1)."""


@dataclass(frozen=True, slots=True)
class Departure:
    """When a run will be gone: one in two by the first instant, nine in ten by the second."""

    p50_at: Instant
    p90_at: Instant
    n: int = 0
    """Of how many runs this speaks; 0 if it was stated, or is certain."""
    is_guess: bool = False
    """Nobody knows how long such runs take, or this one has outlasted what was known."""

    def within(self, now: Instant) -> Remaining | None:
        """None if nobody can tell."""
        if self.is_guess or self.p50_at == inf:
            return None
        return Remaining(Seconds(self.p50_at - now), Seconds(self.p90_at - now), self.n)


NEVER = Departure(Instant(inf), Instant(inf))


class Departures:
    """Of the runs in one draft, each worked out once."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant) -> None:
        self.draft = draft
        self.policy = policy
        self.now = now
        self._sketches = draft.world.learned.sketches
        self._known: dict[tuple[TaskId, int, TaskState], Departure] = {}

    def of_holding(self, holding: Holding) -> Departure:
        """What nobody can say anything about, like a quarantined lease, never leaves."""
        run = self.draft.holder(holding.lease)
        if holding.lease.state is LeaseState.RELEASING:
            return Departure(self.now, self.now)
        if holding.lease.state is LeaseState.QUARANTINED or run is None or not run.is_active:
            return NEVER
        if run.state is not TaskState.STOPPING and holding.stopping:  # one rank of a gang that goes on
            run = part_of(run, holding.lease.rank)
        return self.of(run)

    def of(self, run: Task) -> Departure:
        """Of a run that is ADMITTED, RUNNING or STOPPING."""
        if run.state is TaskState.STOPPING:
            at = max(self.now, run.stop_deadline_at or self.now)
            return Departure(at, at)
        key = run.id, run.fence, run.state
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._work_out(run)
        return known

    def _work_out(self, run: Task) -> Departure:
        kind = self._kind_of(run)
        if run.started_at is None:
            left = run_seconds(run, self._sketches, self.policy, kind=kind)
        else:
            left = remaining_seconds(run, self._sketches, self.now, kind=kind)
        if left is None:
            guess = max(LEAST_GUESS_SECONDS, self._elapsed(run) - self._known_seconds(run, kind))
            return self._bounded(run, guess, GUESS_P90 * guess, 0, is_guess=True)
        return self._bounded(run, left.p50_seconds, left.p90_seconds, left.n, is_guess=False)

    def _bounded(self, run: Task, p50: float, p90: float, n: int, *, is_guess: bool) -> Departure:
        """Whatever it would take, it is stopped at its time limit and at its deadline."""
        latest = inf
        if run.timeout_seconds is not None:
            latest = (run.started_at or self.now) + run.timeout_seconds + run.grace_seconds
        if run.deadline_at is not None and run.external is None:  # whose deadline each renewal moves on
            latest = min(latest, run.deadline_at + run.grace_seconds)
        latest = max(self.now, latest)
        return Departure(
            Instant(min(latest, self.now + p50)), Instant(min(latest, self.now + p90)), n, is_guess
        )

    def _elapsed(self, run: Task) -> float:
        return 0.0 if run.started_at is None else self.now - run.started_at

    def _known_seconds(self, run: Task, kind: str) -> float:
        """What the run was thought to take at most; 0 if nothing was."""
        if run.expected_seconds is not None:
            return run.expected_seconds
        known = self._sketches.get(Topic(run.tenant, run.subject, kind, What.SECONDS), Sketch())
        return known.quantile(1.0) or 0.0

    def _kind_of(self, run: Task) -> str:
        """Of its devices, by which run times are told apart; empty if it has none."""
        known = [lease.device for lease in self.draft.world.leases_of(run)]
        if not known and run.demand.gpus and run.node is not None:  # this draft has admitted it
            for book in self.draft.books_on(run.node):
                if any(h.lease.holder == run.id for h in book.holdings.values()):
                    known.append(book.device.key)
        return min((self.draft.book(device).device.kind for device in known), default="")


@dataclass(frozen=True, slots=True)
class Supply:
    """What one node will have for one sort of task, as those leave who are there now."""

    devices: dict[DeviceKey, list[tuple[float, int]]]
    """Its usable devices: (from when on, MiB that the task could then have), in order of time."""
    room: list[tuple[float, Headroom]]
    """The same of everything else that the node has."""

    def mb(self, device: DeviceKey, at: float) -> int:
        steps = self.devices.get(device)
        return 0 if steps is None else steps[bisect_right(steps, at, key=_time) - 1][1]

    def headroom(self, at: float) -> Headroom:
        return self.room[bisect_right(self.room, at, key=_time) - 1][1]


class Supplies:
    """What the nodes of one draft will have. Worked out when asked for, and again when a node changed.

    `for_plans`: to work out when a task can start. Otherwise it is for asking whether somebody else may take
    something before it starts: then runs that the task may stop are no obstacle at all, and who came after
    it, for nobody knows how long, is taken to stay.
    """

    def __init__(self, departures: Departures, *, for_plans: bool) -> None:
        self.departures = departures
        self._draft = departures.draft
        self._for_plans = for_plans
        self._known: dict[tuple[NodeName, int, bool, Instant], tuple[int, Supply]] = {}

    def of(self, node: NodeName, task: Task) -> Supply:
        """For a task of this priority; only one that asks for GPUs may have runs stopped for it."""
        stops = self.departures.policy.preemption and asks_for_gpus(task.demand)
        since = self.departures.now if self._for_plans else task.submitted_at
        key = node, task.priority, stops, since
        revision = self._draft.changes.at(node)
        known = self._known.get(key)
        if known is None or known[0] != revision:
            known = self._known[key] = revision, self._work_out(node, task, stops=stops)
        return known[1]

    def leaves_at(self, run: Task, departure: Departure, task: Task, *, stops: bool) -> float:
        """By when a run is no obstacle any more to the task."""
        now, policy = self.departures.now, self.departures.policy
        came_after = (run.admitted_at or now) > task.submitted_at
        stays = departure.is_guess and came_after and not self._for_plans
        leaves_at = inf if stays else departure.p50_at
        if not stops or run.state is TaskState.STOPPING:
            return leaves_at
        grace = run.grace_seconds if self._for_plans else 0.0
        return min(leaves_at, stoppable_at(run, task.priority, policy, now) + grace)

    def _work_out(self, node: NodeName, task: Task, *, stops: bool) -> Supply:
        draft, policy, now = self._draft, self.departures.policy, self.departures.now
        devices: dict[DeviceKey, list[tuple[float, int]]] = {}
        for book in draft.usable_books(node, policy, now):
            free = book.unheld_mb() - sum(
                pledge.mb for pledge in book.pledges.values() if pledge.priority >= task.priority
            )
            steps = [(-inf, free)]
            for at, mb in self._leaving(book, task, stops=stops):
                free += mb
                steps.append((at, free))
            devices[book.device.key] = steps
        return Supply(devices, self._rooms(node, task, stops=stops))

    def _leaving(self, book: Book, task: Task, *, stops: bool) -> Iterator[tuple[float, int]]:
        """(when, MiB) of all who hold memory of the device, in order of time."""
        found = []
        for holding in book.holdings.values():
            departure = self.departures.of_holding(holding)
            run = self._draft.holder(holding.lease)
            at: float = departure.p50_at
            if at < inf and run is not None:
                at = self.leaves_at(run, departure, task, stops=stops)
            found.append((at, holding.takes_mb))
        return iter(sorted(found))

    def _rooms(self, node: NodeName, task: Task, *, stops: bool) -> list[tuple[float, Headroom]]:
        room = self._draft.headroom(node, priority=task.priority)
        steps = [(-inf, room)]
        leaving = (
            (self.leaves_at(run, self.departures.of(run), task, stops=stops), run.id, run)
            for run in self._draft.active_on(node)
        )
        for at, _, run in sorted(leaving, key=lambda leaver: leaver[:2]):
            room = room.with_room_of(run)
            steps.append((at, room))
        return steps


def _time(step: tuple[float, object]) -> float:
    return step[0]
