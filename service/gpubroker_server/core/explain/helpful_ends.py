"""Find the first run whose end gives a task room that no task ahead of it would take."""

from collections.abc import Iterator
from heapq import nsmallest

from msgspec import Struct
from msgspec.structs import replace

from gpubroker_server.core.domain.demand import may_use_node
from gpubroker_server.core.domain.ranks import nodes_of
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.explain.blockers import is_short, quota_of
from gpubroker_server.core.explain.survey import NodeFinding, Survey, Verdict
from gpubroker_server.core.explain.what_if import WhatIf
from gpubroker_server.core.planning.forecasts.future_capacity import ExpectedEnds
from gpubroker_server.core.planning.forecasts.limits import share_a_limit
from gpubroker_server.core.planning.forecasts.run_estimates import Remaining
from gpubroker_server.core.planning.gangs.gang_search import Gang
from gpubroker_server.core.planning.nodes.draft import Draft
from gpubroker_server.core.planning.tenants.fair_share import FairShares
from gpubroker_server.core.world.queue import EquivalenceClass, OrderKey, order_key

MAX_RUNS = 64
"""The most runs that are tried. The runs that end first are tried first."""

MAX_RUNS_OF_A_GANG = 8
"""The most runs that are tried for a gang. Each of them takes a search over all nodes."""

MAX_CONTESTED = 4
"""The most runs whose room is checked against the tasks ahead that might take it."""


class End(Struct, frozen=True):
    run: Task
    within: Remaining
    places: Gang
    """The places of the waiting task, once this run has ended."""


def first_end(survey: Survey, expected_ends: ExpectedEnds) -> End | None:
    """Return the first run to end whose end alone gives the task room that no task ahead would take; None if
    there is none."""
    task, ahead, contested = survey.task, _TasksAhead(survey), 0
    anywhere = _is_limited(survey) or bool(task.demand.bundles)
    runs = _runs(survey, anywhere=anywhere)
    ends = ((expected_ends.of(run).within(survey.now), run) for run in runs if run.is_active)
    earliest = nsmallest(
        MAX_RUNS_OF_A_GANG if task.demand.bundles else MAX_RUNS,
        ((end, run) for end, run in ends if end is not None),
        key=lambda pair: (pair[0].p50_seconds, pair[1].id),
    )
    for end, run in earliest:
        without = Draft(survey.draft.world)
        without.remove_run(run)
        what_if = WhatIf(without, survey.policy, survey.now, survey.forecasts)
        places = what_if.places(task) if anywhere else what_if.places_on(nodes_of(run), task)
        if places is None:
            continue
        contested += 1
        if not ahead.would_take(what_if, run):
            return End(run, end, places)
        if contested == MAX_CONTESTED:
            break
    return None


def _is_limited(survey: Survey) -> bool:
    """Return True if the task waits for a quota or a shared limit, of which a run on any node may give back a
    part."""
    quota = quota_of(survey)
    needs_quota = quota is not None and is_short(quota)
    return needs_quota or bool(survey.draft.short_of(survey.task, survey.policy.custom_limits))


def _runs(survey: Survey, *, anywhere: bool) -> Iterator[Task]:
    draft = survey.draft
    if anywhere:
        yield from map(draft.task, draft.world.active)
        return
    for finding in survey.nodes:
        if finding.is_usable and may_use_node(survey.task.demand, finding.node):
            yield from _large_enough_runs(survey, finding)


def _large_enough_runs(survey: Survey, finding: NodeFinding) -> Iterator[Task]:
    """Yield the runs on a node that hold enough memory to give the task its missing devices."""
    draft, node = survey.draft, finding.node.name
    gpus = survey.task.demand.gpus - finding.count(Verdict.FITS)
    if gpus <= 0:
        yield from draft.runs_on(node)
        return
    devices_by_holder: dict[str, int] = {}
    for device in finding.devices:
        missing_mb = (device.need_mb or 0) - device.free_mb
        is_full = device.verdict is Verdict.NO_ROOM or device.verdict is Verdict.KEPT_FOR_OTHERS
        if is_full and device.ledger.held_mb() >= missing_mb:
            held_mb: dict[str, int] = {}
            for holding in device.ledger.holdings.values():
                holder = holding.lease.holder
                held_mb[holder] = held_mb.get(holder, 0) + holding.occupied_mb
            for holder, mb in held_mb.items():
                if mb >= missing_mb:
                    devices_by_holder[holder] = devices_by_holder.get(holder, 0) + 1
    large_enough = {TaskId(holder) for holder, devices in devices_by_holder.items() if devices >= gpus}
    yield from map(draft.task, sorted(large_enough & draft.world.runs.get(node, set())))


class _TasksAhead:
    """The tasks ahead of one task: those with pledges, and the first of each distinct demand."""

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._ahead: list[Task] | None = None
        self._shares: FairShares

    def would_take(self, what_if: WhatIf, run: Task) -> bool:
        """Return True if a task ahead might take what this run gives back: memory, or a part of a limit or a
        quota that both share. `what_if` asks about a draft without the run."""
        return any(
            other.demand.bundles
            or share_a_limit(run, other, self._survey.policy)
            or any(what_if.may_have(node, other) for node in nodes_of(run))
            for other in self._most_urgent()
        )

    def _most_urgent(self) -> list[Task]:
        if self._ahead is None:
            task, now, policy = self._survey.task, self._survey.now, self._survey.policy
            self._shares = FairShares(self._survey.draft.world, policy, now)
            world = self._survey.draft.world
            own_order = world.queue.order_within_tenant(task, now, policy)
            key = order_key(own_order, self._shares.rank(task.tenant))
            to_place = (
                equivalence
                for equivalence in world.queue.classes.values()
                if not equivalence.demand.answered_by
            )
            most_urgent = [task for equivalence in to_place for task in self._of(equivalence, key)]
            most_urgent += [world.tasks[name] for name in world.pledges if name in world.queue]
            self._ahead = [other for other in most_urgent if other.id != task.id]
        return self._ahead

    def _of(self, equivalence: EquivalenceClass, key: OrderKey) -> Iterator[Task]:
        """Yield the first task ahead with this demand; if there are quotas, the first of each tenant."""
        tenants_seen = set[str]()
        world, now, policy = self._survey.draft.world, self._survey.now, self._survey.policy
        groups = [
            group
            for priorities in equivalence.bands.values()
            for same_priority in priorities.values()
            for group in same_priority.values()
        ]
        for group in sorted(groups, key=lambda group: -group.priority):
            first = group.member(0)
            own_order = group.order_within_tenant(first, now, policy)
            # The end of a run may change the order between tenants.
            is_other = group.tenant != self._survey.task.tenant
            tenant = group.tenant if policy.has_quotas else ""
            if tenant not in tenants_seen and (
                (is_other and own_order[0] <= key[0])
                or order_key(own_order, self._shares.rank(group.tenant)) < key
            ):
                tenants_seen.add(tenant)
                yield replace(world.tasks[first[1]], id=TaskId(""))
