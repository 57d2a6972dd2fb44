"""Consolidation: move runs to other devices, for a task whose room is free only in small pieces.

A move takes nothing from other tasks. From its stop notice on, a moved run has a place pledged to it, which
only tasks of a higher band than the waiting task can take.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand, need_mb
from gpubroker_server.core.domain.holders import Run, WorkerSeat
from gpubroker_server.core.domain.interval import Interval
from gpubroker_server.core.domain.policy import Policy, band_of
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds
from gpubroker_server.core.planning.budget import CLOSE_LOOK
from gpubroker_server.core.planning.decisions import evict, pledge_destination
from gpubroker_server.core.planning.forecasts.reservations import Forecast
from gpubroker_server.core.planning.forecasts.waiting import first_of_queue
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.offers import Offers
from gpubroker_server.core.planning.nodes.shields import is_shielded
from gpubroker_server.core.planning.nodes.victims import Candidate, PossibleVictim
from gpubroker_server.core.planning.places import Places, scores_of
from gpubroker_server.core.planning.preemption.eviction import Eviction, best_of, eviction_of, is_coming
from gpubroker_server.core.world.world import World

EVERY_SECONDS = Seconds(1.0)
"""The time between two searches for a move."""

MAX_TASKS = 8
"""The number of the first tasks of the queue for which a move is tried."""

MAX_RUNS = 4
"""The most runs that are moved for one task."""

MAX_PROBES = 2_000
"""The most probes of one search, which take some tens of milliseconds. A task that needs more gets no
move."""

HOUR_SECONDS = 3600.0

_LOWEST_PRIORITY = 0
"""The priority at which the waiting task and the moved runs look for room, so that they respect every
pledge."""


class Consolidation:
    """Moves runs together so that a task fits. A consolidation lives in the memory of one leader: a new
    leader does not know how many runs were moved in the last hour."""

    def __init__(self) -> None:
        self._pace = Interval(EVERY_SECONDS)
        self._moved: list[Instant] = []
        """The instants of the moves in the last hour."""

    def next_move(
        self, world: World, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = ()
    ) -> Decision | None:
        """Return the next move; None if there is none, or if no search is due."""
        if not policy.consolidation or not self._pace.is_due(now):
            return None
        self._pace.done(now)
        self._moved = [moved_at for moved_at in self._moved if 0 <= now - moved_at < HOUR_SECONDS]
        limit = min(MAX_RUNS, policy.consolidation - len(self._moved))
        return consolidate(world, policy, now, forecasts, limit) if limit > 0 else None

    def count(self, decision: Decision, now: Instant) -> None:
        """Count the moves of a committed decision."""
        self._moved += [now for _ in decision.tasks]


def consolidate(
    world: World, policy: Policy, now: Instant, forecasts: Iterable[Forecast] = (), most: int = MAX_RUNS
) -> Decision | None:
    """Return stop notices to at most `most` runs, for the first task of the queue that fits once they have
    moved. What they free is pledged to the task, and a new place to each of them.

    Runs are moved only for a task without room, without room to come and without runs that it may preempt.
    The choice is by the least lost work, then the fewest runs, then by node. Nodes with a reservation ahead
    of the task are left out.
    """
    search = _Search(world, policy, now, most)
    foreseen = {forecast.task: {place.node for place in forecast.places} for forecast in forecasts}
    closed: set[NodeName] = set()
    tried: set[tuple[Demand, int]] = set()
    for task in first_of_queue(search.draft, policy, now, MAX_TASKS):
        if (task.demand, task.priority) not in tried:
            tried.add((task.demand, task.priority))
            decision = search.moves_for(task, closed)
            if decision is not None or search.is_exhausted:
                return decision
        closed |= foreseen.get(task.id, set())
    return None


def may_be_moved(run: Task, task: Task, policy: Policy, now: Instant) -> bool:
    """Return True if the run may be moved for the task.

    Such a run has saved a checkpoint since it began, is of no higher band than the task, is not shielded and
    has no deadline. A run that was preempted before stays where it is for an hour, so that runs are not moved
    back and forth.
    """
    if run.state is not TaskState.RUNNING or run.started_at is None or run.checkpoint_at is None:
        return False
    has_saved = run.checkpoint_at > run.started_at
    is_plain = run.demand.gpus > 0 and isinstance(run.holder, (Run, WorkerSeat)) and run.deadline_at is None
    is_lower = band_of(run.priority)[2] <= band_of(task.priority)[2]
    has_run_undisturbed = run.preemptions == 0 or now - run.started_at >= HOUR_SECONDS
    return has_saved and is_plain and is_lower and has_run_undisturbed and not is_shielded(run, policy, now)


class _Search:
    def __init__(self, world: World, policy: Policy, now: Instant, most: int) -> None:
        self.draft = Draft(world)
        self._world = world
        self._policy = policy
        self._now = now
        self._most = most
        self._probes = 0
        """The number of probes used so far."""
        self._worth = scores_of(world, policy)
        self._offers = Offers(self.draft, policy, now)
        self._places = self._places_in(self.draft)
        self._open: dict[Demand, frozenset[NodeName]] = {}
        """Maps a demand to the nodes that have room for such a run now."""

    @property
    def is_exhausted(self) -> bool:
        return self._probes >= MAX_PROBES

    def moves_for(self, task: Task, closed: AbstractSet[NodeName]) -> Decision | None:
        if not self._lacks_one_piece(task):
            return None
        best, best_decision = None, None
        for node in sorted(self._offers.nodes - closed):
            if self.is_exhausted:
                break
            runs = self._movable(node, task)
            if not runs:
                continue
            offer = self._offers.among(node, _LOWEST_PRIORITY, runs)
            way = best_of(offer, task, best, lambda removed: self._may_go(removed, closed))
            if way is None or way is best:
                continue
            decision = self._move_decision(task, eviction_of(way, self.draft, self._now), closed)
            if decision is not None:
                best, best_decision = way, decision
        return best_decision

    def _lacks_one_piece(self, task: Task) -> bool:
        """Return True if enough memory is free in sum, but not in one piece, neither now nor soon."""
        self._probes += len(self._offers.nodes)
        if not task.demand.gpus or self._places.best(task) is not None:
            return False
        if any(is_coming(self._offers, task, node) for node in self._offers.nodes):
            return False
        free_mb, needs = 0, []
        for node in self._offers.nodes:
            for ledger in self.draft.usable_ledgers(node, self._policy, self._now):
                need = need_mb(task.demand, ledger.device)
                if need is not None:
                    needs.append(need)
                    free_mb += max(0, ledger.free_mb(priority=_LOWEST_PRIORITY))
        return bool(needs) and free_mb >= task.demand.gpus * min(needs)

    def _movable(self, node: NodeName, task: Task) -> list[PossibleVictim]:
        runs = self._offers.rooms.possible_victims(node)
        return [run for run in runs if may_be_moved(run.task, task, self._policy, self._now)]

    def _may_go(self, removed: Sequence[Candidate], closed: AbstractSet[NodeName]) -> bool:
        """Return False if these are too many runs, or if one of them has no room elsewhere even by itself."""
        return len(removed) <= self._most and all(self._open_to(run.task) - closed for run in removed)

    def _open_to(self, run: Task) -> frozenset[NodeName]:
        open_nodes = self._open.get(run.demand)
        if open_nodes is None:
            probe = _at_lowest_priority(run)
            roomy = [node for node in self._offers.nodes if self._places.on(node, probe) is not None]
            self._probes += len(self._offers.nodes) + CLOSE_LOOK * len(roomy)
            open_nodes = self._open[run.demand] = frozenset(roomy)
        return open_nodes

    def _move_decision(
        self, task: Task, eviction: Eviction, closed: AbstractSet[NodeName]
    ) -> Decision | None:
        """Return the decision to move the runs, after placing them in a new draft, the largest first; None if
        one of them has no place."""
        draft = Draft(self._world)
        # Keep the room from the whole band: otherwise another task of the band could take it, and the move
        # would be a preemption in favour of that task.
        kept_up_to = band_of(task.priority)[2]
        decision = evict(draft, task, eviction, self._now, StopReason.MOVE, kept_up_to)
        places = self._places_in(draft)
        # Leave out the devices that are being cleared: a run that went there would be in the way again.
        left = {device for device, _ in eviction.devices}
        left |= {lease.device for run in eviction.victims for lease in self._world.leases_of(run)}
        runs = sorted((draft.task(run.id) for run in eviction.victims), key=self._size)
        pledges = list(decision.pledges)
        for run in runs:
            options = [
                place
                for node in sorted(self._open_to(run) - closed)
                if (
                    place := places.on(node, _at_lowest_priority(run), lambda device, _mb: device not in left)
                )
            ]
            self._probes += CLOSE_LOOK * len(self._open_to(run))
            if not options:
                return None
            # A run under notice counts as leaving until its deadline plus this patience, and not longer.
            gone_by = Instant(self._now + run.grace_seconds + self._policy.kill_patience_seconds)
            pledges += pledge_destination(draft, run, min(options)[1], self._now, gone_by, kept_up_to)
        return replace(decision, pledges=tuple(pledges))

    def _size(self, run: Task) -> tuple[int, str]:
        return -sum(lease.mb for lease in self._world.leases_of(run)), run.id

    def _places_in(self, draft: Draft) -> Places:
        return Places(draft, self._policy, self._now, scores=self._worth)


def _at_lowest_priority(run: Task) -> Task:
    return replace(run, priority=_LOWEST_PRIORITY)
