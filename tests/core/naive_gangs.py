"""Gangs, for the naive planner: every rank in every place, and every choice of who leaves.

Where a gang goes, and of equally cheap ways whom it stops, is the planner's to choose. Whether it can start,
with how many ranks, delaying nobody, and what it costs others at least, is not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations
from typing import Any

from gpubroker_server.core.domain.holders import RUN
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from msgspec.structs import replace

from tests.core import naive_backfill as backfill

EXACT = 8
"""With more who might leave, those who do are only all needed."""

Places = tuple[tuple[str, tuple[tuple[str, int], ...]], ...]
"""(node, devices) of each rank."""


@lru_cache(1_000)
def a_rank(task: Task, rank: int) -> Task:
    """As a task of its own: with its notice, if it was asked to leave a gang that goes on."""
    if not task.demand.bundles:
        return task
    late = next((m.bundle for m in members_of(task) if m.rank == rank), None)
    part = replace(task, demand=task.demand.bundles[rank if late is None else late], holder=RUN)
    for member in members_of(task):
        if member.rank == rank:
            part = replace(part, node=member.node)
        if member.rank == rank and not member.takes_part:
            notice = {"freeing_for": member.freeing_for, "stop_deadline_at": member.stop_deadline_at}
            part = replace(part, state=TaskState.STOPPING, **notice)
    return part


def runs(task: Task) -> list[Task]:
    """Of a task that is placed, or of what may leave of it."""
    if not members_of(task):
        return [task]
    return [a_rank(task, member.rank) for member in members_of(task) if not member.gone]


def places(
    naive: Any, task: Task, count: int, nodes: Sequence[Any], gone: Sequence[Task] | None = None
) -> Iterator[Places]:
    """All for the first so many ranks on these nodes: now, or once these and whoever is leaving have left."""
    usable = [node for node in nodes if node.ready and not node.cordoned]
    left = {node.name: beside_devices(naive, node, task, gone) for node in usable}
    free: dict[str, int] = {}
    for device in (device for node in usable for device in naive.devices(node.name)):
        if gone is None:
            free[device.key] = min(naive.unheld(device), naive.free(device, task))
        else:
            freed = [ls for one in gone for ls in naive.leases_of(one) if ls.device == device.key]
            free[device.key] = naive.soon(device, task) + sum(map(naive.takes, freed))

    def put(found: Places) -> Iterator[Places]:
        if len(found) == count:
            yield found
            return
        part = replace(task, demand=task.demand.bundles[len(found)], holder=RUN)
        for node in usable:
            before = left[node.name]
            after = less(before, part)
            if not naive.is_open(node, part) or any(
                after[name] < 0 for name in after if after[name] < before[name]
            ):
                continue
            if not lies_well(task.demand.strategy, [name for name, _ in found], node.name):
                continue
            for devices in combinations(naive.devices(node.name), part.demand.gpus):
                needs = [(device.key, naive.needs(part.demand, device)) for device in devices]
                if any(need is None or need > free[key] for key, need in needs):
                    continue
                left[node.name] = after
                for key, need in needs:
                    free[key] -= need
                yield from put((*found, (node.name, tuple(needs))))
                for key, need in needs:
                    free[key] += need
                left[node.name] = before

    yield from put(())


def lies_well(strategy: str, others: Sequence[str], node: str) -> bool:
    if strategy == "strict_pack":
        return {*others} <= {node}
    return strategy != "strict_spread" or node not in others


def beside_devices(naive: Any, node: Any, task: Task, gone: Sequence[Task] | None) -> dict[str, float]:
    stay = naive.runs_on(node)
    if gone is not None:
        stay = [run for run in stay if run.state is not TaskState.STOPPING]
        for run in (run for one in gone for run in runs(one) if run.node == node.name):
            stay.remove(run)
    has = {"cpu": node.cpu, "memory": node.memory_mb, "runs": node.max_runs, **dict(node.custom)}
    for run in [*stay, *naive.waiting_here(node, task)]:
        has = less(has, run)
    return has


def less(has: dict[str, float], run: Task) -> dict[str, float]:
    asked = {"cpu": run.demand.cpu, "memory": run.demand.memory_mb, "runs": 1, **dict(run.demand.custom)}
    return {name: round(amount - asked.get(name, 0), 6) for name, amount in has.items()}


def delays_nobody(naive: Any, task: Task, where: Places) -> bool:
    """Of those ahead of it."""
    guarded = {name for forecast in backfill.keepers(naive) for name in backfill.nodes_of(forecast)}
    for node in (node for node in naive.nodes if node.name in guarded & {name for name, _ in where}):
        if naive.refused_by_reservation >= naive.policy.backfill_depth:
            return False
        there = [rank for rank, (name, _) in enumerate(where) if name == node.name]
        parts = [replace(task, demand=task.demand.bundles[rank], holder=RUN) for rank in there]
        if not backfill.is_open(naive, task, node, all_reservations=False, parts=parts):
            return False
        for device in naive.devices(node.name):
            mb = sum(need for rank in there for key, need in where[rank][1] if key == device.key)
            if mb and not backfill.allows(naive, task, device, mb, all_reservations=False):
                return False
    return True


def gang_step(naive: Any, task: Task, *, is_pledged: bool) -> list[Any]:
    """What becomes of a gang whose turn it is."""
    if naive.over_quota(task):
        return [] if is_pledged else room_in_quota(naive, task)
    if not naive.custom_is_there(task):
        return [] if is_pledged else room_in_limit(naive, task)
    ranks = list(range(task.demand.least_ranks, len(task.demand.bundles) + 1))
    ranks = [n for n in ranks if n == ranks[0] or not naive.over_quota(task, n)]
    ranks = [n for n in ranks if n == ranks[0] or naive.custom_is_there(with_ranks(task, n))]
    most = most_of(naive, task, ranks, lambda _: True)
    if not most:
        return [] if is_pledged else make_room(naive, task)
    able = most if is_pledged else most_of(naive, task, ranks, lambda one: delays_nobody(naive, task, one))
    if not able:
        naive.refused_by_reservation += 1
        return []
    _, _, nodes, devices, *_ = naive.taken.get(task.id, ("", "", (), ()))
    taken = tuple((node, tuple(d[1:] for d in devices if d[0] == rank)) for rank, node in enumerate(nodes))
    is_good = len(taken) in (most, able) and taken in places(naive, task, len(taken), naive.nodes)
    if not is_good or not (is_pledged or delays_nobody(naive, task, taken)):
        return [("admit", task.id, f"{able} ranks", taken)]
    return [naive.admit_gang(task, taken)]


def with_ranks(task: Task, count: int) -> Task:
    """The gang, if it needed so many ranks, under the limits that count ranks."""
    parts = task.demand.bundles[:count]
    custom, slots = Counter[str](), Counter[str]()
    for part in parts:
        custom.update(dict(part.custom))
        slots.update(dict(part.slots))
    sums = {"custom": tuple(sorted(custom.items())), "slots": tuple(sorted(slots.items()))}
    return replace(task, demand=replace(task.demand, **sums))


def most_of(
    naive: Any,
    task: Task,
    ranks: Sequence[int],
    may: Callable[[Places], bool],
    nodes: Sequence[Any] | None = None,
) -> int:
    for count in reversed(ranks):
        if any(may(one) for one in places(naive, task, count, naive.nodes if nodes is None else nodes)):
            return count
    return 0


# Who must leave


def make_room(naive: Any, task: Task) -> list[Any]:
    closed = backfill.nodes_closed_to(naive, task)
    may_stop = naive.may_preempt(task)
    surplus = naive.surplus_for(task)
    if surplus and may_stop:
        above = backfill.floors(naive, task)
        nodes = [node for node in naive.nodes if node.name not in closed or node.name in above]
        found = above_floors(nodes, above, lambda node: naive.borrowers_on(node.name, task, surplus))
        if step := stop(naive, task, nodes, found, lambda gone: naive.leaves_guarantees(gone, surplus)):
            return step
    if naive.refused_by_reservation >= naive.policy.backfill_depth:
        closed = [name for forecast in backfill.keepers(naive) for name in backfill.nodes_of(forecast)]
    nodes = [node for node in naive.nodes if node.name not in closed]
    if may_stop:
        if any(places(naive, task, task.demand.least_ranks, nodes, ())):
            return []  # room is coming
        found = [one for node in nodes for one in naive.possible_victims(node, task)]
        if step := stop(naive, task, nodes, found, lambda gone: naive.may_be_stopped_for(task, gone)):
            return step
        if above := backfill.floors(naive, task):
            nodes = [node for node in naive.nodes if node.name not in closed or node.name in above]
            found = above_floors(nodes, above, lambda node: naive.possible_victims(node, task))
            if step := stop(naive, task, nodes, found, lambda gone: naive.may_be_stopped_for(task, gone)):
                return step
    naive.refused_by_reservation += any(
        could_hold_a_rank(naive, task, node) for node in naive.nodes if node.name in closed
    )
    return []


def above_floors(
    nodes: Sequence[Any], floors: dict[str, int], victims_on: Callable[[Any], Sequence[Task]]
) -> list[Task]:
    return [one for node in nodes for one in victims_on(node) if one.priority >= floors.get(node.name, -1)]


def could_hold_a_rank(naive: Any, task: Task, node: Any) -> bool:
    """If everybody left who may be stopped for it."""
    if not node.ready or node.cordoned:
        return False
    alone = [replace(task, demand=bundle) for bundle in task.demand.bundles]
    return any(
        naive.is_open(node, rank) and naive.would_fit(node, devices, rank, naive.possible_victims(node, rank))
        for rank in alone
        for devices in combinations(naive.devices(node.name), rank.demand.gpus)
    )


def room_in_quota(naive: Any, task: Task) -> list[Any]:
    lacks, closed = naive.lacks(task), backfill.nodes_closed_to(naive, task)
    if not lacks or not naive.policy.preemption or not naive.custom_is_there(task):
        return []
    above = backfill.floors(naive, task)
    nodes = [node for node in naive.nodes if node.name not in closed or node.name in above]
    found = above_floors(nodes, above, lambda node: naive.possible_victims(node, task))
    found = [one for one in found if one.tenant == task.tenant]
    return stop(naive, task, nodes, found, enough=lambda gone: naive.held_by(gone) >= lacks)


def room_in_limit(naive: Any, task: Task) -> list[Any]:
    if not naive.may_clear_limit(task):
        return []
    closed = backfill.nodes_closed_to(naive, task)
    nodes = [node for node in naive.nodes if node.name not in closed]
    found = [one for node in nodes for one in naive.possible_victims(node, task)]
    return stop(naive, task, nodes, found, enough=lambda gone: naive.custom_is_there(task, gone))


Judge = Callable[[Sequence[Task]], bool]


def stop(
    naive: Any,
    task: Task,
    nodes: Sequence[Any],
    found: Sequence[Task],
    may: Judge = lambda _: True,
    enough: Judge = lambda _: True,
) -> list[Any]:
    """The way that was taken, if none costs less; something else if there is one and none was taken."""
    leavers = sorted({naive.name_of(one): one for one in found}.values(), key=naive.by_cost)
    least = task.demand.least_ranks

    def suffices(gone: Sequence[Task]) -> bool:
        return enough(gone) and any(places(naive, task, least, nodes, gone))

    if not leavers or not suffices(leavers):
        return []
    what, _, names, made, *_ = naive.taken.get(task.id, ("", "", (), ()))
    chosen = [one for one in leavers if what == "preempt" and naive.is_named(one, names)]
    chosen = chosen if may(chosen) else []
    better = (gone for gone in subsets(leavers) if not chosen or naive.cost(gone) < naive.cost(chosen))
    found_better = next((gone for gone in better if may(gone) and suffices(gone)), ())
    if not chosen and not found_better:
        return []
    one_less = ([one for one in chosen if one.id != name] for name in {one.id for one in chosen})
    is_minimal = len(leavers) <= EXACT or not any(map(suffices, one_less))
    is_good = bool(chosen) and not found_better and is_minimal and suffices(chosen)
    if not is_good or made not in (needs_of(one) for one in places(naive, task, least, nodes, chosen)):
        return [("preempt", task.id, [naive.name_of(one) for one in found_better], "and not", names, made)]
    return [naive.evict(task, made, chosen)]


def subsets(leavers: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
    for count in range(1, len(leavers) + 1 if len(leavers) <= EXACT else 1):
        yield from combinations(leavers, count)


def needs_of(where: Places) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """(device, MiB, ranks)"""
    keys = sorted({key for _, devices in where for key, _ in devices})
    return tuple(
        (
            key,
            sum(mb for _, devices in where for each, mb in devices if each == key),
            tuple(rank for rank, (_, devices) in enumerate(where) if key in dict(devices)),
        )
        for key in keys
    )
