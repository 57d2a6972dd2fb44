"""Runs that are moved, for the naive planner."""

from typing import Any

from gpubroker_server.core.domain.task import StopReason, Task, TaskState


def is_moving(naive: Any, name: str) -> bool:
    task = naive.tasks.get(name)
    return task is not None and (task.state, task.stop_reason) == (TaskState.STOPPING, StopReason.MOVE)


def kept(naive: Any, task: Task) -> list[Any]:
    """Who was moved has what was pledged to it, and nothing else."""
    mine = {pledge.device for pledge in naive.pledges if pledge.preemptor == task.id}
    naive.barred = frozenset(ledger.device.key for ledger in naive.ledgers) - mine
    found = list(naive.places(task))
    naive.barred = frozenset()
    return found
