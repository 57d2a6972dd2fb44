"""Two rules that need no memory: gangs are whole, and nobody is passed by one who stands behind him."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from service.core.plan import Decision
from service.core.policy import Policy
from service.core.task import Task, TaskState
from service.core.world import World
from tests.core.naive import Naive


def check_gang(world: World, task: Task) -> None:
    """Never half placed: of an active gang every rank has its place and all of its memory, or is over."""
    wanted = task.demand.bundles
    assert not wanted or task.demand.least_ranks <= len(task.members) <= len(wanted)
    if task.state in (TaskState.ADMITTED, TaskState.RUNNING):
        held = Counter(lease.rank for lease in world.leases_of(task))
        for member in task.members:
            assert member.gone or held[member.rank] == wanted[member.rank].gpus
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


def check_order(done: Sequence[Decision], ahead: dict[str, Standing]) -> None:
    """Of those who ask for the same, nobody is passed by one who stands behind him.

    Unless room was made for that one, or his higher priority lets him have what is kept for others.
    """
    admitted = {decision.subject for decision in done if decision.why == "admit"}
    for name in admitted:
        place, task, pledged = ahead[name]
        for other, (its_place, rival, _) in ahead.items():
            same = _asked(rival) == _asked(task)
            if other not in admitted and same and rival.priority >= task.priority and not pledged:
                assert place < its_place, f"{name} passed {other}"
