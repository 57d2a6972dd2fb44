"""Time from a restart with a long queue to the first decision, and memory that the queue takes.

The queue is filled in batches, behind a task that holds the only device. Then all processes are stopped and
started again. The simulated engine has lost the run by then, so the leader has to end it and to admit the
next task: the time from the start of the first process to that admission in the log is measured. Memory is
the resident set of each process with the full queue, before and after.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping

import psutil

from bench.accept import FULL_SETTINGS, fill_device, must_be_queued
from bench.deployment import Deployment, add_variants, prefix_of, storage, variants_of
from bench.measuring import Figure, report
from bench.pickup import task_events

PER_BATCH = 1000
PATIENCE_SECONDS = 120.0


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--tasks", type=int, default=100_000, help="waiting tasks")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with storage(variant) as place:
            with place.started(**FULL_SETTINGS) as running:
                fill_device(running)
                fill_queue(running, options.tasks)
                before = memory_mb(running)
            known = len(task_events(place.database))
            began = time.time()
            with place.started(**FULL_SETTINGS) as running:
                took = first_admission_at(place.database, known) - began
                after = memory_mb(running)
        report(f"  {variant}: first decision after {took:.2f} s; MiB before {before}, after {after}")
        prefix = prefix_of("restart", variant)
        yield Figure("restart", f"{prefix}.first_decision_s", took, "s", options.tasks, place.durability)
        for name, mb in before.items():
            most = max(mb, after[name])
            yield Figure("restart", f"{prefix}.{name}_mb", most, "MiB", options.tasks, place.durability)


def fill_queue(running: Deployment, tasks: int) -> None:
    for start in range(0, tasks, PER_BATCH):
        some = [a_task(number) for number in range(start, min(tasks, start + PER_BATCH))]
        running.gateways[0].ask("POST", "/tasks/batch", {"tasks": some})
    must_be_queued(running, tasks)


def a_task(number: int) -> Mapping[str, object]:
    return {
        "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"number": number}},
        "priority": 4 * (number % 10),
        "resources": {"gpu_mb": 1024 * (1 + number % 20)},
    }


def memory_mb(running: Deployment) -> dict[str, float]:
    """Return the resident MiB per kind of process; of several gateways, of the largest one."""
    gateways = [_resident_mb(gateway.process) for gateway in running.gateways]
    if running.broker is None:
        return {"memory": max(gateways)}
    return {"gateway": max(gateways), "broker": _resident_mb(running.broker)}


def _resident_mb(process: psutil.Process) -> float:
    return round(float(process.memory_info().rss) / 2**20, 1)


def first_admission_at(database: str, known: int) -> float:
    """Return when the first admission after the first `known` events was logged. Raises RuntimeError if none
    is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for at, kind, _, _ in task_events(database)[known:]:
            if kind == "task.admitted":
                return at
        time.sleep(0.5)
    raise RuntimeError(f"no task was admitted within {PATIENCE_SECONDS:g} s of the start")
