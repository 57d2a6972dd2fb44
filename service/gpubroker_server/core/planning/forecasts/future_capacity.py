"""The free capacity of nodes over time, as the current runs end."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.estimates import SketchKey, What
from gpubroker_server.core.domain.holders import External, Model
from gpubroker_server.core.domain.lease import LeaseState
from gpubroker_server.core.domain.node_capacity import NodeHeadroom
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import needs_gpus, rank_task
from gpubroker_server.core.domain.task import Placement, Task, TaskState
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.lifecycle.model_turns import never_leaves, turn_ends_at, yields_to_tasks_at
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining, remaining_seconds, run_seconds
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import NOTHING, preempts, stoppable_at, stops_below
from gpubroker_server.core.world.ledger import DeviceLedger, Holding


class ExpectedEnd(Struct, frozen=True):
    """The times at which a run is expected to be gone: median and 90th percentile."""

    p50_at: Instant
    p90_at: Instant
    n: int = 0
    """The number of past runs behind the estimate; 0 if the end was stated, or is certain."""
    is_guess: bool = False
    """True if the run's length is unknown, or the run has outlasted its estimate."""

    def within(self, now: Instant) -> Remaining | None:
        """Return the time that remains until the run is gone; None for a guess."""
        if self.is_guess or self.p50_at == inf:
            return None
        return Remaining(Seconds(self.p50_at - now), Seconds(self.p90_at - now), self.n)


class ExpectedEnds:
    """The expected ends of the runs in one draft, each computed once."""

    def __init__(self, draft: Draft, policy: Policy, now: Instant, as_of: Instant | None = None) -> None:
        """`as_of` is the instant at which uncertain ends are estimated; None stands for `now`. An uncertain
        end moves on with every moment that the run lasts, so estimates as of now would make every task delay
        a forecast made just before."""
        self.draft = draft
        """The draft, which may be replaced by another draft of the same World."""
        self.policy = policy
        self.now = now
        self._as_of = now if as_of is None else as_of
        self._sketches = draft.world.learned.sketches
        self._known: dict[tuple[TaskId, int, TaskState], ExpectedEnd] = {}

    def of_holding(self, holding: Holding) -> ExpectedEnd:
        """Return the expected end of a lease. A quarantined lease never ends."""
        run = self.draft.holder(holding.lease)
        if holding.lease.state is LeaseState.RELEASING:
            return ExpectedEnd(self.now, self.now)
        if holding.lease.state is LeaseState.QUARANTINED or run is None or not run.is_active:
            return NEVER
        if run.state is not TaskState.STOPPING and holding.stopping:  # one rank of a gang that goes on
            run = rank_task(run, holding.lease.rank)
        return self.of(run)

    def of(self, run: Task) -> ExpectedEnd:
        """Return the expected end of a run that is ADMITTED, RUNNING or STOPPING."""
        if run.state is TaskState.STOPPING:
            at = max(self.now, run.stop_deadline_at or self.now)
            return ExpectedEnd(at, at)
        key = run.id, run.fence, run.state
        expected_end = self._known.get(key)
        if expected_end is None:
            expected_end = self._known[key] = self._work_out(run)
        return expected_end

    def _work_out(self, run: Task) -> ExpectedEnd:
        match run.holder:
            case Model():
                return self._end_of_model(run)
            case _:
                return self._end_of_run(run)

    def _end_of_model(self, model: Task) -> ExpectedEnd:
        """Return when the model makes room for a task of lower priority, if no request comes. A model that
        gateways see in use makes room when it is no longer wanted, which each request delays."""
        if never_leaves(model) or model.expires_at is None:
            return NEVER
        if model.started_at is not None:
            at = yields_to_tasks_at(self.draft.world, model, self.policy)
            if self.now < at < model.expires_at:
                return ExpectedEnd(at, at)
        at = max(self.now, model.expires_at)
        return ExpectedEnd(at, at, is_guess=at > self.now)

    def _end_of_run(self, run: Task) -> ExpectedEnd:
        kind = self._kind_of(run)
        at = max(self._as_of, run.started_at or run.admitted_at or self.now)
        if run.started_at is None:
            left = run_seconds(run, self._sketches, self.policy, kind=kind)
        else:
            left = remaining_seconds(run, self._sketches, at, kind=kind)
        if left is not None:
            p50_at, p90_at = at + left.p50_seconds, at + left.p90_seconds
            return self._bounded(run, p50_at, p90_at, left.n, is_guess=False)
        if run.expected_seconds is not None:
            return self._guessed(run, run.expected_seconds, at)
        sketch = self._sketches.get(SketchKey(run.tenant, run.subject, kind, What.SECONDS))
        return self._guessed(run, 0.0 if sketch is None else sketch.quantile(1.0) or 0.0, at)

    def _guessed(self, run: Task, known_seconds: float, at: Instant) -> ExpectedEnd:
        """Return a guess of the end. `known_seconds` is the longest known run time of such a task in seconds;
        0 if unknown."""
        elapsed = 0.0 if run.started_at is None else at - run.started_at
        guess = max(LEAST_GUESS_SECONDS, elapsed - known_seconds)
        return self._bounded(run, at + guess, at + GUESS_P90 * guess, 0, is_guess=True)

    def _bounded(self, run: Task, p50_at: float, p90_at: float, n: int, *, is_guess: bool) -> ExpectedEnd:
        """Return the expected end, bounded by the time limit and the deadline at which every run is
        stopped."""
        latest = inf
        if run.timeout_seconds is not None:
            latest = (run.started_at or self.now) + run.timeout_seconds + run.grace_seconds
        if run.deadline_at is not None:
            match run.holder:
                case External(ttl_seconds) if run.deadline_at > (run.admitted_at or self.now) + ttl_seconds:
                    pass  # the lease was renewed: the next renewal moves its deadline again
                case _:
                    latest = min(latest, run.deadline_at + run.grace_seconds)
        latest = max(self.now, latest)
        return ExpectedEnd(Instant(min(latest, p50_at)), Instant(min(latest, p90_at)), n, is_guess)

    def _kind_of(self, run: Task) -> str:
        """Return the kind of the run's devices; empty if it has none."""
        devices = [lease.device for lease in self.draft.world.leases_of(run)]
        if not devices and run.demand.gpus and run.node is not None:  # this draft has admitted the run
            devices = [d for d in self.draft.given_to(run.id) if self.draft.ledger(d).device.node == run.node]
        return min((self.draft.ledger(device).device.kind for device in devices), default="")


