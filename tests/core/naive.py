"""The planner once more, as plainly as can be: lists, no caches, every combination tried.

Slow on purpose. It shares the values of the core (tasks, leases, pledges) and none of its reasoning.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from service.core.demand import Demand
from service.core.lease import HolderKind, Lease, LeaseState, Pledge
from service.core.policy import Policy
from service.core.task import Task, TaskState
from service.core.world import World
from tests.core.naive_backfill import beside, other_way, stands_behind
from tests.core.naive_moves import is_moving, kept
from tests.core.naive_tenants import TOPS, NaiveTenants
from tests.core.naive_worth import fullest, learn, score

Step = tuple[Any, ...]
"""("admit", task, node, devices, ended pledges) or ("preempt", task, victims, made, ended) or
("withdraw", task, ended pledges): what a plan does, without its bookkeeping."""


class Naive(NaiveTenants):
    """Everything the planner may look at, in flat lists."""

    def __init__(self, world: World, policy: Policy, now: float, forecasts: Sequence[Any] = ()) -> None:
        self.policy, self.now, self.forecasts = policy, now, forecasts
        self.kept_away, self.barred = 0, frozenset[str]()
        self.tasks: dict[str, Task] = dict(world.tasks)
        self.nodes = sorted(world.nodes.values(), key=lambda node: node.name)
        self.books = [world.books[key] for key in sorted(world.books)]
        self.leases: list[Lease] = [lease for run in world.leases.values() for lease in run.values()]
        self.pledges: list[Pledge] = [pledge for mine in world.pledges.values() for pledge in mine.values()]
        self.measure = learn(self, world.mix.edition)
        self.weigh(world)
        self.standings = {task.id: self.standing(task) for task in self.tasks.values()}

    def devices(self, node: str) -> list[Any]:
        return [
            book.device
            for book in self.books
            if book.device.node == node
            and book.sample is not None
            and self.now - book.sample.at <= 3 * self.policy.sample_period_seconds
        ]

    def strangers(self, device: Any) -> int:
        """What must be left to whoever has no lease: as listed, as declared, and what nobody explains."""
        book = next(book for book in self.books if book.device.key == device.key)
        listed = book.sample.foreign_mb
        foreign = max(listed or 0, device.declared_foreign_mb)
        if listed is None:
            begun = [lease for lease in self.leases if lease.state is not LeaseState.RESERVED]
            ours = sum(lease.mb for lease in begun if lease.device == device.key)
        else:
            here = {lease.mark for lease in self.leases if lease.device == device.key}
            ours = sum(mb for holder, mb in book.sample.by_holder.items() if holder in here)
        hidden = book.sample.used_mb - foreign - ours - device.reserve_mb
        return foreign + (hidden if hidden > device.physical_mb / 256 else 0)

    def takes(self, lease: Lease) -> int:
        book = next(book for book in self.books if book.device.key == lease.device)
        measured = book.sample.by_holder.get(lease.mark, 0) if book.sample else 0
        return max(lease.mb, measured)

    def is_leaving(self, lease: Lease) -> bool:
        task = self.tasks.get(lease.holder)
        stopping = task is not None and task.state is TaskState.STOPPING and task.fence == lease.fence
        if lease.state is LeaseState.QUARANTINED:
            return False
        return stopping or lease.state is LeaseState.RELEASING

    def leaves_for(self, lease: Lease) -> str | None:
        task = self.tasks.get(lease.holder)
        return task.freeing_for if task is not None and task.fence == lease.fence else None

    def unheld(self, device: Any) -> int:
        held = sum(self.takes(lease) for lease in self.leases if lease.device == device.key)
        return device.physical_mb - device.reserve_mb - self.strangers(device) - held

    def respected(self, device: Any, task: Task) -> list[Pledge]:
        return [
            p
            for p in self.pledges
            if p.device == device.key and p.preemptor != task.id and p.priority >= task.priority
        ]

    def free(self, device: Any, task: Task) -> int:
        if device.key in self.barred:
            return 0
        free = self.unheld(device)
        for pledge in self.respected(device, task):
            to_come = sum(
                self.takes(lease)
                for lease in self.leases
                if lease.device == device.key
                and self.is_leaving(lease)
                and self.leaves_for(lease) == pledge.preemptor
            )
            free -= max(0, pledge.mb - to_come)
        return free

    def leaving(self, device: Any) -> int:
        return sum(
            self.takes(lease)
            for lease in self.leases
            if lease.device == device.key and self.is_leaving(lease)
        )

    def soon(self, device: Any, task: Task) -> int:
        promised = sum(pledge.mb for pledge in self.respected(device, task))
        return self.unheld(device) + self.leaving(device) - promised

    def room(self, node: Any, task: Task) -> tuple[float, int, int]:
        """(CPU, host memory, run slots) left for this task, less what pledged tasks will need here."""
        taken = [run for run in self.tasks.values() if run.is_active and run.node == node.name]
        taken += self.waiting_here(node, task)
        return (
            round(node.cpu - sum(run.demand.cpu for run in taken), 6),
            node.memory_mb - sum(run.demand.memory_mb for run in taken),
            node.max_runs - len(taken),
        )

    def waiting_here(self, node: Any, task: Task) -> list[Task]:
        here = {book.device.key for book in self.books if book.device.node == node.name}
        names = {
            p.preemptor
            for p in self.pledges
            if p.device in here and p.preemptor != task.id and p.priority >= task.priority
        }
        return [self.tasks[name] for name in sorted(names)]

    def custom_is_there(self, task: Task) -> bool:
        for name, amount in (*task.demand.custom, *task.demand.slots):
            names = (name, f"{name.split('=')[0]}=*", "tenant:*" if name.startswith("tenant") else "")
            found = [limit for each in names for limit in self.policy.custom_limits if limit.name == each]
            if not found:
                continue
            limit = found[0]
            if task.priority < limit.priority_threshold:
                return False
            if limit.per_node:
                continue
            users = [run for run in self.tasks.values() if run.is_active]
            for node in self.nodes:
                users += [other for other in self.waiting_here(node, task) if not other.is_active]
            used = sum(dict((*user.demand.custom, *user.demand.slots)).get(name, 0.0) for user in users)
            if amount > round(limit.amount - used, 6):
                return False
        return True

    def node_has(self, node: Any, task: Task, gone: Sequence[Task] = ()) -> bool:
        """Of its own resources, enough for this task once these have left."""
        runs = [run for run in self.tasks.values() if run.is_active and run.node == node.name]
        taken = [run for run in runs if run not in gone] + self.waiting_here(node, task)
        for name, has in node.custom:
            used = sum(dict(run.demand.custom).get(name, 0.0) for run in taken)
            asked = dict(task.demand.custom)
            if name in asked and asked[name] > round(has - used, 6):
                return False
        return True

    def needs(self, demand: Demand, device: Any) -> int | None:
        if self.is_barred(demand, device):
            return None
        whole = device.physical_mb - device.reserve_mb - device.declared_foreign_mb
        if demand.exclusive or (demand.gpu_mb is None and demand.gpu_fraction is None):
            own = demand.gpu_mb + device.context_mb if demand.gpu_mb is not None else 0
            return whole if whole >= own else None
        if demand.gpu_mb is not None:
            size = demand.gpu_mb + device.context_mb
        else:
            size = max(1, int(demand.gpu_fraction * whole))
        return size if size <= whole else None

    def is_barred(self, demand: Demand, device: Any) -> bool:
        """Kinds are single words in these stories."""
        where = demand.where
        if where.kinds and not set(where.kinds) & set(device.kind.split()):
            return True
        if (device.parent and demand.gpus > 1) or (where.devices and device.uuid not in where.devices):
            return True
        return device.power < where.min_power or device.physical_mb < where.min_device_mb

    def is_open(self, node: Any, task: Task) -> bool:
        has = [("node", node.name), *node.labels]
        return all(any((label, v) in has for v in values) for label, values in task.demand.where.nodes)

    def unmet(self, node: Any, devices: Sequence[Any], task: Task) -> int:
        """What the task would rather have had: per device, how far down its list; per label, one."""
        where = task.demand.where
        has = [("node", node.name), *node.labels]
        count = sum(not any((label, v) in has for v in values) for label, values in where.prefer_nodes)
        for device in devices:
            words = device.kind.split()
            places = [place for place, kind in enumerate(where.prefer_kinds) if kind in words]
            count += min(places, default=len(where.prefer_kinds))
        return count

    # What fits

    def places(self, task: Task) -> Iterator[tuple[Any, str, tuple[tuple[str, int], ...]]]:
        """Every placement there is: (rank, node, devices)."""
        demand = task.demand
        sign = -1 if "spread" in (demand.placement, self.policy.placement) else 1
        for node in self.nodes:
            cpu, memory, runs = self.room(node, task)
            if not node.ready or node.cordoned or not self.custom_is_there(task) or self.over_quota(task):
                continue
            if not self.is_open(node, task):
                continue
            if cpu < demand.cpu or memory < demand.memory_mb or runs < 1 or not self.node_has(node, task):
                continue
            for chosen in combinations(self.devices(node.name), demand.gpus):
                needs = [self.needs(demand, device) for device in chosen]
                if any(
                    need is None or self.free(d, task) < need for d, need in zip(chosen, needs, strict=True)
                ):
                    continue
                left = sum(self.free(d, task) - need for d, need in zip(chosen, needs, strict=True))
                names = (node.name, *(device.key for device in chosen))
                devices = tuple((d.key, need) for d, need in zip(chosen, needs, strict=True))
                unmet = self.unmet(node, chosen, task)
                if self.measure is None or demand.placement == "spread" or demand.where.devices:
                    yield (unmet, sign * left, sign * cpu, names), node.name, devices
                elif demand.gpus <= 1 or devices == fullest(self, node, task):
                    yield (unmet, -score(self, node, task, dict(devices)), 0, names), node.name, devices

    # Who must leave

    def stoppable(self, node: Any, task: Task) -> list[Task]:
        """The runs that may be stopped for a task, in the documented order."""
        found = [
            run
            for run in self.tasks.values()
            if run.node == node.name
            and run.state in (TaskState.ADMITTED, TaskState.RUNNING)
            and run.admitted_at < self.now
            and run.priority < task.priority
            and (task.priority >= 90 or not self.is_shielded(run))
        ]
        return sorted(found, key=lambda r: (self.lost(r), r.priority, -self.gives_back(r), r.id))

    def is_shielded(self, run: Task, at: float | None = None) -> bool:
        now = self.now if at is None else at
        spent = run.preemptions >= self.policy.preemption_budget
        began = run.started_at is not None
        saved = began and run.checkpoint_at is not None and run.checkpoint_at > run.started_at
        long = began and now - run.started_at >= self.policy.shield_seconds
        young = not began or now - run.started_at < self.policy.min_run_seconds
        return (young and self.policy.min_run_seconds > 0) or (spent and not saved and not long)

    def lost(self, run: Task) -> float:
        if run.started_at is None:
            return 0.0
        return max(0.0, self.now - max(run.started_at, run.checkpoint_at or 0.0)) * max(1, run.demand.gpus)

    def leases_of(self, run: Task) -> list[Lease]:
        return [lease for lease in self.leases if lease.holder == run.id and lease.fence == run.fence]

    def gives_back(self, run: Task) -> int:
        return sum(self.takes(lease) for lease in self.leases_of(run))

    def would_fit(self, node: Any, devices: Sequence[Any], task: Task, gone: Sequence[Task]) -> bool:
        """Once these, and everybody who is leaving anyway, have left the node."""
        cpu, memory, runs = self.room(node, task)
        leavers = [r for r in self.tasks.values() if r.node == node.name and r.state is TaskState.STOPPING]
        for run in [*leavers, *gone]:
            cpu, memory, runs = cpu + run.demand.cpu, memory + run.demand.memory_mb, runs + 1
        if round(cpu, 6) < task.demand.cpu or memory < task.demand.memory_mb or runs < 1:
            return False
        if not self.node_has(node, task, [*leavers, *gone]):
            return False
        return all(self.left_after(device, task, gone) >= 0 for device in devices)

    def left_after(self, device: Any, task: Task, gone: Sequence[Task]) -> int:
        freed = sum(self.takes(ls) for run in gone for ls in self.leases_of(run) if ls.device == device.key)
        need = self.needs(task.demand, device)
        return -1 if need is None else self.soon(device, task) + freed - need

    def evictions(self, task: Task) -> Iterator[tuple[Any, list[Any], list[Task]]]:
        """Every way to make room: (rank, devices, victims). Tries every subset of runs on every node."""
        if not self.policy.preemption or not task.demand.gpus or not self.custom_is_there(task):
            return
        if self.over_quota(task):
            return
        for node in self.nodes:
            if not node.ready or node.cordoned or not self.is_open(node, task):
                continue
            found = self.stoppable(node, task)
            for count in range(len(found) + 1):
                for gone in combinations(enumerate(found), count):
                    victims = [run for _, run in gone]
                    lost = sum(self.lost(run) for run in victims)
                    by_place = tuple(place for place, _ in gone)
                    for chosen in combinations(self.devices(node.name), task.demand.gpus):
                        if self.would_fit(node, chosen, task, victims):
                            left = sorted((self.left_after(d, task, victims), d.key) for d in chosen)
                            keys = tuple(device.key for device in chosen)
                            yield ((lost, count), node.name, by_place, left, keys), list(chosen), victims

    def eviction(self, task: Task, closed: Sequence[str] = ()) -> tuple[list[Any], list[Task]] | None:
        """The cheapest, of open nodes; ties go by node, then (one GPU) device or (several) by who leaves."""
        options = [option for option in self.evictions(task) if option[0][1] not in closed]
        if not options:
            return None

        def rank(option: Any) -> Any:
            cost, node, by_place, left, keys = option[0]
            return (cost, node, keys, by_place) if task.demand.gpus == 1 else (cost, node, by_place, left)

        best = min(options, key=rank)
        if not self.may_be_stopped_for(task, best[2]):
            options = [option for option in options if self.may_be_stopped_for(task, option[2])]
            best = min(options, key=lambda option: option[0][:4], default=best)
        return (best[1], best[2]) if best[2] and self.may_be_stopped_for(task, best[2]) else None

    # The cycle

    def waits(self, task: Task | None) -> bool:
        due = task is not None and (task.not_before is None or task.not_before <= self.now)
        return due and task.state is TaskState.PENDING and not (task.held or task.awaits)

    def plan(self) -> list[Step]:
        steps: list[Step] = []
        for name in sorted({pledge.preemptor for pledge in self.pledges}):
            if not self.waits(self.tasks.get(name)) and not is_moving(self, name):
                steps.append(("withdraw", name, self.end(name, "withdrawn")))
        left = list(filter(self.waits, self.tasks.values()))
        while left:
            task = min(left, key=self.order)
            left.remove(task)
            pledged = any(pledge.preemptor == task.id for pledge in self.pledges)
            if not pledged and stands_behind(self, task):
                continue
            places = list(self.places(task) if not (pledged and task.stop_reason) else kept(self, task))
            best = min(places, key=lambda place: place[0]) if places else None
            place = best if best is None or pledged else beside(self, task, best)
            if place is not None:
                _, node, devices = place
                promised = sum(pledge.mb for pledge in self.pledges if pledge.preemptor == task.id)
                self.given[task.tenant] += max(0, sum(mb for _, mb in devices) - promised)
                steps.append(self.admit(task, node, devices))
            elif not pledged and (way := other_way(self, task, best)) is not None:
                self.given[task.tenant] += sum(self.needs(task.demand, device) or 0 for device in way[0])
                steps.append(self.evict(task, *way))
        return steps

    def admit(self, task: Task, node: str, devices: tuple[tuple[str, int], ...]) -> Step:
        used = {device for device, _ in devices}
        ended = {
            (p, d, "consumed" if d in used else "withdrawn") for p, d, _ in self.end(task.id, "consumed")
        }
        self.tasks[task.id] = replace(
            task, state=TaskState.ADMITTED, node=node, fence=task.fence + 1, admitted_at=self.now
        )
        for device, mb in devices:
            holder = (HolderKind.RUN, task.id, task.fence + 1, device, mb)
            self.leases.append(Lease(*holder, task.tenant, task.priority, since=self.now))
        return ("admit", task.id, node, devices, tuple(sorted(ended | self.overtake(used, task.priority))))

    def evict(self, task: Task, devices: list[Any], victims: list[Task]) -> Step:
        is_owner = self.is_within_guarantee(task) and self.policy.tenant(task.tenant).cohort
        kept_up_to = min(top for top in TOPS if task.priority <= top) if is_owner else task.priority
        for victim in victims:
            until = self.now + victim.grace_seconds
            notice = {"freeing_for": task.id, "stop_deadline_at": until}
            self.tasks[victim.id] = replace(victim, state=TaskState.STOPPING, **notice)
        made = []
        for device in devices:
            mb = self.needs(task.demand, device)
            made.append((device.key, mb))
            whose = (kept_up_to, task.tenant, self.now, self.now)
            self.pledges.append(Pledge(task.id, device.key, mb, *whose))
        ended = self.overtake({device.key for device in devices}, task.priority)
        names = tuple(sorted(victim.id for victim in victims))
        return ("preempt", task.id, names, tuple(sorted(made)), tuple(sorted(ended)))

    def end(self, preemptor: str, how: str) -> tuple[tuple[str, str, str], ...]:
        ended = sorted(p.device for p in self.pledges if p.preemptor == preemptor)
        self.pledges = [p for p in self.pledges if p.preemptor != preemptor]
        return tuple((preemptor, device, how) for device in ended)

    def overtake(self, devices: set[str], priority: int) -> set[tuple[str, str, str]]:
        """Pledges of lower priority, lowest first, while what is promised exceeds what there will be."""
        ended: set[tuple[str, str, str]] = set()
        for book in self.books:
            here = book.device
            if here.key not in devices:
                continue
            lower = [p for p in self.pledges if p.device == here.key and p.priority < priority]
            for pledge in sorted(lower, key=lambda p: (p.priority, p.preemptor)):
                promised = sum(p.mb for p in self.pledges if p.device == here.key)
                if promised > self.unheld(here) + self.leaving(here):
                    ended |= set(self.end(pledge.preemptor, "taken"))
        return ended
