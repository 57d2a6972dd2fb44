"""Workloads to replay: a cluster, and jobs with their submit times and run times."""

import csv
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from gpubroker_server.core.admission.feasibility import check
from gpubroker_server.core.domain.demand import Demand
from gpubroker_server.core.domain.device import Device, Node
from gpubroker_server.core.domain.policy import Policy
from gpubroker_server.core.domain.task import Task
from gpubroker_server.core.domain.units import Instant, Mib, NodeName, Seconds, TaskId, device_key
from msgspec import Struct
from msgspec.structs import replace

from bench.openb.trace import TASKS, read_machines, traces_in

GIB = 1024
GPUS_PER_NODE = 8
GPU_MB = 80 * GIB
TRACE_GPU_MB = 32 * GIB
"""The memory of a whole GPU, since the traces give shares of a GPU."""
CLUSTER = "simulated"


class Job(Struct, frozen=True):
    """A task that runs `seconds` if it is not preempted. If it checkpoints, a preemption loses none of its
    work."""

    task: Task
    seconds: float
    checkpoints: bool = True


class Workload(Struct, frozen=True):
    name: str
    nodes: Sequence[Node]
    devices: Sequence[Device]
    jobs: Sequence[Job]
    """The jobs in order of submission."""

    @property
    def seconds(self) -> float:
        """The seconds from the first submit to the last."""
        return self.jobs[-1].task.submitted_at - self.jobs[0].task.submitted_at if self.jobs else 0.0


def a_node(
    name: str, gpus: int, cpu: float, memory_mb: int, kind: str, gpu_mb: int
) -> tuple[Node, list[Device]]:
    node = Node(NodeName(name), cpu, Mib(memory_mb), 10_000, "1", "boot")
    devices = [
        Device(
            device_key(CLUSTER, node.name, f"gpu{i}"),
            node.name,
            f"gpu{i}",
            kind,
            i,
            Mib(gpu_mb),
            simulated=True,
        )
        for i in range(gpus)
    ]
    return node, devices


class Kind(NamedTuple):
    """One kind of job of a generated day."""

    name: str
    weight: float
    priorities: tuple[int, ...]
    gpus: tuple[int, ...]
    gib: tuple[int, ...]
    """The GiB on each GPU, of which one is drawn."""
    minutes: tuple[float, float]
    checkpoints: bool = False
    by_day: bool = False
    """True for jobs that are submitted during working hours, most of them after noon."""


KINDS = (
    Kind("train", 1.6, (40, 54, 60), (1, 1, 2, 4, 8), (20, 40, 70), (30, 360), checkpoints=True),
    Kind("sweep", 10.0, (20, 30), (1,), (8, 16, 24), (5, 60)),
    Kind("notebook", 2.0, (70, 75), (1,), (4, 10, 20), (10, 120), by_day=True),
    Kind("evaluate", 0.6, (90, 95), (1, 2), (40, 60), (5, 20)),
    Kind("fill", 3.0, (0, 5), (1,), (10, 30), (20, 120), checkpoints=True),
)


def a_day(seed: int, hours: float, gpus: int, load: float, stated: float = 0.0) -> Workload:
    """Return a day of training and sweeps around the clock, notebooks by day, evaluations now and then, idle
    fill.

    Jobs are drawn until they request `load` times the GPU memory × time of the cluster. A share of `stated`
    (0 to 1) of them states its run time, up to a third too long.
    """
    chance, statements = Random(f"{seed}/day"), Random(f"{seed}/stated")
    nodes = [
        a_node(f"n{i:03}", GPUS_PER_NODE, 128.0, 1024 * GIB, "H100", GPU_MB)
        for i in range(max(1, gpus // GPUS_PER_NODE))
    ]
    devices = [device for _, of_node in nodes for device in of_node]
    missing_mb_seconds = load * hours * 3600.0 * sum(device.allocatable_mb for device in devices)
    jobs: list[Job] = []
    while missing_mb_seconds > 0:
        job = _random_job(chance, hours, len(jobs))
        demand = job.task.demand
        missing_mb_seconds -= job.seconds * demand.gpus * (demand.gpu_mb or 0)
        if statements.random() < stated:
            expected = Seconds(job.seconds * statements.uniform(1.0, 1.33))
            job = replace(job, task=replace(job.task, expected_seconds=expected))
        jobs.append(job)
    jobs.sort(key=lambda job: job.task.submitted_at)
    return Workload(f"day{seed}", [node for node, _ in nodes], devices, jobs)


def _random_job(chance: Random, hours: float, number: int) -> Job:
    [kind] = chance.choices(KINDS, [kind.weight for kind in KINDS])
    hour = chance.triangular(0, hours, hours * 0.6) if kind.by_day else chance.uniform(0, hours)
    task = Task(
        TaskId(f"{kind.name}-{number:06}"),
        tenant=chance.choice(("red", "blue")),
        name=kind.name,
        priority=chance.choice(kind.priorities),
        demand=Demand(gpus=chance.choice(kind.gpus), gpu_mb=Mib(chance.choice(kind.gib) * GIB)),
        submitted_at=Instant(hour * 3600.0),
        subject=kind.name,
    )
    return Job(task, 60.0 * chance.uniform(*kind.minutes), kind.checkpoints)


class NoTrace(SystemExit):
    """The data has no such trace; the text names the traces that exist."""


def an_openb_day(data: Path, nodes: int, trace: str = "default") -> Workload:
    """Return the tasks of a trace with their real submit times and run times; GPU kinds are ignored.

    The tasks used a small part of their cluster, so only its largest nodes are taken, and only tasks that fit
    on one of them. Priorities follow the trace's classes of service: latency-sensitive 70, guaranteed 60,
    burstable 50, best effort 20. Raises NoTrace.
    """
    if trace not in traces_in(data):
        traces = ", ".join(traces_in(data)) or "none"
        raise NoTrace(f"no trace {trace!r} in {data}; traces: {traces}")
    machines = sorted(read_machines(data), key=lambda m: (-m.gpus, -m.cpu_milli, m.name))[:nodes]
    made = [a_node(m.name, m.gpus, m.cpu_milli / 1000, m.memory_mb, m.kind, TRACE_GPU_MB) for m in machines]
    nodes_only, devices = [node for node, _ in made], [device for _, of_node in made for device in of_node]
    priorities = {"LS": 70, "Guaranteed": 60, "Burstable": 50, "BE": 20}
    jobs = []
    with open(data / TASKS.format(trace), newline="") as file:
        for row in csv.DictReader(file):
            if "creation_time" not in row:
                raise NoTrace(f"the trace {trace!r} has no submit times; take another one")
            gpus = int(row["num_gpu"])
            share = int(row["gpu_milli"]) / 1000 if gpus else 0.0
            demand = Demand(
                gpus=gpus,
                gpu_mb=Mib(max(1, round(share * TRACE_GPU_MB))) if gpus else None,
                cpu=int(row["cpu_milli"]) / 1000,
                memory_mb=Mib(int(row["memory_mib"])),
            )
            submitted_at = float(row["creation_time"])
            ran = float(row["deletion_time"]) - float(row["scheduled_time"] or row["creation_time"])
            priority = priorities.get(row["qos"], 50)
            task = Task(TaskId(row["name"]), "trace", row["qos"], priority, demand, Instant(submitted_at))
            if check(demand, devices, nodes_only, Policy()) is None:
                jobs.append(Job(task, max(1.0, ran)))
    jobs.sort(key=lambda job: (job.task.submitted_at, job.task.id))
    return Workload(f"openb-{trace}", nodes_only, devices, jobs)
