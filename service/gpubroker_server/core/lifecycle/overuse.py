"""Runs that were measured to use more of a device than they have a lease of."""

from collections import defaultdict

from gpubroker_server.core.domain.decisions import Decision, Outcome
from gpubroker_server.core.domain.lease import LeaseState, mark_overused
from gpubroker_server.core.domain.orders import Ending
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import StopReason, Task, TaskState, notice_of
from gpubroker_server.core.domain.units import Instant, TaskId
from gpubroker_server.core.lifecycle.stopping import give_notice, over_use
from gpubroker_server.core.world.world import World


def overuse(world: World, now: Instant, policy: Policy) -> list[Decision]:
    """Each such lease is marked once, for whoever asks later; by policy its run is told to stop.

    Looks at what was measured above its lease only. A run that has not said that it began, or is under
    notice, is left alone: what becomes of it is decided elsewhere.
    """
    over: dict[TaskId, list[str]] = defaultdict(list)
    for key, holding in world.learned.above.items():
        lease = holding.lease
        task = world.holder(lease.holder, lease.fence)
        is_over = holding.measured_mb > lease.mb * (1 + policy.overuse_tolerance)
        if is_over and task is not None and _is_at_work(task, lease.rank):
            over[task.id].append(key)
    decisions = (_decision(world, world.tasks[name], over[name], now, policy) for name in sorted(over))
    return [decision for decision in decisions if not decision.is_empty()]


def _is_at_work(task: Task, rank: int) -> bool:
    return task.model is None and task.state is TaskState.RUNNING and not notice_of(task, rank)[1]


def _decision(world: World, task: Task, keys: list[str], now: Instant, policy: Policy) -> Decision:
    leases = {lease.key: lease for lease in world.leases_of(task)}
    marks = tuple(
        mark_overused(leases[key], world.learned.above[key].measured_mb)
        for key in sorted(keys)
        if leases[key].state is LeaseState.HELD and not leases[key].overused_mb
    )
    if policy.overuse == "report":
        return Decision(task.id, "overuse", leases=marks)
    notice, orders = give_notice(world, task, StopReason.OVERUSE, task.grace_seconds, now)
    marked = {**leases, **{lease.key: lease for lease in marks}}
    verdict = Outcome(
        task.id, task.fence, Ending.FAILED, now, failure=over_use(StopReason.OVERUSE, marked.values())
    )
    return Decision(task.id, "overuse", tasks=(notice,), leases=marks, outcome=verdict, orders=orders)
