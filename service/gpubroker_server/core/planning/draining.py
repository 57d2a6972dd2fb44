"""Draining a node: everything that holds memory or CPU on the node is asked to leave, like a preempted run.

Critical work and runs that are protected from preemption stay at first. A grace period before the deadline,
every run that is still there is asked to leave by the deadline. A model server stays, and its models leave.
"""

from collections.abc import Iterator

from gpubroker_server.core.domain.decisions import Decision, write_move
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.holders import Gang, Member
from gpubroker_server.core.domain.policy import BAND_NAMES, Policy, band_of
from gpubroker_server.core.domain.ranks import removable_ranks
from gpubroker_server.core.domain.task import Move, StopReason, Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, Seconds
from gpubroker_server.core.lifecycle.gang_runs import stop_ranks
from gpubroker_server.core.lifecycle.stopping import give_notice, orders_to_leave
from gpubroker_server.core.planning.nodes.shields import is_protected
from gpubroker_server.core.world.node_holders import is_server
from gpubroker_server.core.world.world import World

INTERACTIVE = BAND_NAMES["interactive"]
"""The priority at which a drain stops runs: until the deadline, runs that are shielded from an interactive
task that has not waited stay."""


def ask_to_leave(world: World, policy: Policy, now: Instant) -> list[Decision]:
    """Return the stop notices that are due on draining nodes, with at most one decision for each task."""
    decisions: dict[str, Decision] = {}
    for name, node in sorted(world.nodes.items()):
        if node.draining_since is None:
            continue
        for task in (world.tasks[id] for id in sorted(world.runs.get(name, ()))):
            if task.id not in decisions and not is_server(task):
                for decision in _leave(world, node, task, policy, now):
                    decisions[task.id] = decision
    return list(decisions.values())


def _leave(world: World, node: Node, task: Task, policy: Policy, now: Instant) -> Iterator[Decision]:
    """Yield the decision that asks a task to leave a node; nothing if the task may stay for now, or leaves in
    time."""
    ends_at = node.drain_deadline_at
    at_latest = None if ends_at is None else max(now, ends_at)
    grace = task.grace_seconds if at_latest is None else min(task.grace_seconds, Seconds(at_latest - now))
    if task.state is TaskState.STOPPING:
        if at_latest is not None and task.stop_deadline_at is not None and task.stop_deadline_at > at_latest:
            sooner = write_move(task, Move.CHANGED, stop_deadline_at=at_latest)
            yield Decision(task.id, "drain", tasks=(sooner,), orders=orders_to_leave(world, task, grace))
        return
    members = [member for member in members_of(task) if member.node == node.name and not member.has_ended]
    late = [member for member in members if _leaves_later(member, at_latest)]
    remaining = [member for member in members if member.takes_part]
    if not _must_go(task, ends_at, policy, now):
        remaining = []
    elif not isinstance(task.holder, Gang) or not {member.rank for member in remaining} <= set(
        removable_ranks(task)
    ):
        notice, orders = give_notice(world, task, StopReason.PREEMPT, grace, now, drain_cause(node))
        yield Decision(task.id, "drain", tasks=(notice,), orders=orders)
        return
    if ranks := {member.rank for member in (*remaining, *late)}:
        write, told = stop_ranks(world, task, ranks, None, now, grace, drain_cause(node))
        yield Decision(task.id, "drain", tasks=(write,), orders=told)


def drain_cause(node: Node) -> str:
    by = f" by {node.cordoned_by}" if node.cordoned_by else ""
    return f"the drain of {node.name}{by}"


def _leaves_later(member: Member, at_latest: Instant | None) -> bool:
    until = member.stop_deadline_at
    return not member.takes_part and at_latest is not None and until is not None and until > at_latest


def _must_go(task: Task, ends_at: Instant | None, policy: Policy, now: Instant) -> bool:
    if ends_at is not None and now >= ends_at - task.grace_seconds:
        return True
    return band_of(task.priority)[0] != "critical" and not is_protected(task, INTERACTIVE, policy, now)
