"""What would let a task start that waits: found by planning it again with one thing changed, not guessed."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Any

from service.core.admission import Refusal, check, check_priority
from service.core.blockers import called
from service.core.demand import Demand
from service.core.departures import Departures
from service.core.expectations import Remaining
from service.core.explain import stands_aside
from service.core.gang import Gang
from service.core.kept import short_enough
from service.core.need import may_use_device
from service.core.pools import resettled, without_pool
from service.core.rivals import first_end
from service.core.survey import Survey
from service.core.task import Task
from service.core.trial import Planner, Trial, in_words
from service.core.units import Mib, NodeName, in_gib

LEAST_SHARE = 0.1
"""To ask for less than this part of what was asked is no remedy."""

MOST_NODES = 12
"""On so many nodes victims are looked for who would have to leave for a higher priority."""

Change = Mapping[str, Any]
"""Fields as a submit or a change names them, and their new values."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing that would do. It is so as of now, if nobody else is given the room first."""

    change: Change
    """What to ask for instead; empty: nothing, it is enough to wait."""
    task: Task
    """The task with that change."""
    message: str
    places: Gang | None = None
    """Where it then starts; None if runs must leave first."""
    victims: tuple[Task, ...] = ()
    """Who would be asked to leave."""
    after: Task | None = None
    """The run after whose end it starts."""
    within: Remaining | None = None
    """When that is expected; None: at once, or nobody can tell."""


def remedies(
    seen: Survey, departures: Departures, planner: Planner, highest_priority: int = 100
) -> tuple[Remedy, ...]:
    """All that were found for a task without room, what changes least first.

    `highest_priority`: the most that whoever asks may give it. The work is bounded: a few plans for this one
    task, however large the cluster.
    """
    search = _Search(seen, departures, planner)
    found = [
        search.release(),
        search.sooner_over(),
        search.after_an_end(),
        search.less_memory(),
        search.fewer_gpus(),
        *search.elsewhere(),
        search.less_of_the_node(),
        search.more_priority(highest_priority),
    ]
    return tuple(remedy for remedy in found if remedy is not None)


