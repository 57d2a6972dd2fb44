"""How soon a service that comes back to a long queue decides something, and how much memory the queue takes.

The queue is filled in batches, behind a task that holds the one device. Then all processes stop and start
again. The engine that runs nothing has forgotten the run by then, so that the leader has to say what becomes
of it, and to give its room to somebody: the first admission in the log is what is timed, from the start of
the first process. Memory is the resident set of each process with the queue full, before and after.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping

import psutil

from bench.accept import FULL_SETTINGS, fill_device, must_be_queued
from bench.measuring import Figure, say
from bench.pickup import task_events
from bench.sites import Site, add_variants, home, prefix_of, variants_of

PER_BATCH = 1000
PATIENCE_SECONDS = 120.0


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--tasks", type=int, default=100_000, help="that wait")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with home(variant) as place:
            with place.started(**FULL_SETTINGS) as running:
                fill_device(running)
                fill_queue(running, options.tasks)
                before = memory_mb(running)
            known = len(task_events(place.database))
            began = time.time()
            with place.started(**FULL_SETTINGS) as running:
                took = first_admission_at(place.database, known) - began
                after = memory_mb(running)
        say(f"  {variant}: first decision after {took:.2f} s; MiB before {before}, after {after}")
        prefix = prefix_of("restart", variant)
        yield Figure("restart", f"{prefix}.first_decision_s", took, "s", options.tasks, place.durability)
        for name, mb in before.items():
            most = max(mb, after[name])
            yield Figure("restart", f"{prefix}.{name}_mb", most, "MiB", options.tasks, place.durability)


def fill_queue(running: Site, tasks: int) -> None:
    for start in range(0, tasks, PER_BATCH):
        some = [a_task(number) for number in range(start, min(tasks, start + PER_BATCH))]
        running.doors[0].ask("POST", "/tasks/batch", {"tasks": some})
    must_be_queued(running, tasks)


def a_task(number: int) -> Mapping[str, object]:
    return {
        "run": {"entrypoint": "bench.tasks:noop", "kwargs": {"number": number}},
        "priority": 4 * (number % 10),
        "resources": {"gpu_mb": 1024 * (1 + number % 20)},
    }


def memory_mb(running: Site) -> dict[str, float]:
    """Resident MiB by the kind of process; of several gateways the one that takes most."""
    doors = [_resident_mb(door.process) for door in running.doors]
    if running.broker is None:
        return {"memory": max(doors)}
    return {"gateway": max(doors), "broker": _resident_mb(running.broker)}


def _resident_mb(process: psutil.Process) -> float:
    return round(float(process.memory_info().rss) / 2**20, 1)


def first_admission_at(database: str, known: int) -> float:
    """When the first task was admitted after so many events of tasks. Raises RuntimeError if none is."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        for at, kind, _, _ in task_events(database)[known:]:
            if kind == "task.admitted":
                return at
        time.sleep(0.5)
    raise RuntimeError(f"nothing was admitted within {PATIENCE_SECONDS:g} s of the start")
