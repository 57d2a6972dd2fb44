"""Ranks of tasks. A task that is no gang has one rank, 0, which is the task itself."""

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import assert_never

from msgspec.structs import replace

from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.holders import (
    RUN,
    External,
    Gang,
    Inference,
    Member,
    Model,
    Run,
    WorkerSeat,
)
from gpubroker_server.core.domain.task import Task, TaskState, members_of
from gpubroker_server.core.domain.units import Instant, NodeName

MAX_RANKS = 256
"""The most ranks of one claim, including those that have left. The limit exists because every report of a
rank writes the whole list."""

MAX_FAILED_JOINS = 3
"""The number of failed joins after which a gang grows no more before its next start. A gang that fails this
often may be unable to grow."""


def ranks_of(task: Task) -> tuple[tuple[int, NodeName], ...]:
    """Return (rank, node) of each run of an active task, without the ranks of a gang that are gone; empty for
    external holders, models and inferences, which no agent starts."""
    match task.holder:
        case Run() | WorkerSeat():
            assert task.node is not None, "an active task has a node"
            return ((0, task.node),)
        case Gang(members):
            return tuple((member.rank, member.node) for member in members if not member.gone)
        case External() | Model() | Inference():
            return ()
        case _:
            assert_never(task.holder)


def rank_count(task: Task) -> int:
    """Return the number of ranks of the newest claim, including those that are gone; 0 for holders that no
    node agent starts."""
    match task.holder:
        case Run() | WorkerSeat():
            return 1
        case Gang(members):
            return len(members)
        case External() | Model() | Inference():
            return 0
        case _:
            assert_never(task.holder)


def rank_tasks(task: Task) -> tuple[tuple[NodeName, Task], ...]:
    """Return (node, task) of each run of an active task, with each rank of a gang as a task of its own.
    External holders and models are on the node where they hold memory; inferences are on none."""
    match task.holder:
        case Run() | WorkerSeat() | External() | Model():
            assert task.node is not None, "an active task has a node"
            return ((task.node, task),)
        case Gang():
            return tuple((node, rank_task(task, rank)) for rank, node in ranks_of(task))
        case Inference():
            return ()
        case _:
            assert_never(task.holder)


def rank_tasks_on(task: Task, node: NodeName) -> Iterator[Task]:
    """Yield the ranks of a task on one node, each as a task of its own. A task that is no gang must be on the
    node."""
    if not isinstance(task.holder, Gang):
        yield task
        return
    for rank, rank_node in ranks_of(task):
        if rank_node == node:
            yield rank_task(task, rank)


def rank_task(task: Task, rank: int) -> Task:
    """Return one rank of a gang as a run of its own with the gang's id. It is STOPPING if the rank was asked
    to leave. Other tasks are returned unchanged."""
    match task.holder:
        case Gang(members):
            part = replace(task, demand=demand_of(task, rank), holder=RUN)
            if not members or (member := members[rank]).takes_part:
                return part
            until = member.stop_deadline_at
            return replace(
                part, state=TaskState.STOPPING, freeing_for=member.freeing_for, stop_deadline_at=until
            )
        case _:
            return task


def bundle_of(members: Sequence[Member], rank: int) -> int:
    """Return the index of the bundle, in the gang's demand, that a rank has."""
    late = members[rank].bundle if members else None
    return rank if late is None else late


def demand_of(task: Task, rank: int) -> Demand:
    """Return the demand of one rank."""
    match task.holder:
        case Gang(members):
            return task.demand.bundles[bundle_of(members, rank)]
        case _:
            return task.demand


def counted_by(task: Task) -> Iterable[tuple[str, float]]:
    """Return (name, amount) of the custom resources and shared limits that an active task holds. A gang holds
    the amounts of its ranks that are not gone, and one place under the limits of running tasks."""
    if not members_of(task):
        return task.demand.counted
    # In rows of earlier releases, the gang's own demand has the pool amounts of all its ranks.
    is_by_rank = any(bundle.slots for bundle in task.demand.bundles)
    amounts = [slot for slot in task.demand.slots if not (is_by_rank and slot[0].startswith("pool:"))]
    for rank, _ in ranks_of(task):
        amounts += demand_of(task, rank).counted
    return amounts


def stop_deadline_of(task: Task, rank: int) -> Instant | None:
    """Return the stop deadline of one rank; None if the rank is not asked to stop."""
    match task.holder:
        case Gang(members) if members and not (member := members[rank]).takes_part:
            return member.stop_deadline_at
        case _:
            return task.stop_deadline_at


