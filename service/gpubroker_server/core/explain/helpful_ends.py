"""For whose end a task waits, and who stands ahead of it and would take the room that then comes back."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import nsmallest

from gpubroker_server.core.domain.demand import may_use_node
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.explain.blockers import quota_of
from gpubroker_server.core.explain.survey import NodeFinding, Survey, Verdict
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.forecasts.limits import share_a_limit
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.queue import Kin, OrderKey, order_key, own_key

MOST_RUNS = 64
"""So many runs are tried, those that are expected to end first."""

MOST_RUNS_OF_A_GANG = 8
"""The same for a gang, for which each takes a search over all nodes."""

MOST_CONTESTED = 4
"""Of so many of them it is looked up whether somebody ahead of the task would take the room."""


@dataclass(frozen=True, slots=True)
class End:
    run: Task
    within: Remaining
    places: Gang
    """Of the task that waits, once this run has ended."""


def first_end(seen: Survey, expected_ends: ExpectedEnds) -> End | None:
    """The run that is expected to end first of those after whose end alone the task has room, with nobody
    ahead of it to take that."""
    task, rivals, contested = seen.task, _Rivals(seen), 0
    anywhere = _is_limited(seen) or bool(task.demand.bundles)
    runs = _runs(seen, anywhere=anywhere)
    known = ((expected_ends.of(run).within(seen.now), run) for run in runs if run.is_active)
    soonest = nsmallest(
        MOST_RUNS_OF_A_GANG if task.demand.bundles else MOST_RUNS,
        ((end, run) for end, run in known if end is not None),
        key=lambda pair: (pair[0].p50_seconds, pair[1].id),
    )
    for end, run in soonest:
        without = Draft(seen.draft.world)
        without.remove_run(run)
        what_if = WhatIf(without, seen.policy, seen.now, seen.forecasts)
        places = what_if.places(task) if anywhere else what_if.places_on(nodes_of(run), task)
        if places is None:
            continue
        contested += 1
        if not rivals.would_take(what_if, run):
            return End(run, end, places)
        if contested == MOST_CONTESTED:
            break
    return None


def _is_limited(seen: Survey) -> bool:
    """Whether what the task waits for may come back on any node: what its quota leaves, or a limit that many
    share."""
    quota = quota_of(seen)
    is_short = quota is not None and quota.is_short
    return is_short or bool(seen.draft.short_of(seen.task, seen.policy.custom_limits))


def _runs(seen: Survey, *, anywhere: bool) -> Iterator[Task]:
    draft = seen.draft
    if anywhere:
        yield from map(draft.task, draft.world.active)
        return
    for one in seen.nodes:
        if one.is_usable and may_use_node(seen.task.demand, one.node):
            yield from _of_enough(seen, one)


def _of_enough(seen: Survey, one: NodeFinding) -> Iterator[Task]:
    """Those on a node without whom enough devices may have room. By sums, nobody else can be the one."""
    draft, node = seen.draft, one.node.name
    gpus = seen.task.demand.gpus - one.count(Verdict.FITS)
    if gpus <= 0:
        yield from draft.runs_on(node)
        return
    given: dict[str, int] = {}
    for device in one.devices:
        missing_mb = (device.need_mb or 0) - device.free_mb
        is_full = device.verdict is Verdict.NO_ROOM or device.verdict is Verdict.KEPT_FOR_OTHERS
        if is_full and device.book.held_mb() >= missing_mb:
            held: dict[str, int] = {}
            for holding in device.book.holdings.values():
                holder = holding.lease.holder
                held[holder] = held.get(holder, 0) + holding.takes_mb
            for holder, mb in held.items():
                if mb >= missing_mb:
                    given[holder] = given.get(holder, 0) + 1
    enough = {TaskId(holder) for holder, devices in given.items() if devices >= gpus}
    yield from map(draft.task, sorted(enough & draft.world.runs.get(node, set())))


class _Rivals:
    """Of one task: whoever is ahead of it and has pledges, and per different demand the most urgent one."""

    def __init__(self, seen: Survey) -> None:
        self._seen = seen
        self._ahead: list[Task] | None = None
        self._shares: FairShares

    def would_take(self, what_if: WhatIf, run: Task) -> bool:
        """Whether one of them might take what this run gave back, in a draft in which it did. In doubt, yes:
        what it counted of a limit that many share, or of a quota, may be taken on any node."""
        return any(
            rival.demand.bundles
            or share_a_limit(run, rival, self._seen.policy)
            or any(what_if.may_have(node, rival) for node in nodes_of(run))
            for rival in self._most_urgent()
        )

    def _most_urgent(self) -> list[Task]:
        if self._ahead is None:
            task, now, policy = self._seen.task, self._seen.now, self._seen.policy
            self._shares = FairShares(self._seen.draft.world, policy, now)
            world = self._seen.draft.world
            standing = world.queue.standing_of(task)
            own = own_key(standing, task.stream, task.submitted_at, task.id, now, policy)
            key = order_key(own, self._shares.rank(task.tenant))
            to_place = (kin for kin in world.queue.kin.values() if not kin.demand.answered_by)
            found = [one for kin in to_place for one in self._of(kin, key)]
            found += [world.tasks[name] for name in world.pledges if name in world.queue]
            self._ahead = [rival for rival in found if rival.id != task.id]
        return self._ahead

    def _of(self, kin: Kin, key: OrderKey) -> Iterator[Task]:
        """Of one demand, the highest priority of which somebody stands ahead; with quotas, of each tenant."""
        told = set[str]()
        world, now, policy = self._seen.draft.world, self._seen.now, self._seen.policy
        groups = [group for by in kin.bands.values() for likes in by.values() for group in likes.values()]
        for group in sorted(groups, key=lambda group: -group.priority):
            first = group.member(0)
            own = group.own_key(first, now, policy)
            is_other = group.tenant != self._seen.task.tenant  # an end may change who comes first of them
            whose = group.tenant if policy.has_quotas else ""
            if whose not in told and (
                (is_other and own[0] <= key[0]) or order_key(own, self._shares.rank(group.tenant)) < key
            ):
                told.add(whose)
                yield replace(world.tasks[first[1]], id=TaskId(""))
