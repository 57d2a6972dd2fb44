"""Who leaves, for the naive planner: tasks, gangs, and ranks that their gangs can do without."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import combinations
from typing import Any

from gpubroker_server.core.domain.holders import Gang, MemberState
from gpubroker_server.core.domain.lease import Lease
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from msgspec.structs import replace

from tests.core.naive_gangs import runs
from tests.core.naive_tenants import TOPS, NaiveTenants


def leavers(run: Task) -> list[Task]:
    """Each with those of its members that would leave."""
    if not members_of(run):
        return [run]
    at_work = [member for member in members_of(run) if member.takes_part and not member.gone]
    beyond = [m for m in at_work if m.rank >= run.demand.least_ranks and not m.has_ended]
    surplus = beyond if run.state is TaskState.RUNNING else []
    rest = tuple(member for member in at_work if member not in surplus)
    return [replace(run, holder=Gang(some)) for some in (*((m,) for m in surplus), rest) if some]


def is_alone(one: Task) -> bool:
    """A rank without which its gang goes on."""
    if one.state is not TaskState.RUNNING or len(members_of(one)) != 1:
        return False
    [member] = members_of(one)
    return member.rank >= one.demand.least_ranks and not member.has_ended


def is_on(one: Task, node: str) -> bool:
    return any(run.node == node for run in runs(one))


def names_of(gone: Sequence[Task]) -> tuple[str, ...]:
    """As a step has them: `task`, or `task:rank,rank` of one that goes on."""
    whole = {one.id for one in gone if not is_alone(one)}
    ranks: dict[str, list[int]] = {}
    for one in gone:
        if one.id not in whole:
            ranks.setdefault(one.id, []).append(members_of(one)[0].rank)
    named = [(name, f"{name}:{','.join(map(str, sorted(some)))}") for name, some in ranks.items()]
    return tuple(said for _, said in sorted([*named, *((name, name) for name in whole)]))


def leave(naive: Any, gone: Sequence[Task], preemptor: str) -> tuple[str, ...]:
    """They get notice; returns their names."""
    names = names_of(gone)
    for one in gone:
        run = naive.tasks[one.id]
        notice: dict[str, Any] = {"freeing_for": preemptor, "stop_deadline_at": naive.now + run.grace_seconds}
        if one.id in names:
            naive.tasks[one.id] = replace(run, state=TaskState.STOPPING, **notice)
            continue
        [leaver] = members_of(one)
        members = [
            replace(m, state=MemberState.LEAVING, **notice) if m.rank == leaver.rank else m
            for m in members_of(run)
        ]
        naive.tasks[one.id] = replace(run, holder=Gang(tuple(members)))
    return names


class NaiveLeavers(NaiveTenants):
    taken: dict[str, tuple[Any, ...]]
    node_has: Any

    runs_of = staticmethod(runs)
    leaving_members = staticmethod(leavers)
    is_alone = staticmethod(is_alone)

    def possible_victims(self, node: Any, task: Task) -> list[Task]:
        """What may be stopped for a task, in the documented order: of a gang at work each rank that it can do
        without, and the rest of it."""
        found = [
            one
            for run in self.tasks.values()
            if run.state in (TaskState.ADMITTED, TaskState.RUNNING)
            and (run.admitted_at or 0.0) < self.now
            and run.priority < self.stops_below(task)
            for one in leavers(run)
            if self.ignores_shields(run, task)
            or is_alone(one)
            or not (self.is_shielded(run) or self.has_turn_protection(run, task.priority))
        ]
        return sorted((one for one in found if is_on(one, node.name)), key=self.by_cost)

    def by_cost(self, one: Task) -> Any:
        rank = members_of(one)[0].rank if is_alone(one) else -1
        return self.lost(one), not is_alone(one), one.priority, -self.gives_back(one), one.id, -rank

    def may_preempt(self, task: Task) -> bool:
        return self.policy.preemption and self.stops_below(task) >= 0

    def stops_below(self, task: Task) -> int:
        if self.needs_gpus(task) or task.priority >= 90:
            return task.priority
        return 10 if task.priority >= 10 else -1

    @staticmethod
    def key_of(one: Any) -> str:
        """Of a device or a node."""
        return one.key if hasattr(one, "key") else f"/{one.name}/"

    def cost(self, gone: Sequence[Task]) -> tuple[float, int, int]:
        """Lost GPU-seconds, tasks that are stopped, and if there are none the ranks that leave."""
        ranks = sum(map(is_alone, gone))
        stopped = len(gone) - ranks
        return sum(map(self.lost, gone)), stopped, 0 if stopped else ranks

    def name_of(self, one: Task) -> tuple[str, int]:
        return one.id, members_of(one)[0].rank if is_alone(one) else -1

    def is_named(self, one: Task, names: Sequence[str]) -> bool:
        """Whether a step says that it leaves: a whole gang, or just these of its ranks."""
        for task, _, ranks in (name.partition(":") for name in names):
            if task == one.id:
                return not ranks or str(self.name_of(one)[1]) in ranks.split(",")
        return False

    def ignores_shields(self, run: Task, task: Task) -> bool:
        return task.priority >= 90 or run.priority < 10 <= task.priority

    def is_shielded(self, run: Task, at: float | None = None) -> bool:
        now = self.now if at is None else at
        spent = run.preemptions >= self.policy.preemption_budget
        since = run.started_at
        saved = since is not None and run.checkpoint_at is not None and run.checkpoint_at > since
        long = since is not None and now - since >= self.policy.shield_seconds
        young = since is None or now - since < self.policy.min_run_seconds
        return (young and self.policy.min_run_seconds > 0) or (spent and not saved and not long)

    def has_turn_protection(self, run: Task, priority: int, at: float | None = None) -> bool:
        """Until it has saved its work or run for long, those of its band are kept from it before whom it went
        by its age when it was admitted."""
        now = self.now if at is None else at
        since = run.started_at
        saved = since is not None and run.checkpoint_at is not None and run.checkpoint_at > since
        early = since is None or now - since < self.policy.shield_seconds
        admitted = run.admitted_at if run.is_active and run.admitted_at is not None else self.now
        points = int(max(0.0, admitted - run.submitted_at) / self.policy.ageing_seconds_per_point)
        stood = min(min(top for top in TOPS if run.priority <= top), run.priority + points)
        return self.policy.shield_seconds > 0 and early and not saved and priority <= stood

    def lost(self, run: Task) -> float:
        if run.started_at is None or is_alone(run):
            return 0.0
        gpus = sum(part.demand.gpus for part in runs(self.tasks[run.id]))
        return max(0.0, self.now - max(run.started_at, run.checkpoint_at or 0.0)) * max(1, gpus)

    def leases_of(self, run: Task) -> list[Lease]:
        mine = [lease for lease in self.leases if lease.holder == run.id and lease.fence == run.fence]
        if not members_of(run):
            return mine
        ranks = {member.rank for member in members_of(run)}
        return [lease for lease in mine if lease.rank in ranks and not self.is_leaving(lease)]

    def taken_from(self, gone: Sequence[Task]) -> list[Lease]:
        """What tenants lose by it: of a gang that is stopped, all that it has."""
        rows = [self.leases_of(one if is_alone(one) else self.tasks[one.id]) for one in gone]
        return list(dict.fromkeys(lease for row in rows for lease in row))

    def held_by(self, gone: Sequence[Task]) -> int:
        return sum(lease.mb for lease in self.taken_from(gone))

    def gives_back(self, run: Task) -> int:
        return sum(self.takes(lease) for lease in self.leases_of(run))

    def room_after(self, node: Any, task: Task, gone: Sequence[Task]) -> tuple[float, int, int]:
        """What the node has beside its devices, once these and all that is leaving anyway have left."""
        cpu, memory, slots = self.room(node, task)
        for run in self.gone_from(node, gone):
            cpu, memory, slots = cpu + run.demand.cpu, memory + run.demand.memory_mb, slots + 1
        return round(cpu, 6), memory, slots

    def gone_from(self, node: Any, gone: Sequence[Task]) -> list[Task]:
        here = [run for one in gone for run in runs(one) if run.node == node.name]
        return [run for run in self.runs_on(node) if run.state is TaskState.STOPPING] + here

    def would_fit(self, node: Any, devices: Sequence[Any], task: Task, gone: Sequence[Task]) -> bool:
        """Once these, and all that is leaving anyway, have left the node."""
        cpu, memory, slots = self.room_after(node, task, gone)
        if max(0.0, cpu) < task.demand.cpu or max(0, memory) < task.demand.memory_mb or slots < 1:
            return False
        if not self.node_has(node, task, self.gone_from(node, gone)):
            return False
        return all(self.left_after(device, task, gone) >= 0 for device in devices)

    def left_after(self, device: Any, task: Task, gone: Sequence[Task]) -> int:
        need = self.needs(task.demand, device)
        return -1 if need is None else self.free_after(device, task, gone) - need

    def free_after(self, device: Any, task: Task, gone: Sequence[Task]) -> int:
        freed = sum(self.takes(ls) for run in gone for ls in self.leases_of(run) if ls.device == device.key)
        return self.soon(device, task) + freed

    def evictions(self, task: Task) -> Iterator[tuple[Any, list[Any], list[Task]]]:
        """Every way to make room: (rank, devices, victims). Tries every subset of runs on every node."""
        if not self.may_preempt(task) or not self.custom_is_there(task) or self.over_quota(task):
            return
        for node in self.nodes:
            if not node.ready or node.cordoned or not self.is_open(node, task):
                continue
            found = self.possible_victims(node, task)
            for count in range(len(found) + 1):
                for gone in combinations(enumerate(found), count):
                    victims = [run for _, run in gone]
                    by_place = tuple(place for place, _ in gone)
                    for chosen in combinations(self.devices(node.name), task.demand.gpus):
                        if self.would_fit(node, chosen, task, victims):
                            left = sorted((self.left_after(d, task, victims), d.key) for d in chosen)
                            keys = tuple(device.key for device in chosen)
                            what = list(chosen) or [node]
                            yield (self.cost(victims), node.name, by_place, left, keys), what, victims

    def eviction(self, task: Task, closed: Sequence[str] = ()) -> tuple[list[Any], list[Task]] | None:
        """Of idle work what is in the way, else the cheapest, of open nodes; ties go by node, then (one GPU)
        device or (several) by who leaves."""
        options = [option for option in self.evictions(task) if option[0][1] not in closed]
        if not options or not all(option[2] for option in options):
            return None  # room is coming where it may go
        idle = self.idle_eviction(task, closed)
        if idle is not None and self.may_be_stopped_for(task, idle[1]):
            return idle

        if any(members_of(one) for option in options for one in option[2]):
            return self.as_taken(task, [o for o in options if self.may_be_stopped_for(task, o[2])])

        def rank(option: Any) -> Any:
            cost, node, by_place, left, keys = option[0]
            return (cost, node, keys, by_place) if task.demand.gpus == 1 else (cost, node, by_place, left)

        best = min(options, key=rank)
        if idle is not None or not self.may_be_stopped_for(task, best[2]):
            options = [option for option in options if self.may_be_stopped_for(task, option[2])]
            best = min(options, key=lambda option: option[0][:4], default=best)
        return (best[1], best[2]) if best[2] and self.may_be_stopped_for(task, best[2]) else None

    def eviction_above(self, task: Task, floors: dict[str, int]) -> tuple[list[Any], list[Task]] | None:
        """The cheapest on these nodes, of runs from such a priority on."""
        options = [
            option
            for option in self.evictions(task)
            if option[0][1] in floors
            and all(one.priority >= floors[option[0][1]] for one in option[2])
            and self.may_be_stopped_for(task, option[2])
        ]
        if any(members_of(one) for option in options for one in option[2]):
            return self.as_taken(task, options)
        best = min(options, key=lambda option: option[0][:4], default=None)
        return None if best is None else (best[1], best[2])

    def idle_eviction(self, task: Task, closed: Sequence[str]) -> Any:
        """Where the task would go if there were no idle work, the cheapest of it that is in the way there."""
        if task.priority < 10:
            return None
        idle = {
            node.name: [run for run in self.possible_victims(node, task) if run.priority < 10]
            for node in self.nodes
        }
        without: Any = copy(self)
        without.nodes = [node for node in self.nodes if node.name not in closed]
        without.free = lambda device, task: self.free_after(device, task, idle[device.node])
        without.room = lambda node, task: self.room_after(node, task, idle[node.name])
        without.node_has = lambda node, task: self.node_has(node, task, self.gone_from(node, idle[node.name]))
        places = list(without.places(task))
        if not places:
            return None
        _, name, chosen = min(places, key=lambda place: place[0])
        node = next(node for node in self.nodes if node.name == name)
        devices = [device for device in self.devices(name) if device.key in dict(chosen)]
        ways = [
            (
                (self.cost([run for _, run in gone]), tuple(place for place, _ in gone)),
                [run for _, run in gone],
            )
            for count in range(1, len(idle[name]) + 1)
            for gone in combinations(enumerate(idle[name]), count)
            if self.would_fit(node, devices, task, [run for _, run in gone])
        ]
        if any(members_of(one) for _, gone in ways for one in gone):
            return self.as_taken(task, [(rank, devices or [node], gone) for rank, gone in ways])
        return devices or [node], min(ways, key=lambda way: way[0])[1]

    def as_taken(self, task: Task, options: Sequence[Any]) -> Any:
        """Of the cheapest ways, the one that was taken if it is one of them."""
        least = min((option[0][0] for option in options), default=None)
        cheapest = [option for option in options if option[0][0] == least]
        what, _, names, made, *_ = self.taken.get(task.id, ("", "", (), ()))
        for _, devices, victims in cheapest:
            is_same = sorted(map(self.key_of, devices)) == sorted(key for key, *_ in made)
            if what == "preempt" and is_same and names_of(victims) == names:
                return devices, victims
        return cheapest[0][1:] if cheapest and cheapest[0][2] else None
