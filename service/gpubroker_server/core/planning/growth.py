"""More ranks for running elastic gangs, of what no waiting task could take."""

from collections.abc import Iterator

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.ranks import vacant_bundles, workers
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.domain.values import changed
from gpubroker_server.core.planning.decisions import grow
from gpubroker_server.core.planning.find_way import View
from gpubroker_server.core.planning.gangs.gang_nodes import GangNode, gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import place_gang
from gpubroker_server.core.planning.places import CLOSE_LOOK

BEHIND_ALL = -1
"""Priority of a rank that is added: it takes nothing that is pledged to any task."""


def more_ranks(view: View) -> Iterator[Decision]:
    """One decision for each gang that gets ranks, the most urgent gang first."""
    world = view.draft.world
    gangs = [view.draft.task(name) for name in world.growable]
    for gang in sorted(gangs, key=lambda gang: (-gang.priority, gang.submitted_at, gang.id)):
        if world.queue.pause_of(gang) is None and (bundles := vacant_bundles(gang)):
            decision = _more_ranks_of(gang, bundles, view)
            if decision is not None:
                yield decision


def _more_ranks_of(gang: Task, bundles: tuple[int, ...], view: View) -> Decision | None:
    """As many as fit, in the order of the bundles, on nodes on which nothing is reserved."""
    nodes = view.draft.world.nodes
    view.budget.spent += CLOSE_LOOK * len(nodes)
    wanted = _as_pending(gang, bundles)
    if view.quotas.is_short(wanted):
        return None
    free = gang_nodes_of(view.draft, wanted, view.policy, view.now)
    usable = [node for node in free if node.node.name not in view.reservations.on and _suits(gang, node)]
    places = place_gang(wanted, usable, view.quotas.max_ranks(wanted))
    if places is None:
        return None
    ready_by = Instant(view.now + view.policy.gang_start_seconds)
    joining = [(bundles[number], place) for number, place in enumerate(places)]
    return grow(view.draft, gang, joining, view.now, ready_by)


def _as_pending(gang: Task, bundles: tuple[int, ...]) -> Task:
    """A gang of the missing ranks alone. What counts for the whole gang is counted already."""
    missing = tuple(gang.demand.bundles[bundle] for bundle in bundles)
    demand = changed(gang.demand, bundles=missing, min_ranks=1, custom=(), slots=())
    return changed(gang, demand=demand, members=(), state=TaskState.PENDING, priority=BEHIND_ALL)


def _suits(gang: Task, node: GangNode) -> bool:
    """Whether the strategy allows it beside the ranks that are at work."""
    here = {gang.members[rank].node for rank in workers(gang)}
    match gang.demand.strategy:
        case "strict_pack":
            return node.node.name in here
        case "strict_spread":
            return node.node.name not in here
        case _:
            return True
