"""Runs that are moved, and preemptors that go elsewhere, for the naive planner."""

from collections.abc import Sequence
from typing import Any

from gpubroker_server.core.domain.lease import Pledge
from gpubroker_server.core.domain.task import StopReason, Task, TaskState
from gpubroker_server.core.domain.units import node_of


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


def step_elsewhere(naive: Any, task: Task, mine: Sequence[Pledge]) -> list[Any]:
    """What becomes of it as if nothing were pledged to it, unless what leaves will be enough. What was, ends
    if it finds a way."""
    if is_room_coming(naive, mine):
        return []
    given, refused = naive.given[task.tenant], naive.refused_by_reservation
    naive.pledges = [pledge for pledge in naive.pledges if pledge not in mine]
    found = naive.step(task, pledged=False)
    if not found:
        naive.pledges += mine
        naive.refused_by_reservation = refused
        return []
    more = naive.given[task.tenant] - given - sum(pledge.mb for pledge in mine)
    naive.given[task.tenant] = given + max(0, more)
    [(what, name, where, devices, ended)] = found
    used = {key for key, *_ in devices} if what == "admit" else set()
    other = "dissolved" if what == "preempt" else "withdrawn"
    old = {(name, p.device, "consumed" if p.device in used else other) for p in mine}
    return [(what, name, where, devices, tuple(sorted({*ended, *old})))]


def is_room_coming(naive: Any, mine: Sequence[Pledge]) -> bool:
    nodes = [node for node in naive.nodes if node.name in {node_of(pledge.device) for pledge in mine}]
    leaves = any(run.state is TaskState.STOPPING for node in nodes for run in naive.runs_on(node))
    for device in [ledger.device for ledger in naive.ledgers]:
        for pledge in (pledge for pledge in mine if pledge.device == device.key):
            others = [p for p in naive.pledges if p.device == device.key and p not in mine]
            promised = sum(p.mb for p in others if p.priority >= pledge.priority)
            leaves = leaves or naive.leaving(device) > 0
            if naive.unheld(device) + naive.leaving(device) - promised < pledge.mb:
                return False
    return leaves
