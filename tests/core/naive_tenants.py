"""What the naive planner makes of tenants: their order, quotas and claims, from flat lists."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, permutations
from itertools import count as whole_numbers
from math import log
from types import MappingProxyType
from typing import Any

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.lease import HolderKind, Lease, Pledge
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import DeviceKey, Fence, Instant, Mib
from gpubroker_server.core.world.world import World
from msgspec.structs import replace

from tests.builders import NOW
from tests.core.naive_moves import is_moving


def needs_gpus(demand: Demand) -> bool:
    return any(part.gpus for part in (demand, *demand.bundles))


NO_FLOORS: Mapping[str, int] = MappingProxyType({})

TOPS = (9, 39, 69, 89, 100)


class NaiveTenants:
    policy: Policy
    now: float
    tasks: dict[str, Task]
    ledgers: list[Any]
    leases: list[Lease]
    pledges: list[Pledge]
    waits: Any
    needs: Any
    nodes: list[Any]
    custom_is_there: Any
    is_open: Any
    devices: Any
    would_fit: Any
    left_after: Any
    is_leaving: Any
    is_shielded: Any
    ignores_shields: Any
    lost: Any
    takes: Any
    soon: Any
    room: Any
    unmet: Any
    possible_victims: Any
    gives_back: Any
    leases_of: Any
    standings: dict[str, int]
    forecasts: Sequence[Any]
    stream_weights: Mapping[str, float]
    runs_on: Any
    runs_of: Any
    leaving_members: Any
    is_alone: Any
    by_cost: Any
    name_of: Any
    cost: Any
    taken_from: Any
    held_by: Any
    as_taken: Any

    def standing(self, task: Task) -> int:
        """The highest priority among a task and those that wait for it, unless those are held."""
        rows = self.tasks.values()
        heirs = [t for t in rows if any(it.task == task.id for it in t.after) and t.awaits and not t.held]
        heirs = [heir for heir in heirs if heir.state is TaskState.PENDING]
        return max([task.priority, *map(self.standing, heirs)])

    def comes_first(self, one: Task, other: Task) -> bool:
        """Whether what is reserved for one binds the other; if each would, what was reserved first does."""
        reserved = [
            f.task
            for f in self.forecasts
            if (f.first_in or (f.reserves_room and f.places))
            and f.task in self.tasks
            and self.tasks[f.task].state is TaskState.PENDING
        ]
        is_earlier = other.id not in reserved or reserved.index(one.id) < reserved.index(other.id)
        return self.would_bind(one, other) and (is_earlier or not self.would_bind(other, one))

    def would_bind(self, one: Task, other: Task) -> bool:
        """Whether it is ahead; or it has aged to the top of its band, and is behind by its tenant's share
        alone."""
        mine, theirs = list(self.order(one)), list(self.order(other))
        ahead, is_aged = mine < theirs, mine[0] == mine[3]
        del mine[2], theirs[2]
        return ahead or (is_aged and mine < theirs)

    def order(self, task: Task) -> Any:
        standing = self.standings[task.id]
        top = min(top for top in TOPS if standing <= top)
        waited = max(0.0, self.now - task.submitted_at)
        aged = min(top, standing + int(waited / self.policy.ageing_seconds_per_point))
        weight = {**dict(self.policy.streams), **self.stream_weights}.get(task.stream, 1.0)
        weight = 0.0 if aged == top else weight
        return (-top, *self.rank(task.tenant), -aged, -weight, task.submitted_at, task.id)

    def kept_up_to(self, task: Task) -> int:
        """Whoever stands behind it in its band takes nothing of what is freed for it."""
        top = min(top for top in TOPS if task.priority <= top)
        is_owner = self.is_within_guarantee(task) and self.policy.tenant(task.tenant).cohort
        aged = -self.order(task)[3]
        return top if is_owner or len(self.known) > 1 else min(top, aged)

    def rank(self, tenant: str) -> tuple[bool, int]:
        """Whether it has what it is guaranteed, and how many twentieths of its fair share it has had."""
        claimed = self.claimed[tenant] + self.given[tenant]
        mine = self.policy.tenant(tenant)
        above = mine.guaranteed_mb is None or claimed >= mine.guaranteed_mb
        level = (self.used[tenant] + claimed / self.whole) * self.weights / mine.weight
        return above, int(level * 20)

    def weigh(self, world: World) -> None:
        """How the tenants stand when the cycle begins."""
        self.whole = max(
            1, sum(ledger.device.allocatable_mb for ledger in self.ledgers if ledger.device.present)
        )
        life = world.accounts.half_life_seconds / log(2.0)
        self.used, self.claimed, self.given = Counter[str](), Counter[str](), Counter[str]()
        rows: list[Any] = [*self.leases, *(p for p in self.pledges if not is_moving(self, p.preemptor))]
        for row in rows:
            self.claimed[row.tenant] += row.mb
        for tenant in world.accounts:
            self.used[tenant] = world.accounts.used(tenant, Instant(self.now)) / (self.whole * life)
        waiting = {task.tenant for task in self.tasks.values() if self.waits(task)}
        self.known = sorted({*world.accounts, *waiting})
        self.weights = sum(self.policy.tenant(tenant).weight for tenant in self.known)

    def needs_gpus(self, task: Task) -> bool:
        return needs_gpus(task.demand)

    # Quotas

    def counts(self, demand: Demand, ranks_of_it: int | None = None) -> int:
        """Against a quota: on the largest devices; of a gang the ranks without which it does not run."""
        ranks = demand.bundles[: ranks_of_it or demand.least_ranks] or (demand,)
        return sum(
            rank.gpus * max(self.needs(rank, ledger.device) or 0 for ledger in self.ledgers)
            for rank in ranks
            if rank.gpus
        )

    def claims_of(self, tenant: str, task: Task) -> int:
        """Held, or being freed for others of its tasks that this one must respect."""
        pledges = [p for p in self.pledges if p.preemptor != task.id and p.priority >= task.priority]
        pledges = [p for p in pledges if not is_moving(self, p.preemptor)]
        rows: list[Any] = [*self.leases, *pledges]
        return sum(row.mb for row in rows if row.tenant == tenant)

    def over_quota(self, task: Task, ranks: int | None = None) -> bool:
        mine = self.policy.tenant(task.tenant)
        if mine.guaranteed_mb is None or not needs_gpus(task.demand):
            return False
        need = self.counts(task.demand, ranks)
        claimed = self.claims_of(task.tenant, task)
        if claimed + need <= mine.guaranteed_mb:
            return False
        if not mine.cohort or (
            mine.borrow_mb is not None and claimed + need > mine.guaranteed_mb + mine.borrow_mb
        ):
            return True
        everybody = {lease.tenant for lease in self.leases} | {task.tenant}
        everybody |= {pledge.tenant for pledge in self.pledges}
        members = [name for name in everybody if self.policy.tenant(name).cohort == mine.cohort]
        there_is = sum(t.guaranteed_mb or 0 for t in self.policy.tenants if t.cohort == mine.cohort)
        return sum(self.claims_of(name, task) for name in members) + need > there_is

    def lacks(self, task: Task) -> int:
        """What its tenant has to give back for it, besides what is leaving; it may have less."""
        stayed, self.leases = self.leases, [ls for ls in self.leases if not self.is_leaving(ls)]
        for lacking in whole_numbers():
            self.leases.append(
                Lease(HolderKind.RUN, "", Fence(0), DeviceKey(""), Mib(-lacking), task.tenant, 0, NOW)
            )
            is_over = self.over_quota(task)
            self.leases.pop()
            if not is_over:
                break
        self.leases = stayed
        return lacking

    def room_in_quota(
        self, task: Task, closed: Any, floors: dict[str, int]
    ) -> tuple[list[Any], list[Task]] | None:
        """The cheapest of the tenant's own runs of lower priority, wherever they are, with whom it has a
        place, and where: at the node with the least left, on the devices with the least left."""
        lacks = self.lacks(task)
        if not lacks or not self.policy.preemption or not self.custom_is_there(task):
            return None
        return self.room_of(
            task,
            [name for name in closed if name not in floors],
            lambda run: run.tenant == task.tenant,
            lambda gone: self.held_by(gone) >= lacks,
            floors,
        )

    def room_in_limit(self, task: Task, closed: Any) -> tuple[list[Any], list[Task]] | None:
        """The same of anybody's runs, for a critical task that lacks a custom resource or its pool's."""
        if not self.may_clear_limit(task):
            return None
        return self.room_of(task, closed, lambda run: True, lambda gone: self.custom_is_there(task, gone))

    def may_clear_limit(self, task: Task) -> bool:
        """No run is stopped for a place under a limit of running tasks, nor for what is coming back."""
        places = tuple(slot for slot in task.demand.slots if not slot[0].startswith("pool:"))
        without = replace(task, demand=replace(task.demand, custom=(), slots=places))
        return (
            self.policy.preemption
            and task.priority >= 90
            and self.custom_is_there(without)
            and not self.custom_is_there(task)
        )

    def room_of(
        self,
        task: Task,
        closed: Any,
        is_asked: Callable[[Task], bool],
        gives: Callable[[list[Task]], bool],
        floors: Mapping[str, int] = NO_FLOORS,
    ) -> tuple[list[Any], list[Task]] | None:
        nodes = [n for n in self.nodes if n.ready and not n.cordoned and n.name not in closed]
        found = [
            run
            for node in nodes
            for run in self.possible_victims(node, task)
            if is_asked(run) and run.priority >= floors.get(node.name, -1)
        ]
        found = list({self.name_of(one): one for one in found}.values())
        found.sort(key=self.by_cost)
        options = []
        for count in range(len(found) + 1):
            for gone in combinations(enumerate(found), count):
                victims = [run for _, run in gone]
                if not gives(victims):
                    continue
                cost = (*self.cost(victims), tuple(place for place, _ in gone))
                for node in nodes:
                    if self.is_open(node, task) and (fit := self.fullest_fit(node, task, victims)):
                        options.append(((cost, *fit[0]), fit[1] or [node], victims))
        if any(members_of(one) for one in found):
            return self.as_taken(task, [((cost[:3],), *way) for (cost, *_), *way in options])
        best = min(options, key=lambda option: option[0], default=None)
        return (best[1], best[2]) if best and best[2] else None

    def fullest_fit(self, node: Any, task: Task, victims: list[Task]) -> Any:
        here = victims
        sign = -1 if task.demand.placement == "spread" else 1
        rated = []
        for device in self.devices(node.name):
            left = self.left_after(device, task, here)
            if left >= 0:
                rated.append((self.unmet(node, [device], task), sign * left, device.key, device))
        chosen = [device for *_, device in sorted(rated, key=lambda one: one[:3])[: task.demand.gpus]]
        if len(chosen) < task.demand.gpus or not self.would_fit(node, chosen, task, here):
            return None
        free = 0
        for device in self.devices(node.name):
            leases = [lease for run in here for lease in self.leases_of(run) if lease.device == device.key]
            free += self.soon(device, task) + sum(map(self.takes, leases))
        leaving = [run for run in self.runs_on(node) if run.state is TaskState.STOPPING]
        leaving += [run for one in here for run in self.runs_of(one) if run.node == node.name]
        cpu = self.room(node, task)[0] + sum(run.demand.cpu for run in leaving)
        return (self.unmet(node, [], task), (free, cpu), node.name), chosen

    # What may be taken back

    def is_within_guarantee(self, task: Task) -> bool | None:
        """With this task; None: there is no quota."""
        mine = self.policy.tenant(task.tenant)
        if mine.guaranteed_mb is None or not needs_gpus(task.demand):
            return None
        return self.claims_of(task.tenant, task) + self.counts(task.demand) <= mine.guaranteed_mb

    def surplus_for(self, task: Task) -> dict[str, int]:
        """Borrower of the cohort -> what it has beyond its guarantee and does not leave anyway."""
        mine = self.policy.tenant(task.tenant)
        if not mine.cohort or not self.is_within_guarantee(task):
            return {}
        found = {}
        for name in {lease.tenant for lease in self.leases} - {task.tenant}:
            other = self.policy.tenant(name)
            stays = sum(ls.mb for ls in self.leases if ls.tenant == name and not self.is_leaving(ls))
            if other.cohort == mine.cohort and stays > (other.guaranteed_mb or 0):
                found[name] = stays - (other.guaranteed_mb or 0)
        return found

    def borrowers_on(self, node: str, task: Task, surplus: dict[str, int]) -> list[Task]:
        top = min(top for top in TOPS if task.priority <= top)
        found = [
            one
            for run in self.tasks.values()
            if run.state in (TaskState.ADMITTED, TaskState.RUNNING)
            and (run.admitted_at or 0.0) < self.now
            and run.tenant in surplus
            and run.priority <= top
            for one in self.leaving_members(run)
            if self.ignores_shields(run, task) or self.is_alone(one) or not self.is_shielded(run)
        ]
        found = [one for one in found if any(run.node == node for run in self.runs_of(one))]
        return sorted(found, key=self.by_cost)

    def leaves_guarantees(self, victims: Sequence[Task], surplus: dict[str, int]) -> bool:
        taken = Counter[str]()
        for lease in self.taken_from(victims):
            taken[lease.tenant] += lease.mb
        return all(mb <= surplus[name] for name, mb in taken.items())

    def may_be_stopped_for(self, task: Task, victims: Sequence[Task]) -> bool:
        """Of the cohort of a task that would borrow, only who borrows as well: one after the other."""
        mine = self.policy.tenant(task.tenant)
        if not mine.cohort or self.is_within_guarantee(task) in (True, None):
            return True
        for order in permutations(victims):
            stays = [lease for lease in self.leases if not self.is_leaving(lease)]
            for victim in order:
                other, name = self.policy.tenant(victim.tenant), victim.tenant
                held = sum(lease.mb for lease in stays if lease.tenant == name)
                is_bound = other.cohort == mine.cohort and name != task.tenant
                mine_too = self.taken_from([victim])
                takes = any(lease in stays for lease in mine_too)
                if is_bound and takes and other.guaranteed_mb is not None and held <= other.guaranteed_mb:
                    break
                stays = [lease for lease in stays if lease not in mine_too]
            else:
                return True
        return False

    def is_spared_from(self, run: Task, other: Task) -> bool:
        """Whether its tenant has no more than it is guaranteed (one that waits: with it), and the other would
        borrow."""
        mine, whose = self.policy.tenant(other.tenant), self.policy.tenant(run.tenant)
        is_bound = mine.cohort and whose.cohort == mine.cohort and run.tenant != other.tenant
        if not is_bound or whose.guaranteed_mb is None or not needs_gpus(run.demand):
            return False
        if self.is_within_guarantee(other) is not False:
            return False
        if not run.is_active:
            return bool(self.is_within_guarantee(run))
        held = [ls.mb for ls in self.leases if ls.tenant == run.tenant and not self.is_leaving(ls)]
        return sum(held) <= whose.guaranteed_mb

    def reclaim(
        self, task: Task, closed: Any = (), floors: Mapping[str, int] = NO_FLOORS
    ) -> tuple[list[Any], list[Task]] | None:
        """The cheapest way to take back from borrowers."""
        if not self.policy.preemption or not task.demand.gpus or not self.custom_is_there(task):
            return None
        surplus = self.surplus_for(task)
        options = []
        for node in self.nodes if surplus else []:
            if not node.ready or node.cordoned or not self.is_open(node, task):
                continue
            found = self.borrowers_on(node.name, task, surplus)
            if node.name in closed:
                found = [one for one in found if one.priority >= floors.get(node.name, 101)]
            for count in range(len(found) + 1):
                for gone in combinations(enumerate(found), count):
                    victims = [run for _, run in gone]
                    if not self.leaves_guarantees(victims, surplus):
                        continue
                    cost = self.cost(victims)
                    by_place = tuple(place for place, _ in gone)
                    for chosen in combinations(self.devices(node.name), task.demand.gpus):
                        if self.would_fit(node, chosen, task, victims):
                            left = sorted((self.left_after(d, task, victims), d.key) for d in chosen)
                            options.append(((cost, node.name, by_place, left), list(chosen), victims))
        if any(members_of(one) for option in options for one in option[2]):
            return self.as_taken(task, options)
        best = min(options, key=lambda option: option[0], default=None)
        return (best[1], best[2]) if best is not None and best[2] else None
