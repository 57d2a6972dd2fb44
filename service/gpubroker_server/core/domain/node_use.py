"""What runs take of a node besides its devices, and of what the cluster has only so much of."""

from gpubroker_server.core.domain.task import Task, TaskState
from gpubroker_server.core.domain.units import TaskId


class NodeUse:
    """What the active runs of one node take of its CPU, host memory, run slots and custom resources."""

    __slots__ = ("cpu", "custom", "memory_mb", "priorities", "runs", "stopping")

    def __init__(self, cpu: float = 0.0, memory_mb: int = 0, runs: int = 0) -> None:
        self.cpu = cpu
        self.memory_mb = memory_mb
        self.runs = runs
        self.custom: dict[str, float] = {}
        self.priorities: dict[int, int] = {}
        """Priority -> how many runs have it."""
        self.stopping: frozenset[TaskId] = frozenset()
        """Those under notice."""

    def copy(self) -> "NodeUse":
        twin = NodeUse(self.cpu, self.memory_mb, self.runs)
        twin.custom = dict(self.custom)
        twin.priorities = dict(self.priorities)
        twin.stopping = self.stopping
        return twin

    def count(self, task: Task, sign: int) -> None:
        self.cpu = round(self.cpu + sign * task.demand.cpu, 6)
        self.memory_mb += sign * task.demand.memory_mb
        self.runs += sign
        left = self.priorities.pop(task.priority, 0) + sign
        if left:
            self.priorities[task.priority] = left
        if task.state is TaskState.STOPPING:
            self.stopping = self.stopping | {task.id} if sign > 0 else self.stopping - {task.id}
        count_custom(self.custom, task, sign)


def count_custom(use: dict[str, float], task: Task, sign: int) -> None:
    """Add or take away a task's custom resources; rounded, so that what was added can be taken away."""
    for name, amount in task.demand.counted:
        use[name] = round(use.get(name, 0.0) + sign * amount, 6)
