"""In which order the naive planner makes forecasts: every task compared with every other."""

from typing import Any

from gpubroker_server.core.domain.task import Task

from tests.core.naive_tenants import TOPS


def in_order_of_forecasts(naive: Any) -> list[Task]:
    """All waiting tasks without pledges, if each waits for room alone."""
    waiting = [task for task in naive.tasks.values() if naive.waits(task) and not task.demand.answered_by]
    first: dict[Any, Task] = {}
    for task in sorted(waiting, key=lambda one: at_equal_shares(naive, one)):
        if is_passed_by_its_tenant(naive, task):
            names = {name for name, _ in (*task.demand.custom, *task.demand.slots)}
            first.setdefault(frozenset(names), task)
    found: list[Task] = []
    for task in sorted(waiting, key=naive.order):
        found += [one for one in first.values() if one not in found and comes_before(naive, one, task)]
        found += [task] if task not in found else []
    return [task for task in found if not any(pledge.preemptor == task.id for pledge in naive.pledges)]


def comes_before(naive: Any, one: Task, other: Task) -> bool:
    """Whether the other one came later, and could only be ahead by its tenant's share."""
    is_later = one.submitted_at < other.submitted_at
    return is_later and at_equal_shares(naive, one) < at_equal_shares(naive, other)


def at_equal_shares(naive: Any, task: Task) -> Any:
    band, guarantee, _, *rest = naive.order(task)
    return band, guarantee, *rest


def is_passed_by_its_tenant(naive: Any, task: Task) -> bool:
    """Whether it has aged to the top of its band while its tenant runs a task that it is ahead of."""
    top, _, _, aged, *_ = naive.order(task)
    if top != aged:
        return False
    for run in naive.tasks.values():
        band = min(one for one in TOPS if run.priority <= one)
        if run.is_active and run.tenant == task.tenant and band <= -top:
            came = run.submitted_at if band == -top else run.admitted_at
            if came > task.submitted_at:
                return True
    return False
