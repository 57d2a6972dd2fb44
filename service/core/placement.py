"""Where a task can run now: one node, and on it as many devices as it asks for."""

from dataclasses import dataclass
from heapq import nsmallest

from service.core.blockers import room_blockers
from service.core.draft import Draft
from service.core.need import need_mb
from service.core.policy import Policy
from service.core.reasons import Reason
from service.core.survey import survey
from service.core.task import Placement, Task
from service.core.units import DeviceKey, Instant, Mib, NodeName

Option = tuple[float, DeviceKey, Mib]
"""(MiB left on the device afterwards, negated for `spread`; the device; MiB to lease)"""

Score = tuple[float, float, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class NoFit:
    """There is no room now. Nothing is wrong: the task waits."""

    reason: Reason
    largest_free_mb: Mib
    """The most that this task could have on one usable device."""


def find_placement(draft: Draft, task: Task, policy: Policy, now: Instant) -> Placement | NoFit:
    """The best place for a task right now, or why there is none."""
    return place(draft, task, policy, now) or no_fit(draft, task, policy, now)


def no_fit(draft: Draft, task: Task, policy: Policy, now: Instant) -> NoFit:
    """Why a task for which there is no place has none. Looks at every device: not for the planner's loop."""
    seen = survey(draft, task, policy, now)
    reasons = [blocker.reason for blocker in room_blockers(seen)]
    return NoFit(reasons[0] if reasons else Reason.PENDING_EVALUATION, seen.largest_free_mb)


def place(draft: Draft, task: Task, policy: Policy, now: Instant) -> Placement | None:
    """The best place for a task right now. Total order, smallest first (`spread`: largest first):

    1. room left on its devices
    2. CPU left on the node
    3. names of node and devices (always smallest first)
    """
    if draft.short_of(task, policy.custom_limits):
        return None
    best: tuple[Score, Placement] | None = None
    for node in draft.usable_nodes():
        found = _place_on(draft, node, task, policy, now)
        if found is not None and (best is None or found[0] < best[0]):
            best = found
    return best and best[1]


def _place_on(
    draft: Draft, node: NodeName, task: Task, policy: Policy, now: Instant
) -> tuple[Score, Placement] | None:
    demand = task.demand
    if demand.gpus and draft.largest_mb(node) < (demand.gpu_mb or 1):
        return None
    room = draft.headroom(node, task=task.id, priority=task.priority)
    if not room.fits(task):
        return None
    sign = -1 if demand.placement == "spread" else 1
    chosen = _devices_on(draft, node, task, policy, now, sign) if demand.gpus else []
    if len(chosen) < demand.gpus:
        return None
    devices = tuple(sorted((key, mb) for _, key, mb in chosen))
    names = (node, *(key for key, _ in devices))
    return (sum(left for left, _, _ in chosen), sign * room.cpu, names), Placement(node, devices)


def _devices_on(
    draft: Draft, node: NodeName, task: Task, policy: Policy, now: Instant, sign: int
) -> list[Option]:
    options: list[Option] = []
    for book in draft.usable_books(node, policy, now):
        need = need_mb(task.demand, book.device)
        if need is None or need > book.unheld_mb():
            continue
        left = book.free_mb(task=task.id, priority=task.priority) - need
        if left >= 0:
            options.append((sign * left, book.device.key, need))
    return nsmallest(task.demand.gpus, options)
