"""What becomes of tasks that run after others, once those have ended."""

from collections import deque
from typing import Any

from gpubroker_server.core.domain.decisions import Decision, Outcome, write_move
from gpubroker_server.core.domain.orders import Failure
from gpubroker_server.core.domain.task import Move, OnFailure, Task, TaskState
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.world.dependents import End
from gpubroker_server.core.world.world import World

MOST = 1000
"""Decisions at a time: a task may have any number of dependents."""


def settle(world: World, now: Instant) -> list[Decision]:
    """Fail those whose dependency failed, and those who wait for them in turn; let in those who await
    nothing any more. At most MOST; ask again until there are none."""
    decisions = list(_cascade(world, now))
    failed = {decision.subject for decision in decisions}
    ripe = sorted(world.awaited.ripe - failed - world.awaited.doomed.keys())[: MOST - len(decisions)]
    return decisions + [_let_in(world.tasks[name], now) for name in ripe]


def _cascade(world: World, now: Instant) -> list[Decision]:
    """In the order in which they hear of it. One that is left for later is doomed by then."""
    awaited = world.awaited
    agenda = deque((name, *awaited.doomed[name]) for name in sorted(awaited.doomed))
    decisions: dict[TaskId, Decision] = {}
    while agenda and len(decisions) < MOST:
        name, by, end = agenda.popleft()
        if name in decisions:
            continue
        first = end.failed_by or by
        decisions[name] = _fail(world.tasks[name], by, end, first, now)
        for dependent, on_failure in sorted(awaited.dependents.get(name, {}).items()):
            if on_failure is OnFailure.FAIL:
                agenda.append((dependent, name, End(TaskState.FAILED, first)))
    return list(decisions.values())


def _fail(task: Task, by: TaskId, end: End, first: TaskId, now: Instant) -> Decision:
    failure = Failure("dependency", f"it was to run after {by}, which {_how(end)}")
    return Decision(
        task.id,
        "dependency",
        tasks=(write_move(task, Move.FAILED, failed_by=first, finished_at=now),),
        outcome=Outcome(task.id, task.fence, TaskState.FAILED, now, failure=failure),
    )


def _how(end: End) -> str:
    match end.state:
        case None:
            return "ended long ago, and its record is gone"
        case TaskState.FAILED if end.failed_by is not None:
            return f"could not run because {end.failed_by} did not succeed"
        case TaskState.CANCELLED:
            return "was cancelled"
        case _:
            return f"has {end.state}"


def _let_in(task: Task, now: Instant) -> Decision:
    """It stands in the queue from now on, and its time to wait begins."""
    changes: dict[str, Any] = {"awaits": False}
    if task.queue_ttl_seconds is not None:
        earliest = max(now, task.not_before or now)
        changes["expires_at"] = Instant(earliest + task.queue_ttl_seconds)
    return Decision(task.id, "awaited", tasks=(write_move(task, Move.CHANGED, **changes),))
