"""The planner once more, as plainly as can be: lists, no caches, every combination tried.

Slow on purpose. It shares the values of the core (tasks, leases, pledges) and none of its reasoning.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import Gang, Member
from gpubroker_server.core.domain.lease import HOLDERS_ON_SERVERS, HolderKind, Lease, LeaseState, Pledge
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName, node_of
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.core.naive_backfill import beside, other_way, stands_behind
from tests.core.naive_gangs import a_rank, gang_step, runs
from tests.core.naive_growth import growth_steps
from tests.core.naive_leavers import NaiveLeavers, leave
from tests.core.naive_moves import is_moving, kept, step_elsewhere
from tests.core.naive_worth import fullest, learn, score

Step = tuple[Any, ...]
"""("admit", task, node, devices, ended pledges) or ("preempt", task, victims, made, ended) or
("withdraw", task, ended pledges): what a plan does, without its bookkeeping."""


def held_by(user: Task, *, of_ranks: bool = False) -> list[tuple[str, float]]:
    """What it has of limits; a task that waits, what it needs at least. `of_ranks`: what its ranks have."""
    demand = user.demand
    if not members_of(user):
        return [*demand.custom, *demand.slots]
    by_rank = any(bundle.slots for bundle in demand.bundles)
    own = [slot for slot in demand.slots if not (by_rank and slot[0].startswith("pool:"))]
    parts = [run.demand for run in runs(user)]
    return [*([] if of_ranks else own), *(it for part in parts for it in (*part.custom, *part.slots))]


class Naive(NaiveLeavers):
    """Everything the planner may look at, in flat lists."""

    def __init__(self, world: World, policy: Policy, now: float, forecasts: Sequence[Any] = ()) -> None:
        self.policy, self.now, self.forecasts = policy, now, forecasts
        self.refused_by_reservation, self.barred, self.taken = 0, frozenset[str](), dict[str, Step]()
        self.tasks: dict[str, Task] = {str(id): task for id, task in world.tasks.items()}
        self.nodes = sorted(world.nodes.values(), key=lambda node: node.name)
        self.ledgers = [world.ledgers[key] for key in sorted(world.ledgers)]
        self.leases: list[Lease] = [lease for run in world.leases.values() for lease in run.values()]
        self.pledges: list[Pledge] = [pledge for mine in world.pledges.values() for pledge in mine.values()]
        self.measure = learn(self, world.mix.edition)
        self.stream_weights = world.queue.stream_weights
        self.weigh(world)
        self.background = dict(world.background.left_mb)
        self.scopes = dict(world.background.scopes)
        self.standings = {task.id: self.standing(task) for task in self.tasks.values()}

    def devices(self, node: str) -> list[Any]:
        return [
            ledger.device
            for ledger in self.ledgers
            if ledger.device.node == node
            and ledger.sample is not None
            and self.now - ledger.sample.at <= 3 * self.policy.sample_period_seconds
        ]

    def strangers(self, device: Any) -> int:
        """What must be left to whoever has no lease: as listed, as declared, and what nobody explains."""
        ledger = next(ledger for ledger in self.ledgers if ledger.device.key == device.key)
        listed = ledger.sample.foreign_mb
        here = [lease for lease in self.leases if lease.device == device.key]
        begun = [lease for lease in here if lease.state is not LeaseState.RESERVED]
        loaded = sum(lease.mb for lease in begun if lease.holder_kind in HOLDERS_ON_SERVERS)
        served = min(listed or 0, loaded)
        foreign = max((listed or 0) - served, device.declared_foreign_mb)
        if listed is None:
            ours = sum(lease.mb for lease in begun)
        else:
            marks = {lease.mark for lease in here}
            ours = served + sum(mb for holder, mb in ledger.sample.by_holder.items() if holder in marks)
            ending = [lease for lease in here if lease.state is LeaseState.RELEASING]
            runs = [lease for lease in ending if lease.holder_kind not in HOLDERS_ON_SERVERS]
            ours += sum(self.takes(lease) - ledger.sample.by_holder.get(lease.mark, 0) for lease in runs)
        hidden = ledger.sample.used_mb - foreign - ours - device.reserve_mb
        return foreign + (hidden if hidden > device.physical_mb / 256 else 0)

    def takes(self, lease: Lease) -> int:
        ledger = next(ledger for ledger in self.ledgers if ledger.device.key == lease.device)
        measured = ledger.sample.by_holder.get(lease.mark, 0) if ledger.sample else 0
        return max(lease.mb, measured)

    def is_leaving(self, lease: Lease) -> bool:
        run = self.run_of(lease)
        stopping = run is not None and run.state is TaskState.STOPPING
        if lease.state is LeaseState.QUARANTINED:
            return False
        return stopping or lease.state is LeaseState.RELEASING

    def leaves_for(self, lease: Lease) -> str | None:
        run = self.run_of(lease)
        return None if run is None else run.freeing_for

    def run_of(self, lease: Lease) -> Task | None:
        """The task, or the rank of a gang, that holds it by its newest claim."""
        task = self.tasks.get(lease.holder)
        return None if task is None or task.fence != lease.fence else a_rank(task, lease.rank)

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
        taken = self.runs_on(node) + self.waiting_here(node, task)
        return (
            round(node.cpu - sum(run.demand.cpu for run in taken), 6),
            node.memory_mb - sum(run.demand.memory_mb for run in taken),
            node.max_runs - len(taken),
        )

    def runs_on(self, node: Any) -> list[Task]:
        return [
            run
            for task in self.tasks.values()
            if task.is_active
            for run in runs(task)
            if run.node == node.name
        ]

    def waiting_here(self, node: Any, task: Task) -> list[Task]:
        here = {ledger.device.key for ledger in self.ledgers if ledger.device.node == node.name}
        here.add(self.key_of(node))
        names = {
            (p.preemptor, rank)
            for p in self.pledges
            if p.device in here and p.preemptor != task.id and p.priority >= task.priority
            for rank in p.ranks or (0,)
        }
        return [a_rank(self.tasks[name], rank) for name, rank in sorted(names)]

    def custom_is_there(self, task: Task, gone: Sequence[Task] | None = None) -> bool:
        """`gone`: once these have left, and all that are leaving anyway."""
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
            alone: list[Task] = []
            if gone is not None:
                left = {one.id for one in gone if not self.is_alone(one)}
                alone = [one for one in gone if one.id not in left]
                users = [run for run in users if run.state is not TaskState.STOPPING and run.id not in left]
            whose = {p.preemptor for p in self.pledges if p.priority >= task.priority} - {task.id}
            users += [self.tasks[name] for name in sorted(whose) if not self.tasks[name].is_active]
            used = sum(amount for user in users for it, amount in held_by(user) if it == name)
            used -= sum(amount for one in alone for it, amount in held_by(one, of_ranks=True) if it == name)
            if amount > round(limit.amount - used, 6):
                return False
        return True

    def node_has(self, node: Any, task: Task, gone: Sequence[Task] = ()) -> bool:
        """Of its own resources, enough for this task once these have left."""
        taken = self.runs_on(node) + self.waiting_here(node, task)
        for run in gone:
            taken.remove(run)
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
        if self.is_closed_to_background(node, task):
            return False
        has = [("node", node.name), *node.labels]
        return all(any((label, v) in has for v in values) for label, values in task.demand.where.nodes)

    def is_closed_to_background(self, node: Any, task: Task) -> bool:
        """A task to which room is pledged has been let through before."""
        pledged = any(pledge.preemptor == task.id for pledge in self.pledges)
        left = [self.background[scope] for scope in self.scopes.get(node.name, ())]
        return task.priority < 40 and task.demand.gpus > 0 and not pledged and min(left, default=1) <= 0

    def take(self, lease: Lease) -> None:
        self.leases.append(lease)
        if lease.priority < 40:
            for scope in self.scopes.get(node_of(lease.device), ()):
                self.background[scope] -= lease.mb

    def unmet(self, node: Any, devices: Sequence[Any], task: Task) -> float:
        """What the task would rather have had: per device, how far down its list; per label, one."""
        where = task.demand.where
        has = [("node", node.name), *node.labels]
        count: float = sum(not any((label, v) in has for v in values) for label, values in where.prefer_nodes)
        if not task.demand.gpus:  # four more that are being started count less than an unmet preference
            starting = [run for run in self.runs_on(node) if run.state is TaskState.ADMITTED]
            count += len(starting) // 4 / 1000
        for device in devices:
            words = device.kind.split()
            places = [place for place, kind in enumerate(where.prefer_kinds) if kind in words]
            count += min(places, default=len(where.prefer_kinds))
        return count

    # What fits

    def places(self, task: Task) -> Iterator[tuple[Any, str, tuple[tuple[str, int], ...]]]:
        """Every placement there is: (rank, node, devices)."""
        demand = task.demand
        is_spread = "spread" in (demand.placement, self.policy.placement)
        for node in self.nodes:
            cpu, memory, runs = self.room(node, task)
            if not node.ready or node.cordoned or not self.custom_is_there(task) or self.over_quota(task):
                continue
            if not self.is_open(node, task):
                continue
            if max(0.0, cpu) < demand.cpu or max(0, memory) < demand.memory_mb or runs < 1:
                continue
            if not self.node_has(node, task):
                continue
            for chosen in combinations(self.devices(node.name), demand.gpus):
                sizes = [self.needs(demand, device) for device in chosen]
                needs = [need for need in sizes if need is not None]
                if len(needs) < len(sizes) or any(
                    self.free(d, task) < need for d, need in zip(chosen, needs, strict=True)
                ):
                    continue
                left = sum(self.free(d, task) - need for d, need in zip(chosen, needs, strict=True))
                names = (node.name, *(device.key for device in chosen))
                devices = tuple((d.key, need) for d, need in zip(chosen, needs, strict=True))
                unmet = self.unmet(node, chosen, task)
                if is_spread:
                    taken = sum(self.taken_share(device, task) for device in chosen)
                    holders = sum(lease.device == device.key for device in chosen for lease in self.leases)
                    busy = len(self.runs_on(node))
                    yield (unmet, holders, taken, busy, -cpu, names), node.name, devices
                elif self.measure is None or demand.where.devices:
                    yield (unmet, left, 0, 0, cpu, names), node.name, devices
                elif demand.gpus <= 1 or devices == fullest(self, node, task):
                    worth = score(self, node, task, dict(devices))
                    yield (unmet, -worth, 0, 0, 0, names), node.name, devices

    def taken_share(self, device: Any, task: Task) -> int:
        """In millionths of what may be leased of it."""
        size = device.physical_mb - device.reserve_mb - device.declared_foreign_mb
        return (size - self.free(device, task)) * 1_000_000 // size

    # The cycle

    def waits(self, task: Task | None) -> bool:
        if task is None:
            return False
        due = task.not_before is None or task.not_before <= self.now
        return due and task.state is TaskState.PENDING and not (task.held or task.awaits)

    def plan(self, taken: Sequence[Step] = ()) -> list[Step]:
        """`taken`: the steps of a plan. Where gangs are placed or stopped, of ways that are as good as each
        other the one that it takes, if it is one of them."""
        steps: list[Step] = []
        self.taken = {step[1]: step for step in taken if step[0] != "withdraw"}
        for name in sorted({pledge.preemptor for pledge in self.pledges}):
            if not self.waits(self.tasks.get(name)) and not is_moving(self, name):
                steps.append(("withdraw", name, self.end(name, "withdrawn")))
        left = list(filter(self.waits, self.tasks.values()))
        while left:
            task = min(left, key=self.order)
            left.remove(task)
            mine = [pledge for pledge in self.pledges if pledge.preemptor == task.id]
            found = self.step(task, pledged=bool(mine))
            steps += found or (step_elsewhere(self, task, mine) if mine else [])
        return [*steps, *growth_steps(self)]

    def step(self, task: Task, *, pledged: bool) -> list[Step]:
        if not pledged and stands_behind(self, task):
            return []
        if task.demand.bundles:
            return gang_step(self, task, is_pledged=pledged)
        places = list(self.places(task) if not (pledged and task.stop_reason) else kept(self, task))
        best = min(places, key=lambda place: place[0]) if places else None
        place = best if best is None or pledged else beside(self, task, best)
        if place is not None:
            _, node, devices = place
            promised = sum(pledge.mb for pledge in self.pledges if pledge.preemptor == task.id)
            self.given[task.tenant] += max(0, sum(mb for _, mb in devices) - promised)
            return [self.admit(task, node, devices)]
        if pledged or (way := other_way(self, task, best)) is None:
            return []
        return [self.evict(task, [(*self.pledged(task, one), ()) for one in way[0]], way[1])]

    def pledged(self, task: Task, one: Any) -> tuple[str, int]:
        """What is pledged of a device, or of a node to a task without GPUs."""
        return (self.key_of(one), self.needs(task.demand, one) or 0 if task.demand.gpus else 0)

    def admit(self, task: Task, node: str, devices: tuple[tuple[str, int], ...]) -> Step:
        used = {device for device, _ in devices}
        ended = self.use_up(task, {*used, f"/{node}/"})
        self.tasks[task.id] = replace(
            task, state=TaskState.ADMITTED, node=node, fence=task.fence + 1, admitted_at=self.now
        )
        for device, mb in devices:
            holder: tuple[Any, Any, Any, Any, Any] = (HolderKind.RUN, task.id, task.fence + 1, device, mb)
            self.take(Lease(*holder, task.tenant, task.priority, since=Instant(self.now)))
        return ("admit", task.id, node, devices, tuple(sorted(ended | self.overtake(used, task.priority))))

    def admit_gang(self, task: Task, places: Sequence[tuple[str, tuple[tuple[str, int], ...]]]) -> Step:
        members = tuple(Member(rank, NodeName(node)) for rank, (node, _) in enumerate(places))
        devices = tuple((rank, key, mb) for rank, (_, some) in enumerate(places) for key, mb in some)
        promised = sum(pledge.mb for pledge in self.pledges if pledge.preemptor == task.id)
        self.given[task.tenant] += max(0, sum(mb for *_, mb in devices) - promised)
        used = {key for _, key, _ in devices}
        ended = self.use_up(task, used | {f"/{node}/" for node, _ in places})
        claim = {"node": places[0][0], "fence": task.fence + 1, "admitted_at": self.now}
        claim["holder"] = Gang(members)
        self.tasks[task.id] = replace(task, state=TaskState.ADMITTED, started_at=None, **claim)
        for rank, key, mb in devices:
            holder: tuple[Any, Any, Any, Any, Any] = (
                HolderKind.GANG_MEMBER,
                task.id,
                task.fence + 1,
                key,
                mb,
            )
            self.take(Lease(*holder, task.tenant, task.priority, since=Instant(self.now), rank=rank))
        ended |= self.overtake(used, task.priority)
        return ("admit", task.id, tuple(node for node, _ in places), devices, tuple(sorted(ended)))

    def evict(self, task: Task, devices: Sequence[tuple[Any, Any, Any]], victims: list[Task]) -> Step:
        kept_up_to = self.kept_up_to(task)
        names = leave(self, victims, task.id)
        made = []
        for key, mb, ranks in devices:
            made.append((key, mb, ranks))
            self.given[task.tenant] += mb
            whose: tuple[Any, Any, Any, Any] = (kept_up_to, task.tenant, self.now, self.now)
            self.pledges.append(Pledge(task.id, key, mb, *whose, ranks))
        ended = self.overtake({key for key, *_ in devices}, task.priority)
        return ("preempt", task.id, names, tuple(sorted(made)), tuple(sorted(ended)))

    def use_up(self, task: Task, used: set[str]) -> set[tuple[str, str, str]]:
        return {(p, d, "consumed" if d in used else "withdrawn") for p, d, _ in self.end(task.id, "")}

    def end(self, preemptor: str, how: str) -> tuple[tuple[str, str, str], ...]:
        ended = sorted(p.device for p in self.pledges if p.preemptor == preemptor)
        self.pledges = [p for p in self.pledges if p.preemptor != preemptor]
        return tuple((preemptor, device, how) for device in ended)

    def overtake(self, devices: set[str], priority: int) -> set[tuple[str, str, str]]:
        """Pledges of lower priority, lowest first, while what is promised exceeds what there will be."""
        ended: set[tuple[str, str, str]] = set()
        for ledger in self.ledgers:
            here = ledger.device
            if here.key not in devices:
                continue
            lower = [p for p in self.pledges if p.device == here.key and p.priority < priority]
            for pledge in sorted(lower, key=lambda p: (p.priority, p.preemptor)):
                promised = sum(p.mb for p in self.pledges if p.device == here.key)
                if promised > self.unheld(here) + self.leaving(here):
                    ended |= set(self.end(pledge.preemptor, "taken"))
        return ended