LATE_SECONDS = Seconds(30.0)
"""The extra time for which a device without fresh samples still counts. The reservations on the device must
survive until its samples return, because the next plan sees the samples before the next forecast does."""


class CapacityProfile(Struct, frozen=True):
    """The free capacity of one node over time, for tasks of one priority."""

    devices: dict[DeviceKey, list[tuple[float, int]]]
    """Maps a usable device to its steps (instant, free MiB from then on) by time."""
    room: list[tuple[float, NodeHeadroom]]
    """The steps (instant; free CPU, host memory, run slots and custom resources from then on) by time."""

    def mb(self, device: DeviceKey, at: float) -> int:
        steps = self.devices.get(device)
        return 0 if steps is None else steps[bisect_right(steps, at, key=_time) - 1][1]

    def headroom(self, at: float) -> NodeHeadroom:
        return self.room[bisect_right(self.room, at, key=_time) - 1][1]


class _WaitingTask(NamedTuple):
    """The properties of a waiting task that decide when runs are out of its way."""

    priority: int
    below: int
    """The priority below which runs may be preempted for the task (`stops_below`)."""
    since: Instant
    """The time at which the task was submitted."""
    spared: frozenset[str] = frozenset()
    """Tenants whose runs with GPUs the task may not preempt."""
    pledged: TaskId | None = None
    """The id of the task if it has pledges: other tasks do not take what is pledged to it."""
    is_model: bool = False


