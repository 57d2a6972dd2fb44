"""When and where the first tasks of the queue will start, by what is known of the runs ahead of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf

from service.core.agenda import Agenda
from service.core.backfill import Basis, Forecast
from service.core.departures import Departure, Departures, Supplies, Supply
from service.core.draft import Draft
from service.core.expectations import whole_run_seconds
from service.core.fairness import Shares
from service.core.looks import Looks
from service.core.need import may_use_node, need_mb
from service.core.ordering import Group, Kin
from service.core.policy import Policy
from service.core.quota import Quotas
from service.core.task import Task
from service.core.units import DeviceKey, Instant, Mib, NodeName
from service.core.world import World

NODES_AT_A_TIME = 16
"""Nodes that are looked at before the caller gets its turn again: about a millisecond."""


CLEARLY = 0.5
"""A forecast moves to another node only where its task would wait at most this share of the time: what has
been left free for it would otherwise be given away whenever an estimate changes."""


def make_forecasts(
    world: World, policy: Policy, now: Instant, before: Iterable[Forecast] = ()
) -> Iterator[list[Forecast]]:
    """For the first `policy.forecasts` tasks of the queue that wait for room, in their order, without gangs.

    Yields what there is so far, every few nodes; the last list is whole. Each forecast leaves alone what
    the earlier ones need. A task for which no end is in sight has none, and counts all the same.
    `before`: the last ones made.
    """
    if not len(world.queue) or not policy.forecasts:
        yield []
        return
    work = _Forecasting(world, policy, now, before)
    for task in work.first.values():
        yield from work.forecast(task)
    yield work.made


def first_of_queue(draft: Draft, policy: Policy, now: Instant) -> Iterator[Task]:
    """Who waits for room and for no limit, in order; no gangs. Those whose room has been pledged have it kept
    already."""
    world = draft.world
    agenda, limits = Agenda(world, policy, now, None, Shares(world, policy, now)), _Limits(draft, policy)
    while (head := agenda.next(limits)) is not None:
        if head.task not in world.pledges and not world.tasks[head.task].demand.bundles:
            yield world.tasks[head.task]


class _Limits:
    """Who waits for a limit or a quota waits for no room."""

    def __init__(self, draft: Draft, policy: Policy) -> None:
        self.looks = Looks(inf)
        self._draft = draft
        self._policy = policy
        self._quotas = Quotas(draft, policy)

    def is_over_quota(self, group: Group) -> bool:
        return self._quotas.falls_short(group.tenant, group.demand, group.priority)

    def is_refused(self, group: Group) -> bool:
        if not group.demand.counted:
            return False
        probe = self._draft.world.tasks[group.member(0)[1]]
        return bool(self._draft.short_of(probe, self._policy.custom_limits))

    def shut(self) -> Mapping[Kin, int]:
        return {}

    def has_nothing(self, group: Group) -> bool:
        return self.is_refused(group)

    def may_reclaim(self, group: Group) -> bool:  # noqa: ARG002  # no limit gives way to that
        return False


class _Forecasting:
    def __init__(self, world: World, policy: Policy, now: Instant, before: Iterable[Forecast]) -> None:
        self._stood = {forecast.task: forecast.node for forecast in before}
        self._world = world
        self._policy = policy
        self._now = now
        self._draft = Draft(world)
        self._departures = Departures(self._draft, policy, now)
        self._supplies = Supplies(self._departures, for_plans=True)
        self._nodes = sorted(self._draft.usable_nodes())
        self.made: list[Forecast] = []
        waiting = first_of_queue(self._draft, policy, now)
        self.first = {task.id: task for task in islice(waiting, policy.forecasts)}

    def forecast(self, task: Task) -> Iterator[list[Forecast]]:
        """Where it would start first; ties go to the smaller name, and changes of mind need a reason."""
        best = self._look(self._stood[task.id], task, inf) if task.id in self._stood else None
        before_at = inf if best is None else self._now + CLEARLY * (best.start_at - self._now)
        for number, node in enumerate(self._nodes, start=1):
            better = self._look(node, task, before_at)
            if better is not None:
                best, before_at = better, better.start_at
            if number % NODES_AT_A_TIME == 0:
                yield self.made
        if best is not None:
            self.made.append(best)

    def _look(self, node: NodeName, task: Task, before_at: float) -> Forecast | None:
        """Whether the task can start on the node earlier than that."""
        if node not in self._nodes or not may_use_node(task.demand, self._world.nodes[node]):
            return None
        supply = self._supplies.of(node, task)
        needs = {
            book.device.key: need
            for book in self._draft.usable_books(node, self._policy, self._now)
            if task.demand.gpus and (need := need_mb(task.demand, book.device)) is not None
            if book.device.key in supply.devices
        }
        if len(needs) < task.demand.gpus:
            return None
        sketches, kinds = self._world.learned.sketches, self._draft.kinds_for(node, task)
        run_p50, run_p90 = whole_run_seconds(task, sketches, self._policy, kinds)
        planned = [forecast for forecast in self.made if forecast.node == node]
        for at in self._moments(supply, needs, task, planned):
            if at >= before_at:
                break
            chosen = self._devices_at(at, at + run_p90, supply, needs, task, planned)
            if chosen is not None:
                return self._made(task, node, chosen, at, at + run_p50)
        return None

    def _moments(
        self, supply: Supply, needs: dict[DeviceKey, Mib], task: Task, planned: Sequence[Forecast]
    ) -> list[float]:
        """When it might start: now, and whenever somebody leaves, but not before there can be room at all."""
        gpus = task.demand.gpus
        firsts = sorted(_first(supply.devices[key], need) for key, need in needs.items())
        earliest = max(self._now, firsts[gpus - 1] if gpus else self._now)
        earliest = max(earliest, next((at for at, room in supply.room if room.fits(task)), inf))
        if earliest == inf:
            return []
        if not planned:
            return [earliest]
        times = {earliest, *(forecast.end_at for forecast in planned)}
        times |= {at for key in needs for at, _ in supply.devices[key]} | {at for at, _ in supply.room}
        return sorted(at for at in times if earliest <= at < inf)

    def _devices_at(
        self,
        at: float,
        until: float,
        supply: Supply,
        needs: dict[DeviceKey, Mib],
        task: Task,
        planned: Sequence[Forecast],
    ) -> list[tuple[DeviceKey, Mib]] | None:
        """Devices that it could have from then on without being in the way of those planned before it."""
        checks = [at, *(forecast.start_at for forecast in planned if at < forecast.start_at < until)]
        for check in checks:
            room = supply.headroom(check)
            for forecast in _there(planned, check):
                room = room.with_room_of(self.first[forecast.task], -1)
            if not room.fits(task):
                return None
        chosen = [
            (key, need)
            for key, need in needs.items()
            if all(supply.mb(key, check) - _planned_mb(planned, key, check) >= need for check in checks)
        ]
        return chosen[: task.demand.gpus] if len(chosen) >= task.demand.gpus else None

    def _made(
        self, task: Task, node: NodeName, chosen: list[tuple[DeviceKey, Mib]], at: float, end_at: float
    ) -> Forecast:
        ahead = [] if at == self._now else [d for d in self._ahead(node, chosen) if d.p50_at <= at]
        p90_at = max([at, *(departure.p90_at for departure in ahead)])
        ns = [departure.n for departure in ahead if departure.n]
        is_guess = any(departure.is_guess for departure in ahead)
        basis = Basis.GUESS if is_guess else Basis.LEARNED if ns else Basis.STATED
        keeps_room = not is_guess or all(forecast.basis is not Basis.GUESS for forecast in self.made)
        times = Instant(at), Instant(p90_at), Instant(end_at)
        return Forecast(task.id, node, tuple(chosen), *times, min(ns, default=0), basis, keeps_room)

    def _ahead(self, node: NodeName, chosen: list[tuple[DeviceKey, Mib]]) -> Iterator[Departure]:
        """When those leave who hold what the task is to have, whether before it starts or after."""
        for key, _ in chosen:
            for holding in self._draft.book(key).holdings.values():
                yield self._departures.of_holding(holding)
            for forecast in self.made:
                if key in dict(forecast.devices):
                    late = forecast.p90_at - forecast.start_at
                    is_guess = forecast.basis is Basis.GUESS
                    yield Departure(forecast.end_at, Instant(forecast.end_at + late), forecast.n, is_guess)
        if not chosen:
            yield from map(self._departures.of, self._draft.active_on(node))


def _first(steps: list[tuple[float, int]], need_mb: int) -> float:
    """When there is so much for the first time; infinite if never."""
    return next((at for at, mb in steps if mb >= need_mb), inf)


def _there(planned: Sequence[Forecast], at: float) -> Iterator[Forecast]:
    return (forecast for forecast in planned if forecast.start_at <= at < forecast.end_at)


def _planned_mb(planned: Sequence[Forecast], device: DeviceKey, at: float) -> int:
    return sum(dict(forecast.devices).get(device, 0) for forecast in _there(planned, at))
