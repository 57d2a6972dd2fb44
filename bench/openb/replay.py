"""A replay of a trace: tasks arrive one by one and never end; a task that fits nowhere is dropped."""

from collections.abc import Collection, Sequence

from gpubroker_server.core.world.fragmentation_gradient import DeviceChoice, Remainder

from bench.openb.policies import Node, Policy, group
from bench.openb.trace import Job, Machine

TOO_FULL = -1
"""The score of a node without room."""


class Candidates:
    """The scores of all nodes for equal tasks. Only nodes that have changed are scored again."""

    def __init__(self, nodes: int) -> None:
        self.scores = [TOO_FULL] * nodes
        self.spots: list[DeviceChoice | None] = [None] * nodes
        self.seen = 0
        """The number of changes that the scores take into account."""


class Replay:
    """A cluster that is filled task by task. The first of `machines` wins a tie."""

    def __init__(self, machines: Sequence[Machine], policy: Policy) -> None:
        self.nodes = [Node(machine) for machine in machines]
        self.capacity_milli = sum(sum(node.room.left) for node in self.nodes)
        self.allocated_milli = 0
        self._policy = policy
        self._changed = list(range(len(self.nodes)))
        self._candidates: dict[Job, Candidates] = {}

    def allocated(self, jobs: Sequence[Job], arrivals: Collection[int]) -> dict[int, float]:
        """Return arrival -> GPUs allocated then, both in % of all GPUs; arrivals not reached get the final
        value."""
        found: dict[int, float] = {}
        waiting = sorted(arrivals)
        arrived = 0
        for job in jobs:
            self.place(job)
            arrived += job.total_milli
            while waiting and 100 * arrived >= waiting[0] * self.capacity_milli:
                found[waiting.pop(0)] = self.allocated_percent()
        return found | {arrival: self.allocated_percent() for arrival in waiting}

    def allocated_percent(self) -> float:
        return 100 * self.allocated_milli / self.capacity_milli

    def place(self, job: Job) -> str | None:
        """Place a task and return the name of its node; None if it fits nowhere."""
        candidates = self._up_to_date(job)
        chosen = self._policy.choose(candidates.scores)
        if chosen is None:
            return None
        node, spot = self.nodes[chosen], candidates.spots[chosen]
        assert spot is not None
        self._take(job, node, spot.devices)
        self._changed.append(chosen)
        return node.machine.name

    def _up_to_date(self, job: Job) -> Candidates:
        candidates = self._candidates.get(job)
        if candidates is None:
            candidates = self._candidates[job] = Candidates(len(self.nodes))
        for place in set(self._changed[candidates.seen :]):
            node = self.nodes[place]
            possible = node.memory_mb >= job.memory_mb and (not job.kinds or node.machine.kind in job.kinds)
            spot = self._policy.spot(job, node) if possible else None
            candidates.spots[place] = spot
            candidates.scores[place] = TOO_FULL if spot is None else spot.score
        candidates.seen = len(self._changed)
        return candidates

    def _take(self, job: Job, node: Node, devices: tuple[int, ...]) -> None:
        left = list(node.room.left)
        for place in devices:
            left[place] -= job.gpu_milli
        node.room = Remainder(node.room.cpu - job.cpu_milli, tuple(left), node.room.kind)
        node.memory_mb -= job.memory_mb
        self.allocated_milli += job.total_milli
        if job.gpus:
            node.groups.add(group(job))