class _CapacityReleases:
    """The free room on the nodes of one draft, and the releases over time. The class is separate from
    `FutureCapacity`, so that the answers kept there form no reference cycle."""

    def __init__(self, expected_ends: ExpectedEnds, *, for_plans: bool) -> None:
        self._expected_ends = expected_ends
        self._for_plans = for_plans
        self._heard_until = Instant(expected_ends.now - LATE_SECONDS)

    @property
    def draft(self) -> Draft:
        return self._expected_ends.draft

    def usable_devices(self, node: NodeName) -> list[DeviceKey]:
        period = self._expected_ends.policy.sample_period_seconds
        return [
            ledger.device.key
            for ledger in self.draft.ledgers_on(node)
            if not ledger.takes_nothing(self._heard_until, period)
        ]

    def leaves_at(self, run: Task, waiter: _WaitingTask) -> float:
        """Return when the run will have ended, or can be preempted for the task."""
        return self._out_of_the_way_at(run, self._expected_ends.of(run), waiter)

    def mb_now(self, device: DeviceKey, waiter: _WaitingTask) -> int:
        ledger = self.draft.ledger(device)
        if self._is_unheard_of(ledger):
            return 0
        pledged_mb = sum(
            pledge.mb
            for pledge in ledger.pledges.values()
            if pledge.priority >= waiter.priority and pledge.preemptor != waiter.pledged
        )
        return ledger.unallocated_mb() - pledged_mb

    def room_now(self, node: NodeName, waiter: _WaitingTask) -> NodeHeadroom:
        return self.draft.headroom(node, task=waiter.pledged, priority=waiter.priority)

    def of_device(self, device: DeviceKey, waiter: _WaitingTask) -> Iterator[tuple[float, int]]:
        """Yield (instant, MiB) of every holding's release. A device without samples releases nothing."""
        ledger = self.draft.ledger(device)
        for holding in () if self._is_unheard_of(ledger) else ledger.holdings.values():
            expected_end = self._expected_ends.of_holding(holding)
            run = self.draft.holder(holding.lease)
            at: float = expected_end.p50_at
            if at < inf and run is not None and not holding.stopping:
                at = self._out_of_the_way_at(run, expected_end, waiter)
            yield at, holding.occupied_mb

    def of_node(self, node: NodeName, waiter: _WaitingTask) -> Iterator[tuple[float, Task]]:
        """Yield every active run with the instant at which it is out of the way."""
        return ((self.leaves_at(run, waiter), run) for run in self.draft.active_on(node))

    def _is_unheard_of(self, ledger: DeviceLedger) -> bool:
        return ledger.takes_nothing(self._heard_until, self._expected_ends.policy.sample_period_seconds)

    def _out_of_the_way_at(self, run: Task, expected_end: ExpectedEnd, waiter: _WaitingTask) -> float:
        now, policy = self._expected_ends.now, self._expected_ends.policy
        came_after = (run.admitted_at or now) > waiter.since
        never_leaves = expected_end.is_guess and came_after and not self._for_plans
        leaves_at = inf if never_leaves else expected_end.p50_at
        is_protected = run.tenant in waiter.spared and needs_gpus(run.demand)
        if is_protected or run.state is TaskState.STOPPING:
            return leaves_at
        # A forecast says when the task starts, so the grace period of the run counts. To tell whether a run
        # is in the task's way, it is enough that the run can be given notice by then.
        grace = run.grace_seconds if self._for_plans else 0.0
        leaves_at = min(leaves_at, stoppable_at(run, waiter.below, policy, now) + grace)
        match run.holder:
            case Model():
                own = turn_ends_at(run, waiter.priority, policy, is_model=waiter.is_model)
                return min(leaves_at, own) if own > now else leaves_at
            case _:
                return leaves_at


class CapacityAt:
    """The capacity of one node at one instant, for tasks of one priority. Each part of it is summed on
    demand, since often only some parts are asked for."""

    def __init__(self, leaving: _CapacityReleases, node: NodeName, waiter: _WaitingTask, at: float) -> None:
        self._leaving = leaving
        self._node = node
        self._waiter = waiter
        self._at = at
        self._room: NodeHeadroom | None = None
        self._mb: dict[DeviceKey, int] = {}
        self.revision = leaving.draft.changes.at(node)

    def has_room(self, planned: Iterable[Task], parts: Sequence[Task]) -> bool:
        """Return True if these parts fit beside the planned ones."""
        return _fit(self.room(), planned, parts)

    def has_mb(self, device: DeviceKey, mb: int) -> bool:
        return mb <= self.mb(device)

    def room(self) -> NodeHeadroom:
        if self._room is None:
            # Whether GPUs may be taken is asked of other tasks than the waiter, whose priority may be higher.
            self._room = self._leaving.room_now(self._node, self._waiter)._replace(gives_gpus=True)
            for at, run in self._leaving.of_node(self._node, self._waiter):
                if at <= self._at:
                    self._room = self._room.with_room_of(run)
        return self._room

    def mb(self, device: DeviceKey) -> int:
        mb = self._mb.get(device)
        if mb is None:
            releases = self._leaving.of_device(device, self._waiter)
            mb = self._leaving.mb_now(device, self._waiter)
            mb = self._mb[device] = mb + sum(more for at, more in releases if at <= self._at)
        return mb

    def on_placement(self, run: Task, place: Placement) -> None:
        self.revision = self._leaving.draft.changes.at(self._node)
        if self._leaving.leaves_at(run, self._waiter) <= self._at:
            return
        if self._room is not None:
            self._room = self._room.with_room_of(run, sign=-1)
        for device, mb in place.devices:
            if device in self._mb:
                self._mb[device] -= mb


