"""Possible victims, the cost of stopping them, and the cheapest set that makes room."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec import Struct

from gpubroker_server.core.domain.holders import Gang, Model
from gpubroker_server.core.domain.models import expected_seconds
from gpubroker_server.core.domain.node_capacity import NodeHeadroom
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.ranks import gpus_of, rank_task, ranks_of, removable_ranks
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import DeviceKey, Instant, NodeName, TaskId
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.nodes.shields import may_be_stopped

EXACT_LIMIT = 8
"""The number of candidates up to which every subset is tried. With more candidates the cheapest are taken
first, with fill-back."""

Cost = tuple[float, int, int]
"""The lost GPU-seconds, the number of tasks stopped, and the number of single ranks stopped whose gangs go
on."""

NO_COST: Cost = (0.0, 0, 0)
WITHOUT_LIMIT: Cost = (inf, 0, 0)

Suffices = Callable[[Sequence["Candidate"]], bool]
"""Returns True if there is room once these victims have left. It is monotone: more victims never mean less
room."""

Together = Callable[[Sequence["Candidate"]], Sequence["Candidate"]]
"""Returns the candidates that may leave together, in their order. If a set of candidates may leave, so may
each subset."""


class PossibleVictim(Struct, frozen=True):
    """A possible victim and what it frees: a run, or one rank of a gang that goes on without it. If a gang
    has such ranks, the rest of the gang is a possible victim of its own."""

    task: Task
    frees: dict[DeviceKey, int]
    """Maps a device, on any node, to the MiB that the victim frees there."""
    runs: tuple[tuple[NodeName, Task], ...]
    """The ranks that leave, on all nodes, each as a task of its own."""
    rank: int | None = None
    """The rank, if only one rank leaves."""

    @property
    def key(self) -> tuple[TaskId, int]:
        return self.task.id, -1 if self.rank is None else self.rank

    def parts(self, node: NodeName) -> Iterator[Task]:
        """Yield the parts of the victim on one node."""
        return (part for run_node, part in self.runs if run_node == node)


class Candidate(PossibleVictim, frozen=True):
    lost: float = 0.0
    """The GPU-seconds of work since the task's start or newest checkpoint; 0 for a single rank, since its
    gang goes on."""

    @property
    def order(self) -> tuple[float, bool, int, int, TaskId, int]:
        """See `cheapest_first`."""
        id, rank = self.key
        return self.lost, self.rank is None, self.task.priority, -sum(self.frees.values()), id, -rank


def possible_victims(
    draft: Draft, node: NodeName, began_at: Instant, known: Mapping[TaskId, Sequence[PossibleVictim]]
) -> dict[TaskId, Sequence[PossibleVictim]]:
    """Return, by task, the possible victims with a run on the node, in no order.

    A run admitted in the cycle that began at `began_at` is left alone, since it may not have started. `known`
    is the earlier answer for the node. It still holds for tasks that have not changed, because the caller
    drops it when something is measured.
    """
    victims: dict[TaskId, Sequence[PossibleVictim]] = {}
    for run in draft.runs_on(node):
        if run.state in (TaskState.ADMITTED, TaskState.RUNNING) and is_old_enough(run, began_at):
            before = known.get(run.id)
            if not before or before[0].task is not run:
                match run.holder:
                    case Gang():
                        before = [victim for victim in _of_gang(draft, run) if any(victim.parts(node))]
                    case _:
                        before = (PossibleVictim(run, _frees(draft, run, (0,)), ((node, run),)),)
            if before:
                victims[run.id] = before
    return victims


def _of_gang(draft: Draft, run: Task) -> Iterator[PossibleVictim]:
    """Yield every rank that the gang can do without, and the rest of the gang. Ranks that are leaving free
    nothing more."""
    surplus = removable_ranks(run)
    members = members_of(run)
    for rank in surplus:
        alone = ((members[rank].node, rank_task(run, rank)),)
        yield PossibleVictim(run, _frees(draft, run, (rank,)), alone, rank)
    rest = [(rank, node) for rank, node in ranks_of(run) if rank not in surplus and members[rank].takes_part]
    parts = tuple((node, rank_task(run, rank)) for rank, node in rest)
    yield PossibleVictim(run, _frees(draft, run, [rank for rank, _ in rest]), parts)


def cheapest_first(runs: Iterable[PossibleVictim], now: Instant) -> list[Candidate]:
    """Return the victims in the order in which they are considered:

    1. fewer lost GPU-seconds
    2. ranks that their gangs can do without before whole tasks
    3. lower priority
    4. more memory freed
    5. smaller id, higher rank
    """
    candidates = []
    for run in runs:
        lost = lost_gpu_seconds(run.task, now) if run.rank is None else 0.0
        candidates.append(Candidate(run.task, run.frees, run.runs, run.rank, lost))
    return sorted(candidates, key=lambda candidate: candidate.order)


def is_old_enough(run: Task, began_at: Instant) -> bool:
    """Return True if the run was admitted before the cycle that began at `began_at`."""
    return (run.admitted_at or 0.0) < began_at


def gives_way(victim: PossibleVictim, for_priority: int, policy: Policy, now: Instant) -> bool:
    """Return True if the victim may be preempted by a task of this priority. A rank that its gang can do
    without has no shield, since no work is lost."""
    if victim.rank is not None:
        return victim.task.priority < for_priority
    return may_be_stopped(victim.task, for_priority, policy, now)


def lost_gpu_seconds(run: Task, now: Instant) -> float:
    """Return the GPU-seconds of work that are lost if the run stops. For a model they are the time that
    loading it again is expected to take. A run without a GPU counts as if it had one."""
    if run.started_at is None:
        return 0.0
    match run.holder:
        case Model(load_seconds=load_seconds, usage=usage):
            lost_seconds: float = expected_seconds(load_seconds, usage, now)
        case _:
            saved_at = max(run.started_at, run.checkpoint_at or run.started_at)
            lost_seconds = max(0.0, now - saved_at)
    return lost_seconds * max(1, gpus_of(run))


def after(room: NodeHeadroom, node: NodeName, leavers: Iterable[PossibleVictim]) -> NodeHeadroom:
    """Return the node's headroom once these victims have left."""
    return room.with_room_of(
        *(run for leaver in leavers for run_node, run in leaver.runs if run_node == node)
    )


