"""Ranks of tasks. A task that is not a gang is its own rank 0."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.task import Member, Task, TaskState
from gpubroker_server.core.domain.units import Instant, NodeName

MOST_RANKS = 256
"""Of one claim, those that have left included: every report of a rank writes the whole list."""

MOST_FAILED_JOINS = 3
"""After so many a gang grows no more before its next start: it may be unable to."""


def ranks_of(task: Task) -> tuple[tuple[int, NodeName], ...]:
    """(rank, node) of each run of an active task, without a gang's ranks that are gone. Empty for external
    holders, models and inferences, which no agent starts."""
    if not task.is_run:
        return ()
    if task.members:
        return tuple((member.rank, member.node) for member in task.members if not member.gone)
    assert task.node is not None, "an active task has a node"
    return ((0, task.node),)


def rank_tasks(task: Task) -> tuple[tuple[NodeName, Task], ...]:
    """(node, task) of each run, each rank as a task of its own. External holders and models are where they
    hold memory; inferences are nowhere."""
    if task.is_inference:
        return ()
    if task.members:
        return tuple((node, rank_task(task, rank)) for rank, node in ranks_of(task))
    assert task.node is not None, "an active task has a node"
    return ((task.node, task),)


def rank_tasks_on(task: Task, node: NodeName) -> Iterator[Task]:
    """Its parts on one node, on which it has some."""
    if not task.members:
        yield task
    for rank, there in ranks_of(task) if task.members else ():
        if there == node:
            yield rank_task(task, rank)


def rank_task(task: Task, rank: int) -> Task:
    """One rank of a gang as a task of its own with the same id: STOPPING if the rank is to leave."""
    part = replace(task, demand=demand_of(task, rank), members=()) if task.demand.bundles else task
    if not task.members or (member := task.members[rank]).takes_part:
        return part
    until = member.stop_deadline_at
    return replace(part, state=TaskState.STOPPING, freeing_for=member.freeing_for, stop_deadline_at=until)


def bundle_of(task: Task, rank: int) -> int:
    """Which bundle of the gang's demand a rank has."""
    late = task.members[rank].bundle if task.members else None
    return rank if late is None else late


def demand_of(task: Task, rank: int) -> Demand:
    return task.demand.bundles[bundle_of(task, rank)] if task.demand.bundles else task.demand


def stop_deadline_of(task: Task, rank: int) -> Instant | None:
    """The stop deadline of a run; None if it is not asked to stop."""
    if task.members and not (member := task.members[rank]).takes_part:
        return member.stop_deadline_at
    return task.stop_deadline_at


def removable_ranks(task: Task) -> tuple[int, ...]:
    """The ranks that a running elastic gang can lose."""
    if task.state is not TaskState.RUNNING or not task.members:
        return ()
    beyond = task.members[task.demand.least_ranks :]
    return tuple(member.rank for member in beyond if member.takes_part and not member.has_ended)


def vacant_bundles(task: Task) -> tuple[int, ...]:
    """The bundles for which a running elastic gang may get ranks now; none while ranks are joining, and once
    one is done or too many have failed."""
    demand = task.demand
    if task.state is not TaskState.RUNNING or demand.least_ranks == len(demand.bundles):
        return ()
    if any(member.is_joining or member.has_finished for member in task.members):
        return ()
    if failed_joins(task) >= MOST_FAILED_JOINS:
        return ()
    taken = {bundle_of(task, member.rank) for member in task.members if not member.has_ended}
    vacant = (bundle for bundle in range(len(demand.bundles)) if bundle not in taken)
    return tuple(vacant)[: max(0, MOST_RANKS - len(task.members))]


def failed_joins(task: Task) -> int:
    """Ranks that were added to it while it ran and failed by themselves."""
    return sum(m.is_late and m.has_ended and m.stop_deadline_at is None for m in task.members)


def workers(task: Task) -> tuple[int, ...]:
    """The ranks at work in a running gang; those that are done stay."""
    return tuple(m.rank for m in task.members if m.takes_part and not m.is_joining)


def world_number(task: Task) -> int:
    """Rises whenever ranks join a running gang or leave it; 0 at its start."""
    return sum(member.changes_of_world for member in task.members)


def leaving_members(task: Task) -> tuple[Member, ...]:
    """The ranks that were asked to leave a running gang and are not gone yet."""
    if task.state is not TaskState.RUNNING:
        return ()
    return tuple(member for member in task.members if not (member.takes_part or member.gone))


def unready_members(task: Task) -> tuple[Member, ...]:
    """The ranks that were added to a running gang and are not ready yet."""
    if task.state is not TaskState.RUNNING:
        return ()
    return tuple(member for member in task.members if member.is_joining and not member.address)


def may_be_late_at(task: Task) -> Instant:
    """The earliest instant at which a limit of an active task, or the stop deadline of one of its ranks, can
    pass."""
    if task.state is TaskState.STOPPING:
        return Instant(inf) if task.stop_deadline_at is None else task.stop_deadline_at
    claimed_at = task.admitted_at or Instant(0.0)
    moving = (*leaving_members(task), *unready_members(task))
    limits = [member.stop_deadline_at or claimed_at for member in moving]
    if task.timeout_seconds is not None:
        limits.append(Instant((task.started_at or claimed_at) + task.timeout_seconds))
    if task.deadline_at is not None:
        limits.append(task.deadline_at)
    if task.members and task.started_at is None:
        limits.append(claimed_at)
    return min(limits, default=Instant(inf))


def with_member(task: Task, member: Member) -> tuple[Member, ...]:
    before = task.members
    return (*before[: member.rank], member, *before[member.rank + 1 :])


def node_of(task: Task, rank: int) -> NodeName:
    if task.members:
        return task.members[rank].node
    assert task.node is not None, "an active task has a node"
    return task.node


def nodes_of(task: Task) -> set[NodeName]:
    if task.members:
        return {member.node for member in task.members}
    return set() if task.node is None else {task.node}


def gpus_of(task: Task) -> int:
    if not task.members:
        return task.demand.gpus
    return sum(demand_of(task, rank).gpus for rank, _ in ranks_of(task))


def needs_gpus(demand: Demand) -> bool:
    """Of a gang: whether any of its ranks does."""
    return demand.gpus > 0 or any(bundle.gpus for bundle in demand.bundles)