@dataclass(eq=False)
class FutureCapacity:
    """The capacity of a draft's nodes over time, computed on demand and again after a node changes.

    With `for_plans` it tells when a task can start. Otherwise it tells whether another task may run before
    that task: runs that the task may preempt are then no obstacle, and runs of unknown length that were
    admitted after it was submitted are assumed never to end.
    """

    expected_ends: ExpectedEnds
    for_plans: bool
    protected_tenants: Callable[[Task], frozenset[str]] = lambda _: frozenset()
    """Returns the tenants whose runs with GPUs are not preempted for a task."""

    def __post_init__(self) -> None:
        self._leaving = _CapacityReleases(self.expected_ends, for_plans=self.for_plans)
        self._known: dict[tuple[NodeName, _WaitingTask], tuple[int, CapacityProfile]] = {}
        self._later: dict[NodeName, dict[tuple[_WaitingTask, float], CapacityAt]] = {}

    def of(self, node: NodeName, task: Task) -> CapacityProfile:
        waiter, revision = self._waiter(task), self.expected_ends.draft.changes.at(node)
        profile = self._known.get((node, waiter))
        if profile is None or profile[0] != revision:
            profile = self._known[node, waiter] = revision, self._work_out(node, waiter)
        return profile[1]

    def capacity_at(self, node: NodeName, task: Task, at: float) -> CapacityAt:
        waiter, capacities = self._waiter(task), self._later.setdefault(node, {})
        capacity = capacities.get((waiter, at))
        if capacity is None or capacity.revision != self.expected_ends.draft.changes.at(node):
            capacity = capacities[waiter, at] = CapacityAt(self._leaving, node, waiter, at)
        return capacity

    def on_placement(self, node: NodeName, since: int, run: Task, place: Placement) -> None:
        """Record that a run was placed on the node, whose revision was `since` before."""
        for capacity in self._later.get(node, {}).values():
            if capacity.revision == since:
                capacity.on_placement(run, place)

    def _waiter(self, task: Task) -> _WaitingTask:
        stops = preempts(task, self.expected_ends.policy)
        below = stops_below(task) if stops else NOTHING
        since = self.expected_ends.now if self.for_plans else task.submitted_at
        protected = self.protected_tenants(task) if stops else frozenset[str]()
        pledged = task.id if self.expected_ends.draft.pledges_of(task.id) else None
        return _WaitingTask(task.priority, below, since, protected, pledged, isinstance(task.holder, Model))

    def _work_out(self, node: NodeName, waiter: _WaitingTask) -> CapacityProfile:
        leaving, devices = self._leaving, dict[DeviceKey, list[tuple[float, int]]]()
        for key in leaving.usable_devices(node):
            free = leaving.mb_now(key, waiter)
            steps = devices[key] = [(-inf, free)]
            for at, mb in sorted(leaving.of_device(key, waiter)):
                free += mb
                steps.append((at, free))
        room = leaving.room_now(node, waiter)
        rooms = [(-inf, room)]
        for at, run in sorted(leaving.of_node(node, waiter), key=lambda release: (release[0], release[1].id)):
            room = room.with_room_of(run)
            rooms.append((at, room))
        return CapacityProfile(devices, rooms)


def _fit(room: NodeHeadroom, planned: Iterable[Task], parts: Iterable[Task]) -> bool:
    for part in planned:
        room = room.with_room_of(part, sign=-1)
    for part in parts:
        if not room.fits(part):
            return False
        room = room.with_room_of(part, sign=-1)
    return True


def _time(step: tuple[float, object]) -> float:
    return step[0]


LEAST_GUESS_SECONDS = 60.0
"""A run of unknown length is expected to last as long again as it has, and at least this long."""

GUESS_P90 = 9.0
"""The 90th percentile of the time that remains to a run of unknown length, as a multiple of its age. The
median is 1 (Pareto distribution with exponent 1)."""


NEVER = ExpectedEnd(Instant(inf), Instant(inf))
