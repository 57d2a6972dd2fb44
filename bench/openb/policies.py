"""The policies: those of the paper's simulator, and the service's own.

Scores are those of the simulator (pkg/simulator/plugin), including its integer divisions: 0..100, where
higher is better and the first node by name wins a tie. Unless a policy says otherwise, a task gets the
tightest GPU with room, or whole GPUs from the lowest index on.
"""

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from gpubroker_server.core.world.fragmentation_gradient import (
    DeviceChoice,
    FragmentationMeasure,
    Inventory,
    Remainder,
    Shape,
    fgd,
    tasks_lost,
    typical_shapes,
)

from bench.openb.trace import WHOLE_GPU, Job, Machine

LARGEST_CPU_MILLI = 128_000
LARGEST_GPU_MILLI = 8_000


class Node:
    """One machine during a replay."""

    __slots__ = ("groups", "machine", "memory_mb", "room")

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.memory_mb = machine.memory_mb
        self.room = Remainder(machine.cpu_milli, (WHOLE_GPU,) * machine.gpus, machine.kind)
        self.groups: set[str] = set()
        """The groups of the tasks that are placed on this node, as `clustering` distinguishes them."""


class Policy(ABC):
    """Decides where a task would go on one node, and which node it gets."""

    @abstractmethod
    def spot(self, job: Job, node: Node) -> DeviceChoice | None:
        """Return the devices for the task; None if CPU or GPUs do not suffice. Memory and GPU kind of the
        node were checked before."""

    def choose(self, scores: Sequence[int]) -> int | None:
        """Return the index of the best score; None if there is none. A score of -1 stands for a node without
        room."""
        best = max(scores)
        return None if best < 0 else scores.index(best)


class RandomFit(Policy):
    """Chooses a random node with room, and a random GPU with room on it."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def spot(self, job: Job, node: Node) -> DeviceChoice | None:
        devices = tightest(job, node)
        if devices is not None and 0 < job.gpu_milli < WHOLE_GPU:
            room = [place for place, left in enumerate(node.room.left) if left >= job.gpu_milli]
            devices = (self._chance.choice(room),)
        return None if devices is None else DeviceChoice(0, devices)

    def choose(self, scores: Sequence[int]) -> int | None:
        possible = [place for place, score in enumerate(scores) if score >= 0]
        return self._chance.choice(possible) if possible else None


class ByScore(Policy):
    """A policy of the simulator that scores nodes; on the node the tightest GPU is taken."""

    def spot(self, job: Job, node: Node) -> DeviceChoice | None:
        devices = tightest(job, node)
        return None if devices is None else DeviceChoice(self.score(job, node), devices)

    @abstractmethod
    def score(self, job: Job, node: Node) -> int:
        """Return the score of a node with room, 0..100."""


class DotProduct(ByScore):
    """Prefers the smallest dot product of the node's free resources and the task's demand (Tetris, SIGCOMM
    2014)."""

    def score(self, job: Job, node: Node) -> int:
        cpu = node.room.cpu / LARGEST_CPU_MILLI * (job.cpu_milli / LARGEST_CPU_MILLI)
        gpu = sum(node.room.left) / LARGEST_GPU_MILLI * (job.total_milli / LARGEST_GPU_MILLI)
        return int(100 * (1 - (cpu + gpu) / 2))


class BestFit(ByScore):
    """Prefers the node with the least free resources afterwards; CPU and GPUs weigh half each."""

    def score(self, job: Job, node: Node) -> int:
        cpu = (node.room.cpu - job.cpu_milli) / LARGEST_CPU_MILLI
        gpu = (sum(node.room.left) - job.total_milli) / LARGEST_GPU_MILLI
        return int((1.0 - (cpu * 0.5 + gpu * 0.5)) * 100)


class Clustering(ByScore):
    """Prefers nodes with only tasks of the same group, then mixed ones, then empty ones (Gandiva, OSDI
    2018)."""

    def score(self, job: Job, node: Node) -> int:
        if not job.gpus:
            return 0
        used = 25 * (LARGEST_GPU_MILLI - sum(node.room.left)) // LARGEST_GPU_MILLI
        if group(job) in node.groups:
            return used + (75 if len(node.groups) == 1 else 50)
        return used if node.groups else used + 25


class Packing(ByScore):
    """Prefers shared GPUs, then free ones of a used node, then a free node (MLaaS in the wild, NSDI 2022)."""

    def score(self, job: Job, node: Node) -> int:
        left = node.room.left
        if not job.gpus:
            return 0
        free = left.count(WHOLE_GPU)
        if free == len(left):
            return max(33 - free, free)
        taken = [left[place] for place in tightest(job, node) or ()]
        if WHOLE_GPU in taken:
            return max(50 - taken.count(WHOLE_GPU), 33)
        return max(100 - sum(room * 100 // WHOLE_GPU for room in taken) // 10, 50)


class LeastStranded(Policy):
    """Prefers the node on which the least memory is stranded, by one of the core's measures."""

    def __init__(self, measure: FragmentationMeasure, kinds: Sequence[str]) -> None:
        self._measure = measure
        self._kinds = kinds
        self._shapes: dict[Job, Shape] = {}

    def spot(self, job: Job, node: Node) -> DeviceChoice | None:
        shape = self._shapes.get(job)
        if shape is None:
            shape = self._shapes[job] = shape_of(job, self._kinds)
        return self._measure.spot(shape, node.room)


POLICIES = ("random", "dot_product", "clustering", "packing", "best_fit", "fgd", "gpubroker")


def policy(name: str, jobs: Sequence[Job], machines: Sequence[Machine], chance: random.Random) -> Policy:
    """Return the policy before its first task. `jobs`, the trace, gives the usual demands."""
    match name:
        case "random":
            return RandomFit(chance)
        case "dot_product":
            return DotProduct()
        case "clustering":
            return Clustering()
        case "packing":
            return Packing()
        case "best_fit":
            return BestFit()
    stock: Inventory = {kind: (count, WHOLE_GPU) for kind, count in gpus_by_kind(machines).items()}
    kinds = sorted(stock)
    shapes = typical_shapes(Counter(shape_of(job, kinds) for job in jobs))
    measure = fgd(shapes, WHOLE_GPU) if name == "fgd" else tasks_lost(shapes, stock)
    return LeastStranded(measure, kinds)


def shape_of(job: Job, kinds: Sequence[str]) -> Shape:
    allowed = [kind for kind in kinds if not job.kinds or kind in job.kinds] if job.gpus else []
    return Shape(job.cpu_milli, job.gpus, tuple((kind, job.gpu_milli) for kind in allowed))


def gpus_by_kind(machines: Sequence[Machine]) -> Counter[str]:
    count: Counter[str] = Counter()
    for machine in machines:
        count[machine.kind] += machine.gpus
    return count


def tightest(job: Job, node: Node) -> tuple[int, ...] | None:
    """Return the fullest GPUs with room, the lowest index first; None if CPU or GPUs do not suffice."""
    left = node.room.left
    if job.cpu_milli > node.room.cpu:
        return None
    fitting = sorted((room, place) for place, room in enumerate(left) if job.gpus and room >= job.gpu_milli)
    if len(fitting) < job.gpus:
        return None
    return tuple(place for _, place in fitting[: job.gpus])


def group(job: Job) -> str:
    return "shared" if job.gpu_milli < WHOLE_GPU else f"{job.gpus} GPUs"
