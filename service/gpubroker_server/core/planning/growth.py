"""Growth of running elastic gangs by ranks, with memory that no waiting task could take."""

from collections.abc import Iterator

from msgspec.structs import replace

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import holder_of
from gpubroker_server.core.domain.ranks import vacant_bundles, workers
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant
from gpubroker_server.core.planning.decisions import grow
from gpubroker_server.core.planning.find_way import View
from gpubroker_server.core.planning.gangs.gang_nodes import gang_nodes_of
from gpubroker_server.core.planning.gangs.gang_search import place_gang
from gpubroker_server.core.planning.refusal_cache import RefusalCache

BEHIND_ALL = -1
"""The priority of a rank that is added, so that it takes nothing that is pledged to any task or closed to
background work."""


def more_ranks(view: View, refusals: RefusalCache) -> Iterator[Decision]:
    """Yield one decision for each gang that gets ranks, the most urgent gang first."""
    world = view.draft.world
    gangs = [view.draft.task(name) for name in world.growable]
    for gang in sorted(gangs, key=lambda gang: (-gang.priority, gang.submitted_at, gang.id)):
        if world.queue.pause_of(gang) is None and (bundles := vacant_bundles(gang)):
            decision = _more_ranks_of(gang, bundles, view, refusals)
            if decision is not None:
                yield decision


def _more_ranks_of(
    gang: Task, bundles: tuple[int, ...], view: View, refusals: RefusalCache
) -> Decision | None:
    """Add as many ranks as fit, in the order of the bundles, on nodes on which nothing is reserved."""
    missing = tuple(gang.demand.bundles[bundle] for bundle in bundles)
    ranks = (as_pending(gang, demand) for demand in dict.fromkeys(missing) if refusals.may_join(demand))
    nodes = {node for rank in ranks for node in refusals.nodes_to_join(rank)}
    if not nodes:
        return None  # in most cases, so nothing else is worked out before
    # The amounts of the whole gang, such as its place under limits of running tasks, are counted already.
    first = missing[0]
    demand = replace(gang.demand, bundles=missing, min_ranks=1, custom=first.custom, slots=first.slots)
    wanted = as_pending(gang, demand)
    # A limit may be reserved for higher priorities, so the gang's own priority counts here.
    limited = replace(wanted, priority=gang.priority)
    if view.quotas.is_short(wanted) or view.is_short_of_limits(limited):
        return None
    if gang.demand.strategy.startswith("strict"):
        members = members_of(gang)
        own_nodes = {members[rank].node for rank in workers(members)}
        nodes = nodes & own_nodes if gang.demand.strategy == "strict_pack" else nodes - own_nodes
    if not nodes:
        return None
    free = gang_nodes_of(view.draft, wanted, view.policy, view.now, nodes=nodes)
    within_limits = view.draft.ranks_within_limits(limited, view.policy.custom_limits)
    places = place_gang(wanted, free, min(view.quotas.max_ranks(wanted), within_limits))
    if places is None:
        return None
    ready_by = Instant(view.now + view.policy.gang_start_seconds)
    joining = [(bundles[number], place) for number, place in enumerate(places)]
    return grow(view.draft, gang, joining, view.now, ready_by)


def as_pending(gang: Task, demand: Demand) -> Task:
    """Return the missing ranks of the gang as a pending task of their own."""
    return replace(
        gang, demand=demand, holder=holder_of(demand), state=TaskState.PENDING, priority=BEHIND_ALL
    )
