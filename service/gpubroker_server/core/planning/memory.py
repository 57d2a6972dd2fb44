"""What a planner found out about a World, kept from slice to slice and from cycle to cycle."""

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from operator import ge
from typing import NamedTuple

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Placement, Task
from gpubroker_server.core.domain.units import Instant, NodeName, Seconds, TaskId
from gpubroker_server.core.planning.backfill import Forecast
from gpubroker_server.core.planning.cycle_order import Agenda
from gpubroker_server.core.planning.node_room import Known, Room
from gpubroker_server.core.planning.offers import Offered
from gpubroker_server.core.planning.preemption import Search
from gpubroker_server.core.planning.quota import Needs
from gpubroker_server.core.planning.refused import Refused
from gpubroker_server.core.planning.shields import first_up_to, is_shielded, shielded_seconds, turn_ends_at
from gpubroker_server.core.planning.victims import is_old_enough
from gpubroker_server.core.world.placement_scores import Row, Worth
from gpubroker_server.core.world.queue import Kin
from gpubroker_server.core.world.revisions import Changes
from gpubroker_server.core.world.world import World

Found = tuple[tuple[float, float, tuple[str, ...]], Placement]
"""((what its devices are worth, CPU left on the node, names), placement): the smallest is the best."""


class Right(StrEnum):
    """As what a tenant's task makes room."""

    OWNER = "owner"
    """It takes back what its tenant is guaranteed."""
    BORROWER = "borrower"
    """Its tenant would have more than that."""
    DEBTOR = "debtor"
    """Its tenant would have more than it may."""


class Denied(NamedTuple):
    """A tenant's task could make no room by its own right. While these are the same, so is the answer."""

    as_what: Right
    grown: int
    """Revision of `growth` of which this tells."""
    changed: int
    """Of `changes` if the reason was a passing one, else 0."""
    surplus: tuple[tuple[str, int], ...]
    """What others of its cohort had beyond their guarantees."""
    closed: frozenset[NodeName] = frozenset()
    """Where forecasts let it stop nobody: it tells of those only to whom these nodes are closed as well."""


Likes = tuple[Kin, int]
"""(demand, priority) of tasks that differ in nothing that placement looks at."""

MOST_UNASKED = 10_000
"""So much may be known of demands that nobody has any more before all is forgotten."""

A_MOMENT = 0.001
"""Seconds. What changes by the passing of time is looked at again a little early rather than late."""


@dataclass(slots=True)
class Standing:
    """Where tasks of one sort have room."""

    seen: int = 0
    """Revision of `changes` of which this tells."""
    found: dict[NodeName, Found] = field(default_factory=dict)
    left: dict[NodeName, None] = field(default_factory=dict)
    """Nodes that have changed, and were not looked at yet."""


@dataclass(frozen=True, slots=True)
class Pursuit:
    """A search for an eviction that was left in the middle, and the revision of `changes` at that time."""

    search: Search
    changed: int


class Keepers(NamedTuple):
    """Those who keep room from a task. While they are the same, so is what they keep, unless nodes grow."""

    forecasts: tuple[Forecast, ...]
    is_tired: bool
    ahead: frozenset[TaskId]
    """Who stand ahead of the task, of those for whom room is kept."""
    sort: tuple[object, ...]
    """By what else of the task they tell whether it gives way to them."""
    lengths: tuple[Seconds, ...]
    """How long it takes on each kind of device: who takes longer is kept from no less."""

    def keep_more_than(self, others: "Keepers") -> bool:
        """Or as much."""
        are_same = self.forecasts == others.forecasts and self.sort == others.sort
        is_as_tired = self.is_tired >= others.is_tired
        is_as_long = all(map(ge, self.lengths, others.lengths))
        return are_same and is_as_tired and is_as_long and self.ahead >= others.ahead