def removable_ranks(task: Task) -> tuple[int, ...]:
    """Return the ranks that a running elastic gang can lose."""
    match task.holder:
        case Gang(members) if task.state is TaskState.RUNNING:
            optional = members[task.demand.least_ranks :]
            return tuple(member.rank for member in optional if member.takes_part and not member.has_ended)
        case _:
            return ()


def vacant_bundles(task: Task) -> tuple[int, ...]:
    """Return the indexes of the bundles for which a running elastic gang may get ranks now. There are none
    while ranks are joining, after one has finished, and after too many joins have failed."""
    demand = task.demand
    match task.holder:
        case Gang(members) if task.state is TaskState.RUNNING and demand.least_ranks < len(demand.bundles):
            pass
        case _:
            return ()
    if any(member.is_joining or member.has_finished for member in members):
        return ()
    if failed_joins(members) >= MAX_FAILED_JOINS:
        return ()
    taken = {bundle_of(members, member.rank) for member in members if not member.has_ended}
    vacant = (bundle for bundle in range(len(demand.bundles)) if bundle not in taken)
    return tuple(vacant)[: max(0, MAX_RANKS - len(members))]


def failed_joins(members: Iterable[Member]) -> int:
    """Return how many ranks were added to a gang while it ran and failed by themselves."""
    return sum(m.is_late and m.has_ended and m.stop_deadline_at is None for m in members)


def workers(members: Iterable[Member]) -> tuple[int, ...]:
    """Return the ranks that are at work in a running gang, including those that have finished."""
    return tuple(m.rank for m in members if m.takes_part and not m.is_joining)


def world_number(members: Iterable[Member]) -> int:
    """Return a number that rises whenever ranks join a running gang or leave it; 0 at its start."""
    return sum(member.changes_of_world for member in members)


def leaving_members(task: Task) -> tuple[Member, ...]:
    """Return the ranks that were asked to leave a running gang and are not gone yet."""
    match task.holder:
        case Gang(members) if task.state is TaskState.RUNNING:
            return tuple(member for member in members if not (member.takes_part or member.gone))
        case _:
            return ()


def unready_members(task: Task) -> tuple[Member, ...]:
    """Return the ranks that were added to a running gang and are not ready yet."""
    match task.holder:
        case Gang(members) if task.state is TaskState.RUNNING:
            return tuple(member for member in members if member.is_joining and not member.address)
        case _:
            return ()


def may_be_late_at(task: Task) -> Instant:
    """Return the earliest instant at which a limit of an active task, or the stop deadline of one of its
    ranks, can pass."""
    if task.state is TaskState.STOPPING:
        return Instant(inf) if task.stop_deadline_at is None else task.stop_deadline_at
    claimed_at = task.admitted_at or Instant(0.0)
    limits: list[Instant] = []
    match task.holder:
        case Gang():
            moving = (*leaving_members(task), *unready_members(task))
            limits = [member.stop_deadline_at or claimed_at for member in moving]
            if task.started_at is None:
                limits.append(claimed_at)
        case _:
            pass
    if task.timeout_seconds is not None:
        limits.append(Instant((task.started_at or claimed_at) + task.timeout_seconds))
    if task.deadline_at is not None:
        limits.append(task.deadline_at)
    return min(limits, default=Instant(inf))


def with_member(members: tuple[Member, ...], member: Member) -> tuple[Member, ...]:
    """Return the ranks of a gang with one changed."""
    return (*members[: member.rank], member, *members[member.rank + 1 :])


def node_of(task: Task, rank: int) -> NodeName:
    """Return the node of one rank of an active task."""
    match task.holder:
        case Gang(members) if members:
            return members[rank].node
        case _:
            assert task.node is not None, "an active task has a node"
            return task.node


def nodes_of(task: Task) -> set[NodeName]:
    """Return the nodes of all ranks."""
    match task.holder:
        case Gang(members) if members:
            return {member.node for member in members}
        case _:
            return set() if task.node is None else {task.node}


def gpus_of(task: Task) -> int:
    """Return how many GPUs an active task has."""
    match task.holder:
        case Gang():
            return sum(demand_of(task, rank).gpus for rank, _ in ranks_of(task))
        case _:
            return task.demand.gpus


def needs_gpus(demand: Demand) -> bool:
    """Return True if the demand, or the demand of a rank of a gang, has GPUs."""
    return demand.gpus > 0 or any(bundle.gpus for bundle in demand.bundles)