def cost_of(victims: Sequence[Candidate]) -> Cost:
    ranks = sum(victim.rank is not None for victim in victims)
    return sum(victim.lost for victim in victims), len(victims) - ranks, ranks


def named(victims: Iterable[Candidate]) -> tuple[tuple[Task, ...], dict[TaskId, tuple[int, ...]]]:
    """Return the victims in id order, and the ranks that leave of each gang that goes on."""
    chosen = list(victims)
    whole = {victim.task.id for victim in chosen if victim.rank is None}
    ranks: dict[TaskId, tuple[int, ...]] = {}
    for id, rank in sorted(victim.key for victim in chosen if victim.task.id not in whole):
        ranks[id] = (*ranks.get(id, ()), rank)
    tasks = {victim.task.id: victim.task for victim in chosen}
    return tuple(tasks[id] for id in sorted(tasks)), ranks


def any_may_leave(_gone: Sequence[Candidate]) -> bool:
    return True


def all_of(together: Together) -> Suffices:
    """Return a function that tells whether all of its candidates may leave together."""
    return lambda removed: len(together(removed)) == len(removed)


def cheapest(
    found: Sequence[Candidate],
    suffices: Suffices,
    below: Cost = WITHOUT_LIMIT,
    may_leave: Suffices = any_may_leave,
) -> list[Candidate] | None:
    """Return the set of victims with the least lost work, then the fewest victims; None if no set that costs
    less than `below` suffices.

    `found` has the candidates in order of cost. The answer is exact up to EXACT_LIMIT candidates; with more
    it is minimal by inclusion.
    """
    if not suffices(found):
        return None
    if len(found) <= EXACT_LIMIT:
        return _exact(found, suffices, below, may_leave)
    victims = filled_back(found, suffices, may_leave)
    return victims if suffices(victims) and cost_of(victims) < below else None


def filled_back(
    found: Sequence[Candidate], suffices: Suffices, may_leave: Suffices = any_may_leave
) -> list[Candidate]:
    """Return victims that suffice: take candidates in order until they do, then put back each that is not
    needed, the costliest first.

    `suffices` is monotone, so one pass leaves a set that is minimal by inclusion. The method is that of
    Kueue's fill-back.
    """
    taken: list[Candidate] = []
    for candidate in found:
        if suffices(taken):
            break
        if may_leave([*taken, candidate]):
            taken.append(candidate)
    for candidate in costliest_first(taken):
        rest = [other for other in taken if other is not candidate]
        if suffices(rest):
            taken = rest
    return taken


def costliest_first(taken: Iterable[Candidate]) -> list[Candidate]:
    """Return victims in the order in which they are put back."""
    return sorted(taken, key=lambda c: (c.lost, c.rank is None, c.key), reverse=True)


def _exact(
    found: Sequence[Candidate], suffices: Suffices, below: Cost, may_leave: Suffices
) -> list[Candidate] | None:
    """Search all subsets depth first, except where the victims cost too much or the rest cannot suffice."""
    best: list[Candidate] | None = None
    branches: list[tuple[list[Candidate], int]] = [([], 0)]
    while branches:  # pairs of the candidates taken and the number decided on; the next pair is last
        taken, index = branches.pop()
        cost = cost_of(taken)
        if cost >= below or not may_leave(taken):
            continue
        if suffices(taken):
            best, below = taken, cost
            continue
        candidate = found[index]  # there is a next one, because all that are left together suffice
        if suffices([*taken, *found[index + 1 :]]):
            branches.append((taken, index + 1))
        # This branch is tried next, so that of sets with the same cost the one with earlier candidates is
        # kept.
        branches.append(([*taken, candidate], index + 1))
    return best


def _frees(draft: Draft, run: Task, ranks: Collection[int]) -> dict[DeviceKey, int]:
    """Return the MiB by device that these ranks of the run free. Memory that is being released anyway does
    not count."""
    freed: dict[DeviceKey, int] = {}
    for key, lease in draft.world.leases.get((run.id, run.fence), {}).items():
        holding = draft.ledger(lease.device).holdings.get(key)  # None if the run has left in this draft
        if holding is not None and lease.rank in ranks and not holding.is_leaving:
            freed[lease.device] = freed.get(lease.device, 0) + holding.occupied_mb
    return freed
