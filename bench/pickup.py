"""Time from the commit of a task to the dispatch of its start, when there is room for it.

Tasks arrive one by one at random moments. The wait begins when the submit's transaction takes its position
in the log, shortly before it is on disk, and ends when the start order reaches the executor (the simulated
engine). In between are the wake-up of the leader, the plan, and the commit of the admission. One process is
measured apart from gateways and a broker, which meet only in PostgreSQL. There the baseline is one row
inserted, committed and read by a connection of its own while the tasks arrive.
"""

import json
import sqlite3
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Event
from typing import Any

import psycopg

from bench.deployment import Deployment, add_variants, deployed, prefix_of, variants_of
from bench.http import Target
from bench.load import OpenLoop
from bench.measuring import Figure, percentile, report

TASK = {"run": {"entrypoint": "bench.tasks:noop"}, "resources": {"gpu_mb": 1024}}
ROOM_MB = 1_048_576
WARM_UP_SECONDS = 2.0
ROUND_SECONDS = 0.05
PATIENCE_SECONDS = 30.0

TASK_EVENTS = "SELECT at, kind, key, fields FROM event WHERE kind LIKE 'task.%' ORDER BY position"


LoggedEvent = tuple[float, str, str, str]
"""(at, kind, key, fields as JSON)"""


def add_options(parser: ArgumentParser) -> None:
    add_variants(parser)
    parser.add_argument("--per-second", type=float, default=50.0, help="arrivals on average")
    parser.add_argument("--seconds", type=float, default=30.0, help="duration of the measurement")


def measure(options: Namespace) -> Iterator[Figure]:
    for variant in variants_of(options):
        with roomy_deployment(variant) as running, OpenLoop() as load:
            send = partial(load.send, targets_of(running), per_second=options.per_second, status=202)
            known = send(seconds=WARM_UP_SECONDS)
            with plain_rounds(running.database) as rounds_ms:
                sent = send(seconds=options.seconds)
            waits = waits_ms(running.database, known + sent)[-sent:]
        yield from figures(variant, waits, rounds_ms, running.durability)


def figures(
    variant: str, waits: Sequence[float], rounds_ms: Sequence[float], durability: str
) -> Iterator[Figure]:
    report(f"  {variant}: the longest of {len(waits):,} waits was {max(waits):.1f} ms")
    for name, percent in (("p50", 50), ("p99", 99)):
        value = percentile(waits, percent)
        baseline = percentile(rounds_ms, percent) if rounds_ms else None
        yield Figure(
            "pickup",
            f"{prefix_of('pickup', variant)}.{name}_ms",
            value,
            "ms",
            len(waits),
            durability,
            baseline=baseline,
            ratio=None if baseline is None else value / baseline,
        )


@contextmanager
def plain_rounds(database: str) -> Iterator[Sequence[float]]:
    """Yield the milliseconds of each round, appended while the tasks arrive; nothing on SQLite, where only
    the service may write."""
    rounds_ms: list[float] = []
    if not database.startswith("postgresql:"):
        yield rounds_ms
        return
    stop = Event()
    with psycopg.connect(database, autocommit=True) as server, ThreadPoolExecutor(1) as pool:
        server.execute("CREATE TABLE IF NOT EXISTS bench_round (n bigserial PRIMARY KEY, text text)")
        rounds = pool.submit(_repeat_round, server, stop, rounds_ms)
        try:
            yield rounds_ms
        finally:
            stop.set()
            rounds.result()


def _repeat_round(server: "psycopg.Connection[Any]", stop: Event, rounds_ms: list[float]) -> None:
    while not stop.wait(ROUND_SECONDS):
        began = time.perf_counter()
        with server.transaction():
            [(n,)] = server.execute("INSERT INTO bench_round (text) VALUES ('x') RETURNING n").fetchall()
        server.execute("SELECT text FROM bench_round WHERE n = %s", [n]).fetchall()
        rounds_ms.append(1000 * (time.perf_counter() - began))


@contextmanager
def roomy_deployment(variant: str) -> Iterator[Deployment]:
    """Yield a deployment with room for every task, on the simulated engine."""
    devices = json.dumps([{"memory_mb": ROOM_MB}])
    with deployed(
        variant, ENGINE="simulated", SIMULATED_DEVICES=devices, ENTRYPOINTS="bench.tasks:*"
    ) as running:
        yield running


def targets_of(running: Deployment) -> list[Target]:
    body = json.dumps(TASK)
    return [Target(gateway.port, "POST", "/tasks", gateway.headers, body) for gateway in running.gateways]


def waits_ms(database: str, expected: int) -> list[float]:
    """Return the waits of all tasks in the log, in commit order. Raises RuntimeError if a task does not
    start."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(waits := list(waits_of(task_events(database)))) < expected:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{expected} tasks were accepted, but {len(waits)} were started")
        time.sleep(0.2)
    return waits


def waits_of(events: Sequence[LoggedEvent]) -> Iterator[float]:
    """Yield the waits, in milliseconds, of the tasks that were started."""
    submitted: dict[str, float] = {}
    started: dict[str, float] = {}
    for at, kind, key, fields in events:
        if kind == "task.submitted":
            submitted[key] = at
        elif key not in started and (since := json.loads(fields).get("started_at")) is not None:
            started[key] = since
    return (1000 * (started[task] - at) for task, at in submitted.items() if task in started)


def task_events(database: str) -> Sequence[LoggedEvent]:
    if database.startswith("postgresql:"):
        with psycopg.connect(database) as server:
            return server.execute(TASK_EVENTS).fetchall()
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as file:
        return file.execute(TASK_EVENTS).fetchall()
