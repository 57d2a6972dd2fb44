"""Forecasts of the times and places at which the first tasks of the queue start, as the runs ahead of them
end."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from gpubroker_server.core.domain.demand import may_use_node, need_mb
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import DeviceKey, Instant, Mib, NodeName, Seconds
from gpubroker_server.core.planning.forecasts.future_capacity import (
    CapacityProfile,
    ExpectedEnd,
    ExpectedEnds,
    FutureCapacity,
)
from gpubroker_server.core.planning.forecasts.limits import EndingRun, Limits
from gpubroker_server.core.planning.forecasts.reservations import (
    Basis,
    Forecast,
    Reservation,
    reservations_of,
)
from gpubroker_server.core.planning.forecasts.run_estimates import whole_run_seconds
from gpubroker_server.core.planning.forecasts.waiting import waiting
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode
from gpubroker_server.core.planning.gangs.gang_search import place_ranks
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.guarantees import Guarantees
from gpubroker_server.core.planning.tenants.quota import QuotaNeeds, Quotas
from gpubroker_server.core.world.world import World

NODES_AT_A_TIME = 4
"""The number of nodes examined between two yields, which takes a few milliseconds for the first task."""

CLEARLY = 0.5
"""A forecast moves to another node only if the wait there is at most this share of the current one. Otherwise
reserved room would be given up whenever an estimate changes."""


def make_forecasts(
    world: World, policy: Policy, now: Instant, before: Iterable[Forecast] = ()
) -> Iterator[list[Forecast]]:
    """Forecast the starts of the first tasks of the queue, and yield the list so far every few nodes. The
    last list is complete.

    Forecasts are made, in queue order, for the first `policy.forecasts` tasks that wait for room, and for as
    many of the first tasks that wait for a limit or a quota. No forecast uses room that an earlier one needs.
    A task without an end in sight counts, but gets no forecast. `before` has the previous forecasts.
    """
    if not len(world.queue) or not policy.forecasts:
        yield []
        return
    draft = Draft(world)
    work = _Forecasting(draft, policy, now, before)
    work.look_again()
    for waiting_task in waiting(draft, policy, now, policy.forecasts):
        if waiting_task is None:
            yield work.made
        else:
            for _ in work.forecast(*waiting_task):
                yield work.made
                work.look_again()
    yield work.made


def forecast_alone(
    draft: Draft, task: Task, policy: Policy, now: Instant, nodes: Iterable[NodeName]
) -> Forecast | None:
    """Return when the task would start on these nodes without other waiting tasks and without its pledges;
    None if no end is in sight."""
    work = _Forecasting(draft, policy, now, (), nodes)
    for _ in work.forecast(task):
        pass
    return work.made[0] if work.made else None


class _Forecasting:
    def __init__(
        self,
        draft: Draft,
        policy: Policy,
        now: Instant,
        before: Iterable[Forecast] = (),
        nodes: Iterable[NodeName] | None = None,
    ) -> None:
        """`before` has the previous forecasts. Only the nodes in `nodes` are considered; None stands for
        all."""
        self._stood = {f.task: frozenset(place.node for place in f.places) for f in before}
        self._world = draft.world
        self._policy = policy
        self._now = now
        self._draft = draft
        self._expected_ends = ExpectedEnds(draft, policy, now)
        self._needs = QuotaNeeds()
        guarantees = Guarantees(draft, policy, Quotas(draft, policy, self._needs))
        self._capacity = FutureCapacity(
            self._expected_ends, for_plans=True, protected_tenants=guarantees.protected_tenants
        )
        self._awaited_runs: list[EndingRun] = []
        """The runs that must end before limits allow the current task."""
        usable = set(draft.usable_nodes())
        self._usable = usable if nodes is None else usable.intersection(nodes)
        self._nodes = sorted(self._usable)
        self.made: list[Forecast] = []
        self._ends: list[EndingRun] = []
        """The ends of the forecasts made."""
        self._planned: dict[NodeName, list[Reservation]] = {}

    def look_again(self) -> None:
        """Read the World again, since runs begin and end between two steps. What is known about a node stays
        valid until that node changes."""
        self._draft = self._expected_ends.draft = Draft(self._world, self._world.marks.changes)

    def forecast(self, task: Task, first_in: frozenset[str] = frozenset()) -> Iterator[None]:
        """Forecast the earliest start of a task, and yield every few nodes. The task keeps its previous place
        unless another is much better; of equal places the one on the first node by name is taken. No room is
        reserved for a task that waits for a limit."""
        awaited_runs = Limits(self._draft, self._expected_ends, self._needs).runs_to_wait_for(
            task, self._ends
        )
        if awaited_runs is None:
            return
        best, self._awaited_runs = None, awaited_runs
        for best_so_far in self._gang(task) if task.demand.bundles else self._task(task):
            best = best_so_far
            yield
        if best is not None:
            best = replace(best, places=(), first_in=first_in) if first_in else best
            self.made.append(best)
            self._ends.append(EndingRun(best.end_at, task, _end_of(best)))
            for planned in reservations_of(best, task):
                self._planned.setdefault(planned.node, []).append(planned)

    def _task(self, task: Task) -> Iterator[Forecast | None]:
        """Yield the best forecast so far every few nodes."""
        best = None
        for node in self._stood.get(task.id, frozenset()) & self._usable:
            best = self._look(node, task, inf)
        before_at = self._to_beat(best)
        for number, node in enumerate(self._nodes, start=1):
            better = self._look(node, task, before_at)
            if better is not None:
                best, before_at = better, better.start_at
            if number % NODES_AT_A_TIME == 0:
                yield best
        yield best

    def _to_beat(self, previous: Forecast | None) -> float:
        return inf if previous is None else self._now + CLEARLY * (previous.start_at - self._now)

    def _gang(self, task: Task) -> Iterator[Forecast | None]:
        """Yield the best forecast so far after each search."""
        best = None
        for nodes in (self._stood.get(task.id, frozenset()), frozenset(self._nodes)):
            before_at = self._to_beat(best)
            for found in self._gang_on(sorted(nodes & self._usable), task):
                yield best
                if found is not None and found.start_at < before_at:
                    best = found
        yield best

    def _gang_on(self, nodes: Sequence[NodeName], task: Task) -> Iterator[Forecast | None]:
        """Yield forecasts with places where the required ranks fit on these nodes, each earlier than the one
        before. Free room only grows, so a binary search over the instants finds the earliest. Reservations
        count from now to their end."""
        profiles: dict[NodeName, CapacityProfile] = {}
        for number, node in enumerate(nodes, start=1):
            profiles[node] = self._capacity.of(node, task)
            if number % NODES_AT_A_TIME == 0:
                yield None
        times: set[float] = {reservation.forecast.end_at for node in nodes for reservation in self._on(node)}
        for profile in profiles.values():
            times.update(at for steps in profile.devices.values() for at, _ in steps)
            times.update(at for at, _ in profile.room)
        times.add(earliest := self._limits_allow_at)
        moments = sorted(at for at in times if earliest <= at < inf)
        # The last moment is tried first: if there is no room then, there never is.
        first, last, middle = 0, len(moments), len(moments) - 1
        while first < last:
            at = moments[middle]
            places = place_ranks(task, task.demand.least_ranks, self._gang_nodes(profiles, at))
            first, last = (middle + 1, last) if places is None else (first, middle)
            middle = (first + last) // 2
            yield None if places is None else self._made(task, places, at)

    def _gang_nodes(self, profiles: Mapping[NodeName, CapacityProfile], at: float) -> list[GangNode]:
        """Return the nodes as a gang would find them at that instant."""
        gang_nodes = []
        for node, profile in profiles.items():
            room, free = profile.headroom(at), {key: profile.mb(key, at) for key in profile.devices}
            for reservation in self._on(node):
                for part in reservation.parts if at < reservation.forecast.end_at else ():
                    room = room.with_room_of(part, sign=-1)
                for key in (
                    free.keys() & reservation.devices.keys() if at < reservation.forecast.end_at else ()
                ):
                    free[key] -= reservation.devices[key]
            devices = {key: self._draft.ledger(key).device for key in free}
            gang_nodes.append(GangNode(self._world.nodes[node], room, free, devices))
        return gang_nodes

    def _on(self, node: NodeName) -> Sequence[Reservation]:
        return self._planned.get(node, ())

    def _look(self, node: NodeName, task: Task, before_at: float) -> Forecast | None:
        """Return the forecast of the task on the node, if it starts earlier than `before_at`."""
        if not may_use_node(task.demand, self._world.nodes[node]):
            return None
        profile = self._capacity.of(node, task)
        needs = {
            key: need
            for key in (profile.devices if task.demand.gpus else ())
            if (need := need_mb(task.demand, self._draft.ledger(key).device)) is not None
        }
        if len(needs) < task.demand.gpus:
            return None
        planned, lasts = self._on(node), self._run_seconds(task, [node])[1]
        for at in self._moments(profile, needs, task, planned):
            if at >= before_at:
                break
            chosen = self._devices_at(at, at + lasts, profile, needs, task, planned)
            if chosen is not None:
                return self._made(task, (Placement(node, tuple(chosen)),), at)
        return None

    @property
    def _limits_allow_at(self) -> float:
        return max([self._now, *(run_end.at for run_end in self._awaited_runs)])

    def _moments(
        self,
        profile: CapacityProfile,
        needs: dict[DeviceKey, Mib],
        task: Task,
        planned: Sequence[Reservation],
    ) -> list[float]:
        """Return the possible starts: each time at which a run or a reservation ends, from the first instant
        at which the node has enough room apart from reservations."""
        gpus = task.demand.gpus
        starts = sorted(_first(profile.devices[key], need) for key, need in needs.items())
        earliest = max(self._limits_allow_at, starts[gpus - 1] if gpus else self._now)
        earliest = max(earliest, next((at for at, room in profile.room if room.fits(task)), inf))
        if earliest == inf:
            return []
        if not planned:
            return [earliest]
        times = {earliest, *(reservation.forecast.end_at for reservation in planned)}
        times |= {at for key in needs for at, _ in profile.devices[key]} | {at for at, _ in profile.room}
        return sorted(at for at in times if earliest <= at < inf)

    def _devices_at(
        self,
        at: float,
        until: float,
        profile: CapacityProfile,
        needs: dict[DeviceKey, Mib],
        task: Task,
        planned: Sequence[Reservation],
    ) -> list[tuple[DeviceKey, Mib]] | None:
        """Return devices that the task can have from `at` to `until` without delaying an earlier forecast;
        None if there are too few."""
        starts = (reservation.forecast.start_at for reservation in planned)
        checks = [at, *(start for start in starts if at < start < until)]
        for check in checks:
            room = profile.headroom(check)
            for reservation in _there(planned, check):
                for part in reservation.parts:
                    room = room.with_room_of(part, sign=-1)
            if not room.fits(task):
                return None
        chosen = [
            (key, need)
            for key, need in needs.items()
            if all(profile.mb(key, check) - _planned_mb(planned, key, check) >= need for check in checks)
        ]
        return chosen[: task.demand.gpus] if len(chosen) >= task.demand.gpus else None

    def _made(self, task: Task, places: Sequence[Placement], at: float) -> Forecast:
        end_at = at + self._run_seconds(task, {place.node for place in places})[0]
        ahead = [run_end.expected_end for run_end in self._awaited_runs]
        ahead += [d for place in places for d in self._ahead(place) if d.p50_at <= at if at > self._now]
        p90_at = max([at, *(expected_end.p90_at for expected_end in ahead)])
        n = min((expected_end.n for expected_end in ahead if expected_end.n), default=0)
        is_guess = any(expected_end.is_guess for expected_end in ahead)
        basis = Basis.GUESS if is_guess else Basis.LEARNED if n else Basis.STATED
        guesses = (forecast for forecast in self.made if forecast.basis is Basis.GUESS)
        reserves_room = not is_guess or not any(forecast.places for forecast in guesses)
        times = Instant(at), Instant(p90_at), Instant(end_at)
        return Forecast(task.id, tuple(places), *times, n, basis, reserves_room, as_of=self._now)

    def _run_seconds(self, task: Task, nodes: Iterable[NodeName]) -> tuple[Seconds, Seconds]:
        """Return the median and the 90th percentile of the task's run time on these nodes."""
        kinds = {kind for node in nodes for kind in self._draft.kinds_for(node, task)}
        return whole_run_seconds(task, self._world.learned.sketches, self._policy, kinds)

    def _ahead(self, place: Placement) -> Iterator[ExpectedEnd]:
        """Yield the expected ends of the holders of the place's devices, and of the reservations there."""
        for key, _ in place.devices:
            for holding in self._draft.ledger(key).holdings.values():
                yield self._expected_ends.of_holding(holding)
            for reservation in self._on(place.node):
                if key in reservation.devices:
                    yield _end_of(reservation.forecast)
        if not place.devices:
            yield from map(self._expected_ends.of, self._draft.active_on(place.node))


def _end_of(forecast: Forecast) -> ExpectedEnd:
    late_at = Instant(forecast.end_at + forecast.p90_at - forecast.start_at)
    return ExpectedEnd(forecast.end_at, late_at, forecast.n, forecast.basis is Basis.GUESS)


def _first(steps: list[tuple[float, int]], need_mb: int) -> float:
    """Return the first instant with `need_mb` free; infinite if there is none."""
    return next((at for at, mb in steps if mb >= need_mb), inf)


def _there(planned: Sequence[Reservation], at: float) -> Iterator[Reservation]:
    return (
        reservation
        for reservation in planned
        if reservation.forecast.start_at <= at < reservation.forecast.end_at
    )


def _planned_mb(planned: Sequence[Reservation], device: DeviceKey, at: float) -> int:
    return sum(reservation.devices.get(device, 0) for reservation in _there(planned, at))