class _Search:
    def __init__(self, seen: Survey, departures: Departures, planner: Planner) -> None:
        self._seen = seen
        self._draft = seen.draft
        self._policy = seen.policy
        self._now = seen.now
        self._task = seen.task
        self._departures = departures
        self._planner = planner
        self._nodes = [one.node.name for one in seen.nodes if one.is_usable]
        self._stands_aside = stands_aside(seen.task)

    def release(self) -> Remedy | None:
        """What a person holds, or what waits for its hour, may have room."""
        if self._task.awaits or not (self._task.held or self._task.not_before):
            return None
        change: dict[str, Any] = {}
        if self._task.held:
            change["held"] = False
        if self._task.not_before:
            change["not_before"] = None
        free = replace(self._task, held=False, not_before=None)
        trial = self._planner.attempt(free)
        said = "released" if self._task.held else "without not_before"
        return self._remedy(change, free, trial, said)

    def sooner_over(self) -> Remedy | None:
        """Done before those start for whom its room is kept."""
        if self._stands_aside or not self._seen.forecasts:
            return None
        found = short_enough(self._seen, self._planner)
        if found is None:
            return None
        task, seconds = found
        said = f"said to end within {seconds:.0f} s (expected_seconds)"
        return self._remedy({"expected_seconds": seconds}, task, Trial(self._planner.place(task)), said)

    def less_memory(self) -> Remedy | None:
        """The most GPU memory for which there is room."""
        demand = self._task.demand
        asked = self._asked_mb()
        if self._stands_aside or not asked:
            return None
        most = max((self._most_on(node) for node in self._nodes), default=0)
        if not LEAST_SHARE * asked <= most < asked:
            return None
        less = replace(demand, gpu_mb=Mib(most), gpu_fraction=None, exclusive=False)
        change: dict[str, Any] = {"gpu_mb": most}
        if demand.gpu_fraction is not None:
            change["gpu_fraction"] = None
        if demand.exclusive:
            change["exclusive"] = False
        return self._placed(change, less, f"with gpu_mb at most {most} ({in_gib(most)})")

    def _asked_mb(self) -> int:
        """Of each device; of whole ones and shares, what they come to at least."""
        demand = self._task.demand
        if not demand.gpus or demand.gpu_mb is not None:
            return demand.gpu_mb or 0
        return min(
            (f.need_mb for node in self._seen.nodes for f in node.open_devices if f.need_mb), default=0
        )

    def _most_on(self, node: NodeName) -> int:
        """What each of as many devices of the node as are asked for could give it now."""
        task = self._task
        if not self._draft.headroom(node, task=task.id, priority=task.priority).fits(task):
            return 0
        free = sorted(
            (
                min(book.free_mb(task=task.id, priority=task.priority), book.unheld_mb())
                - book.device.context_mb
                for book in self._draft.usable_books(node, self._policy, self._now)
                if may_use_device(task.demand, book.device)
            ),
            reverse=True,
        )
        gpus = task.demand.gpus
        return free[gpus - 1] if len(free) >= gpus else 0

    def fewer_gpus(self) -> Remedy | None:
        """The most GPUs of which there are enough on one node."""
        demand = self._task.demand
        if self._stands_aside or demand.gpus < 2:
            return None

        def would_do(gpus: int) -> bool:
            return self._planner.place(replace(self._task, demand=replace(demand, gpus=gpus))) is not None

        gpus = _first(range(demand.gpus - 1, 0, -1), would_do)
        if gpus is None:
            return None
        return self._placed({"gpus": gpus}, replace(demand, gpus=gpus), f"with gpus at most {gpus}")

    def elsewhere(self) -> list[Remedy | None]:
        """On devices or nodes that it does not ask for, or outside its pool; what drops least first."""
        demand = self._task.demand
        where = demand.where
        if self._stands_aside or demand.bundles:
            return []
        any_device = {"kinds": [], "min_power": 0, "min_device_mb": 0}
        kinds = {name: to for name, to in any_device.items() if getattr(where, name)}
        nodes: dict[str, Any] = {"nodes": {}} if where.nodes else {}
        on_any_device = replace(where, kinds=(), min_power=0, min_device_mb=Mib(0))
        found: list[Remedy | None] = []
        if kinds:
            wider = replace(demand, where=on_any_device)
            found.append(self._placed(kinds, wider, f"on any GPU (without {', '.join(kinds)})"))
        if nodes:
            wider = replace(demand, where=replace(where, nodes=()))
            found.append(self._placed(nodes, wider, "on any node"))
        if kinds and nodes and not any(found):
            wider = replace(demand, where=replace(on_any_device, nodes=()))
            found.append(self._placed({**kinds, **nodes}, wider, "on any GPU of any node"))
        if demand.pool:
            outside, change = without_pool(demand, self._policy)
            found.append(self._placed({"pool": "", **change}, outside, f"without the pool {demand.pool}"))
        return found

    def less_of_the_node(self) -> Remedy | None:
        """With the CPU and the host memory that are left where its devices have room."""
        task, demand = self._task, self._task.demand
        if self._stands_aside or not (demand.cpu or demand.memory_mb):
            return None
        bare = replace(task, demand=replace(demand, cpu=0.0, memory_mb=Mib(0)))
        best: tuple[float, int, NodeName] | None = None
        for node in self._nodes:
            room = self._draft.headroom(node, task=task.id, priority=task.priority)
            short = room.cpu < demand.cpu or room.memory_mb < demand.memory_mb
            if short and self._planner.place_on([node], bare) is not None:
                left = (min(room.cpu, demand.cpu), min(room.memory_mb, demand.memory_mb), node)
                best = left if best is None else max(best, left)
        if best is None:
            return None
        cpu, memory_mb = floor(best[0] * 100) / 100, best[1]
        if cpu < LEAST_SHARE * demand.cpu or memory_mb < LEAST_SHARE * demand.memory_mb:
            return None
        change: dict[str, Any] = {}
        if cpu < demand.cpu:
            change["cpu"] = cpu
        if memory_mb < demand.memory_mb:
            change["memory_mb"] = memory_mb
        less = replace(demand, cpu=cpu, memory_mb=Mib(memory_mb))
        words = " and ".join(f"{name} at most {value:g}" for name, value in change.items())
        return self._placed(change, less, f"with {words}") if change else None

    def more_priority(self, highest: int) -> Remedy | None:
        """The lowest priority that would do."""
        steps = [step for step in self._steps() if self._task.priority < step <= highest]
        if self._stands_aside or not steps:
            return None

        def would_do(priority: int) -> bool:
            raised = replace(self._task, priority=priority)
            if check_priority(raised.demand, priority, self._policy) is not None:
                return False
            return self._planner.could_start(raised)

        priority = _first(steps, would_do)
        if priority is None:
            return None
        raised = replace(self._task, priority=priority)
        trial = self._planner.attempt(raised, MOST_NODES)
        return self._remedy({"priority": priority}, raised, trial, f"with priority {priority} or above")

    def _steps(self) -> list[int]:
        """The priorities from which on a task may do what it may not below."""
        steps = {priority + 1 for node in self._nodes for priority in self._draft.use(node).priorities}
        for pledges in self._draft.world.pledges.values():
            steps |= {pledge.priority + 1 for pledge in pledges.values()}
        steps |= {limit.priority_threshold for limit in self._policy.custom_limits}
        return sorted(steps | {90})

    def after_an_end(self) -> Remedy | None:
        if self._stands_aside or self._draft.pledges_of(self._task.id):
            return None
        found = first_end(self._seen, self._departures)
        if found is None:
            return None
        end = found.within
        when = f"expected within {end.p50_seconds:.0f} s" if end.p50_seconds else "any moment"
        who = called(found.run.id, found.run.tenant, self._task)
        message = f"when {who} ends ({when}) it starts on {in_words(self._draft, found.places)}"
        return Remedy({}, self._task, message, found.places, after=found.run, within=end)

    def _placed(self, change: Change, demand: Demand, said: str) -> Remedy | None:
        """A remedy if this demand may be submitted and has room now."""
        settled = resettled(demand, self._policy)
        if isinstance(settled, Refusal):
            return None
        changed = replace(self._task, demand=settled)
        places = self._planner.place(changed)
        if places is None or self._refuses(settled):
            return None
        return self._remedy(change, changed, Trial(places), said)

    def _refuses(self, demand: Demand) -> bool:
        world = self._draft.world
        devices = [book.device for book in world.books.values()]
        return check(demand, devices, world.nodes.values(), self._policy) is not None

    def _remedy(self, change: Change, task: Task, trial: Trial, said: str) -> Remedy | None:
        if not trial.is_way:
            return None
        if trial.places is not None:
            where = in_words(self._draft, trial.places)
            return Remedy(change, task, f"{said} it starts now on {where}", trial.places)
        assert trial.eviction is not None
        victims = trial.eviction.victims
        seconds = trial.eviction.deadline_at - self._now
        who = "1 run" if len(victims) == 1 else f"{len(victims)} runs"
        then = f"it starts on {trial.eviction.node} within {seconds:.0f} s"
        return Remedy(change, task, f"{said} {who} would be asked to leave, and {then}", victims=victims)


def _first(steps: Sequence[int], would_do: Callable[[int], bool]) -> int | None:
    """The first step that would do, where all after it do as well."""
    at = bisect_left(steps, True, key=would_do)
    return steps[at] if at < len(steps) else None
