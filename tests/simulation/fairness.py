"""Two rules that need no memory: gangs are whole, and no task is passed by a later one."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gpubroker_server.core.domain.decisions import Decision
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.core.world.world import World
from msgspec import Struct

from tests.core.naive import Naive
from tests.core.naive_backfill import allows, is_open
from tests.core.naive_gangs import delays_nobody


def check_gang(world: World, task: Task) -> None:
    """Never half placed: of an active gang every rank has its place and all of its memory, or is over."""
    wanted = task.demand.bundles
    assert not wanted or task.demand.least_ranks <= len(members_of(task))
    has = Counter(m.rank if m.bundle is None else m.bundle for m in members_of(task) if not m.has_ended)
    assert set(has.values()) <= {1}, "no two ranks have one bundle"
    assert has.keys() <= set(range(len(wanted)))
    if task.state in (TaskState.ADMITTED, TaskState.RUNNING):
        held = Counter(lease.rank for lease in world.leases_of(task))
        for member in members_of(task):
            bundle = wanted[member.rank if member.bundle is None else member.bundle]
            assert member.gone or held[member.rank] == bundle.gpus
            surplus = task.state is TaskState.RUNNING and member.rank >= task.demand.least_ranks
            assert member.takes_part or surplus, "a gang at work has all ranks that it needs"


Standing = tuple[Any, Task, bool]
"""(place in the queue, task, whether room is being made for it)"""


def standings(world: World, policy: Policy, now: float) -> dict[str, Standing]:
    naive = Naive(world, policy, now)
    return {
        task.id: (naive.order(task), task, task.id in world.pledges)
        for task in naive.tasks.values()
        if naive.waits(task)
    }


def _asked(task: Task) -> Any:
    return task.demand, task.tenant, task.expected_seconds, task.timeout_seconds, task.deadline_at


class Passing(Struct, frozen=True):
    """An admitted task, and one ahead of it with the same demand that might not have taken that place."""

    name: str
    passed: str
    was_allowed: bool


def passings(world: World, naive: Naive, decision: Decision, ahead: dict[str, Standing]) -> Iterator[Passing]:
    """Whom an admission passes, before it is committed.

    That is no matter if room was made for it, or if a higher priority lets it have what is kept for others.
    It is allowed if who is passed would have delayed a forecast there, and who passes gives way to it.
    """
    place, task, pledged = ahead[decision.subject]
    waiting = world.queue
    for name, (its_place, rival, _) in ahead.items():
        same = _asked(rival) == _asked(task) and rival.priority >= task.priority and TaskId(name) in waiting
        if name != task.id and same and not pledged and its_place < place:
            yield Passing(task.id, name, _is_kept_away(naive, rival, decision))


def _is_kept_away(naive: Naive, rival: Task, decision: Decision) -> bool:
    """Whether the rival would delay a forecast ahead of it by starting where that one does."""
    task = decision.tasks[0].task
    if rival.demand.bundles:
        nodes = [member.node for member in members_of(task)]
        taken = [
            [(ls.device, ls.mb) for ls in decision.leases if ls.rank == m.rank] for m in members_of(task)
        ]
        return not delays_nobody(naive, rival, tuple(zip(nodes, map(tuple, taken), strict=True)))
    [node] = [node for node in naive.nodes if node.name == task.node]
    devices = {device.key: device for device in naive.devices(node.name)}
    return not is_open(naive, rival, node, all_reservations=False) or not all(
        allows(naive, rival, devices[lease.device], lease.mb, all_reservations=False)
        for lease in decision.leases
    )