class GangRefusal(NamedTuple):
    """There was neither room for such a gang nor any way to make it."""

    changed: int
    grown: int
    """Revisions of `changes` and `growth` of which this tells."""
    coming_on: tuple[NodeName, ...]
    """Or rather: room for it is coming on these nodes together, or is there and kept from it."""
    keepers: Keepers | None = None
    """Forecasts had a part in it: it tells of those only from whom they keep as much."""
    is_kept: bool = False
    """They left no other room, nor another way to make it. Else room is coming."""

    def tells_of(self, keepers: Keepers) -> bool:
        """Of such a gang from which these keep room."""
        if self.keepers is None or not self.is_kept:
            return self.keepers == keepers
        return keepers.keep_more_than(self.keepers)


class Memory:
    """A pure cache: a plan made with it is the plan made without. For one World; another one empties it.

    What is remembered of a node holds until the node is marked as changed. Marks come from the World, from
    drafts, and from time: devices whose samples grow old, and runs that come out of their shield.
    """

    def __init__(self) -> None:
        self._world: World | None = None
        self._policy = Policy()
        self._forget()

    def _forget(self) -> None:
        self._now = self._began_at = Instant(-inf)
        self.changes = Changes()
        self.growth = Changes()
        self.standings: dict[Likes | TaskId, Standing] = {}
        self.refused = Refused()
        self.gangs: dict[Likes, GangRefusal] = {}
        self.beside = Refused()
        """The same where no forecast stands."""
        self.forecast_on: frozenset[NodeName] = frozenset()
        """Where forecasts stood when that was looked at."""
        self.rows: dict[tuple[NodeName, int], tuple[Room, tuple[Row, ...]]] = {}
        """(node, priority) -> (what such a task could have there, the same by sorts of devices)."""
        self.outlooks: Known = {}
        self._worth: Worth | None = None
        self.offers: Offered = {}
        self.needs = Needs()
        self.denied: dict[tuple[str, int, Demand], Denied] = {}
        """(tenant, priority, demand) -> how things stood when there was nothing for such a task."""
        self.awaited: set[NodeName] = set()
        """Nodes with room that is coming, for which somebody waits."""
        self._due: dict[NodeName, Instant] = {}
        """When something changes on a node by itself."""
        self._turned: dict[NodeName, frozenset[str]] = {}
        """What is stale or shielded on a node."""
        self._young: dict[NodeName, Instant] = {}
        """Nodes with runs that this cycle has admitted, and the last of these admissions."""
        self._opened = self._changed = self._grown = self._denied_at = 0
        self._decided: tuple[Decision, ...] = ()
        self.needs_wake = False
        self.agenda: Agenda | None = None
        """Of a cycle that is not finished."""
        self.shortages: dict[Likes, tuple[int, bool]] = {}
        """Revision of `changes` -> whether the cluster had too little of what is counted."""
        self.pursuit: Pursuit | None = None

    def close(self, decisions: Iterable[Decision]) -> None:
        """Remember what a slice decided: the next one looks whether that came true."""
        self._decided = tuple(decisions)

    def resume(self, task: Task, closed: Set[NodeName]) -> Search | None:
        """The search for this task that was left, ready to be gone on with. `closed`: of no concern to it."""
        pursuit, self.pursuit = self.pursuit, None
        if pursuit is None or pursuit.search.task != task:
            return None
        pursuit.search.look_again(set(self.changes.since(pursuit.changed)) - closed)
        return pursuit.search

    def open(
        self, world: World, policy: Policy, now: Instant, began_at: Instant, worth: Worth | None
    ) -> None:
        """Take note of what changed since the last slice. `began_at`, `worth`: of the cycle."""
        if world is not self._world or policy != self._policy or now < self._now:
            self._forget()
            self._world, self._policy = world, policy
        if worth is not self._worth:  # another place may be the best; where there is none, none there is
            self.standings.clear()
            self._worth = worth
        grown = set(world.marks.growth.since(self._grown))
        if began_at != self._began_at:
            self.offers.clear()
            self.pursuit = None
            grown |= {node for node, at in self._young.items() if at < began_at}
        self._now, self._began_at = now, began_at
        grown |= {node for node, at in self._due.items() if at <= now and self._has_turned(node)}
        if not all(_came_true(world, decision) for decision in self._decided):
            grown |= set(self.changes.since(self._opened))
        changed = grown | set(world.marks.changes.since(self._changed))
        looked_at = changed - grown
        grown |= {node for node in looked_at if self._lets_go(node)}
        self._changed, self._grown = world.marks.changes.revision, world.marks.growth.revision
        self._decided = ()
        self.needs_wake = bool(grown or changed & self.awaited)
        self.awaited -= changed
        for node in sorted(changed):
            self.changes.mark(node)
            if node in grown:
                self.growth.mark(node)
            if node not in looked_at:
                self._look_ahead(node)
        self._opened = self.changes.revision
        if self._denied_at != self.growth.revision:  # it holds until something grows
            self._denied_at = self.growth.revision
            self.denied.clear()
        known = len(self.standings) + len(self.refused) + len(self.beside) + len(self.gangs)
        known += len(self.shortages) + len(self.denied)
        if known > 4 * len(world.queue.kin) + MOST_UNASKED:
            self.standings.clear()
            self.refused.clear()
            self.beside.clear()
            self.gangs.clear()
            self.shortages.clear()
            self.denied.clear()

    def _has_turned(self, node: NodeName) -> bool:
        """Whether the passing of time made a difference to the node; if not, when it may."""
        before = self._turned.get(node)
        self._look_ahead(node)
        return self._turned[node] != before

    def _lets_go(self, node: NodeName) -> bool:
        """Whether what was old or shielded there no longer is: its start may be heard of late."""
        before = self._turned.get(node, frozenset())
        self._look_ahead(node)
        return not before <= self._turned[node]

    def _look_ahead(self, node: NodeName) -> None:
        """Note what is old or shielded on a node, and when that may change."""
        assert self._world is not None, "the memory is open"
        period, at = self._policy.sample_period_seconds, inf
        turned: list[str] = []
        for key in self._world.by_node.get(node, ()):
            book = self._world.books[key]
            if book.sample is None or book.is_stale(self._now, period):  # it may be heard of at any time
                turned.append(key)
                at = self._now
            else:
                at = min(at, book.sample.at + 3 * period)
        self._young.pop(node, None)
        for run in self._worth_watching(node):
            if not is_old_enough(run, self._began_at):
                self._young[node] = max(self._young.get(node, Instant(0.0)), run.admitted_at or Instant(0.0))
            if is_shielded(run, self._policy, self._began_at):
                turned.append(run.id)
                if run.started_at is not None:
                    at = min(at, run.started_at + shielded_seconds(run, self._policy))
            if self._has_its_turn(run):
                turned.append(f"turn of {run.id}")
                at = min(at, turn_ends_at(run, self._policy))
        self._due[node] = Instant(at - A_MOMENT)
        self._turned[node] = frozenset(turned)

    def _worth_watching(self, node: NodeName) -> list[Task]:
        """The runs there that may be too young, or shielded. There may be thousands, most of them neither:
        who has begun, and was stopped less often than the policy allows, has a least run time and a turn."""
        assert self._world is not None, "the memory is open"
        tasks = self._world.tasks
        runs = [tasks[name] for name in self._world.runs.get(node, ())]
        least, budget = self._policy.min_run_seconds, self._policy.preemption_budget
        return [
            run
            for run in runs
            if run.preemptions >= budget
            or run.started_at is None
            or run.model is not None
            or self._began_at - run.started_at < least
            or not is_old_enough(run, self._began_at)
            or self._has_its_turn(run)
        ]

    def _has_its_turn(self, run: Task) -> bool:
        """Before some of its band whose priority is higher."""
        is_early = self._began_at < turn_ends_at(run, self._policy)
        return is_early and first_up_to(run, self._policy, self._began_at) > run.priority


def _came_true(world: World, decision: Decision) -> bool:
    """Whether it is plain to see; who only gave pledges back is not asked."""
    return bool(decision.tasks) and all(world.tasks.get(w.task.id) == w.task for w in decision.tasks)
