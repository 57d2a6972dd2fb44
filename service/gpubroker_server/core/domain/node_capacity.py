"""The resources of a node besides its devices: the amounts that its runs use, and the amounts that are
left."""

from typing import NamedTuple

from gpubroker_server.core.domain.demand import has_environment, may_use_node
from gpubroker_server.core.domain.device import Node
from gpubroker_server.core.domain.holders import Gang
from gpubroker_server.core.domain.ranks import counted_by
from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import Seconds, TaskId

SLOW_START_SECONDS = Seconds(30.0)
"""The time from the start order to the first line of user code above which a start is slow."""
BUSY_CPU = 0.95
"""The busy share of a node's CPUs from which on its runs are taken to wait for CPUs."""


class NodeUsage:
    """The CPU, host memory, run slots and custom resources that the active runs of one node use."""

    __slots__ = ("cpu", "custom", "memory_mb", "priorities", "runs", "starting", "stopping")

    def __init__(self, cpu: float = 0.0, memory_mb: int = 0, runs: int = 0) -> None:
        self.cpu = cpu
        self.memory_mb = memory_mb
        self.runs = runs
        self.custom: dict[str, float] = {}
        self.priorities: dict[int, int] = {}
        """Priority -> number of active runs."""
        self.starting = 0
        """The number of runs that are admitted and not started yet."""
        self.stopping: frozenset[TaskId] = frozenset()

    def copy(self) -> "NodeUsage":
        twin = NodeUsage(self.cpu, self.memory_mb, self.runs)
        twin.custom = dict(self.custom)
        twin.priorities = dict(self.priorities)
        twin.starting, twin.stopping = self.starting, self.stopping
        return twin

    def count(self, task: Task, sign: int) -> None:
        self.cpu = round(self.cpu + sign * task.demand.cpu, 6)
        self.memory_mb += sign * task.demand.memory_mb
        self.runs += sign
        if task.state is TaskState.ADMITTED:
            self.starting += sign
        left = self.priorities.pop(task.priority, 0) + sign
        if left:
            self.priorities[task.priority] = left
        if task.state is TaskState.STOPPING:
            self.stopping = self.stopping | {task.id} if sign > 0 else self.stopping - {task.id}
        count_custom(self.custom, task, sign)


def count_custom(use: dict[str, float], task: Task, sign: int) -> None:
    """Add or subtract a task's custom resources and shared limits. Sums are rounded, so that a subtraction
    restores the earlier value."""
    match task.holder:
        case Gang():
            counted = counted_by(task)
        case _:
            counted = task.demand.counted
    for name, amount in counted:
        use[name] = round(use.get(name, 0.0) + sign * amount, 6)


class NodeHeadroom(NamedTuple):
    """The free CPU, host memory in MiB, run slots and custom resources of one node."""

    cpu: float
    memory_mb: int
    runs: int
    custom: tuple[tuple[str, float], ...]
    node: Node
    """The node, whose labels and environments are compared with the demand."""
    gives_gpus: bool = True
    """False if a task of the priority for which the headroom was computed may take none of the node's GPUs
    now."""

    def fits(self, task: Task) -> bool:
        """Return True if the headroom suffices for the task. A resource that is not asked for never lacks,
        even if the node is overcommitted."""
        demand = task.demand
        enough = self.cpu >= demand.cpu or not demand.cpu
        enough = enough and (self.memory_mb >= demand.memory_mb or not demand.memory_mb)
        enough = enough and (self.gives_gpus or not demand.gpus)
        return enough and self.runs >= 1 and self.is_open_to(task) and not self.short_of(task)

    def is_open_to(self, task: Task) -> bool:
        return may_use_node(task.demand, self.node) and has_environment(task.demand, self.node)

    def short_of(self, task: Task) -> list[str]:
        """Return the names of the node's custom resources that do not suffice, sorted."""
        if not (self.custom and task.demand.custom):
            return []
        asked = dict(task.demand.custom)
        return [name for name, left in self.custom if asked.get(name, 0.0) > max(0.0, left)]

    def with_room_of(self, *tasks: Task, sign: int = 1) -> "NodeHeadroom":
        """Return the headroom as if these tasks had left (or, with sign -1, arrived)."""
        cpu, memory_mb, custom = self.cpu, self.memory_mb, self.custom
        for task in tasks:
            demand = task.demand
            cpu += sign * demand.cpu
            memory_mb += sign * demand.memory_mb
            if custom and demand.custom:
                took = dict(demand.custom)
                custom = tuple((name, round(left + sign * took.get(name, 0.0), 6)) for name, left in custom)
        runs = self.runs + sign * len(tasks)
        return NodeHeadroom(round(cpu, 6), memory_mb, runs, custom, self.node, self.gives_gpus)

    def at_most(self, other: "NodeHeadroom") -> "NodeHeadroom":
        """Return the smaller of two headrooms of the same node, resource by resource."""
        custom = tuple((name, min(a, b)) for (name, a), (_, b) in zip(self.custom, other.custom, strict=True))
        cpu, memory_mb = min(self.cpu, other.cpu), min(self.memory_mb, other.memory_mb)
        gives = self.gives_gpus and other.gives_gpus
        return NodeHeadroom(cpu, memory_mb, min(self.runs, other.runs), custom, self.node, gives)
