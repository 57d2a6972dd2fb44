"""Nodes and tasks of the openb traces (alibaba/clusterdata, gpu-v2023), and the order of arrival.

The files have no licence and are not part of this repository; `--data` names their folder.
"""

import csv
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

WHOLE_GPU = 1000
"""A whole GPU in thousandths."""

FULL_ARRIVAL = 130
"""Tasks arrive until this many % of all GPUs are requested."""

NODES = "openb_node_list_gpu_node.csv"
TASKS = "openb_pod_list_{}.csv"


class Machine(NamedTuple):
    """An empty node."""

    name: str
    cpu_milli: int
    memory_mb: int
    gpus: int
    kind: str


class Job(NamedTuple):
    """The request of one task of a trace. Without `kinds`, any kind of GPU will do."""

    cpu_milli: int
    memory_mb: int
    gpus: int
    gpu_milli: int
    """The thousandths that the task requests of each GPU."""
    kinds: tuple[str, ...] = ()

    @property
    def total_milli(self) -> int:
        return self.gpus * self.gpu_milli


def read_machines(data: Path) -> list[Machine]:
    """Return the machines sorted by name."""
    with open(data / NODES, newline="") as file:
        rows = list(csv.DictReader(file))
    machines = [
        Machine(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]), int(row["gpu"]), row["model"])
        for row in rows
    ]
    return sorted(machines)


def read_jobs(data: Path, trace: str) -> list[Job]:
    """Return the tasks in the order of the file."""
    with open(data / TASKS.format(trace), newline="") as file:
        return [job_of(row) for row in csv.DictReader(file)]


def job_of(row: dict[str, str]) -> Job:
    gpus = int(row["num_gpu"])
    kinds = tuple(sorted({kind for kind in (row.get("gpu_spec") or "").split("|") if kind}))
    milli = int(row["gpu_milli"]) if gpus else 0
    return Job(int(row["cpu_milli"]), int(row["memory_mib"]), gpus, milli, kinds if gpus else ())


def traces_in(data: Path) -> list[str]:
    """Return the names of the traces in the folder."""
    before, after = TASKS.split("{}")
    return sorted(path.name[len(before) : -len(after)] for path in data.glob(TASKS.format("*")))


def total_milli(machines: Sequence[Machine]) -> int:
    return WHOLE_GPU * sum(machine.gpus for machine in machines)


def arrivals(jobs: Sequence[Job], capacity_milli: int, chance: random.Random) -> list[Job]:
    """Return the shuffled trace, then tasks drawn from it until one GPU of the next would pass the full
    arrival. If the trace requests more than that, random tasks are removed instead."""
    limit = FULL_ARRIVAL * capacity_milli // 100
    order = list(jobs)
    chance.shuffle(order)
    asked = sum(job.total_milli for job in order)
    while asked > limit:
        asked -= order.pop(chance.randrange(len(order))).total_milli
    while asked + (drawn := chance.choice(jobs)).gpu_milli <= limit:
        asked += drawn.total_milli
        order.append(drawn)
    return order


def shuffled_nodes(machines: Sequence[Machine], chance: random.Random) -> list[Machine]:
    """Return the nodes in random order. The paper's simulator renames its nodes with a random number in front
    (pkg/simulator/simulator.go) and lets the smallest name win a tie, which matters much."""
    order = list(machines)
    chance.shuffle(order)
    return order
